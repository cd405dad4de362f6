"""Arguments of an evaluation, all that it takes to run it again, and the cases they stand for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, ValidationError

from hybrid_kv.config import HybridConfig, Params, budget_tokens, first_sentence
from hybrid_kv.contest.prompts import text_digest
from hybrid_kv.errors import ConfigError, NoBudgetError, said, unknown_name, unknown_setting
from hybrid_kv.eval.tasks import RULER, TASKS, Language, Task, TaskConfig
from hybrid_kv.models.load import resolve_device
from hybrid_kv.plugins import METHODS
from hybrid_kv.report.evaluation import Asking
from hybrid_kv.report.run import probe_cpu

FULL = "full"
"""The method that all others are held against; it always takes part."""

_LONG_QUESTION = 2**20
"""A question of up to so many tokens reads through the method, as the answer does."""


@dataclass(frozen=True, slots=True)
class EvalCase:
    """A method under a budget.

    name: as it was asked for; budget: as it was asked for, None where it changes nothing. refused:
    why the method cannot be given the budget; `config` is then without it, and never run.
    never: no budget would change that: the method takes none, or lacks what it runs with.
    """

    name: str
    budget: str | None
    config: HybridConfig
    refused: str | None = None
    never: bool = False


def parse_spec(text: str) -> tuple[str, dict[str, str]]:
    """'quest:dense_layers=2:page_size=8' -> its name and settings; a value may stand in quotes.

    Raises:
        ConfigError: a part after the name is no setting, or a quote has no end.
    """
    name, *parts = split_outside_quotes(text, ":")
    settings: dict[str, str] = {}
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals or not key:
            raise ConfigError(
                f"'{text}' must be a name with settings like {name}:key=value, got '{part}'"
            )
        settings[key.strip()] = _unquoted(value.strip())
    return name.strip(), settings


def split_outside_quotes(text: str, separator: str) -> list[str]:
    """'a:b="1,2",c' at ',' -> ['a:b="1,2"', 'c']; a quote begins a part or a value.

    Raises:
        ConfigError: a quote has no end.
    """
    parts, quote = [""], ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"" and parts[-1].rstrip()[-1:] in ("", "="):
            quote = letter
        elif letter == separator:
            parts.append("")
            continue
        parts[-1] += letter
    if quote:
        raise ConfigError(f"a quote must have an end, got {text}; close it with {quote}")
    return parts


def _unquoted(text: str) -> str:
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    return text[1:-1] if quoted else text


def contenders(
    names: Sequence[str],
    budgets: Sequence[str],
    context_tokens: int,
    settings: Mapping[str, Any],
) -> Iterator[EvalCase]:
    """Every method under every budget, full attention first; one without budgets once.

    A method's own settings hold whatever the budget says.

    Args:
        names: of methods, each with settings of its own or without.
        settings: for all methods that know them.

    Raises:
        ConfigError: a method or setting is unknown, or a budget is none.
    """
    for budget in budgets:
        budget_tokens(budget, context_tokens)
    for name in dict.fromkeys((FULL, *names)):
        method, own = parse_spec(name)
        plain = _config(method, own, settings)
        under = [_under(name, plain, own, budget, context_tokens) for budget in budgets]
        if all(one.config == plain and one.refused is None for one in under):
            yield EvalCase(name, None, plain)
        else:
            yield from under


def check_settings(names: Sequence[str], settings: Mapping[str, Any]) -> None:
    """Raises ConfigError for a method that is unknown, or a setting that none of them has."""
    methods = [parse_spec(name)[0] for name in names]
    for method in methods:
        if method not in METHODS:
            raise unknown_name("method", method, METHODS)
    for key in settings:
        if not any(HybridConfig.knows(method, key) for method in methods):
            known = {setting for method in methods for setting in HybridConfig.settings_of(method)}
            raise unknown_setting("setting of the methods", key, known)


def _under(
    name: str, plain: HybridConfig, own: Mapping[str, str], budget: str, context_tokens: int
) -> EvalCase:
    try:
        plain.check_complete()
    except ConfigError as error:
        return EvalCase(name, budget, plain, str(error), never=True)
    try:
        given = plain.at_budget(budget, context_tokens)
    except NoBudgetError as error:
        return EvalCase(name, budget, plain, str(error), never=True)
    except ConfigError as error:
        return EvalCase(name, budget, plain, str(error))
    return EvalCase(name, budget, given.replace(**own))


def _config(method: str, own: Mapping[str, str], settings: Mapping[str, Any]) -> HybridConfig:
    common = {key: value for key, value in settings.items() if HybridConfig.knows(method, key)}
    given = {"dense_extend_tokens": _LONG_QUESTION, "index_build": "wait", **common, **own}
    config = HybridConfig.from_settings({"method": method, **given})
    if config.prefill_error is not None:
        raise ConfigError(
            f"prefill={said(config.prefill)} has no effect in an evaluation, which reads each "
            "prompt once for all methods, exactly; leave it out"
        )
    return config


_GROUPS = {"ruler": RULER}


class EvalArguments(Params):
    """One comparison of methods.

    model, device, dtype, weights, dequantize, exact_products: as `load_model`. tasks: names of
    `TASKS` with settings of their own, such as key_value:records=32; "ruler" for its thirteen,
    "all" for all that the model's language has and that need no file. contexts: tokens of context
    and question.
    methods: registered names with settings of their own, such as quest:dense_layers=2; "all" stands
    for each of them once; full attention always takes part. budgets: shares of the context (5%) or
    tokens that a query head attends in a step. question: when it comes, "after" the eviction,
    "before" it, or "both". samples: contexts of each task and length. settings: for all methods
    that know them. text: a file to read on in; None for English prose that every Python brings.
    raw: leaves out the chat template. skip_refused: budgets that a method refuses are named in the
    results and left out, where else nothing is measured at all.
    """

    model: str
    tasks: tuple[str, ...] = ("key_value", "multi_query", "passkey")
    contexts: tuple[int, ...] = (4096,)
    methods: tuple[str, ...] = ("full", "hybrid", "quest", "streaming_llm")
    budgets: tuple[str, ...] = ("5%",)
    question: Literal["after", "before", "both"] = "after"
    samples: int = Field(default=4, ge=1)
    seed: int = Field(default=0, ge=0)
    settings: dict[str, Any] = Field(default_factory=dict)
    device: str | None = None
    dtype: str | None = None
    weights: str | None = None
    dequantize: bool = False
    exact_products: bool = False
    text: str | None = None
    raw: bool = False
    skip_refused: bool = False

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> EvalArguments:
        """Checked arguments.

        Raises:
            ConfigError: a task, method or setting is unknown, a budget leaves a method nothing and
                `skip_refused` is not set, or leaves nothing to compare.
        """
        try:
            asked = cls.model_validate(dict(values))
        except ValidationError as error:
            raise ConfigError(f"arguments of the evaluation: {first_sentence(error)}") from None
        for name in ("tasks", "contexts", "methods", "budgets"):
            if not getattr(asked, name):
                raise ConfigError(f"{name} must name one at least, got none; leave the option out")
        methods = [one for name in asked.methods for one in (METHODS if name == "all" else (name,))]
        tasks = [one for name in asked.tasks for one in _GROUPS.get(name, (name,))]
        asked = asked.model_copy(
            update={
                "methods": tuple(dict.fromkeys((FULL, *methods))),
                "tasks": tuple(dict.fromkeys(tasks)),
                "contexts": tuple(sorted(set(asked.contexts))),
                "budgets": tuple(dict.fromkeys(asked.budgets)),
            }
        )
        check_settings(asked.methods, asked.settings)
        for task in asked.tasks:
            if task != "all":
                asked.check_task(task)
        asked.check_budgets()
        return asked

    def contenders(self, context_tokens: int) -> list[EvalCase]:
        """Methods that take part at a context length, full attention first."""
        return [one for one in self._named(context_tokens) if one.refused is None]

    def refused(self, context_tokens: int) -> list[EvalCase]:
        """Methods that were asked for and cannot take part."""
        return [one for one in self._named(context_tokens) if one.refused is not None]

    def check_budgets(self) -> None:
        """Raises ConfigError for budgets that methods refuse, all of them at once."""
        every = [one for context in self.contexts for one in self.refused(context)]
        found = [one for one in every if not one.never]
        rivals = any(
            one.name != FULL for context in self.contexts for one in self.contenders(context)
        )
        if not every or (rivals and (self.skip_refused or not found)):
            return
        reasons = list(dict.fromkeys(str(one.refused) for one in found or every))
        if not rivals:
            raise ConfigError(f"{reasons[0]}; no method is left to compare")
        names = list(dict.fromkeys(f"{one.name} at {one.budget}" for one in found))
        others = f" (as are {', '.join(names[1:])})" if len(names) > 1 else ""
        raise ConfigError(f"{reasons[0]}{others}; or leave out what is refused with --skip-refused")

    def _named(self, context_tokens: int) -> list[EvalCase]:
        return [*contenders(self.methods, self.budgets, context_tokens, self.settings)]

    def tasks_in(self, language: Language) -> list[str]:
        """The tasks that are asked for.

        Raises:
            ConfigError: one of them is not written in the language of the model.
        """
        if "all" in self.tasks:
            drawn = [name for name in TASKS if not TASKS[name].factory.recorded]
            return [name for name in drawn if self.task(name).speaks(language)]
        for name in self.tasks:
            if not self.task(name).speaks(language):
                known = [task for task in TASKS if self.task(task).speaks(language)]
                tongue = "the needle language" if language == "needle" else "English"
                raise ConfigError(
                    f"task '{name}' is not written in {tongue}, which model '{self.model}' speaks; "
                    f"choose among {', '.join(known)}"
                )
        return list(self.tasks)

    def check_task(self, spec: str) -> None:
        """Raises ConfigError for a task that is unknown, or cannot be asked so often."""
        most = self.task(spec).num_contexts
        if most is not None and self.samples > most:
            raise ConfigError(
                f"samples must be at most {most} for task '{spec}', whose file has "
                f"no more contexts, got {self.samples}; lower samples"
            )

    @staticmethod
    def task(spec: str) -> Task:
        """A task by its name and settings.

        Raises:
            ConfigError: it is unknown, or a setting of it is.
        """
        name, settings = parse_spec(spec)
        task: Task = TaskConfig(task=name, **settings).build()
        return task

    @property
    def askings(self) -> tuple[Asking, ...]:
        """Times at which questions come."""
        return ("after", "before") if self.question == "both" else (self.question,)

    def identity(self) -> dict[str, Any]:
        """Facts that results of one folder must have in common; of all else more may be asked
        later.
        """
        grows = {"tasks", "contexts", "methods", "budgets", "question", "device", "skip_refused"}
        return self.model_dump(mode="json", exclude=grows)

    def on_machine(self) -> dict[str, str | None]:
        """Facts of this machine that results of one folder must have in common, for their times.

        Raises:
            ConfigError: the text cannot be read, or there is no such device.
        """
        device = resolve_device(self.device).type
        processor = probe_cpu().model if device == "cpu" else device
        return {"text": text_digest(self.text), "device": device, "processor": processor}
