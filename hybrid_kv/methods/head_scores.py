"""Choice of the KV heads that keep everything: by given scores or masks, or by a prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from hybrid_kv.entries import Entries
from hybrid_kv.errors import ConfigError
from hybrid_kv.types import Evidence, ModelInfo

Given: TypeAlias = str | Sequence[Sequence[float]]


class HeadChoice:
    """Heads that keep everything: a share of all, by the highest scores.

    Args:
        given: scores, or masks of 0 and 1, for each tiered layer in order; the path of a JSON file
            with those, alone or under "heads"; or "prompt" to observe them.
        ratio: of all heads; None for what masks say, or `usual` by scores.

    Raises:
        ConfigError: there is no such file, or these are no scores of this model's heads.
    """

    def __init__(
        self, given: Given, ratio: float | None, info: ModelInfo, usual: float = 0.5
    ) -> None:
        self._layers = [shape.layer_idx for shape in info.layers]
        self._ratio = usual if ratio is None else ratio
        self._masks: list[Tensor] | None = None
        if given != "prompt":
            scores = given_scores(given, info)
            flat = torch.cat(scores)
            are_masks = ratio is None and bool(((flat == 0) | (flat == 1)).all())
            chosen = flat == 1 if are_masks else best(flat, round(self._ratio * len(flat)))
            self._masks = list(chosen.split([len(layer) for layer in scores]))

    def judge(
        self, layer_idx: int, left: Entries, seen: Evidence | None, first: int
    ) -> dict[str, Tensor]:
        """On the host: `retrieves` [Hkv] bool, with `scores` [Hkv] where they were observed.

        Args:
            left: what first leaves the window, from position `first` on; where nobody saw it leave,
                all heads retrieve.
        """
        layer, heads = self._layers.index(layer_idx), left.num_heads
        if self._masks is not None:
            return {"retrieves": self._masks[layer]}
        if seen is None or not left.lengths[0]:
            return {"retrieves": torch.ones(heads, dtype=torch.bool)}
        scores = observed(seen, heads, first, first + left.lengths[0]).cpu()
        each = heads * self._ratio  # rounded so that all layers together have the ratio
        count = round(each * (layer + 1)) - round(each * layer)
        return {"retrieves": best(scores, count), "scores": scores}


def given_scores(given: Given, info: ModelInfo) -> list[Tensor]:
    """[Hkv] by tiered layer, of a list or of the path of a JSON file.

    Raises:
        ConfigError: there is no such file, or these are no scores of this model's heads.
    """
    rows, name = _read(given) if isinstance(given, str) else (given, "heads")
    return _checked(rows, [shape.num_kv_heads for shape in info.layers], name)


def best(scores: Tensor, count: int) -> Tensor:
    """[N] bool: the `count` highest of scores [N], of equals the first."""
    order = torch.sort(scores, descending=True, stable=True).indices
    return torch.zeros(len(scores), dtype=torch.bool).index_fill_(0, order[:count], 1)


def observed(seen: Evidence, num_kv_heads: int, first: int, stop: int) -> Tensor:
    """[Hkv]: of their attention, what the prompt's last queries gave to tokens first..stop - 1.

    Of a group of query heads the one that gave most counts.
    """
    mass = seen.mass()
    share = mass[:, first:stop].sum(1) / mass.sum(1)
    return torch.amax(share.view(num_kv_heads, -1), 1)


def _read(path: str) -> tuple[object, str]:
    name = f"heads '{path}'"
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{name} must be a JSON file of scores by layer, got none: {reason}; make one with "
            "hybrid-kv heads MODEL --text FILE, or say 'prompt'"
        ) from None
    return (data["heads"] if isinstance(data, Mapping) and "heads" in data else data), name


def _checked(rows: object, counts: Sequence[int], name: str) -> list[Tensor]:
    """Scores [Hkv] by layer; raises ConfigError unless there are as many as the model has heads."""
    if not isinstance(rows, list | tuple) or len(rows) != len(counts):
        got = f"{len(rows)}" if isinstance(rows, list | tuple) else type(rows).__name__
        raise ConfigError(
            f"{name} must have a list for each of the model's {len(counts)} layers, got {got}; "
            "make them with hybrid-kv heads MODEL --text FILE"
        )
    for layer, (row, count) in enumerate(zip(rows, counts, strict=True)):
        if not isinstance(row, list | tuple) or len(row) != count:
            got = f"{len(row)}" if isinstance(row, list | tuple) else repr(row)
            raise ConfigError(
                f"{name} must have {count} numbers in list {layer}, one for each KV head, got {got}"
            )
        if not all(isinstance(score, int | float) and 0 <= score <= 1 for score in row):
            raise ConfigError(
                f"{name} must hold numbers between 0 and 1, got {list(row)} in list {layer}; masks "
                "are 0 and 1"
            )
    return [torch.tensor([float(score) for score in row]) for row in rows]
