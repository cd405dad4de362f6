"""Options that several verbs share, as groups that are spread into single options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from hybrid_kv.cli import known_names
from hybrid_kv.cli.known_names import check_names

_PROMPT, _MODEL, _SAMPLING, _OUTPUT = "Prompt", "Model and cache", "Sampling", "Output"


def count(text: str | int) -> int:
    """'32k' -> 32768.

    Raises:
        ConfigError: not a whole number of at least one.
    """
    from hybrid_kv.counts import parse_count
    from hybrid_kv.errors import ConfigError

    try:
        number = int(str(parse_count(text)))
    except ValueError:
        number = 0
    if number < 1:
        raise ConfigError(
            f"a count must be a whole number of at least 1 like 512 or 32k, got {text!r}"
        )
    return number


ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        autocompletion=known_names.models,
        help="A folder, a .gguf file, a hub id, 'needle' (ships with the package), 'smollm2' "
        "(extra smollm2), or 'random:SHAPE'.",
    ),
]


Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        autocompletion=known_names.settings,
        help="A setting such as top_k=64 or index=hnsw; repeatable.",
        rich_help_panel=_MODEL,
    ),
]


def _load_plugins(modules: list[str] | None) -> list[str] | None:
    if modules:  # else nothing is imported, so that wrong names are refused at once
        from hybrid_kv.plugin import load_plugin

        for module in modules:
            load_plugin(module)
    return modules


Plugins = Annotated[
    list[str] | None,
    typer.Option(
        "--plugin",
        metavar="MODULE",
        callback=_load_plugins,
        is_eager=True,  # --method is checked and completed by what it registers
        help="A module or .py file that registers methods or index kinds; repeatable.",
        rich_help_panel=_MODEL,
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="The same settings as YAML; --method and --set override it.",
        rich_help_panel=_MODEL,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="NAME",
        help="cpu, cuda or cuda:1. [dim]default: the first GPU, else cpu[/]",
        rich_help_panel=_MODEL,
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="NAME",
        help="float32, bfloat16 or float16. [dim]default: as stored[/]",
        rich_help_panel=_MODEL,
    ),
]


Weights = Annotated[
    str | None,
    typer.Option(
        "--weights",
        metavar="KIND",
        help="Pack linear layers while loading: int8, int4 or nf4; plan takes GGUF's, too. "
        "[dim]default: as they are[/]",
        rich_help_panel=_MODEL,
    ),
]
Dequantize = Annotated[
    bool | None,
    typer.Option(
        "--dequantize",
        help="Unpack weights that are stored packed. [dim]default: they stay so, on the CPU[/]",
        rich_help_panel=_MODEL,
    ),
]
ExactProducts = Annotated[
    bool | None,
    typer.Option(
        "--exact-products",
        help="Multiply packed weights as exactly as plain ones, some 8% slower.",
        rich_help_panel=_MODEL,
    ),
]


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Choice of the method, its settings and the model."""

    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            metavar="NAME",
            autocompletion=known_names.methods,
            help="How the cache is kept and read; see the verb methods. [dim]default: hybrid[/]",
            rich_help_panel=_MODEL,
        ),
    ] = None
    plugins: Plugins = None
    settings: Settings = None
    config: ConfigFile = None
    device: Device = None
    dtype: Dtype = None
    weights: Weights = None
    dequantize: Dequantize = None
    exact_products: ExactProducts = None


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """Folder where prompts are kept, so that others can begin with them."""

    cache_dir: Annotated[
        Path | None,
        typer.Option(
            "--cache-dir",
            metavar="FOLDER",
            help="Take from it what the prompt begins with, and leave the prompt there.",
            rich_help_panel=_MODEL,
        ),
    ] = None
    cache_limit: Annotated[
        str | None,
        typer.Option(
            "--cache-limit",
            metavar="BYTES",
            help="Of all in it; what was used least recently goes. [dim]default: 20GiB[/]",
            rich_help_panel=_MODEL,
        ),
    ] = None

    def as_options(self) -> dict[str, Any]:
        """Keyword arguments of `load`.

        Raises:
            ConfigError: a limit without a folder.
        """
        from hybrid_kv.errors import ConfigError

        if self.cache_dir is None:
            if self.cache_limit is not None:
                raise ConfigError("--cache-limit needs --cache-dir; give both or leave it out")
            return {}
        limit = {} if self.cache_limit is None else {"cache_limit": self.cache_limit}
        return {"cache_dir": self.cache_dir, **limit}


@dataclass(frozen=True, slots=True)
class LayersOption:
    """Number of layers that a random model is cut down to."""

    layers: Annotated[
        int | None,
        typer.Option(
            "--layers",
            metavar="N",
            help="Keep only N layers of a random:SHAPE model.",
            rich_help_panel=_MODEL,
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Choice of how text becomes a prompt."""

    system: Annotated[
        str | None,
        typer.Option(
            "--system",
            metavar="TEXT",
            help="What the system message says; needs a chat template.",
            rich_help_panel=_PROMPT,
        ),
    ] = None
    raw: Annotated[
        bool,
        typer.Option(
            "--raw",
            help="Leave out the model's chat template: the text is the prompt.",
            rich_help_panel=_PROMPT,
        ),
    ] = False

    def check(self, *, text: bool = True) -> None:
        """Raises ConfigError for a system message that has no place, before anything is loaded.

        Args:
            text: whether the prompt is text.
        """
        from hybrid_kv.errors import ConfigError

        if self.system is None:
            return
        if not self.system.strip():
            raise ConfigError("--system is empty; write at least one word or leave it out")
        if self.raw:
            raise ConfigError("--system needs the chat template, which --raw turns off; drop one")
        if not text:
            raise ConfigError(
                "--system needs text that the chat template renders, got random tokens; give a "
                "prompt or leave it out"
            )


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Choice of the next token: greedily, unless temperature, top-p or top-k is given."""

    max_new_tokens: Annotated[
        int,
        typer.Option(
            "--max-new-tokens",
            parser=count,
            metavar="N",
            help="Stop after N tokens.",
            rich_help_panel=_SAMPLING,
        ),
    ] = 128
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature", min=0.0, metavar="X", help="0 is greedy.", rich_help_panel=_SAMPLING
        ),
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option(
            "--top-p",
            min=0.0,
            max=1.0,
            metavar="X",
            help="Sample from the likeliest tokens of this total mass.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    top_k: Annotated[
        int | None,
        typer.Option(
            "--top-k",
            min=1,
            metavar="N",
            help="Sample from the N likeliest tokens.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    seed: Annotated[
        int | None,
        typer.Option("--seed", min=0, metavar="N", help="Of sampling.", rich_help_panel=_SAMPLING),
    ] = None
    stop: Annotated[
        list[str] | None,
        typer.Option(
            "--stop",
            metavar="TEXT",
            help="End before this text; repeatable.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    exact: Annotated[
        bool,
        typer.Option(
            "--exact",
            help="Draft tokens by the method and verify them by full attention.",
            rich_help_panel=_SAMPLING,
        ),
    ] = False
    max_error: Annotated[
        float | None,
        typer.Option(
            "--max-error",
            metavar="KL",
            help="Verify by full attention where the expected KL from it is larger, in nats.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None

    def as_options(self) -> dict[str, Any]:
        """Keyword arguments of `LLM.generate`."""
        options: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "seed": self.seed,
            "stop": self.stop or [],
            "exact": self.exact,
            "max_error": self.max_error,
        }
        given = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        given = {name: value for name, value in given.items() if value is not None}
        if not given or self.temperature == 0:
            return {**options, "do_sample": False}
        return {**options, "do_sample": True, **given}


TokenErrorsOption = Annotated[
    bool,
    typer.Option(
        "--token-errors",
        help="Mark tokens that full attention might have chosen otherwise.",
        rich_help_panel=_OUTPUT,
    ),
]


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """Choice of what is printed besides the result."""

    json: Annotated[
        str | None,
        typer.Option(
            "--json",
            metavar="FILE|-",
            help="Write a JSON report; with - it is all that stdout gets.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None
    quiet: Annotated[
        bool,
        typer.Option(
            "--quiet", "-q", help="Nothing on stderr but errors.", rich_help_panel=_OUTPUT
        ),
    ] = False
    debug: Annotated[
        bool,
        typer.Option(
            "--debug",
            help="Show what the library logs, and the traceback of an error.",
            rich_help_panel=_OUTPUT,
        ),
    ] = False

    @property
    def json_only(self) -> bool:
        return self.json == "-"


def each_of(option: str, text: str, parse: Callable[[str], Any]) -> tuple[Any, ...]:
    """The values of an option that takes several, parted by commas.

    Raises:
        ConfigError: one is wrong; the message begins with the option.
    """
    from hybrid_kv.errors import ConfigError

    try:
        return tuple(parse(part.strip()) for part in text.split(",") if part.strip())
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from None


def _method_of(options: Mapping[str, Any]) -> str | None:
    """The method that --method or --set names; None where a file, a context or the default does."""
    settings: list[str] = options["settings"]
    named = [text[7:].strip() for text in settings if text.startswith("method=")]
    return named[0] if named else options.get("method")


def grouped(verb: Callable[..., None]) -> Callable[..., None]:
    """The verb with each parameter that is a group of options spread into single options."""
    hints = get_type_hints(verb, include_extras=True)
    groups: dict[str, Any] = {}
    spread: list[inspect.Parameter] = []
    for parameter in inspect.signature(verb).parameters.values():
        group = hints[parameter.name]
        if not is_dataclass(group):
            spread.append(parameter.replace(annotation=group))
            continue
        groups[parameter.name] = group
        types = get_type_hints(group, include_extras=True)
        spread += [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=types[field.name],
            )
            for field in fields(group)
        ]

    @wraps(verb)
    def call(**values: Any) -> None:
        if values.get("settings") and not values.get("plugins"):
            check_names(_method_of(values), values["settings"])
        for name, group in groups.items():
            own = {field.name: values.pop(field.name) for field in fields(group)}
            values[name] = group(**own)
        verb(**values)

    call.__signature__ = inspect.Signature(spread)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in spread}
    return call
