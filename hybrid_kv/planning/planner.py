"""Planner: bytes of a context by place, costs of a token, and the best way of running it.

Arithmetic only: sizes come from the model's configuration, rates from a measurement or a card's
specification. Nothing is loaded and nothing is allocated.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hybrid_kv.config import HybridConfig, composed
from hybrid_kv.models.layer_major import chunk_size, lie_on_host
from hybrid_kv.ops.triton import SCRATCH_BYTES, result_bytes
from hybrid_kv.planning.plan import Machine, Mode, ModelFacts, Option, Plan
from hybrid_kv.planning.traffic import (
    DeviceSelect,
    PrefillBytes,
    first_token_seconds,
    plan_select,
    prefill_peak_bytes,
    select_ms,
)
from hybrid_kv.store.pinned_allocator import pinned_room
from hybrid_kv.types import Budget, LayerShape, Needs

_log = logging.getLogger(__name__)

AIR_BYTES = 2**30
"""Of a device, for nobody: a display, cuBLAS, and what torch's allocator cannot use of blocks."""

_CONTEXT_BYTES = 600 * 2**20
"""Bytes of a CUDA process before its first tensor (estimate)."""

_ROUND_TRIP_MS = 0.08
"""Query out and result in, for one layer: copies, an event, entering the engine (estimate)."""

_GRAPH_ROWS, _GRAPH_KEYS, _GRAPH_GROWTH = 9000, 2**17, 0.6
"""Rows that one joint search of a group reads at 128K keys, and how they grow (docs/lab.md)."""

_LIST_SHARE = 0.5
"""Bytes of neighbour lists that a search reads, per byte of rows."""

_SKETCH_BYTES, _SKETCH_DIM, _SKETCH_ROWS = 32, 128, 200
"""Bytes of codes that a search by sketch reads of each key at so many channels, and keys that a
query ranks exactly: those of most heads of a real model (docs/lab.md)."""

_LONGEST = 2**24


def make_plan(
    facts: ModelFacts, machine: Machine, context_tokens: int, config: HybridConfig
) -> Plan:
    """Compares dense KV in 16 and 8 bits with the configured tiered method.

    Args:
        context_tokens: prompt and answer together, at least 1.
        config: of the tiered method. One that composes a single method is planned as that method;
            where there are several their tiers differ, and no times are predicted.
    """
    planner = _Planner(facts, machine, config)
    plan = Plan(facts, machine, context_tokens, planner.options(context_tokens))
    _log.info("plan for %d tokens on %s: %s", context_tokens, machine.device, plan.advice)
    return plan


class _Planner:
    """The three options for contexts of one model on one machine."""

    def __init__(self, facts: ModelFacts, machine: Machine, config: HybridConfig) -> None:
        self._parts = composed(config.params)
        if len(self._parts) == 1:
            (part,) = self._parts
            common = config.model_dump(exclude={"method", "params"})
            config = HybridConfig(**common, method=part.method, params=part.params)
        self._facts, self._machine, self._config = facts, machine, config
        self._method = config.build()

    def options(self, tokens: int) -> tuple[Option, ...]:
        options = (
            self._longest(tokens, self._dense(tokens, "dense", 1.0)),
            self._longest(tokens, self._dense(tokens, "dense_8bit", 0.5)),
            self._longest(tokens, self._hybrid(tokens)),
        )
        return tuple(self._with_prompt(tokens, option) for option in options)

    def _with_prompt(self, tokens: int, option: Option) -> Option:
        machine = self._machine
        seconds = first_token_seconds(
            *(self._facts, tokens, machine.prompt, machine.rates),
            cold_tokens=option.cold_tokens,
            sparse=option.mode == "hybrid" and self._config.prefill_error is not None,
        )
        return replace(option, first_token=seconds)

    def _longest(self, tokens: int, option: Option) -> Option:
        """The option with the longest context for which it fits, to the nearest 1024 tokens."""
        low, high = 0, (self._facts.max_context_tokens or _LONGEST) // 1024
        while low < high:
            middle = (low + high + 1) // 2
            if self._again(option.mode, 1024 * middle).fits:
                low = middle
            else:
                high = middle - 1
        longest = max(1024 * low, tokens) if option.fits else 1024 * low
        return replace(option, max_context_tokens=longest)

    def _again(self, mode: Mode, tokens: int) -> Option:
        if mode == "hybrid":
            return self._hybrid(tokens)
        return self._dense(tokens, mode, 1.0 if mode == "dense" else 0.5)

    def _chunk(self, tokens: int) -> int:
        return chunk_size(self._config.prefill_chunk_tokens, tokens)

    def _dense(self, tokens: int, mode: Mode, size: float) -> Option:
        facts, rates = self._facts, self._machine.rates
        kv = int(size * tokens * facts.kv_bytes_per_token) + facts.other_kv_bytes(tokens)
        where = {
            "weights": facts.weight_bytes,
            "kv": kv,
            "states": facts.fixed_bytes,
            "prefill": prefill_peak_bytes(facts, tokens, self._chunk(tokens)),
        }
        read = {
            "weights": facts.read_bytes,
            "resident_attention": kv,
            "states": 2 * facts.fixed_bytes,  # read and written
        }
        ms = {name: _ms(count, rates.device) for name, count in read.items()}
        return self._place(mode, where, {}, ms, {})

    def _hybrid(self, tokens: int) -> Option:
        facts, config = self._facts, self._config
        per_token = facts.kv_bytes_per_token
        pinned = min(
            tokens, getattr(config, "sink_tokens", 0) + getattr(config, "window_tokens", 0)
        )
        learning = self._learning(tokens)
        # Earlier layers hold their resident pages while the last ones are computed, so that
        # prefill's memory comes on top of them. When a layer ends, its best keys are searched for
        # in what its last chunk has left.
        on_host = self._states_on_host(tokens)
        sparse = self._config.prefill_error is not None
        parts = PrefillBytes.of(facts, tokens, self._chunk(tokens), sparse=sparse)
        working = max(parts.working, learning.sealing)
        # Two layers' KV while one leaves and the next is computed, if the states leave room.
        layer_kv = tokens * facts.largest_layer_bytes
        if on_host:
            prefill = parts.ids + layer_kv + working + learning.collecting
        else:
            working = max(working, parts.making_rotary)
            prefill = parts.ids + parts.waiting + 2 * layer_kv + working + learning.collecting
        kept, rest = self._tiers(tokens - pinned)
        resident = (pinned + kept) * per_token + facts.other_kv_bytes(tokens)
        if self._has_digests:
            resident += kept * per_token // config.page_size
        taken = facts.weight_bytes + resident + facts.fixed_bytes + prefill
        select = self._select(rest, taken)
        by_device = select is not None and select.code_bytes is not None
        spare, settings = self._spare_tokens(rest, taken, fill=not by_device)
        extra = spare * per_token
        resident += extra + extra // config.page_size
        cold = rest - spare
        index = (
            0
            if by_device
            else sum(
                cold * self._method.index_bytes_per_token(layer, cold) for layer in facts.layers
            )
        )
        device = {"weights": facts.weight_bytes, "kv": resident, "prefill": prefill}
        device["states"] = facts.fixed_bytes
        ms = self._hybrid_ms(cold, pinned, kept + spare)
        if select is not None and select.code_bytes is not None:
            learning = Learning()  # the host builds nothing
            device |= {"codes": select.num_bytes, "search": select.search}
            settings["select"] = "device"
            ms = self._selected_ms(ms, select.code_bytes, cold)
        host = {"kv": cold * per_token, "index": index}
        if on_host:
            host["prefill"] = parts.waiting
        host |= self._host_extras(cold, learning, sum(host.values()))
        option = replace(self._place("hybrid", device, host, ms, settings), cold_tokens=cold)
        return (
            option
            if select is None
            else replace(option, select=select.why, code_bytes=select.code_bytes)
        )

    @property
    def _has_digests(self) -> bool:
        """Whether resident entries are read by pages, which digests choose."""
        return hasattr(self._config, "page_budget")

    def _tiers(self, tokens: int) -> tuple[int, int]:
        """Of so many that leave sinks and window, those the device and the host hold, as a layer of
        the model's average: where layers differ, by their bytes.
        """
        facts = self._facts
        tiers = [(self._method.tiers(x, tokens), facts.kv_bytes(x)) for x in facts.layers]
        per_token = max(1, facts.kv_bytes_per_token)
        device = sum(tier.device_tokens * size for tier, size in tiers)
        host = sum(tier.host_tokens * size for tier, size in tiers)
        return -(-device // per_token), -(-host // per_token)

    def _states_on_host(self, tokens: int) -> bool:
        """Whether a prompt's hidden states lie on the host, as the running model decides by what is
        free.
        """
        facts = self._facts
        if self._machine.device_bytes is None:
            return False
        layer_kv = tokens * facts.largest_layer_bytes
        free = self._device_free() - facts.weight_bytes
        setting = self._config.prefill_states
        return lie_on_host(setting, tokens * facts.states_bytes, layer_kv, free)

    def _select(self, rest: int, taken: int) -> DeviceSelect | None:
        """Side that finds cold entries, where there is a device beside the host.

        Args:
            rest: tokens that are cold but for the spare ones that were asked for, which the device
                holds beside `taken` bytes.
        """
        facts, config = self._facts, self._config
        spare = min(getattr(config, "spare_tokens", 0), rest)
        cold, pages = rest - spare, spare * facts.kv_bytes_per_token
        if self._machine.device_bytes is None or cold <= 0:
            return None
        free = self._device_free() - taken - pages - pages // config.page_size
        return plan_select(facts.layers, self._config, cold, facts.dtype_bytes, free)

    def _selected_ms(self, ms: Mapping[str, float], size: int, cold: int) -> dict[str, float]:
        """Milliseconds of a token where the device selects, given its plan with a host."""
        facts, top_k = self._facts, self._config.cold.top_k
        if not ms or top_k == "all":
            return dict(ms)
        shapes, rates = facts.layers, self._machine.rates
        return {**ms, **select_ms(shapes, size, cold, top_k, facts.dtype_bytes, rates)}

    def _learning(self, tokens: int) -> Learning:
        """Of the widest layer; no device finds nearest keys where the model runs on the CPU."""
        needs = self._method.needs
        if self._machine.device_bytes is None:
            needs = replace(needs, nearest_keys=0)
        facts = self._facts
        learned = (learning_bytes(x, needs, tokens, facts.dtype_bytes) for x in facts.layers)
        return max(learned, key=lambda one: one.collecting, default=Learning())

    def _host_extras(self, cold: int, learning: Learning, taken: int) -> dict[str, int]:
        """Bytes that the host holds beside cold KV and indexes (`taken` bytes): room in pinned
        arrays, which is committed at once; a staging area; and what waits for its index. That is of
        all layers if there is memory for it; else a layer waits for the builds of those before it.
        """
        extras = {}
        if self._machine.device_bytes is not None and cold:
            extras["room"] = pinned_room(cold) * self._facts.kv_bytes_per_token
            extras["staging"] = learning.kept
        if cold:
            free = self._machine.host_bytes - taken - sum(extras.values())
            waiting = learning.kept * len(self._facts.layers)
            extras["builds"] = max(learning.kept, min(waiting, free))
        return {name: size for name, size in extras.items() if size}

    def _spare_tokens(
        self, rest: int, taken: int, *, fill: bool
    ) -> tuple[int, dict[str, int | str]]:
        """Spare tokens that the device holds beside `taken` bytes, and what sets them.

        Memory that is free becomes spare pages where the method has them. Not without `fill`.
        """
        config, page = self._config, self._config.page_size
        wanted = min(getattr(config, "spare_tokens", 0), rest)
        fill &= self._machine.device_bytes is not None and hasattr(config, "spare_tokens")
        if wanted or not fill:
            return wanted, {}
        pages = max(0, self._device_free() - taken) // (self._facts.kv_bytes_per_token * (page + 1))
        found = min(pages * page, rest // page * page)
        return found, {"spare_tokens": found} if found else {}

    def _hybrid_ms(self, cold: int, pinned: int, extra: int) -> dict[str, float]:
        facts, rates, config = self._facts, self._machine.rates, self._config
        chosen: Budget = getattr(config, "page_budget", "all")
        paged = extra if chosen == "all" else min(extra, chosen * config.page_size)
        # Two rows a page, as many bytes as a token.
        digests = extra // config.page_size if self._has_digests else 0
        search = self._searched_bytes(cold)
        if search is None:
            return {}
        budget = getattr(getattr(config, "cold", None), "top_k", 0)
        top_k = cold if budget == "all" else min(cold, budget)
        read = sum(
            min(top_k * layer.group_size, cold) * facts.kv_bytes(layer) for layer in facts.layers
        )
        streamed, random = search
        trips = len(facts.layers) if self._machine.device_bytes and cold else 0
        return {
            "weights": _ms(facts.read_bytes, rates.device),
            "states": _ms(2 * facts.fixed_bytes, rates.device),
            "select": _ms(digests * facts.kv_bytes_per_token, rates.device),
            "resident_attention": _ms(
                (pinned + paged) * facts.kv_bytes_per_token
                + facts.other_kv_bytes(cold + pinned + extra),
                rates.device,
            ),
            "search": _ms(streamed, rates.dram) + _ms(random, rates.gather),
            "cold_attention": _ms(read, rates.gather),
            "transfer": trips * _ROUND_TRIP_MS,
        }

    def _searched_bytes(self, cold: int) -> tuple[float, float] | None:
        """Bytes that the searches of one step read in order, and at random places."""
        if len(self._parts) > 1:
            return None
        index = getattr(getattr(self._config, "cold", None), "index", None)
        if index is None:
            return 0.0, 0.0
        facts = self._facts
        heads = [layer for layer in facts.layers for _ in range(layer.num_kv_heads)]
        in_8_bits = float(sum(cold * (layer.head_dim + 1) for layer in heads))
        rows = min(cold, _GRAPH_ROWS * (cold / _GRAPH_KEYS) ** _GRAPH_GROWTH) if cold else 0
        walked = float(sum(rows * (layer.head_dim + 1) * (1 + _LIST_SHARE) for layer in heads))
        # Of the keys that come before codes are made again, half on average; they are scanned.
        needs = index.needs
        later = min(cold, needs.horizon_tokens // 2)
        coded = float(
            sum(
                (cold - later) * layer.head_dim * _SKETCH_BYTES / _SKETCH_DIM
                + later * (layer.head_dim + 1)
                for layer in heads
            )
        )
        ranked = sum(
            min(cold, _SKETCH_ROWS * layer.group_size) * facts.kv_bytes(layer) / 2
            for layer in facts.layers
        )
        if index.kind == "flat":
            return 2.0 * in_8_bits, 0.0
        scan, graph, sketch = (in_8_bits, 0.0), (0.0, walked), (coded, float(ranked))
        able = {"graph": (scan, graph), "sketch": (scan, sketch), "auto": (scan, sketch, graph)}
        if index.kind not in able:
            return None
        rates = self._machine.rates
        return min(
            able[index.kind], key=lambda read: _ms(read[0], rates.dram) + _ms(read[1], rates.gather)
        )

    def _device_free(self) -> int:
        total = self._machine.device_bytes
        return 0 if total is None else total - _CONTEXT_BYTES - AIR_BYTES

    def _place(
        self,
        mode: Mode,
        device: Mapping[str, int],
        host: Mapping[str, int],
        ms: Mapping[str, float],
        settings: Mapping[str, int | str],
    ) -> Option:
        """Compares needs with what there is; on the CPU everything is in host memory."""
        if self._machine.device_bytes is None:
            host = {name: device.get(name, 0) + host.get(name, 0) for name in {**device, **host}}
            device = {}
        lacking = []
        for what, need, free in (
            ("device", sum(device.values()), self._device_free()),
            ("host", sum(host.values()), self._machine.host_bytes),
        ):
            if need > free:
                lacking.append(
                    f"{need / 2**30:.1f} GiB of {what} memory are needed, "
                    f"{free / 2**30:.1f} are free"
                )
        why = " and ".join(lacking) or "fits"
        return Option(mode, dict(device), dict(host), not lacking, why, dict(ms), dict(settings))


def _ms(count: float, gbps: float) -> float:
    return count / gbps / 1e6


@dataclass(frozen=True, slots=True)
class Learning:
    """Bytes of one layer and row, at most.

    collecting: on the device, while a layer's prompt is computed and the layer before it leaves.
    sealing: on the device beside that, when the layer ends. kept: on the host until its index is
    built.
    """

    collecting: int = 0
    sealing: int = 0
    kept: int = 0


def learning_bytes(layer: LayerShape, needs: Needs, num_tokens: int, itemsize: int) -> Learning:
    """Bytes that `needs` take for a prompt of `num_tokens`, for queries of `itemsize` bytes a
    channel.
    """
    sampled = min(2 * needs.sampled_queries, num_tokens)  # a stride doubles when so many are held
    positions = sampled + min(needs.last_queries, num_tokens)
    if not positions:
        return Learning()
    per_position = itemsize * layer.num_q_heads * layer.head_dim
    queries = positions * per_position
    found = scratch = 0
    if needs.nearest_keys:
        count = min(needs.nearest_keys, num_tokens)
        found = result_bytes(layer.num_q_heads, positions, count)
        scratch = SCRATCH_BYTES
    # The collector joins pieces by copying; queries and result of the layer before are leaving.
    collecting = 3 * queries + queries + found
    # Queries are turned to where decoding will ask them, through temporaries in float32.
    turning = 5 * queries
    return Learning(collecting, queries + found + max(scratch, turning), queries + found)
