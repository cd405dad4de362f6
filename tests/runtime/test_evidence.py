from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hybrid_kv.rotary import UNKNOWN
from hybrid_kv.runtime.layer_prompt import EvidenceCollector
from hybrid_kv.types import Evidence, Needs

NEEDS = Needs(sampled_queries=10, last_queries=6)


def observe(q: Tensor, pieces: list[int], needs: Needs = NEEDS) -> Evidence:
    collector = EvidenceCollector(needs)
    for piece in q.split(pieces, 1):
        collector.observe(piece)
    return collector.evidence()


def numbered(tokens: int) -> Tensor:
    """[Hq, tokens, D] whose entries are token numbers."""
    return torch.arange(tokens).float()[None, :, None].expand(3, tokens, 8)


@pytest.mark.parametrize("tokens", [1, 9, 19, 20, 21, 37, 640, 1111])
def test_the_sample_is_even_and_bounded(tokens: int) -> None:
    sample = observe(numbered(tokens), [tokens]).sampled_queries
    assert sample is not None
    taken = sample[0, :, 0]
    stride = 1 if len(taken) < 2 else int(taken[1] - taken[0])
    assert torch.equal(taken, torch.arange(0, tokens, stride).float())
    assert min(tokens, 10) <= len(taken) < 20


@pytest.mark.parametrize("tokens", [1, 37, 640, 1111])
@pytest.mark.parametrize("chunk", [1, 7, 37, 256, 4096])
def test_chunks_do_not_change_the_evidence(tokens: int, chunk: int) -> None:
    q = torch.randn(3, tokens, 8)
    pieces = [min(chunk, tokens - start) for start in range(0, tokens, chunk)]
    whole, cut = observe(q, [tokens]), observe(q, pieces)
    assert cut.num_tokens == whole.num_tokens == tokens
    assert whole.sampled_queries is not None
    assert whole.last_queries is not None
    assert torch.equal(cut.sampled_queries, whole.sampled_queries)
    assert torch.equal(cut.last_queries, whole.last_queries)
    assert torch.equal(whole.last_queries, q[:, -6:])


def test_only_what_is_needed_is_kept() -> None:
    q = torch.randn(3, 37, 8)
    assert observe(q, [37], Needs()).sampled_queries is None
    assert observe(q, [37], Needs(sampled_queries=4)).last_queries is None
    assert observe(q, [37], Needs(last_queries=4)).sampled_queries is None


def test_a_row_of_padding_alone_leaves_nothing() -> None:
    assert observe(torch.randn(3, 0, 8), [0]).num_tokens == 0


def test_evidence_does_not_alias_the_queries() -> None:
    q = torch.randn(3, 15, 8)
    before = q.clone()
    collector = EvidenceCollector(NEEDS)
    collector.observe(q)
    q.zero_()  # a chunk's memory is used again by the next
    evidence = collector.evidence()
    assert evidence.last_queries is not None
    assert torch.equal(evidence.last_queries, before[:, -6:])
    assert evidence.sampled_queries is not None
    assert torch.equal(evidence.sampled_queries, before)


@pytest.mark.parametrize("tokens", [1, 9, 20, 37, 1111])
@pytest.mark.parametrize("chunk", [1, 7, 4096])
def test_evidence_knows_where_its_queries_were_asked(tokens: int, chunk: int) -> None:
    pieces = [min(chunk, tokens - start) for start in range(0, tokens, chunk)]
    samples = observe(numbered(tokens), pieces).samples(3, UNKNOWN)
    assert samples is not None
    assert samples.positions is not None
    assert torch.equal(samples.queries[0, 0, :, 0].long(), samples.positions)
