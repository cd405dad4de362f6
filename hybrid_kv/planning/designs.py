"""Costs of a decode step by design: launches, bytes, work of the host and waits.

A step of a model on a GPU can find its cold entries in several ways, which differ less in bytes
than in who waits for whom. Here each is a list of parts in the order in which they follow one
another; those that run beside others are marked as hidden. Parts of a GPU and a bus are computed
from a specification and never were measured; search, cold attention and entering come from costs
that were measured on one core (`HOST_COSTS`, by `benchmarks/step_model`) and from the bandwidth of
the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from hybrid_kv.config import HybridConfig
from hybrid_kv.models.exact_steps import MOST_DRAFTS_GPU
from hybrid_kv.ops.tail import moments_bytes
from hybrid_kv.planning.plan import ModelFacts
from hybrid_kv.planning.planner import AIR_BYTES
from hybrid_kv.planning.rates import Card, Rates
from hybrid_kv.planning.traffic import codes_bytes, select_bytes
from hybrid_kv.runtime.select import CODE_BYTES
from hybrid_kv.types import LayerShape

EvalTarget: TypeAlias = Literal["device", "bus", "host", "wait"]

OVER_THE_BUS = "full attention over the bus"
"""The design that reads everything, whose step is a pass of exact answers too."""
_CUDA_BYTES = 600 * 2**20
_KERNEL_US = 1.5
"""A kernel that reads next to nothing, behind another one, and as much again for every copy."""
_MODEL_KERNELS = 38
"""Of a layer in 16 bit: seven products, norms, rotary embedding, gate, sums."""
_OWN_KERNELS = 2
"""That store a token and attend what is resident (tests count both on an emulated device)."""
SELECT_KERNELS = 14
"""More of them where the device finds cold entries, counted in tests: ten that find and attend,
their sum, the estimate of what is left, the merge with it, and the copy of the queries."""
_LAUNCH_US = 6.6
"""Of the model's Python for a kernel or copy that it launches (estimate)."""
_EVENT_US = 40.0
"""From the last kernel before a wait until the host goes on, or back: event, copy, wake-up."""
_CALLER_MS = 2.0
"""Of `generate` around a step: masks, sampling, the model's own Python before its first kernel."""
_CAPTURED_CALLER_MS = 0.5
"""The same around a step that is one captured graph: sampling alone."""
_DEFAULTS: Any = HybridConfig(method="hybrid")
_WINDOW = _DEFAULTS.sink_tokens + _DEFAULTS.window_tokens
_TOP_K: int = _DEFAULTS.cold.top_k
_FOUND_SHARED = 0.55
"""Cold entries of a query head, and how many of a group's are distinct."""
_CANDIDATES = 2 * _TOP_K
"""Found ahead for a query head on the host."""
_SPILL_MS, _SPILL_LAUNCHES = 10.0, 1200
"""Python and launches of the step in which all layers hand a page over to the host (estimates)."""
_CONTEXT = 2**17
_WALK_GROWTH = 0.6
"""Of the rows that a graph's search reads, in the number of keys (docs/lab.md)."""


@dataclass(frozen=True, slots=True)
class CoreCost:
    """Work for one KV head and its group of queries, on one core.

    base_us: whatever the number of keys. us, growth: microseconds more at 128K keys, and with which
    power they grow. key_bytes: that it reads of each key; walked_bytes: of a graph, at 128K keys.
    """

    base_us: float
    us: float
    growth: float
    key_bytes: float = 0.0
    walked_bytes: float = 0.0

    def core_us(self, keys: int) -> float:
        """Of one core at so many keys."""
        return float(self.base_us + self.us * (keys / _CONTEXT) ** self.growth)

    def bytes(self, keys: int) -> float:
        """Bytes that it reads."""
        walked = self.walked_bytes * (keys / _CONTEXT) ** _WALK_GROWTH
        return float(self.key_bytes * keys + walked)


@dataclass(frozen=True, slots=True)
class PythonCost:
    """Python of a layer's step: us, and emptied_us more where the search has emptied the caches, in
    proportion up to 128K keys.
    """

    us: float
    emptied_us: float

    def at(self, keys: int) -> float:
        """Microseconds behind a search among so many keys."""
        return self.us + self.emptied_us * min(1.0, keys / _CONTEXT)


@dataclass(frozen=True, slots=True)
class HostCosts:
    """Measured costs of a core; groups of 4 query heads of 128 channels in 16 bit.

    search: by kind of index. attend: attention over what a group found, 100 entries a query head,
    which lie farther apart among more keys. rank: the exact ranking of what was found ahead, 200
    entries a query head. enter: Python from the queries' arrival to the result, around the engine's
    call. launch: all other Python of ours, before the queries leave and after the result. wake_us:
    until the pool works (estimate).
    """

    search: dict[str, CoreCost]
    attend: CoreCost
    rank: CoreCost
    enter: PythonCost
    launch: PythonCost
    wake_us: float


HOST_COSTS = HostCosts(
    search={
        "graph": CoreCost(0.0, 410.0, 1.0, walked_bytes=1.5 * 9000 * 129),
        "sketch": CoreCost(30.0, 160.0, 1.0, key_bytes=24.0),
        "scan": CoreCost(0.0, 470.0, 1.0, key_bytes=129.0),
    },
    attend=CoreCost(8.0, 9.0, 0.5),
    rank=CoreCost(10.0, 27.0, 0.5),
    enter=PythonCost(40.0, 50.0),
    launch=PythonCost(100.0, 110.0),
    wake_us=20.0,
)
"""One core of an AMD EPYC, Zen 5, AVX-512 (docs/results.md)."""


@dataclass(frozen=True, slots=True)
class Host:
    """Cores that search, and what their memory gives, in 1e9 bytes per second."""

    cores: int
    dram: float
    gather: float

    @property
    def threads(self) -> int:
        """As `default_threads`: one is left to everybody else from four on."""
        return self.cores - 1 if self.cores >= 4 else self.cores


DESKTOP_GBPS = (70.0, 35.0)
"""Rates of two channels of DDR5-5600, in order and at random places (assumptions)."""


@dataclass(frozen=True, slots=True)
class DesignPart:
    """Milliseconds of a token.

    hidden: it runs beside other parts and adds nothing. measured: made of `HOST_COSTS`; all else is
    computed or estimated.
    """

    name: str
    place: EvalTarget
    ms: float
    hidden: bool = False
    measured: bool = False


@dataclass(frozen=True, slots=True)
class DesignStep:
    """A decode step of one design.

    launches: kernels, copies or graphs that the host starts for a token. waits: how often host and
    device wait for each other. host_core_ms: work of all cores. device_bytes: of the codes that the
    design keeps on the device, with weights and window; host_bytes: of cold KV.
    why_not: a sentence where it cannot run.
    """

    design: str
    parts: tuple[DesignPart, ...]
    launches: int
    waits: int
    host_core_ms: float
    device_read_bytes: int
    host_read_bytes: int
    bus_bytes: int
    device_bytes: int
    host_bytes: int
    why_not: str = ""

    @property
    def ms(self) -> float:
        """Of a token: the parts that nothing hides."""
        return sum(part.ms for part in self.parts if not part.hidden)


@dataclass(frozen=True, slots=True)
class ExactPlan:
    """A token of an exact answer: steps of a design draft it, and a pass over the bus verifies it.

    accepted: share of drafts that full attention chooses too, each independent of the others.
    drafts: of a pass, at best. ms: as it is built, the pass behind its drafts. beside_drafts,
    beside_ms: the same where a pass runs beside the drafts of the next one, which are dropped if
    it rejects one of its own; not built.
    """

    design: str
    accepted: float
    drafts: int
    ms: float
    beside_drafts: int
    beside_ms: float


def exact_plans(designs: Sequence[DesignStep], accepted: Sequence[float]) -> tuple[ExactPlan, ...]:
    """Exact answers by each design that runs and leaves entries unread, at each share below 1."""
    passes = [step.ms for step in designs if step.design == OVER_THE_BUS]
    return tuple(
        _exact_plan(step, share, pass_ms)
        for pass_ms in passes
        for step in designs
        if step.design != OVER_THE_BUS and not step.why_not
        for share in accepted
    )


def _exact_plan(step: DesignStep, accepted: float, pass_ms: float) -> ExactPlan:
    def tokens(most: int) -> float:
        """Of a pass that gives at most so many: 1 + accepted + accepted^2 + ..."""
        return (1 - accepted**most) / (1 - accepted)

    def behind(drafts: int) -> float:
        return (drafts * step.ms + pass_ms) / tokens(drafts + 1)

    def beside(drafts: int) -> float:
        again = (1 - accepted**drafts) * drafts * step.ms
        return (max(drafts * step.ms, pass_ms) + again) / tokens(drafts)

    counts = range(1, MOST_DRAFTS_GPU + 1)
    best, best_beside = min(counts, key=behind), min(counts, key=beside)
    return ExactPlan(*(step.design, accepted, best, behind(best), best_beside, beside(best_beside)))


def host_search_ms(shape: LayerShape, kind: str, keys: int, host: Host, costs: HostCosts) -> float:
    """A layer's search on all threads: its work, or its bytes where those take longer."""
    cost = costs.search[kind]
    work = shape.num_kv_heads * cost.core_us(keys) / host.threads / 1e3
    gbps = host.gather if cost.walked_bytes else host.dram
    return max(work, shape.num_kv_heads * cost.bytes(keys) / gbps / 1e6)


def host_attend_ms(shape: LayerShape, keys: int, host: Host, costs: HostCosts) -> float:
    """A layer's attention over what was found in 16 bit, on as many threads as it has KV heads."""
    return _by_heads_ms(shape, costs.attend.core_us(keys), _found_bytes(shape, 2) / 2, host)


def host_rank_ms(shape: LayerShape, keys: int, host: Host, costs: HostCosts) -> float:
    """A layer's exact ranking of what was found ahead in 16 bit, on as many threads."""
    found = _CANDIDATES / _TOP_K * _found_bytes(shape, 2) / 2
    return _by_heads_ms(shape, costs.rank.core_us(keys), found, host)


def _by_heads_ms(shape: LayerShape, core_us: float, read_bytes: float, host: Host) -> float:
    work = shape.num_kv_heads * core_us / 1e3
    return max(work / min(host.threads, shape.num_kv_heads), read_bytes / host.gather / 1e6)


def _found_bytes(shape: LayerShape, itemsize: int) -> float:
    """Keys and values of what a layer's query heads find."""
    rows = _FOUND_SHARED * _TOP_K * shape.group_size * shape.num_kv_heads
    return 2 * rows * shape.head_dim * itemsize


class Designs:
    """The designs for one model on one card beside one host, at one context.

    Args:
        code_bytes: of a key on the device, as a plan with its prompt has chosen them; None for what
            fits beside a step alone.
    """

    def __init__(
        self,
        facts: ModelFacts,
        tokens: int,
        card: Card,
        rates: Rates,
        host: Host,
        costs: HostCosts = HOST_COSTS,
        code_bytes: int | None = None,
    ) -> None:
        self._facts, self._tokens, self._host, self._costs = facts, tokens, host, costs
        self._card, self._rates, self._planned_codes = card, rates, code_bytes
        self._cold = max(0, tokens - _WINDOW)
        self._layers, self._depth = len(facts.layers), facts.num_layers
        self._resident = min(tokens, _WINDOW) * facts.kv_bytes_per_token
        self._resident += facts.other_kv_bytes(tokens) + facts.fixed_bytes
        self._leaving = facts.kv_bytes_per_token if self._cold else 0  # pages, over their tokens

    def all(self) -> tuple[DesignStep, ...]:
        """Each of them, in the order of the documents."""
        makers: tuple[Callable[[], DesignStep], ...] = (
            lambda: self._searched("graph on the host", "graph"),
            lambda: self._searched("graph on the host, look-ahead", "graph", ahead=True),
            lambda: self._searched("sketch on the host", "sketch"),
            lambda: self._searched("sketch on the host, look-ahead", "sketch", ahead=True),
            lambda: self._on_device(one_graph=False),
            lambda: self._on_device(one_graph=True),
            self._streamed,
        )
        return tuple(make() for make in makers)

    def _kernels(self, more: int = 0) -> int:
        """Kernels and copies of a token: of the model's layers, and of ours with `more` each."""
        return self._depth * _MODEL_KERNELS + self._layers * (_OWN_KERNELS + more)

    def _base(self, kernels: int) -> Iterator[DesignPart]:
        """Part of every design on the device."""
        facts, rates = self._facts, self._rates
        yield DesignPart("weights", "device", facts.read_bytes / rates.device / 1e6)
        yield DesignPart("resident attention", "device", self._resident / rates.device / 1e6)
        yield DesignPart("small kernels", "device", kernels * _KERNEL_US / 1e3)
        if facts.fixed_bytes:
            written = facts.fixed_bytes / rates.device / 1e6  # what is read of them is resident
            yield DesignPart("states of fixed size", "device", written)

    def _searched(self, name: str, kind: str, *, ahead: bool = False) -> DesignStep:
        facts, host, costs = self._facts, self._host, self._costs
        search = [host_search_ms(s, kind, self._cold, host, costs) for s in facts.layers]
        attend = [host_attend_ms(s, self._cold, host, costs) for s in facts.layers]
        rank = [host_rank_ms(s, self._cold, host, costs) if ahead else 0.0 for s in facts.layers]
        base = tuple(self._base(self._kernels(1)))  # and merge
        layer_ms = sum(part.ms for part in base) / max(1, self._depth)
        exposed = [max(0.0, ms - layer_ms) if ahead else ms for ms in search]
        enter = self._layers * (costs.enter.at(self._cold) + costs.wake_us) / 1e3
        launches = self._kernels(1 + 2)  # copies out and in
        # While a device computes, Python launches what comes behind; what it takes longer shows.
        launch_ms = (launches * _LAUNCH_US + self._layers * costs.launch.at(self._cold)) / 1e3
        late = max(0.0, launch_ms - self._depth * layer_ms)
        trips = 2 * self._layers
        parts = (
            *base,
            DesignPart("query out, result in", "wait", trips * _EVENT_US / 1e3),
            DesignPart("launching", "host", late),
            DesignPart("launching beside", "host", launch_ms - late, hidden=True),
            DesignPart("entering the host's part", "host", enter, measured=True),
            DesignPart("search", "host", sum(exposed), measured=True),
            DesignPart(
                "search ahead", "host", sum(search) - sum(exposed), hidden=True, measured=True
            ),
            DesignPart("ranking of what was found", "host", sum(rank), measured=True),
            DesignPart("cold attention", "host", sum(attend), measured=True),
            DesignPart("generate", "host", _CALLER_MS),
        )
        core_ms = enter + sum(
            s.num_kv_heads
            * (
                costs.search[kind].core_us(self._cold)
                + costs.attend.core_us(self._cold)
                + (costs.rank.core_us(self._cold) if ahead else 0.0)
            )
            / 1e3
            for s in facts.layers
        )
        read = sum(
            s.num_kv_heads * costs.search[kind].bytes(self._cold)
            + _found_bytes(s, facts.dtype_bytes)
            for s in facts.layers
        )
        queries = [s.num_q_heads * s.head_dim * facts.dtype_bytes for s in facts.layers]
        # Out and back with a log-sum-exp a head; the predicted ones of each layer behind another.
        travels = 2 * sum(queries) + sum(4 * s.num_q_heads for s in facts.layers)
        travels += sum(queries[1:]) if ahead else 0
        return self._step(name, parts, launches, trips, core_ms, read, travels)

    def _on_device(self, *, one_graph: bool) -> DesignStep:
        """As it is built, where Python launches all but the cold part of a layer, which is a graph;
        or with the whole step as one graph.
        """
        facts, cold, rates = self._facts, self._cold, self._rates
        size, why = self._code_bytes()
        read = select_bytes(facts.layers, size, cold, _TOP_K, facts.dtype_bytes)
        moments = sum(moments_bytes(s.num_kv_heads, s.head_dim, cold) for s in facts.layers)
        bus = rates.h2d or rates.dram
        rows = read.ranked + read.attended
        device = (
            *self._base(self._kernels(SELECT_KERNELS)),
            DesignPart("scan of codes", "device", read.coded / rates.device / 1e6),
            DesignPart("moments", "device", moments / rates.device / 1e6),
            DesignPart("ranking and attention of host rows", "bus", rows / bus / 1e6),
        )
        name, scanned = f"sketch on the device, {size} B a key", read.coded + moments
        held = codes_bytes(facts.layers, size, cold, facts.dtype_bytes)
        sizes = rows, scanned, held
        spilled = (_SPILL_MS + _SPILL_LAUNCHES * _LAUNCH_US / 1e3) / _DEFAULTS.page_size
        spills = DesignPart("pages to the host", "host", spilled)
        if one_graph:
            if facts.other_kv_bytes(self._tokens):
                why = why or "layers whose keys are transformers' own are not captured"
            parts = (*device, DesignPart("generate", "host", _CAPTURED_CALLER_MS), spills)
            return self._step(f"{name}, one graph", parts, 1, 0, 0.0, 0.0, *sizes, why)
        launches = self._kernels(2)  # queries' copy, graph
        told = launches * _LAUNCH_US / 1e3
        told += self._layers * self._costs.launch.at(0) / 1e3  # no search empties the caches
        late = max(0.0, told - sum(part.ms for part in device))
        parts = (
            *device,
            DesignPart("launching", "host", late),
            DesignPart("launching beside", "host", told - late, hidden=True),
            DesignPart("generate", "host", _CALLER_MS),
            spills,
        )
        return self._step(f"{name}, as built", parts, launches, 0, 0.0, 0.0, *sizes, why)

    def _code_bytes(self) -> tuple[int, str]:
        """Of a key, by the runtime's rule of what fits beside all else; and why none does."""
        if self._planned_codes is not None:
            return self._planned_codes, ""
        facts = self._facts
        taken = facts.weight_bytes + self._resident + _CUDA_BYTES + AIR_BYTES
        free = self._card.memory_bytes - taken
        for size in CODE_BYTES:
            needed = codes_bytes(facts.layers, size, self._cold, facts.dtype_bytes)
            if needed <= free:
                return size, ""
        return size, (
            f"codes of {size} bytes a key need {needed / 2**30:.1f} GiB of device memory, "
            f"{free / 2**30:.1f} are free"
        )

    def _streamed(self) -> DesignStep:
        facts, bus = self._facts, self._rates.h2d or self._rates.dram
        travels = self._cold * facts.kv_bytes_per_token
        parts = (
            *self._base(self._kernels()),
            DesignPart("keys and values over the bus", "bus", travels / bus / 1e6),
            DesignPart(
                "attention of them", "device", travels / self._rates.device / 1e6, hidden=True
            ),
            DesignPart("generate", "host", _CALLER_MS),
        )
        launches = self._kernels(2)  # keys, values
        return self._step(OVER_THE_BUS, parts, launches, 0, 0.0, travels, travels)

    def _step(
        self,
        name: str,
        parts: tuple[DesignPart, ...],
        launches: int,
        waits: int,
        core_ms: float,
        host_read: float,
        bus: float,
        scanned: float = 0.0,
        codes: int = 0,
        why: str = "",
    ) -> DesignStep:
        facts = self._facts
        device_read = facts.read_bytes + self._resident + scanned
        return DesignStep(
            design=name,
            parts=tuple(part for part in parts if part.ms > 0),
            launches=launches,
            waits=waits,
            host_core_ms=core_ms,
            device_read_bytes=round(device_read),
            host_read_bytes=round(host_read),
            bus_bytes=round(bus) + self._leaving,
            device_bytes=facts.weight_bytes + self._resident + codes,
            host_bytes=self._cold * facts.kv_bytes_per_token,
            why_not=why,
        )
