"""`blocks`: representatives, and what they choose, by the paper's formula written out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from hybrid_kv.errors import FileFormatError
from hybrid_kv.index.pages import BlocksIndex
from tests.index.oracle import check_result, clustered

SIZE, HEADS, GROUP = 16, 2, 3


def built(keys: Tensor, samples: Tensor | None, **params: int) -> BlocksIndex:
    index = BlocksIndex(BlocksIndex.Params(page_size=SIZE, num_representatives=3, **params))
    index.build(keys, samples)
    return index


def by_hand(keys: Tensor, asked: Tensor | None, total: int, local: int) -> list[Tensor]:
    """By block the mean of its representatives, of keys [N, D]; asked [M, D] over `total` keys."""
    means = []
    for start in range(0, len(keys), SIZE):
        block = keys[start : start + SIZE]
        if asked is not None:
            every = total // len(asked)  # keys from one sample to the next
            first = min((start + SIZE) // every, len(asked) - 1)
            last = max(first + 1, min((start + SIZE + local) // every, len(asked)))
            scores = torch.stack([(asked[first:last] @ key).mean() for key in block])
            block = block[scores.topk(3).indices]
        means.append(block.mean(0))
    return means


@pytest.mark.parametrize("rows", [5, 160, 165])
@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_comes_back_from_a_file_goes_on_alike(
    rows: int, learns: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    keys, queries = clustered(rows + 40)
    keys, queries = keys.to(dtype), queries.float()
    samples = torch.randn(HEADS, GROUP, 40, keys.shape[2]) if learns else None
    index = built(keys[:, :rows], samples)
    index.save(tmp_path / "a")
    again = BlocksIndex.load(tmp_path / "a", keys[:, :rows])
    for known in (rows, rows + 40):
        index.add(keys[:, :known])
        again.add(keys[:, :known])
        for one, other in zip(again.search(queries, 20), index.search(queries, 20), strict=True):
            assert one is None or torch.equal(torch.as_tensor(one), torch.as_tensor(other))
        assert torch.equal(
            again._digests[:, : again._num_pages], index._digests[:, : index._num_pages]
        )
    with pytest.raises(FileFormatError, match="was made for other keys"):
        BlocksIndex.load(tmp_path / "a", keys[:, 1 : rows + 1])


@pytest.mark.parametrize("rows", [16, 160, 165])
@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("local", [3, 64])
def test_the_best_blocks_by_their_representatives_are_read_whole(
    rows: int, learns: bool, local: int
) -> None:
    keys, queries = clustered(rows, heads=HEADS)
    count = min(rows, 160) // 4
    samples = torch.randn(HEADS, GROUP, count, keys.shape[-1]) if learns else None
    index = built(keys[:, :160], samples, local_tokens=local)
    index.add(keys)  # a partial block, which the last sample judges
    found = index.search(queries, 2 * SIZE)
    check_result(found, queries, keys, 2 * SIZE)
    for head in range(HEADS):
        asked = None if samples is None else samples[head].mean(0)
        means = torch.stack(by_hand(keys[head], asked, min(rows, 160), local))
        for query, ids in zip(queries[head], found.ids[head], strict=True):
            best = (means @ query).topk(min(2, len(means))).indices.tolist()
            expected = {row for row in range(rows) if row // SIZE in best}
            assert set(ids[ids >= 0].tolist()) == expected


def test_a_block_is_found_by_one_key_that_queries_look_for() -> None:
    """The mean of all its keys says nothing of it."""
    keys = 0.1 * torch.randn(1, 20 * SIZE, 72)
    wanted = torch.nn.functional.normalize(torch.randn(72), dim=0)
    keys[0, 7 * SIZE + 5] = 6 * wanted
    keys[0, 7 * SIZE + 6] = -6 * wanted
    samples = (wanted + 0.1 * torch.randn(1, 1, 64, 72)).expand(1, GROUP, 64, 72)
    found = built(keys, samples).search(wanted[None, None], SIZE)
    assert int(found.ids[0, 0, 0]) == 7 * SIZE + 5


def test_of_the_samples_only_the_last_is_held() -> None:
    """All of them were, which nobody counted: 2 MiB a layer of 4 heads."""
    keys, _ = clustered(160, heads=HEADS)
    index = built(keys, torch.randn(HEADS, GROUP, 40, 72))
    assert index._asked.untyped_storage().nbytes() == HEADS * 2 * 72 * 4


def test_a_shortened_index_has_the_same_whole_blocks() -> None:
    keys, queries = clustered(165)
    index = built(keys, torch.randn(HEADS, GROUP, 40, keys.shape[2]))
    digests = index._digests[:, : index._num_pages]  # what lies behind them was never written
    before = digests.clone()
    shorter = index.shortened(keys[:, :70])
    assert torch.equal(shorter._digests[:, :4], before[:, :4])
    assert not torch.equal(shorter._digests[:, 4], before[:, 4])  # six keys of sixteen
    check_result(shorter.search(queries, 20), queries, keys[:, :70], 20)
    assert torch.equal(digests, before)
    assert shorter.shortened(keys[:, :64])._num_pages == 4
