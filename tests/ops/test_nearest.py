"""A device's search for nearest keys: what it holds at a time, and what it reads."""

from __future__ import annotations

import pytest
import torch

from benchmarks.prefill_memory.run import LiveBytes
from hybrid_kv.ops.triton import BLOCK_KEYS, SCRATCH_BYTES, portion, query_bytes, result_bytes

LLAMA = (8, 2**17, 100)  # KV heads, keys, wanted
QUERIES = 4 * 8192


def test_a_prompt_s_search_fits_into_its_scratch_and_one_array_of_results() -> None:
    heads, keys, count = LLAMA
    assert portion(*LLAMA) * heads * query_bytes(keys, count) <= SCRATCH_BYTES
    assert portion(*LLAMA) >= 128, "small portions are launches"
    # It was .96 GiB: scores and 64-bit ids of all queries, twice while portions were joined.
    assert result_bytes(heads, QUERIES, count) + SCRATCH_BYTES < 0.36 * 2**30
    assert portion(1, 2**30, 2**20) == 1


def test_both_passes_move_least_with_blocks_of_this_size() -> None:
    """Maxima are written and read; the keys of 100 listed blocks are read, 256 bytes each."""

    def moved(block: int) -> float:
        return 2 * 4 * 2**17 / block + 100 * block * 256

    assert moved(BLOCK_KEYS) < 0.4 * moved(64)


def test_a_prompt_s_search_takes_no_more_than_its_result_and_its_scratch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On tensors without values, with the kernels left out: sizes are those of a launch."""
    pytest.importorskip("triton", reason="Triton is not installed: scripts/check --triton")
    from triton.runtime.jit import JITFunction

    from hybrid_kv.ops.triton import nearest

    heads, keys, count = LLAMA
    monkeypatch.setattr(JITFunction, "run", lambda *_, **__: None)
    queries = torch.empty(heads, QUERIES, 128, dtype=torch.bfloat16, device="meta")
    with LiveBytes() as live:
        found = nearest.nearest_keys(queries, queries.new_empty(heads, keys, 128), count)
    assert found.shape == (heads, QUERIES, count)
    assert found.dtype == torch.int32
    given = queries.nbytes // QUERIES * keys
    assert live.peak([]) - given <= found.nbytes + SCRATCH_BYTES
