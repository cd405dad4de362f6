"""Arguments of an evaluation: all that it takes to run it again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, ValidationError

from hybrid_kv.config import Params, first_sentence
from hybrid_kv.contest.cases import FULL, EvalCase, check_settings, contenders, parse_spec
from hybrid_kv.errors import ConfigError
from hybrid_kv.eval.tasks import RULER, TASKS, Language, Task, TaskConfig
from hybrid_kv.plugins import METHODS
from hybrid_kv.report.evaluation import Asking

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
