"""How large the measurements are: full ones, and tiny ones that only show that they run."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.gpu_check.plan import MODELS


@dataclass(frozen=True, slots=True)
class Sizes:
    """Lengths in tokens, bytes where the name says so.

    model, layers: of the model that is run end to end. kv_heads, group, dim: of attention, the
    Llama-3-8B shape. working_set_bytes: layers are visited in turn until they are beyond any cache.
    rounds: repetitions behind a median, small_rounds of what is over at once. calls: behind one
    timing. checked_*: of the model that is held to float64. warm_steps, measured_steps,
    watched_steps: of decode steps at a context's length, the last under a profiler. turn_tokens: of
    a later turn. grown_tokens: of an answer that outgrows the cold tier's room. locked_bytes: a
    layer's keys at 128K with their room.
    """

    model: str
    layers: int | None
    dtype: torch.dtype
    kv_heads: int
    group: int
    dim: int
    rounds: int
    small_rounds: int
    calls: int
    working_set_bytes: int
    small_copies_bytes: tuple[int, ...]
    large_copy_bytes: int
    host_rows: int
    host_ids: int
    gathered_page_tokens: tuple[int, ...]
    gathered_pages: int
    gather_source_bytes: int
    decode_tokens: tuple[int, ...]
    page_size: int
    scored_pages: int
    chosen_pages: int
    keys: int
    queries: int
    reference_queries: int
    nearest: int
    prefill_tokens: int
    prefill_chunk: int
    contexts: dict[str, int]
    new_tokens: int
    slow_new_tokens: int
    warmup_tokens: int
    offloaded_prefill_tokens: int
    offloaded_chunk: int
    tests: tuple[str, ...]
    checked_tokens: int
    checked_layers: int
    warm_steps: int
    measured_steps: int
    watched_steps: int
    turn_tokens: int
    grown_tokens: int
    locked_bytes: int

    @property
    def q_heads(self) -> int:
        return self.kv_heads * self.group


FULL = Sizes(
    model=MODELS["full"],
    layers=None,
    dtype=torch.bfloat16,
    kv_heads=8,
    group=4,
    dim=128,
    rounds=7,
    small_rounds=175,
    calls=20,
    working_set_bytes=256 * 2**20,
    small_copies_bytes=(8 * 2**10, 16 * 2**10),
    large_copy_bytes=64 * 2**20,
    host_rows=2**17,
    host_ids=2**13,
    gathered_page_tokens=(16, 32, 64),  # 4, 8, 16 KiB of keys a page and head
    gathered_pages=512,
    gather_source_bytes=2**29,
    decode_tokens=(640, 1024, 2048, 4096, 8192),
    page_size=16,
    scored_pages=8192,
    chosen_pages=128,
    keys=2**17,
    queries=2**14,
    reference_queries=2**11,
    nearest=64,
    prefill_tokens=2**17,
    prefill_chunk=4096,
    contexts={"32k": 2**15, "64k": 2**16, "128k": 2**17},
    new_tokens=24,
    slow_new_tokens=6,
    warmup_tokens=4096,
    offloaded_prefill_tokens=2**15,
    offloaded_chunk=2048,
    tests=("tests",),
    checked_tokens=2**11,
    checked_layers=2,
    warm_steps=16,
    measured_steps=128,
    watched_steps=4,
    turn_tokens=200,
    grown_tokens=8300,
    locked_bytes=285 * 10**6,
)

TINY = Sizes(
    model=MODELS["tiny"],
    layers=2,
    dtype=torch.float32,
    kv_heads=2,
    group=3,
    dim=24,
    rounds=1,
    small_rounds=3,
    calls=2,
    working_set_bytes=2**16,
    small_copies_bytes=(8 * 2**10, 16 * 2**10),
    large_copy_bytes=2**20,
    host_rows=257,
    host_ids=37,
    gathered_page_tokens=(16, 37),
    gathered_pages=5,
    gather_source_bytes=2**18,
    decode_tokens=(48, 96),
    page_size=16,
    scored_pages=77,
    chosen_pages=9,
    keys=523,
    queries=11,
    reference_queries=5,
    nearest=7,
    prefill_tokens=137,
    prefill_chunk=37,
    contexts={"32k": 701, "64k": 823, "128k": 937},
    new_tokens=5,
    slow_new_tokens=3,
    warmup_tokens=650,
    offloaded_prefill_tokens=701,
    offloaded_chunk=100,
    tests=("tests/ops/triton/test_decode.py",),
    checked_tokens=301,
    checked_layers=1,
    warm_steps=2,
    measured_steps=3,
    watched_steps=1,
    turn_tokens=50,
    grown_tokens=12,
    locked_bytes=2**21,
)

SIZES = {"full": FULL, "tiny": TINY}
