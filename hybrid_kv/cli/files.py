"""Texts, prompts and settings that a command is given, and reports that it writes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid_kv.cli.options import ModelOptions, OutputOptions
from hybrid_kv.config import HybridConfig, as_printed
from hybrid_kv.errors import ConfigError, unknown_setting
from hybrid_kv.report.files import check_files, write_file
from hybrid_kv.report.run import (
    AuditReport,
    Environment,
    ExactReport,
    MemoryBytes,
    Percentiles,
    PhasesMs,
    PrefillReport,
    Run,
    TokenErrorReport,
    WorkReport,
    environment_on,
)
from hybrid_kv.report.schema import to_json
from hybrid_kv.texts import text_of_pdf
from hybrid_kv.types import Work

if TYPE_CHECKING:
    from hybrid_kv.api import LLM, Generation
    from hybrid_kv.api.llm import Prompt
    from hybrid_kv.cli.model_run import Outcome
    from hybrid_kv.config import HybridConfig


def check_target(output: OutputOptions) -> None:
    """Raises ConfigError if the report could not be written; said before the work begins."""
    check_files({"--json": output.json})


def write_report(report: Any, output: OutputOptions) -> None:
    """Puts a report where --json says, if it says anything.

    Raises:
        WriteError: it cannot be written; an older one is still there.
    """
    if output.json is not None:
        write_file(output.json, to_json(report) + "\n", "report")


def environment_of(llm: LLM) -> Environment:
    """The environment with the device that the model is on."""
    return environment_on(llm.model.device)


def describe_run(llm: LLM, model: str, outcome: Outcome, config: HybridConfig | None = None) -> Run:
    """The run as schema 1 has it; what nobody measured is null.

    Args:
        config: of the run, where it is not the model's.
    """
    got, config = outcome.generation, config or llm.config
    errors = None if got.token_errors is None else tuple(map(TokenErrorReport.of, got.token_errors))
    return Run(
        config=config.flat(),
        method=config.method,
        model=model,
        context_tokens=got.prompt_tokens,
        new_tokens=len(got.token_ids),
        text=got.text,
        token_ids=tuple(got.token_ids),
        ttft_s=got.ttft_s if got.token_ids else None,
        prefill_s=got.prefill_s if got.token_ids else None,
        index_build_s=got.index_build_s,
        tpot_ms=got.tpot_ms if len(got.token_times_s) > 1 else None,
        itl_ms=_gaps(got.token_times_s),
        phases_ms=_phases(got),
        work=WorkReport.of(got.work, got.audit),
        memory_bytes=_memory(llm, got),
        backends=got.backends,
        index=tuple(got.index),
        audit=None if got.audit is None else AuditReport.of(got.audit),
        prefill=None if got.prefill is None else PrefillReport.of(got.prefill),
        exact=None if got.exact is None else ExactReport.of(got.exact),
        token_errors=errors,
        look_ahead=tuple(got.look_ahead),
        steps=tuple(got.steps),
        chat_template=got.chat_template,
        interrupted=outcome.interrupted,
    )


def _gaps(times: list[float]) -> Percentiles | None:
    return Percentiles.of([1e3 * (end - begin) for begin, end in pairwise(times)])


def _phases(got: Generation) -> PhasesMs:
    steps = len(got.token_times_s) - 1
    if steps < 1:
        return PhasesMs()
    phases = {name: 1e3 * seconds / steps for name, seconds in got.phases_s.items()}
    return PhasesMs(**phases, other=max(0.0, got.tpot_ms - sum(phases.values())))


def _memory(llm: LLM, got: Generation) -> MemoryBytes:
    import torch

    device = llm.model.device
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return MemoryBytes(
        device_peak=peak,
        host_kv=got.host_kv_bytes,
        host_index=got.host_index_bytes,
        host_peak=_peak_resident_set(),
    )


def _peak_resident_set() -> int | None:
    if sys.platform == "win32":
        return None
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def read_texts(files: Sequence[str]) -> str:
    """The text of all files, in order, with an empty line between two.

    Raises:
        ConfigError: a file cannot be read, or there is no text in any of them.
    """
    texts = [_read(file) for file in files]
    if not any(text.strip() for text in texts):
        raise ConfigError(
            f"a context needs text, got none in {', '.join(files)}; scanned pages have none"
        )
    return "\n\n".join(texts)


def _read(file: str, name: str = "file") -> str:
    if file == "-":
        return sys.stdin.read()
    path = Path(file)
    try:
        if path.suffix.lower() == ".pdf":
            return text_of_pdf(path.read_bytes(), f"file '{path}'")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{name} '{path}' must be UTF-8 text or PDF; convert it") from None
    except OSError as error:
        raise ConfigError(
            f"{name} '{path}' cannot be read: {error.strerror}; check the path"
        ) from None


def has_no_tokenizer(model: str) -> bool:
    """Whether a MODEL is one of random weights."""
    return model.startswith("random:")


@dataclass(frozen=True, slots=True)
class PromptSource:
    """Exactly one of text and a number of random tokens."""

    text: str | None
    random_tokens: int | None
    seed: int

    def check(self, model: str) -> None:
        """Raises ConfigError for text where it is known, before anything is loaded, that no
        tokenizer will read it.
        """
        if self.text is not None and has_no_tokenizer(model):
            raise ConfigError(
                f"a text prompt needs a tokenizer, and model '{model}' has none; give "
                "--prompt-tokens N instead"
            )

    def for_model(self, llm: LLM, system: str | None, *, raw: bool) -> Prompt:
        """Prompt as `LLM.generate` takes it: messages if the model has a chat template, unless
        `raw`.

        Raises:
            ConfigError: there is none to put the system message into.
        """
        import torch

        if self.text is not None:
            if system is None and (raw or llm.chat_template is None):
                return self.text
            llm.require_chat_template()
            opening = [] if system is None else [{"role": "system", "content": system}]
            return [*opening, {"role": "user", "content": self.text}]
        embedding: Any = llm.model.get_input_embeddings()
        size = embedding.weight.shape[0]
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randint(size, (self.random_tokens or 1,), generator=generator)


def find_prompt(
    text: str | None, file: str | None, random_tokens: int | None, seed: int
) -> PromptSource:
    """The one prompt that was given.

    Raises:
        ConfigError: none or several were given, the file cannot be read, or the text is empty.
    """
    given = [value for value in (text, file, random_tokens) if value is not None]
    if len(given) != 1:
        raise ConfigError(
            "prompt must be given once, as an argument, with --prompt-file or with "
            f"--prompt-tokens, got {len(given)} of them"
        )
    if file is not None:
        text = _read(file, "prompt file")
    if text is not None and not text.strip():
        raise ConfigError("prompt is empty; pass at least one word")
    return PromptSource(text, random_tokens, seed)


# From --method, --set and --config to one HybridConfig --------------------------------------------


def build_config(options: ModelOptions) -> HybridConfig:
    """The configuration; a flag overrides the same setting of the file.

    Raises:
        ConfigError: a setting is unknown, out of range or badly written.
    """
    given = given_settings(options)
    _check_all_are_settings(
        str(given.get("method", HybridConfig.model_fields["method"].default)), given
    )
    return HybridConfig.from_settings(given)


def _check_all_are_settings(method: str, given: Mapping[str, object]) -> None:
    """Raises ConfigError for a name that Python code alone may give."""
    for path in HybridConfig.python_only(method, given):
        for key in given:
            below = (f"{path}.", f"{as_printed(path)}.")
            if key == path or path.endswith(f".{key}") or key.startswith(below):
                known = HybridConfig.settings_of(method, given)
                raise unknown_setting(f"{method} setting", key, known)


def config_of_context(saved: Mapping[str, Any], options: ModelOptions) -> HybridConfig:
    """Configuration of a saved context, changed by what the user gives.

    Args:
        saved: the settings in its manifest.

    Raises:
        ConfigError: another method is given, or a setting is unknown or out of range.
    """
    from hybrid_kv.saved.identity import settings_of_file

    given, known = given_settings(options), dict(_flatten(settings_of_file(saved)))
    if given.get("method", known["method"]) != known["method"]:
        raise ConfigError(
            f"a context must be read by the method that it was made with, '{known['method']}', got "
            f"'{given['method']}'; leave the method out"
        )
    _check_all_are_settings(str(known["method"]), given)
    kept = {key: value for key, value in known.items() if not any(_covers(f, key) for f in given)}
    return HybridConfig.from_settings({**kept, **given})


def given_settings(options: ModelOptions) -> dict[str, object]:
    """Settings that the user gave, by dotted name, defaults left out."""
    flags = parse_settings(options.settings or ())
    if options.method is not None:
        if "method" in flags:
            raise ConfigError("setting 'method' is given twice; keep --method or --set method=")
        flags["method"] = options.method
    stored = read_settings(options.config) if options.config is not None else {}
    kept = {key: value for key, value in stored.items() if not any(_covers(f, key) for f in flags)}
    return {**kept, **flags}


def parse_settings(texts: Sequence[str]) -> dict[str, object]:
    """'key=value' texts as a mapping; values stay text."""
    settings: dict[str, object] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ConfigError(f"--set must be KEY=VALUE like top_k=64, got '{text}'")
        if key in settings:
            raise ConfigError(f"setting '{key}' is given twice; keep one")
        settings[key] = value.strip()
    return settings


def read_settings(path: Path) -> dict[str, object]:
    """The settings of a YAML file by dotted name."""
    import yaml

    try:
        data = yaml.load(path.read_text(encoding="utf-8"), _loader(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"config '{path}' cannot be read: {reason}; check the path") from None
    except yaml.YAMLError as error:
        line = getattr(getattr(error, "problem_mark", None), "line", 0) + 1
        raise ConfigError(
            f"config '{path}' must be YAML, got a syntax error in line {line}"
        ) from None
    if data is None:
        return {}
    if not isinstance(data, Mapping):
        raise ConfigError(
            f"config '{path}' must hold settings like 'top_k: 64', got {type(data).__name__}"
        )
    settings: dict[str, object] = {}
    for key, value in _flatten(data):
        if key in settings:
            raise ConfigError(f"config '{path}' gives setting '{key}' twice; keep one")
        settings[key] = value
    return settings


def _loader(path: Path) -> Any:
    """YAML's safe loader, which would take the last of two equal keys."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Refuses what is written twice in one mapping."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            seen: set[str] = set()
            for key, _ in node.value:
                if key.value in seen:
                    raise ConfigError(
                        f"config '{path}' gives '{key.value}' twice, again in line "
                        f"{key.start_mark.line + 1}; keep one"
                    )
                if isinstance(key, yaml.ScalarNode):
                    seen.add(key.value)
            return super().construct_mapping(node, deep)

    return Loader


def _flatten(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _covers(flag: str, key: str) -> bool:
    """Whether a flag replaces a file's setting: the same name, short or long, or its group."""
    flag, key = as_printed(flag), as_printed(key)
    same = flag == key or flag.endswith(f".{key}") or key.endswith(f".{flag}")
    return same or f".{key}.".find(f".{flag}.") >= 0


def exactness_notice(settings: Mapping[str, object], work: Work, tokens: int) -> str | None:
    """One line if a budget that the user set covered the whole cache."""
    budgets = [key for key in settings if key.split(".")[-1] in ("top_k", "page_budget")]
    given = [f"{key}={settings[key]}" for key in budgets if settings[key] != "all"]
    if not given or work.visible == 0 or work.attended < work.visible:
        return None
    return f"{' and '.join(given)} covers the whole cache of {tokens:,} tokens: attention was exact"
