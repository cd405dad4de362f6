"""`hybrid-kv serve`: the model behind OpenAI's interface, and a page."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hybrid_kv.cli import INTERRUPTED
from hybrid_kv.cli.display import note
from hybrid_kv.cli.options import (
    LayersOption,
    ModelArgument,
    ModelOptions,
    OutputOptions,
    count,
)

if TYPE_CHECKING:
    from hybrid_kv.config import HybridConfig
    from hybrid_kv.serve import Limits
    from hybrid_kv.serve.http.app import Rules
    from hybrid_kv.serve.http.service import AnyEngine, Ending
    from hybrid_kv.serve.http.tokenizer import ServedModel

_ADDRESS, _LIMITS = "Address", "Limits"
_KEY = "HYBRID_KV_API_KEY"


@dataclass(frozen=True, slots=True)
class AddressOptions:
    """Address of the server, the model's name there, and who may ask."""

    host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            help="127.0.0.1 serves this machine alone, 0.0.0.0 all others too.",
            rich_help_panel=_ADDRESS,
        ),
    ] = "127.0.0.1"
    port: Annotated[
        int,
        typer.Option(
            min=0, max=65535, metavar="N", help="0 takes a free one.", rich_help_panel=_ADDRESS
        ),
    ] = 8000
    api_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            envvar=_KEY,
            show_envvar=True,
            help="Must come with every request; other users see it in the list of processes unless "
            "the environment has it.",
            rich_help_panel=_ADDRESS,
        ),
    ] = None
    name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="What the model is called. [dim]default: as MODEL, of a path the last part[/]",
            rich_help_panel=_ADDRESS,
        ),
    ] = None
    cors_origins: Annotated[
        list[str] | None,
        typer.Option(
            "--cors-origin",
            metavar="ORIGIN",
            help="Pages of this origin may ask from a browser; repeatable.",
            rich_help_panel=_ADDRESS,
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class LimitOptions:
    """Limits of requests, tokens and bytes, and what requests may say."""

    max_running: Annotated[
        int,
        typer.Option(
            min=1, metavar="N", help="Requests computed at a time.", rich_help_panel=_LIMITS
        ),
    ] = 16
    max_queue: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="Requests that wait beside them; more are told to come back (429).",
            rich_help_panel=_LIMITS,
        ),
    ] = 64
    max_prompt_tokens: Annotated[
        int | None,
        typer.Option(
            parser=count,
            metavar="N",
            help="Of one prompt. [dim]default: the model's context[/]",
            rich_help_panel=_LIMITS,
        ),
    ] = None
    max_body: Annotated[
        str,
        typer.Option(metavar="BYTES", help="Of one request or document.", rich_help_panel=_LIMITS),
    ] = "32MiB"
    timeout: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="Of one request, from its arrival to its end; 0 for none.",
            rich_help_panel=_LIMITS,
        ),
    ] = 600.0
    max_stall: Annotated[
        float,
        typer.Option(
            min=1,
            metavar="MS",
            help="Chunks of prompts are cut so that streams wait no longer for one.",
            rich_help_panel=_LIMITS,
        ),
    ] = 100.0
    prefix_memory: Annotated[
        str,
        typer.Option(
            metavar="BYTES",
            help="Host memory for contexts of ended requests, which later ones continue.",
            rich_help_panel=_LIMITS,
        ),
    ] = "1GiB"
    reproducible: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Answers depend on no other request, bit for bit: prompts are computed N tokens "
            "at a time, steps 8 rows at a time, and nothing of others is continued.",
            rich_help_panel=_LIMITS,
        ),
    ] = None
    lenient: Annotated[
        bool,
        typer.Option(
            "--lenient",
            help="Ignore settings of requests that are not served, with a warning for each name, "
            "where they are refused otherwise.",
            rich_help_panel=_LIMITS,
        ),
    ] = False
    cache_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Contexts on disk: prompts may begin with one, and new ones are left there, with "
            "the page's documents and answers.",
            rich_help_panel=_LIMITS,
        ),
    ] = None

    def as_limits(self) -> Limits:
        """As the engine takes them."""
        from hybrid_kv.errors import ConfigError
        from hybrid_kv.serve import Limits

        if self.reproducible is not None and self.cache_dir is not None:
            raise ConfigError(
                "--reproducible must go without --cache-dir, got both: a prompt that continues a "
                "saved context adds up in another order; leave one of them out"
            )
        return Limits(
            max_running=self.max_running,
            max_queue=self.max_queue,
            max_stall_ms=self.max_stall,
            request_timeout_s=self.timeout or None,
            max_prompt_tokens=self.max_prompt_tokens,
            prefix_bytes=_bytes("--prefix-memory", self.prefix_memory),
            reproducible=self.reproducible,
        )


@dataclass(frozen=True, slots=True)
class TalkOptions:
    """Choice of what the server prints."""

    json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Write JSON lines to stdout: one with url, pid and model when requests are taken, "
            "then one for each request.",
            rich_help_panel="Output",
        ),
    ] = False
    quiet: Annotated[
        bool,
        typer.Option(
            "--quiet",
            "-q",
            help="Nothing on stderr but errors, and no line for each request.",
            rich_help_panel="Output",
        ),
    ] = False
    debug: Annotated[
        bool,
        typer.Option(
            "--debug",
            help="Show what the library logs, and the traceback of an error.",
            rich_help_panel="Output",
        ),
    ] = False

    def as_output(self) -> OutputOptions:
        """As notes take them."""
        return OutputOptions(quiet=self.quiet, debug=self.debug)


def serve(
    model: ModelArgument,
    *,
    address: AddressOptions,
    limits: LimitOptions,
    options: ModelOptions,
    cut: LayersOption,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Answer by a replica on each node of a Ray cluster: HOST:PORT of its head, or "
            "auto. Limits are those of each replica.",
            rich_help_panel=_ADDRESS,
        ),
    ] = None,
    output: TalkOptions,
) -> None:
    """Serve a model to the interfaces people use: OpenAI's over HTTP, and a page for documents."""
    from hybrid_kv.cli.files import build_config, has_no_tokenizer
    from hybrid_kv.errors import ConfigError

    _check_extra()
    asked, rules = limits.as_limits(), _rules(address, limits)
    if has_no_tokenizer(model):
        raise ConfigError(f"serving needs a tokenizer, and model '{model}' has none")

    from hybrid_kv.serve.http.app import application
    from hybrid_kv.serve.http.server import Server, bound_socket
    from hybrid_kv.serve.http.service import Service

    told = output.as_output()
    bound = bound_socket(address.host, address.port)  # before a long loading
    wanted = WantedEngine(model, build_config(options), asked, limits.cache_dir, options, cut)
    engines = wanted.here(told) if ray is None else wanted.on_cluster(ray, told)
    with bound, engines as (llm, engine):
        kept = None if limits.cache_dir is None else limits.cache_dir.expanduser() / "documents"
        service = Service(llm, engine, address.name or _name_of(model), kept)
        app = application(service, rules, address.cors_origins or ())
        host, port = bound.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

        def started() -> None:
            if output.json:
                facts = {"url": url, "pid": os.getpid(), "model": service.name}
                print(json.dumps(facts), flush=True)
            note(f"serving {service.name} at {url} (page), {url}/v1; Ctrl-C ends it", told)
            if rules.api_key is None and rules.hosts is None:
                note(
                    "whoever reaches this address may ask, and read what others asked on the "
                    "page: --api-key asks for a key",
                    told,
                )

        server = Server(app, service, started, lambda ending: note(_farewell(ending), told))
        with _requests_logged(output):
            server.run([bound])
    if server.signal == signal.SIGINT:
        raise typer.Exit(INTERRUPTED)


@dataclass(frozen=True, slots=True)
class WantedEngine:
    """A model to serve, with its settings and limits; it is loaded here or on a cluster."""

    model: str
    config: HybridConfig
    limits: Limits
    cache_dir: Path | None
    options: ModelOptions
    cut: LayersOption

    @contextmanager
    def here(self, output: OutputOptions) -> Iterator[tuple[ServedModel, AnyEngine]]:
        """The model and its engine, in this process."""
        from hybrid_kv.cli.model_run import opened
        from hybrid_kv.saved.registry import ContextRegistry
        from hybrid_kv.serve import Engine

        contexts = None if self.cache_dir is None else ContextRegistry(self.cache_dir)
        with (
            opened(self.model, self.options, self.config, output, self.cut.layers) as llm,
            Engine(llm, self.limits, contexts) as engine,
        ):
            yield llm, engine

    @contextmanager
    def on_cluster(
        self, address: str, output: OutputOptions
    ) -> Iterator[tuple[ServedModel, AnyEngine]]:
        """The model without its weights, and an engine in front of its replicas."""
        from hybrid_kv.cli.display import waiting
        from hybrid_kv.ray.replica import ReplicaSpec
        from hybrid_kv.ray.replicas import ReplicaEngine

        options = self.options
        spec = ReplicaSpec(
            model=self.model,
            config=self.config,
            options={
                "device": options.device,
                "dtype": options.dtype,
                "layers": self.cut.layers,
                "weights": options.weights,
                "dequantize": bool(options.dequantize),
                "exact_products": bool(options.exact_products),
            },
            limits=self.limits,
            contexts=None if self.cache_dir is None else str(self.cache_dir),
            folder=os.getcwd(),
            plugins=tuple(options.plugins or ()),
        )
        with waiting(f"loading {self.model} on the nodes", output):
            engine = ReplicaEngine(address, spec, lambda text: note(text, output))
        with engine:
            yield engine.model, engine


class _Lines(logging.Handler):
    """Writes a line for each request: on stderr, or as JSON on stdout."""

    def __init__(self, *, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json

    def emit(self, record: logging.LogRecord) -> None:
        """A reader that has gone ends no request."""
        line = json.dumps(vars(record)["facts"]) if self._as_json else record.getMessage()
        with suppress(OSError, ValueError):
            print(line, file=sys.stdout if self._as_json else sys.stderr, flush=True)


@contextmanager
def _requests_logged(output: TalkOptions) -> Iterator[None]:
    """A block in which each request has its line, unless --quiet."""
    from hybrid_kv.serve.http.metrics import log

    handler, level, propagate = _Lines(as_json=output.json), log.level, log.propagate
    if not output.quiet:
        log.addHandler(handler)
    log.setLevel(logging.WARNING if output.quiet else logging.INFO)
    log.propagate = False  # --debug shows it a second time
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagate


def _check_extra() -> None:
    """Raises ConfigError where what the extra `serve` brings is missing."""
    from hybrid_kv.errors import ConfigError

    packages = ("fastapi", "uvicorn", "prometheus_client")
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"serving needs {', '.join(missing)}, got an environment without; "
            "pip install 'hybrid-kv[serve]', or '.[serve]' in a checkout"
        )


def _rules(address: AddressOptions, limits: LimitOptions) -> Rules:
    from hybrid_kv.errors import ConfigError
    from hybrid_kv.serve.http.app import LOCAL_HOSTS, Rules

    if address.api_key is not None and not address.api_key.strip():
        raise ConfigError(f"--api-key is empty; write a word, or leave it and {_KEY} out for none")
    local = address.host in LOCAL_HOSTS
    longest = _bytes("--max-body", limits.max_body)
    return Rules(
        api_key=address.api_key,
        hosts=LOCAL_HOSTS if local else None,
        max_body_bytes=longest,
        max_bodies_bytes=8 * longest,
        lenient=limits.lenient,
    )


def _bytes(option: str, text: str) -> int:
    """'32MiB' -> 2**25.

    Raises:
        ConfigError: it is no number of bytes.
    """
    from hybrid_kv.config import parse_count
    from hybrid_kv.errors import ConfigError

    number = parse_count(text)
    try:
        count = int(str(number))
    except ValueError:
        count = -1
    if count < 0:
        raise ConfigError(f"{option} must be bytes such as 512MiB, got '{text}'")
    return count


def _name_of(model: str) -> str:
    """'./models/llama' -> 'llama'; a name or hub id as it is."""
    path = Path(model)
    return path.resolve().name if path.exists() else model


def _farewell(ending: Ending) -> str:
    """Sentence on what became of the requests in work."""
    if not ending.finished and not ending.cancelled:
        return "ended; no request was in work"
    parts = []
    for word, names in (("finished", ending.finished), ("cancelled", ending.cancelled)):
        if names:
            parts.append(f"{word} {len(names)} ({', '.join(names)})")
    return f"ended; of the requests in work {' and '.join(parts)}"
