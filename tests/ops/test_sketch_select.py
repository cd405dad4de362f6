"""Selection by sketch in torch: the same codes and scores as the host's sketches have."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from hybrid_kv.index._device_keys import SelectGoal, learn
from hybrid_kv.ops import portable, sketch_select
from hybrid_kv.ops.sketch_codes import SketchMap
from hybrid_kv.ops.sketch_select import DeviceCodes
from tests.index.sketch_heads import seen_heads

HEADS, GROUP, DIM, KEYS = 2, 3, 72, 1237


def scene(size: int) -> tuple[DeviceCodes, Tensor, Tensor, list[SketchMap]]:
    """Codes of 1,237 keys, the keys, queries [Hkv, M, D] and each head's map for the host."""
    keys, samples, later = seen_heads(HEADS, KEYS, dim=DIM, group=GROUP, positions=64)
    made = learn(keys, samples, size, SelectGoal(20, 0.9, 0.9))
    assert made is not None
    learned, codes = made
    room = learned.codes_for(KEYS, 16, torch.float32)
    room.codes.copy_(codes)
    room.state.fill_(KEYS)
    maps = [
        SketchMap(learned.plan, key_map, learned.plan.zeros - start, query_map)
        for key_map, start, query_map in zip(
            learned.key_map, learned.start, learned.query_map, strict=True
        )
    ]
    return room, keys, later[:, :, 5], maps


@pytest.mark.parametrize("size", [16, 24, 32, 48, 64])
def test_codes_and_scores_are_the_host_s(size: int) -> None:
    codes, keys, q, maps = scene(size)
    queries = sketch_select.quantise(codes, q)
    scores = sketch_select.code_scores(codes.codes, codes.plan, queries)
    for head, one in enumerate(maps):
        tier = portable.SketchTier(one, with_ids=False)
        tier.append(keys[head])
        lines = codes.plan.num_lines
        rows = tier.codes.view(-1, lines, 16, 4).transpose(1, 2).flatten(0, 1).flatten(1)[:KEYS]
        mine, host = (
            sketch_select.unpacked(r, codes.plan).int() for r in (codes.codes[head], rows)
        )
        # Sums of another order may round a value that lies between two codes to the other one.
        assert int((mine - host).abs().max()) <= 1
        assert float((mine != host).float().mean()) < 1e-3
        for member in range(GROUP):
            by_host, scale = portable.quantise_query(one, q[head, member])
            own = queries.codes[head, member]
            assert int((own - by_host).abs().max()) <= 1
            centred = mine.numpy() - codes.plan.zeros.numpy().astype(np.float64)
            exact = centred @ own.numpy().astype(np.float64) * scale
            np.testing.assert_allclose(scores[head, member].numpy(), exact, rtol=1e-5, atol=1e-4)


def test_a_list_without_room_counts_what_it_lost() -> None:
    codes, keys, q, _ = scene(32)
    codes.wanted.fill_(40)
    listed = (sketch_select.find(codes, q, keys, new=1, width=512).ids >= 0).sum(-1)[:, 0]
    assert int(listed.min()) > 40
    assert int(listed.max()) < 400
    assert not codes.lost.any()
    for times in (1, 2):
        found = sketch_select.find(codes, q, keys, new=1, width=32)
        assert codes.lost.tolist() == [times * (count - 32) for count in listed.tolist()]
        assert 32 < int((found.ids >= 0).sum()) <= 64


def test_twice_the_candidates_are_twice_as_many() -> None:
    codes, keys, q, _ = scene(32)
    codes.wanted.fill_(40)
    counts = [
        int((sketch_select.find(codes, q, keys, new=1, width=1024, times=n).ids >= 0).sum())
        for n in (1.0, 2.0)
    ]
    assert 1.5 < counts[1] / counts[0] < 2.5


@pytest.mark.parametrize("width", [50, 64])
def test_a_full_list_keeps_the_best_of_each_query_and_not_those_that_came_first(width: int) -> None:
    """The keys lie in the order of their scores, the best last: the limit is far too low."""
    codes, keys, q, _ = scene(48)
    order = (keys @ q[:, :1].mT)[..., 0].argsort(-1)
    keys = keys.take_along_dim(order[..., None], 1)
    sketch_select.encode(codes, keys, 0)
    codes.wanted.fill_(600)
    found = sketch_select.find(codes, q, keys, new=1, width=width).ids[:, 0]
    scores = sketch_select.code_scores(codes.codes, codes.plan, sketch_select.quantise(codes, q))
    for head in range(HEADS):
        kept = found[head][found[head] >= 0].tolist()
        assert len(set(kept)) == len(kept) > width // 2
        for member in range(GROUP):
            by_codes = scores[head, member].topk(width // GROUP).indices.tolist()
            assert set(by_codes) <= set(kept)
            exact = (keys[head] @ q[head, member]).topk(5).indices.tolist()
            assert len(set(exact) & set(kept)) >= 3


def test_of_equal_keys_a_full_list_keeps_the_first() -> None:
    codes, keys, q, _ = scene(32)
    keys = keys[:, :1].expand(-1, KEYS, -1)
    sketch_select.encode(codes, keys, 0)
    found = sketch_select.find(codes, q, keys, new=1, width=100).ids
    assert found.sort(-1).values.tolist() == [[list(range(100))]] * HEADS
