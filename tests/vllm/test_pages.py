"""Decoding over chosen blocks of a paged cache, with what stands for vLLM's kernel; no GPU."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from hybrid_kv.errors import BackendUnavailable, IntegrityError
from hybrid_kv.index.pages import PagesIndex
from hybrid_kv.ops.dispatch import get_ops
from hybrid_kv.ops.reference_pages import choose_pages, page_digests
from hybrid_kv.vllm.audit import AuditTurns
from hybrid_kv.vllm.counters import StepCounts
from hybrid_kv.vllm.page_step import BlockChoice, PageStep, SequenceRow
from hybrid_kv.vllm.pages import HeadBlocks, PageLayer
from hybrid_kv.vllm.settings import VllmSettings
from tests.vllm.paged import PagedSequence

SMALL = VllmSettings(method="quest", budget="100", sink_tokens=20, window_tokens=40)


@pytest.fixture(autouse=True)
def short_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybrid_kv.vllm.settings.LEAST_SEARCHED", 256)


@dataclass
class Shape:
    heads: int = 2
    group: int = 3
    dim: int = 24
    block: int = 16
    order: tuple[int, ...] = (0, 1, 2, 3)  # of the axes in memory

    def cache(self, blocks: int) -> Tensor:
        """[blocks, Hkv, block, 2 D], NaN in blocks that nobody has."""
        sizes = blocks, self.heads, self.block, 2 * self.dim
        memory = torch.full([sizes[axis] for axis in self.order], torch.nan)
        return memory.permute([self.order.index(axis) for axis in range(4)])


def attend_heads(q: Tensor, cache: Tensor, tables: Tensor, lengths: Tensor) -> Tensor:
    """What vLLM's kernel computes: [n, G, D] of sequences of one KV head."""
    assert tables.dtype == lengths.dtype == torch.int32
    dim, outs = q.shape[-1], []
    for own, table, length in zip(q, tables.long(), lengths.tolist(), strict=True):
        k, v = cache[table, 0].flatten(0, 1)[:length].split(dim, -1)
        outs.append((dim**-0.5 * own @ k.T).softmax(-1) @ v)
    return torch.stack(outs)


class PageDriver:
    """A layer, its cache, and free blocks in a random order."""

    def __init__(
        self,
        shape: Shape | None = None,
        settings: VllmSettings = SMALL,
        num_blocks: int = 300,
        seed: int = 0,
        turns: AuditTurns | None = None,
    ) -> None:
        self.shape, self.settings = shape or Shape(), settings
        self.random = torch.Generator().manual_seed(seed)
        self.cache = self.shape.cache(num_blocks)
        self.free = torch.randperm(num_blocks, generator=self.random).tolist()
        self.layer = PageLayer(self.shape.dim**-0.5, 0.0, get_ops("auto"), StepCounts(), turns)
        self.spoiled: int | None = None  # the sequence of a step whose query holds NaN

    def sequence(self) -> PagedSequence:
        shape = self.shape.heads, 0, self.shape.dim
        return PagedSequence(k=torch.empty(shape), v=torch.empty(shape))

    def step(self, *work: tuple[PagedSequence, int]) -> list[Tensor | None]:
        """One forward of new tokens; outputs [Hq, D] of those whose blocks were chosen."""
        shape, size = self.shape, self.shape.block
        keys, slots, rows, first = [], [], [], 0
        for number, (one, count) in enumerate(work):
            k, v = (torch.randn(shape.heads, count, shape.dim, generator=self.random) for _ in "kv")
            begin = one.length
            one.k, one.v = torch.cat([one.k, k], 1), torch.cat([one.v, v], 1)
            while len(one.table) * size < one.length:
                one.table.append(self.free.pop())
            token = torch.arange(begin, one.length)
            where = torch.tensor(one.table)[token // size]
            self.cache[where, :, token % size] = torch.cat([k, v], -1).transpose(0, 1)
            keys.append(k.transpose(0, 1))
            slots.append(where * size + token % size)
            rows.append(SequenceRow(number, first, first + count, one.length, count > 1))
            first += count
        # Padding, as vLLM has it: keys that hold anything, and slots of -1 in the middle too.
        keys.insert(1, torch.full((1, shape.heads, shape.dim), 9e9))
        slots.insert(1, torch.tensor([-1]))
        keys.append(torch.full((3, shape.heads, shape.dim), torch.nan))
        self.layer.write(self.cache, torch.cat(keys), torch.cat(slots))
        table = torch.zeros(len(work), 300, dtype=torch.int32)
        for number, (one, _) in enumerate(work):
            table[number, : len(one.table)] = torch.tensor(one.table)
        step = PageStep.of(rows, table, size, self.settings)
        step.count(self.layer.counts)
        self.query = torch.randn(
            first + 2, shape.heads * shape.group, shape.dim, generator=self.random
        )
        if self.spoiled is not None:
            self.query[rows[self.spoiled].begin] = torch.nan
        output = torch.full_like(self.query, 7.0)
        outs: list[Tensor | None] = [None] * len(work)
        if step.decodes is not None:
            self.layer.forward(self.cache, self.query, output, step.decodes, attend_heads)
            for row in step.decodes.rows:
                outs[row] = output[rows[row].begin]
        mine = [rows[row].begin for row in (step.decodes.rows if step.decodes else [])]
        others = [token for token in range(len(output)) if token not in mine]
        assert bool((output[others] == 7).all()), "vLLM's own outputs are left alone"
        self.begins = [row.begin for row in rows]
        return outs

    def give_back(self, one: PagedSequence) -> None:
        self.free += one.table

    def chosen(self, one: PagedSequence, query: Tensor) -> Tensor:
        """Tokens [Hkv, n] bool that are attended, by the project's own choice of pages."""
        size, shape = self.shape.block, self.shape
        choice = BlockChoice.of(self.settings, one.length, size)
        assert choice is not None
        k = torch.nn.functional.pad(one.k, (0, 0, 0, -one.length % size))
        pages = k.unflatten(1, (-1, size)).clone()
        fill = one.length - (choice.blocks - 1) * size
        pages[:, -1, fill:] = pages[:, -1, :1]
        found = choose_pages(
            *(query.view(shape.heads, -1, shape.dim), *page_digests(pages)),
            new=1,
            oldest=choice.oldest,
            newest=choice.newest,
            count=choice.attended,
        )[:, 0]
        page = torch.arange(one.length) // size
        return (page[None, None] == found[..., None]).any(1)

    def wanted(self, one: PagedSequence, place: int, seen: Tensor | None = None) -> Tensor:
        """Attention [Hq, D] of the latest step's token of a sequence over what is chosen."""
        query, shape = self.query[self.begins[place]], self.shape
        seen = self.chosen(one, query) if seen is None else seen
        q = query.view(shape.heads, -1, shape.dim)
        logits = (shape.dim**-0.5 * q @ one.k.mT).masked_fill(~seen[:, None], -torch.inf)
        return (logits.softmax(-1) @ one.v).flatten(0, 1)


SHAPES = [
    Shape(),
    Shape(group=1, dim=7, order=(0, 2, 1, 3)),
    Shape(heads=1, group=4, dim=40, block=32),
    Shape(heads=3, group=2, dim=16, order=(1, 0, 2, 3)),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_decode_attends_what_the_projects_own_choice_of_pages_names(shape: Shape) -> None:
    driver = PageDriver(shape)
    one, other, short = (driver.sequence() for _ in range(3))
    driver.step((one, 700))
    driver.step((other, 530), (one, 33))
    driver.step((short, 90))
    for _ in range(40):
        outs = driver.step((other, 1), (short, 1), (one, 1))
        assert outs[1] is None, "a short context is vLLM's"
        for place, sequence in ((0, other), (2, one)):
            torch.testing.assert_close(outs[place], driver.wanted(sequence, place))


@pytest.mark.parametrize("shape", SHAPES)
def test_all_blocks_are_full_attention(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    """A choice of every block, which settings leave to vLLM's own attention."""

    def every(settings: VllmSettings, length: int, size: int) -> BlockChoice:
        blocks = -(-length // size)
        return BlockChoice(blocks, 1, 2, blocks - 3)

    monkeypatch.setattr(BlockChoice, "of", every)
    driver = PageDriver(shape)
    one, other = driver.sequence(), driver.sequence()
    driver.step((one, 300), (other, 211))
    for _ in range(20):
        for place, (out, each) in enumerate(
            zip(driver.step((one, 1), (other, 1)), (one, other), strict=True)
        ):
            seen = torch.ones(shape.heads, each.length, dtype=torch.bool)
            torch.testing.assert_close(out, driver.wanted(each, place, seen))


def test_settings_leave_all_to_vllm_where_all_is_attended() -> None:
    rows = [SequenceRow(0, 0, 1, 50_000, False)]
    table = torch.zeros(1, 4000, dtype=torch.int32)
    for settings in (VllmSettings(method="quest", budget="all"),
                     VllmSettings(method="quest", budget="60%")):  # fmt: skip
        step = PageStep.of(rows, table, 16, settings)
        assert (step.decodes, step.whole, step.longest) == (None, [50_000], 50_000)


def test_a_chunk_of_one_token_is_a_prompt() -> None:
    table = torch.zeros(2, 300, dtype=torch.int32)
    rows = [SequenceRow(0, 0, 1, 3000, True), SequenceRow(1, 1, 2, 4000, False)]
    step = PageStep.of(rows, table, 16, SMALL)
    assert step.decodes is not None
    assert (step.decodes.rows, step.prompt_tokens, step.longest) == ([1], 1, 3000)


def test_blocks_that_are_used_again_are_chosen_by_their_new_keys() -> None:
    """Sequences come, are preempted and go over few blocks, which hold keys of others."""
    draw, driver = random.Random(5), PageDriver(num_blocks=230, seed=2)
    running: list[PagedSequence] = []
    checked = 0
    for _ in range(60):
        needed = draw.randrange(40, 1400)
        while len(driver.free) * 16 < needed + 400 and running:
            driver.give_back(running.pop(draw.randrange(len(running))))
        one = driver.sequence()
        running.append(one)
        while one.length < needed:
            driver.step((one, min(300, needed - one.length + 1)))
        for place, (each, out) in enumerate(
            zip(running, driver.step(*((each, 1) for each in running)), strict=True)
        ):
            if out is not None:
                checked += 1
                torch.testing.assert_close(out, driver.wanted(each, place))
    assert checked > 30


def test_a_shared_prefix_needs_no_digests_of_its_own() -> None:
    driver = PageDriver(seed=4)
    one = driver.sequence()
    driver.step((one, 640))
    other = PagedSequence(one.table[:30], one.k[:, :480], one.v[:, :480])
    driver.step((other, 90))
    outs = driver.step((other, 1), (one, 1))
    for place, each in enumerate((other, one)):
        torch.testing.assert_close(outs[place], driver.wanted(each, place))


def test_a_query_that_is_not_finite_spoils_no_other_sequence() -> None:
    driver = PageDriver()
    one, other = driver.sequence(), driver.sequence()
    driver.step((one, 600), (other, 500))
    driver.spoiled = 0
    outs = driver.step((one, 1), (other, 1))
    assert outs[0] is not None
    assert bool(outs[0].isnan().any())
    torch.testing.assert_close(outs[1], driver.wanted(other, 1))


def test_other_memory_is_another_cache() -> None:
    driver = PageDriver()
    one = driver.sequence()
    driver.step((one, 600))
    before = driver.layer.digests
    driver.cache = driver.cache.clone()
    (out,) = driver.step((one, 1))
    assert driver.layer.digests is not before
    torch.testing.assert_close(out, driver.wanted(one, 0))


def test_blocks_of_another_size_are_refused() -> None:
    driver = PageDriver()
    rows = [SequenceRow(0, 0, 1, 2000, False)]
    step = PageStep.of(rows, torch.zeros(1, 99, dtype=torch.int32), 32, SMALL)
    assert step.decodes is not None
    query = torch.zeros(1, 6, 24)
    with pytest.raises(IntegrityError, match="the tokens of the cache's, 16, got 32"):
        driver.layer.forward(driver.cache, query, query, step.decodes, attend_heads)


def test_the_choice_is_that_of_the_index_of_pages() -> None:
    """Of one query head, whose choice no others share."""
    driver = PageDriver(Shape(group=1), VllmSettings(method="quest", budget="100", sink_tokens=0,
                                                     window_tokens=1))  # fmt: skip
    one = driver.sequence()
    driver.step((one, 800))
    (out,) = driver.step((one, 1))
    query = driver.query[0].view(2, 1, -1)
    index = PagesIndex(PagesIndex.Params(page_size=16))
    index.build(one.k[:, :800], None)
    found = index.search(query, 7 * 16).ids[:, 0]
    seen = torch.zeros(2, 801, dtype=torch.bool).scatter(1, found, value=True)
    seen[:, 800:] = True
    assert torch.equal(seen, driver.chosen(one, driver.query[0]))
    torch.testing.assert_close(out, driver.wanted(one, 0, seen))


def test_counts_are_of_what_was_read() -> None:
    driver = PageDriver()
    one, short = driver.sequence(), driver.sequence()
    driver.step((one, 1000), (short, 60))
    driver.step((one, 1), (short, 1))
    counts = driver.layer.counts
    seen = int(driver.chosen(one, driver.query[0])[0].sum())
    assert {name: counts[name] for name in ("prompt_tokens", "decodes", "searched_decodes")} == {
        "prompt_tokens": 1060, "decodes": 2, "searched_decodes": 1,
    }  # fmt: skip
    assert counts["context_entries"] == 1001 + 61
    assert counts["read_entries"] == seen + 61
    assert counts["searched_entries"] == (1001 - 40) // 16 * 16 - 32


def test_the_audit_finds_what_was_missed() -> None:
    driver = PageDriver(turns=AuditTurns(2))
    one = driver.sequence()
    driver.step((one, 777))
    driver.step((one, 1))
    assert driver.layer.counts["audit_looks"] == 0
    (out,) = driver.step((one, 1))
    seen = driver.chosen(one, driver.query[0])
    q = driver.query[0].view(2, 3, -1)
    weights = (24**-0.5 * q @ one.k.mT).softmax(-1)
    missed = (weights * ~seen[:, None]).sum(-1).mean()
    exact = (weights @ one.v).flatten(0, 1)
    assert out is not None
    error = ((out - exact).norm(dim=-1) / exact.norm(dim=-1)).mean()
    counts = driver.layer.counts
    assert counts["audit_looks"] == 1
    assert counts["audit_missed_mass"] == pytest.approx(float(missed), rel=1e-4)
    assert counts["audit_output_error"] == pytest.approx(float(error), rel=1e-4)


def test_blocks_of_heads_lie_where_the_cache_has_them() -> None:
    def places(order: tuple[int, ...]) -> Iterator[bool]:
        cache = Shape(heads=3, block=16, dim=2, order=order).cache(5)
        cache.copy_(torch.arange(cache.numel()).view(cache.shape))
        blocks = HeadBlocks.of(cache)
        numbers = blocks.numbers(torch.arange(5).expand(3, -1))
        assert blocks.cache.data_ptr() == cache.data_ptr()
        for head in range(3):
            for block in range(5):
                own = blocks.cache[numbers[head, block], 0]
                yield torch.equal(own, cache[block, head])

    for order in ((0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3)):
        assert all(places(order))
    with pytest.raises(BackendUnavailable, match="steps of which one is a multiple of the other"):
        HeadBlocks.of(torch.zeros(1000).as_strided((4, 2, 16, 4), (100, 64, 4, 1)))
