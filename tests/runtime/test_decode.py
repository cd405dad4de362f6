"""Every method's decode steps, held against attention over the entries that the method names.

The set of each query is worked out here from positions and float64 scores alone, without the store:
sinks and window by arithmetic, cold entries by their true scores, pages by their bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_kv.config import HybridConfig
from hybrid_kv.ops.tail import AttendedSums, Tail
from hybrid_kv.runtime import KVCache
from hybrid_kv.types import LayerShape, ModelInfo, PartialAttention, Work
from tests.kit import held
from tests.oracle import softmax_attention, spread
from tests.tolerances import TOLERANCES

PAGE = 4
SCALE = 0.3


@dataclass
class Named:
    """What a method says: everything outside sinks, spare pages and window is cold or lost.

    top_k: cold entries per query head, None where the rest is lost.
    most, min_share: of the TokenBudget; an exact index ranks all entries, so `most` counts at once.
    pages: resident pages read beside sinks and window; None for all.
    keep: nothing ever leaves the resident tier.
    estimate: cold entries that no query attends are estimated from the moments of their extent.
    """

    settings: dict[str, Any]
    sinks: int = 0
    window: int = 0
    spare: int = 0
    top_k: int | None = None
    most: int | None = None
    min_share: float | None = None
    pages: int | None = None
    keep: bool = False
    estimate: bool = False

    def config(self, **common: Any) -> HybridConfig:
        return HybridConfig(page_size=PAGE, **self.settings, **common)


SIZES = {"sink_tokens": 4, "window_tokens": 8}
FLAT = {"index": "flat", "estimate": "none"}  # exact, and its work is known
ESTIMATED = {"index": "flat", "estimate": "gaussian"}
NAMED = {
    "full": Named({"method": "full"}, keep=True),
    "streaming_llm": Named({"method": "streaming_llm", **SIZES}, 4, 8),
    "streaming_llm_without_window": Named(
        {"method": "streaming_llm", "sink_tokens": 0, "window_tokens": 0}
    ),
    "quest": Named({"method": "quest", "page_budget": 3, "dense_layers": 0}, pages=3, keep=True),
    "quest_with_sinks_and_window": Named(
        {"method": "quest", "page_budget": 2, "dense_layers": 0, **SIZES}, 4, 8, pages=2, keep=True
    ),
    "quest_dense": Named({"method": "quest", "page_budget": 1, "dense_layers": 1}, keep=True),
    "retrieval_attention": Named(
        {"method": "retrieval_attention", "cold": {"top_k": 5, **FLAT}, **SIZES}, 4, 8, top_k=5
    ),
    "retrieval_attention_without_sinks": Named(
        {"method": "flat", "cold": {"top_k": 1}, "sink_tokens": 0, "window_tokens": 0}, top_k=1
    ),
    "whole_beam": Named(
        {"method": "flat", "cold": {"top_k": 3, "max_tokens": 7}, **SIZES}, 4, 8, top_k=3, most=7
    ),
    "what_weighs": Named(
        {"method": "flat", "cold": {"top_k": 9, "min_share": 0.03}, **SIZES},
        4,
        8,
        top_k=9,
        min_share=0.03,
    ),
    "what_weighs_of_the_whole_beam": Named(
        {
            "method": "flat",
            "cold": {"top_k": 2, "max_tokens": 13, "min_share": 0.01, **FLAT},
            **SIZES,
        },
        4,
        8,
        top_k=2,
        most=13,
        min_share=0.01,
    ),
    "hardly_any": Named(
        {"method": "flat", "cold": {"top_k": 9, "min_share": 0.3}, **SIZES},
        4,
        8,
        top_k=9,
        min_share=0.3,
    ),
    "hybrid": Named({"method": "hybrid", "cold": {"top_k": 3, **FLAT}, **SIZES}, 4, 8, top_k=3),
    "hybrid_with_spare_pages": Named(
        {
            "method": "hybrid",
            "cold": {"top_k": 3, **FLAT},
            "spare_tokens": 16,
            "page_budget": 2,
            **SIZES,
        },
        4,
        8,
        16,
        top_k=3,
        pages=2,
    ),
    "estimated": Named(
        {"method": "hybrid", "cold": {"top_k": 3, **ESTIMATED}, **SIZES},
        4,
        8,
        top_k=3,
        estimate=True,
    ),
    "estimated_beside_spare": Named(
        {
            **{"method": "hybrid", **SIZES},
            "cold": {"top_k": 2, **ESTIMATED},
            "page_budget": "all",
            "spare_tokens": 8,
        },
        4,
        8,
        8,
        top_k=2,
        estimate=True,
    ),
    "estimated_beside_what_weighs": Named(
        {
            **{"method": "flat", **SIZES},
            "cold": {"top_k": 2, "max_tokens": 7, "min_share": 0.05, **ESTIMATED},
        },
        4,
        8,
        top_k=2,
        most=7,
        min_share=0.05,
        estimate=True,
    ),
}


@dataclass
class Row:
    """Everything one row ever stored, and where its cold entries end."""

    k: Tensor  # [Hkv, n, D]
    v: Tensor
    cold_end: int = 0

    @property
    def length(self) -> int:
        return self.k.shape[1]


@dataclass
class Twin:
    """The naive cache beside the real one."""

    named: Named
    shape: LayerShape
    cache: KVCache
    softcap: float | None = None
    rows: list[Row] = field(default_factory=list)
    work: Work = field(default_factory=Work)

    def draw(self, rows: int, new: int) -> tuple[Tensor, Tensor, Tensor]:
        heads, dim = (self.shape.num_q_heads, self.shape.num_kv_heads), self.shape.head_dim
        q = torch.randn(rows, heads[0], new, dim)
        return q, torch.randn(rows, heads[1], new, dim), torch.randn(rows, heads[1], new, dim)

    def prompt(self, lengths: Sequence[int]) -> None:
        """Left-padded where the lengths differ."""
        longest = max(lengths)
        q, k, v = self.draw(len(lengths), longest)
        valid = torch.stack([torch.arange(longest) >= longest - n for n in lengths])
        mask = None if valid.all() else valid
        self.cache.attend(0, q, (k, v), mask, scale=SCALE, softcap=self.softcap)
        self.rows = [
            Row(k[row][:, valid[row]], v[row][:, valid[row]]) for row in range(len(lengths))
        ]
        self._demote()

    def fork(self, sources: Sequence[int]) -> None:
        self.cache.layers[0].fork(sources)
        self.rows = [Row(row.k, row.v, row.cold_end) for row in (self.rows[s] for s in sources)]

    def step(self, new: int) -> None:
        q, k, v = self.draw(len(self.rows), new)
        self.cache.layers.seal_if_open(0)
        part = self.cache.attend(0, q, (k, v), None, scale=SCALE, softcap=self.softcap)
        for row, mine in enumerate(self.rows):
            mine.k, mine.v = torch.cat([mine.k, k[row]], 1), torch.cat([mine.v, v[row]], 1)
        self._expect(part.out, part.lse, q, new)
        self.cache.check_integrity()
        self._demote()

    def _demote(self) -> None:
        if self.named.keep:
            return
        for row in self.rows:
            kept = self.named.window + self.named.spare
            whole = min((row.length - kept) // PAGE, (row.length - 1) // PAGE) * PAGE
            row.cold_end = max(row.cold_end, whole, min(self.named.sinks, row.length))

    def _expect(self, out: Tensor, lse: Tensor, q: Tensor, new: int) -> None:
        heads = self.shape.num_q_heads
        for row, mine in enumerate(self.rows):
            each = [
                [self._seen(row, q[row], head, t, new) for t in range(new)] for head in range(heads)
            ]
            seen = torch.stack([torch.stack([one for one, _ in tokens]) for tokens in each])
            k, v = spread(mine.k[None], heads)[0], spread(mine.v[None], heads)[0]
            exact, exact_lse = softmax_attention(
                q[row], k, v, scale=SCALE, softcap=self.softcap, visible=seen
            )
            if self.named.estimate:
                limits = torch.tensor([[limit for _, limit in tokens] for tokens in each])
                exact, exact_lse = self._with_estimates(
                    *(row, q[row], seen, limits, exact, exact_lse)
                )
            torch.testing.assert_close(out[row].double(), exact, **TOLERANCES[torch.float32])
            torch.testing.assert_close(lse[row].double(), exact_lse, **TOLERANCES[torch.float32])
            self.work.attended += int(seen.sum())
            self.work.visible += heads * sum(range(mine.length - new + 1, mine.length + 1))
            self.work.steps += heads * new
        self._count_scored(new)

    def check_work(self) -> None:
        """What was touched; bytes are left open."""
        work = self.cache.work
        names = [one.name for one in fields(work) if one.name.endswith("_bytes")]
        left_open = {name: getattr(work, name) for name in names}
        assert work == replace(self.work, **left_open)

    def _with_estimates(
        self,
        number: int,
        q: Tensor,
        seen: Tensor,
        limits: Tensor,
        out: Tensor,
        lse: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Attention [Hq, T, D] and [Hq, T] over what was seen, and what was not as estimated."""
        row, group = self.rows[number], self.shape.group_size
        start, end = self._cold(row)
        outs, lses = [out], [lse]
        for extent in held(self.cache, row=number).extents:
            stop = min(end, start + extent.length)  # what left when the step ended was resident
            left = (~seen[..., start:stop]).sum(-1)
            if bool(left.any()):
                assert extent.moments is not None
                learned = slice(start, start + extent.moments.count)
                known = Tail.of(row.k[:, learned], row.v[:, learned])
                torch.testing.assert_close(extent.moments.key_value, known.key_value)
                guesses = [
                    self._estimated(
                        _of_head(known, head // group),
                        *(t[head // group, start:stop] for t in (row.k, row.v)),
                        *(q[head, token], seen[head, token, start:stop]),
                        limits[head, token],
                    )
                    for head in range(lse.shape[0])
                    for token in range(lse.shape[1])
                ]
                outs.append(torch.stack([one.out for one in guesses]).view(out.shape).double())
                lses.append(torch.stack([one.lse for one in guesses]).view(lse.shape).double())
            start = stop
        every = torch.stack(lses)
        weights = every.softmax(0)[..., None]
        return (weights * torch.stack(outs)).sum(0), every.logsumexp(0)

    def _estimated(
        self, known: Tail, k: Tensor, v: Tensor, q: Tensor, seen: Tensor, limit: Tensor
    ) -> PartialAttention:
        """Of one query [D] and one extent [n, D]."""
        attended = AttendedSums(seen.sum()[None, None], (k[seen] @ q).sum()[None, None])
        part = known.attend(
            *(q[None, None], torch.tensor(len(k)), attended, limit[None, None]),
            scale=SCALE,
            softcap=self.softcap,
        )
        return part.without(v[seen].sum(0)[None, None])

    def _seen(
        self, number: int, q: Tensor, head: int, token: int, new: int
    ) -> tuple[Tensor, float]:
        """[n] bool: the entries that one query attends; the lowest logit of those that it found."""
        row = self.rows[number]
        positions = torch.arange(row.length)
        start, end = self._cold(row)
        cold = (positions >= start) & (positions < end)
        resident = ~cold
        if self.named.pages is not None:
            resident = self._pages(row, q, head, token, new, resident)
        seen, limit = resident & (positions <= row.length - new + token), torch.inf
        if self.named.top_k is not None and end > start:
            keys = row.k[head // self.shape.group_size, start:end].double()
            near = row.k[head // self.shape.group_size][seen].double() @ q[head, token].double()
            best = self._retrieved(keys @ q[head, token].double(), near)
            if len(best):
                limit = float(self._logits(keys[best] @ q[head, token].double()).amin())
            seen[start + best] = True
            self.work.retrieved += len(best)
            self.work.most_retrieved = max(self.work.most_retrieved, len(best))
        return seen, limit

    def _retrieved(self, scores: Tensor, near: Tensor) -> Tensor:
        """The cold entries that a query with these true scores attends, beside resident ones."""
        assert self.named.top_k is not None
        if self.named.top_k >= len(scores):
            return torch.arange(len(scores))
        best = scores.topk(min(self.named.most or self.named.top_k, len(scores))).indices
        if self.named.min_share is None:
            return best
        logits, beside = self._logits(scores[best]), self._logits(near)
        shares = (logits - torch.cat([logits, beside]).logsumexp(0)).exp()
        return best[shares >= self.named.min_share]

    def _logits(self, scores: Tensor) -> Tensor:
        logits = SCALE * scores
        return logits if self.softcap is None else self.softcap * (logits / self.softcap).tanh()

    def _cold(self, row: Row) -> tuple[int, int]:
        if self.named.keep:
            return 0, 0
        return min(self.named.sinks, row.cold_end), row.cold_end

    def _page_starts(self, row: Row, resident: Tensor, new: int) -> tuple[list[int], list[int]]:
        """First positions of the pages that every query reads, and of those to choose from."""
        # The window of the first new token reaches back to here.
        recent = (row.length - new + 1 - max(1, self.named.window)) // PAGE * PAGE
        starts = [p for p in range(0, row.length, PAGE) if resident[p]]
        pinned = [p for p in starts if p < self.named.sinks or p >= recent]
        return pinned, [p for p in starts if p not in pinned]

    def _pages(
        self, row: Row, q: Tensor, head: int, token: int, new: int, resident: Tensor
    ) -> Tensor:
        pinned, free = self._page_starts(row, resident, new)
        group = self.shape.group_size
        kv_head = head // group
        queries = q[kv_head * group : (kv_head + 1) * group, token, None].double()
        keys = row.k[kv_head].double()
        bounds = [
            torch.maximum(queries * page.amin(0), queries * page.amax(0)).sum(-1).amax()
            for page in (keys[start : start + PAGE] for start in free)
        ]
        assert self.named.pages is not None
        count = min(self.named.pages, len(free))
        best = torch.stack(bounds).topk(count).indices.tolist() if count else []
        chosen = torch.zeros(row.length, dtype=torch.bool)
        for start in [*pinned, *(free[index] for index in best)]:
            chosen[start : start + PAGE] = True
        return chosen

    def _count_scored(self, new: int) -> None:
        queries = self.shape.num_q_heads * new
        pages, choice = 0, False
        for row in self.rows:
            start, end = self._cold(row)
            if self.named.top_k is not None and self.named.top_k < end - start:
                self.work.scored += queries * (end - start)  # a flat index
            positions = torch.arange(row.length)
            resident = (positions < start) | (positions >= end)
            pinned, free = self._page_starts(row, resident, new)
            pages += len(pinned) + len(free)
            choice |= self.named.pages is not None and len(free) > self.named.pages
        self.work.scored += queries * pages if choice else 0


def _of_head(known: Tail, head: int) -> Tail:
    own = slice(head, head + 1)
    return Tail(known.count, **{name: t[own] for name, t in known.tensors().items()})


def twin(name: str, shape: LayerShape, softcap: float | None = None, **common: Any) -> Twin:
    cache = KVCache(ModelInfo((shape,)), NAMED[name].config(**common))
    return Twin(NAMED[name], shape, cache, softcap)


GROUP_OF_3 = LayerShape(0, 6, 2, 24)
ONE_HEAD = LayerShape(0, 1, 1, 72)


@pytest.fixture(params=NAMED)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("shape", [GROUP_OF_3, ONE_HEAD], ids=["group_of_3", "one_head"])
def test_a_step_attends_exactly_what_the_method_names(name: str, shape: LayerShape) -> None:
    both = twin(name, shape)
    both.prompt([37])
    for _ in range(11):
        both.step(1)
    both.check_work()


def test_several_new_tokens_see_themselves_and_those_before(name: str) -> None:
    both = twin(name, GROUP_OF_3)
    both.prompt([37])
    for new in (3, 1, 7, 2, 12, 1):
        both.step(new)
    both.check_work()


def test_rows_of_different_lengths_keep_to_themselves(name: str) -> None:
    both = twin(name, GROUP_OF_3)
    both.prompt([41, 5, 26])
    for new in (1, 3, 1, 1, 6, 1):
        both.step(new)
    both.check_work()


def test_rows_that_were_forked_share_and_diverge(name: str) -> None:
    both = twin(name, GROUP_OF_3)
    both.prompt([41, 30])
    for sources in ([1, 0], [0, 0], [1, 1, 0], [2, 0, 0], [1]):
        both.step(3)
        both.fork(sources)
        both.step(1)
    both.check_work()


def test_a_softcap_keeps_the_choice_and_bends_the_logits(name: str) -> None:
    both = twin(name, GROUP_OF_3, softcap=1.5)
    both.prompt([37])
    for new in (1, 3, 1):
        both.step(new)


@pytest.mark.parametrize("length", [1, 2, 4, 8, 12, 13, 16, 17])
def test_a_prompt_shorter_than_sinks_and_window_loses_nothing(name: str, length: int) -> None:
    both = twin(name, GROUP_OF_3)
    both.prompt([length])
    for _ in range(9):
        both.step(1)
    both.check_work()


@pytest.mark.parametrize("backend", ["reference", "torch_cpu"])
def test_hidden_slots_may_hold_anything(backend: str, name: str) -> None:
    """Memory that was never written holds NaN here, and holds leftovers elsewhere."""
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        both = twin(name, GROUP_OF_3, backend=backend)
        both.prompt([41, 5])
        for new in (1, 3, 1, 1):
            both.step(new)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("few", "tokens", "searches"), [(5, 5, True), (5, 6, False), (1, 2, False)]
)
def test_a_later_turn_of_few_tokens_reads_through_the_method(
    few: int, tokens: int, searches: bool
) -> None:
    """As many as dense_extend_tokens; a longer one attends everything."""
    shape = LayerShape(0, 4, 2, 8)
    config = HybridConfig(
        **{"method": "flat", "page_size": PAGE, **SIZES, "cold": {"top_k": 3, **FLAT}},
        dense_extend_tokens=few,
    )
    kv = KVCache(ModelInfo((shape,)), config)
    for count in (60, 1, tokens):
        q, k, v = (torch.randn(1, heads, count, 8) for heads in (4, 2, 2))
        before = kv.work.scored
        kv.attend(0, q, (k, v), None, scale=SCALE)
    assert (kv.work.scored > before) == searches
    kv.close()
