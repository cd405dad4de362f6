"""MagicPIG in a cache: samples weigh 1 / their probability, in every row, after crops and forks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hybrid_kv.config import HybridConfig
from hybrid_kv.errors import ConfigError
from hybrid_kv.index.hashing import LshIndex
from hybrid_kv.runtime import KVCache
from hybrid_kv.types import LayerShape, ModelInfo
from tests.kit import every, extents, held
from tests.oracle import softmax_attention
from tests.tolerances import TOLERANCES

SHAPE, SCALE, SOFTCAP, PROMPT = LayerShape(0, 6, 2, 72), 0.1, 20.0, 333
SAMPLING = {"num_bits": 3, "num_tables": 9, "seed": 5}
CONFIG = HybridConfig(
    method="magic_pig",
    page_size=16,
    sink_tokens=16,
    window_tokens=32,
    cold={"top_k": 5, "index": {"kind": "lsh", **SAMPLING}},
)


class Played:
    """A cache of one layer and two rows, and what was stored in it."""

    def __init__(self, config: HybridConfig = CONFIG) -> None:
        self.kv = KVCache(ModelInfo((SHAPE,)), config)
        self.k = self.v = torch.empty(2, 2, 0, 72)
        self.step(PROMPT)
        self.step()
        self.first = [self.cold(self.k, row) for row in range(2)]
        self.sample_rows([0, 1])

    def sample_rows(self, sources: list[int]) -> None:
        """Indexes of rows that continue from these ones; the mean is that of the prompt's keys."""
        self.index = [LshIndex(LshIndex.Params(**SAMPLING)) for _ in sources]
        for index, source in zip(self.index, sources, strict=True):
            index.build(self.first[source], None)

    def cold(self, rows: Tensor, row: int) -> Tensor:
        count = len(held(self.kv, row=row).cold)
        return rows[row, :, 16 : 16 + count]

    def step(self, new: int = 1) -> tuple[Tensor, Tensor]:
        q, k, v = (torch.randn(len(self.k), heads, new, 72) for heads in (6, 2, 2))
        self.k, self.v = torch.cat([self.k, k], 2), torch.cat([self.v, v], 2)
        return q, self.kv.attend(0, q, (k, v), None, scale=SCALE, softcap=SOFTCAP).out

    def check(self) -> None:
        before = [self.cold(self.k, row) for row in range(len(self.k))]
        q, out = self.step()
        for row, keys in enumerate(before):
            self.index[row].add(keys)
            asked = q[row].view(2, 3, 72)
            found = self.index[row].search(asked, 5, 4096)
            assert found.bias is not None
            for head in range(2):
                for m in range(3):
                    ids = found.ids[head, m][found.ids[head, m] >= 0]
                    read = torch.ones(self.k.shape[2], dtype=torch.bool)
                    read[16 : 16 + keys.shape[1]] = False
                    read[16 + ids] = True
                    bias = torch.zeros(self.k.shape[2])
                    bias[16 + ids] = found.bias[head, m, : len(ids)]
                    expected = softmax_attention(
                        asked[head, m : m + 1],
                        self.k[row, head][read],
                        self.v[row, head][read],
                        scale=SCALE,
                        softcap=SOFTCAP,
                        bias=bias[read],
                    )[0]
                    got = out[row, 3 * head + m]
                    torch.testing.assert_close(got, expected.float(), **TOLERANCES[torch.float32])


def test_samples_weigh_one_by_their_probability() -> None:
    played = Played()
    for _ in range(40):  # pages leave the window meanwhile
        played.check()
    work = played.kv.work
    assert 0.1 < work.attended / work.visible < 0.9


def test_rows_that_were_cropped_and_forked_sample_only_what_they_hold() -> None:
    played = Played()
    for _ in range(37):
        played.step()
    sources, gone = [1, 0, 0], 60  # more than the window holds
    for layer in played.kv.layers.values():
        layer.fork(sources)
        layer.crop(gone)
    played.k, played.v = played.k[sources, :, :-gone], played.v[sources, :, :-gone]
    played.sample_rows(sources)
    assert [len(row.extents) for row in every(played.kv)] == [1] * 3
    assert all(extent.length < extent.stored for extent in extents(played.kv))
    for _ in range(3):
        played.check()


def test_only_what_samples_is_taken_for_an_index() -> None:
    with pytest.raises(ConfigError, match=r"index.kind: input should be 'lsh', got 'flat'"):
        HybridConfig(method="magic_pig", cold={"index": "flat"})
