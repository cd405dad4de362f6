"""Says which matrices of a checkpoint, an expert's each, transformers makes one weight of.

Checkpoints name a matrix of each expert, `experts.3.gate_proj` or `experts.3.w1`; transformers has
one weight [experts, rows, columns] of all, in which rows of the gate come before those that it
gates. A model's own conversions tell both names, so that no table of architectures is kept here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

_OF_EXPERT = re.compile(r"(.+)\.\*\.(\w+)\.weight")
_STEPS = ((MergeModulelist, 0), (Concatenate, 1))
"""Operations of a conversion, and their dimensions: of one matrix of an expert the first only."""


class Merge(NamedTuple):
    """Matrices of experts that become one weight of all, [E, parts * N, K].

    prefix: a pattern of their names, up to the expert's number. parts: their names behind it, in
    the order of rows. target: how the weight's name ends. patterns: of the matrices' weights.
    """

    prefix: str
    parts: tuple[str, ...]
    target: str
    patterns: tuple[str, ...]


def merges_of(conversions: Iterable[Any]) -> Iterator[Merge]:
    """Conversions that put matrices of experts together and do nothing else."""
    for one in conversions:
        if not isinstance(one, WeightConverter):
            continue
        found = [_OF_EXPERT.fullmatch(pattern) for pattern in one.source_patterns]
        names = [(match[1], match[2]) for match in found if match is not None]
        steps = tuple((type(step), getattr(step, "dim", None)) for step in one.operations)
        is_one = len(names) == len(found) and len({prefix for prefix, _ in names}) == 1
        if is_one and steps == _STEPS[: len(names)]:
            parts = tuple(part for _, part in names)
            yield Merge(names[0][0], parts, one.target_patterns[0], tuple(one.source_patterns))


class StoredNames:
    """A model's names of what a checkpoint stores."""

    def __init__(self, model: PreTrainedModel) -> None:
        mapping = get_model_conversion_mapping(model)
        self._renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
        self._converters = [one for one in mapping if isinstance(one, WeightConverter)]
        self._prefix, self._known = model.base_model_prefix, dict(model.named_parameters())
        self._ignored = [*(model._keys_to_ignore_on_load_unexpected or ())]
        merges = list(merges_of(mapping))
        self._patterns = {name for merge in merges for name in merge.patterns}
        self._parts = list(dict.fromkeys(part for merge in merges for part in merge.parts))

    def find(self, matrix: str) -> tuple[str, bool | None]:
        """The model's weight that a matrix goes to, and whether it is one of those that go there:
        an expert's. None: transformers makes something else of it.
        """
        target, pattern = rename_source_key(
            *(f"{matrix}.weight", self._renamings, self._converters, self._prefix, self._known)
        )
        if pattern is None:
            return target, False
        is_numbered = matrix.split(".")[-2].isdigit()
        return target, True if pattern in self._patterns and is_numbered else None

    def is_ignored(self, target: str) -> bool:
        """Whether transformers leaves a weight out that the model does not have, such as those of
        layers that foresee further tokens.
        """
        unknown = target not in self._known
        return unknown and any(re.search(pattern, target) for pattern in self._ignored)

    def parts(self, experts: str, prefix: str) -> dict[str, list[str]]:
        """By weight of a module the names of an expert's matrices that go there, in their order.

        Args:
            experts: the module. prefix: of its matrices in the checkpoint, up to the number.
        """
        found: dict[str, list[str]] = {}
        for part in self._parts:
            target, is_expert = self.find(f"{prefix}.0.{part}")
            owner, _, weight = target.rpartition(".")
            if is_expert and owner == experts:
                found.setdefault(weight, []).append(part)
        return found
