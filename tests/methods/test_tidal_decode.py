"""TidalDecode: what a selection layer chooses is read by the layers behind it, row by row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_kv.config import HybridConfig
from hybrid_kv.errors import ConfigError, IntegrityError
from hybrid_kv.methods.windows import Choices, ReusingIndex
from hybrid_kv.runtime import KVCache
from hybrid_kv.types import LayerShape, ModelInfo
from tests.kit import every
from tests.oracle import softmax_attention
from tests.tolerances import TOLERANCES

SCALE, PROMPT, GROUP = 0.3, 173, 3
SHAPES = tuple(LayerShape(idx, 6, 2, 72) for idx in (0, 2, 3, 5, 6))  # 1 and 4 are not tiered
SINKS, WINDOW, TOP_K = 16, 32, 9


class Played:
    """A cache of random layers, and everything that was stored in them."""

    def __init__(self, rows: int = 1, **settings: Any) -> None:
        config = HybridConfig(
            method="tidal_decode",
            page_size=16,
            **{"sink_tokens": SINKS, "window_tokens": WINDOW, "top_k": TOP_K, **settings},
        )
        self.rows, self.kv = rows, KVCache(ModelInfo(SHAPES), config)
        empty = torch.empty(rows, 2, 0, 72)
        self.k = {shape.layer_idx: empty for shape in SHAPES}
        self.v = dict(self.k)
        self.step(PROMPT)
        self.step()  # ends the prompt

    def step(self, new: int = 1) -> dict[int, tuple[Tensor, Tensor]]:
        """By layer the queries and outputs [B, Hq, T, D] of new random tokens."""
        outputs, rows = {}, every(self.kv)
        self.window = SINKS + len(rows[0].cold) if rows else 0  # where it starts
        for idx in self.k:
            q, k, v = (torch.randn(self.rows, heads, new, 72) for heads in (6, 2, 2))
            self.k[idx] = torch.cat([self.k[idx], k], 2)
            self.v[idx] = torch.cat([self.v[idx], v], 2)
            outputs[idx] = q, self.kv.attend(idx, q, (k, v), None, scale=SCALE).out
        return outputs

    def expected(self, idx: int, q: Tensor, chooser: int | None, asked: Tensor) -> Tensor:
        """[B, Hq, D]: attention over sinks, window and the best cold keys of another layer."""
        out = torch.empty(self.rows, 6, 72)
        length = self.k[idx].shape[2]
        for row in range(self.rows):
            for head in range(6):
                kv = head // GROUP
                read = torch.ones(length, dtype=torch.bool)
                if chooser is not None:
                    scores = self.k[chooser][row, kv, SINKS : self.window] @ asked[row, head, 0]
                    read[SINKS : self.window] = False
                    read[SINKS + scores.topk(TOP_K).indices] = True
                out[row, head] = softmax_attention(
                    q[row, head],
                    self.k[idx][row, kv][read],
                    self.v[idx][row, kv][read],
                    scale=SCALE,
                )[0][0]
        return out

    def check(self, choosers: dict[int, int | None]) -> None:
        """One step: every layer read what its chooser (None for everything) scores highest."""
        outputs = self.step()
        for idx, chooser in choosers.items():
            q, out = outputs[idx]
            asked = outputs[idx if chooser is None else chooser][0]
            expected = self.expected(idx, q, chooser, asked)
            torch.testing.assert_close(out[:, :, 0], expected, **TOLERANCES[torch.float32])


def test_layers_read_what_the_last_selection_layer_chose() -> None:
    played = Played(selection_layers=(2, 4))  # layer 4 is not tiered: 5 chooses
    for _ in range(40):  # pages leave the window meanwhile
        played.check({0: None, 2: None, 3: 2, 5: None, 6: 5})


def test_selection_layers_may_read_only_what_they_choose() -> None:
    played = Played(selection_layers="0,4", selection_reads="selected")
    played.check({0: 0, 2: 0, 3: 0, 5: 5, 6: 5})


def test_rows_and_forks_keep_to_their_own_choices() -> None:
    played = Played(rows=2, selection_layers=(2,))
    played.check({0: None, 2: None, 3: 2, 5: 2, 6: 2})
    sources = [1, 1, 0]
    for layer in played.kv.layers.values():
        layer.fork(sources)
    played.rows = 3
    played.k = {idx: k[sources] for idx, k in played.k.items()}
    played.v = {idx: v[sources] for idx, v in played.v.items()}
    played.check({2: None, 3: 2, 5: 2, 6: 2})


def test_a_cropped_row_does_not_read_what_it_forgot() -> None:
    played = Played(selection_layers=(2,))
    for _ in range(40):
        played.step()
    for layer in played.kv.layers.values():
        layer.crop(37)
    played.k = {idx: k[:, :, :-37] for idx, k in played.k.items()}
    played.v = {idx: v[:, :, :-37] for idx, v in played.v.items()}
    played.check({0: None, 2: None, 3: 2, 5: 2, 6: 2})


def test_what_was_not_chosen_in_step_is_refused() -> None:
    index = ReusingIndex(Choices())
    index.build(torch.randn(2, 37, 8), None)
    with pytest.raises(IntegrityError, match="search 1 of a step must follow one of the layer"):
        index.search(torch.randn(2, 3, 8), 5)


@pytest.mark.parametrize("layers", ["", "two", "2,-1", []])
def test_layers_that_cannot_be_are_refused(layers: object) -> None:
    with pytest.raises(ConfigError, match=r"^selection_layers"):
        HybridConfig(method="tidal_decode", selection_layers=layers)
