"""Bytes that a step reads, by purpose, and their least time; bytes that a prefill or codes hold.

The time to the first token is told by its parts: products, attention, entries that leave.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from hybrid_kv.config import HybridConfig, IndexConfig
from hybrid_kv.index._device_keys import device_bytes, search_bytes
from hybrid_kv.models.packed_linear import product
from hybrid_kv.models.prompt_layers import trial
from hybrid_kv.ops import get_ops
from hybrid_kv.ops.native.library import pool_here
from hybrid_kv.ops.native.linear import (
    PACKED_KINDS,
    PackedWeight,
    multiplies_packed,
)
from hybrid_kv.ops.reference import SCORE_BYTES
from hybrid_kv.ops.sketch_select import MARGIN
from hybrid_kv.planning.plan import ModelFacts, PromptRates
from hybrid_kv.planning.rates import Card, Rates, median_seconds
from hybrid_kv.runtime import KVCache
from hybrid_kv.runtime.select import CODE_BYTES
from hybrid_kv.runtime.sparse_prefill import CHOOSING, query_block
from hybrid_kv.types import KEY_BLOCK, LayerShape, Work

_WALKED = ("graph", "hnsw")
"""Index kinds that read rows at random places; the others read them in order."""


def bytes_per_step(
    facts: ModelFacts, cache: KVCache, work: Work, *, on_device: bool
) -> dict[str, int]:
    """Bytes that a decode step of one sequence reads, on average, as `Work` counts; {} for none.

    Args:
        work: of decode steps alone.
        on_device: whether entries leave a device for the host.
    """
    if not work.steps:
        return {}
    steps = work.steps / sum(shape.num_q_heads for shape in facts.layers)
    is_cold = any(layer.rows[0].chain.num_tokens for layer in cache.stores.values())
    length = max(layer.rows[0].length for layer in cache.stores.values())
    # A page leaves when as many tokens have come.
    leaving = facts.kv_bytes_per_token if on_device and is_cold else 0
    read = {
        "weights": facts.read_bytes,
        "resident_attention": work.resident_bytes / steps + facts.other_kv_bytes(length),
        "select": work.select_bytes / steps,
        "search": work.search_bytes / steps,
        "cold_attention": work.cold_bytes / steps,
        "estimate": work.estimate_bytes / steps,
        "transfer": work.transfer_bytes / steps + leaving,
    }
    if facts.fixed_bytes:
        read["states"] = 2 * facts.fixed_bytes  # read and written
    return {purpose: round(count) for purpose, count in read.items()}


def limit_ms(read: Mapping[str, int], cache: KVCache, rates: Rates) -> float | None:
    """Milliseconds that reading takes at the measured bandwidths, one thing after the other; None
    for {}.
    """
    if not read:
        return None
    walks = _serving_kind(cache) in _WALKED
    selects = _device_selects(cache)
    speed = {
        "weights": rates.device,
        "resident_attention": rates.device,
        "states": rates.device,
        "select": rates.device,
        "search": rates.gather if walks else rates.dram,
        "cold_attention": (rates.h2d or rates.dram) if selects else rates.gather,
        "estimate": rates.device if selects else rates.dram,
        "transfer": rates.d2h or rates.dram,
    }
    return sum(count / speed[purpose] / 1e6 for purpose, count in read.items())


def _device_selects(cache: KVCache) -> bool:
    """Whether a device finds cold entries by codes, and reads the host's rows over the bus."""
    spans = (span for layer in cache.stores.values() for span in layer.cold.spans())
    indexes = (span.extent.index for span in spans)
    return any(index is not None and index.selector is not None for index in indexes)


def index_of(config: HybridConfig) -> IndexConfig | None:
    """The index that a method finds cold entries with; None where it has none."""
    return getattr(getattr(config, "cold", None), "index", None)


def _serving_kind(cache: KVCache) -> str | None:
    """The kind of the index; of kinds that choose by head "graph", "sketch" or "scan", the first of
    these that serves one.
    """
    index = index_of(cache.config)
    if index is None or index.kind not in ("graph", "auto"):
        return None if index is None else index.kind
    heads = cache.layers.describe_indexes()
    serving = {head.get("serves") for head in heads}
    return next((kind for kind in ("graph", "sketch") if kind in serving), "scan")


def prefill_peak_bytes(facts: ModelFacts, num_tokens: int, chunk_tokens: int) -> int:
    """The most that a layer-major prefill holds beside weights and KV.

    One hidden-state tensor of full length; rotary tables, whose making takes more than their
    keeping; and for one chunk the MLP's three products, the attention block or a linear attention
    in float32, as transformers computes it without kernels of others. The factors were read off
    live storages of a Llama and of Qwen3.5 (benchmarks/prefill_memory) and bound them from above;
    merging by the plain definition, without engine or Triton, takes 2.25 query widths more.
    """
    parts = PrefillBytes.of(facts, num_tokens, chunk_tokens)
    return parts.waiting + parts.ids + max(parts.making_rotary, parts.working)


@dataclass(frozen=True, slots=True)
class PrefillBytes:
    """Bytes of a prompt that is being computed.

    waiting: hidden states and rotary tables of full length, which may lie on the host; making them
    takes `making_rotary` more, once. ids: token ids, positions and masks. working: the most that a
    chunk takes.
    """

    waiting: int
    making_rotary: int
    ids: int
    working: int

    @classmethod
    def of(
        cls, facts: ModelFacts, num_tokens: int, chunk_tokens: int, *, sparse: bool = False
    ) -> PrefillBytes:
        size, chunk = facts.dtype_bytes, min(chunk_tokens, num_tokens)
        head_dim = max((layer.head_dim for layer in facts.layers), default=0)
        q_width = max((layer.num_q_heads * layer.head_dim for layer in facts.layers), default=0)
        kv_width = max((layer.num_kv_heads * layer.head_dim for layer in facts.layers), default=0)
        mlp = size * (3 * facts.intermediate_size + 3.25 * facts.hidden_size)
        attention = size * (2.5 * facts.hidden_size + 5.75 * q_width + 3 * kv_width)
        linear = 4 * 5.5 * facts.linear_width + 2 * size * facts.hidden_size
        linear = linear if facts.linear_width else 0.0
        states, rotary = facts.states_bytes, 2 * size * head_dim
        return cls(
            waiting=num_tokens * (states + rotary),
            making_rotary=15 * num_tokens * head_dim,
            ids=4 * 8 * num_tokens,
            working=int(chunk * max(mlp, attention, linear))
            + (_choosing_bytes(facts, num_tokens, chunk) if sparse else 0),
        )


def _choosing_bytes(facts: ModelFacts, num_tokens: int, chunk: int) -> int:
    """Bytes at most by which block-sparse prefill chooses.

    They are weights of the queries that choose by key block and their order, slices of scores, and
    keys and values of one KV head in float32.
    """
    found = 0
    for layer in facts.layers:
        blocks = -(-chunk // query_block(layer.num_q_heads // layer.num_kv_heads))
        weights = 4 * layer.num_q_heads * CHOOSING + 24 * layer.num_kv_heads
        copies = 8 * num_tokens * layer.head_dim
        found = max(found, blocks * num_tokens // KEY_BLOCK * weights + copies)
    return found + 2 * SCORE_BYTES


# Codes of all cold keys on a device: whether they fit, and what a step then reads -----------------

_RANKED = MappingProxyType({16: 1024, 24: 1024, 32: 404, 48: 205, 64: 130})
"""Keys that a query ranks exactly for its best 100, by bytes of a code: made-up heads of a paper's
kind, recall .95; 1,024 is the most that there is room for (docs/lab.md)."""
_SHARED = 0.5
"""Rows that are read over the bus, per row that a query head wants: a group shares (assumed)."""
_SAMPLED = 1 / 8
"""Codes that are read a second time, for the limit."""
_DIM = 128


@dataclass(frozen=True, slots=True)
class DeviceSelect:
    """code_bytes: of a key at 128 channels, None where the host searches. num_bytes: that codes,
    later keys and maps take of the device. search: bytes of what a search holds. why: one clause.
    """

    code_bytes: int | None
    num_bytes: int
    search: int
    why: str


def plan_select(
    layers: Sequence[LayerShape], config: HybridConfig, cold: int, itemsize: int, free: int
) -> DeviceSelect | None:
    """By the rule of `select`, for `cold` tokens and `free` bytes of a device.

    None for a method that finds nothing in a cold tier.
    """
    settings = getattr(config, "cold", None)
    select = getattr(settings, "select", None)
    if settings is None or select is None:
        return None
    if select == "host":
        return DeviceSelect(None, 0, 0, "the host searches, as select says")
    if settings.why_host is not None:
        return DeviceSelect(None, 0, 0, f"the host searches: the device {settings.why_host}")
    if getattr(config, "demote", None) is not None:
        return DeviceSelect(None, 0, 0, "the host searches: it has to know what is found")
    if cold < settings.index.params.min_keys and select == "auto":
        return DeviceSelect(None, 0, 0, f"the host searches: {max(0, cold):,} cold keys are few")
    needed = {size: codes_bytes(layers, size, cold, itemsize) for size in CODE_BYTES}
    search = searching_bytes(layers, cold)
    for size, count in needed.items():
        if count + search <= free:
            why = f"the device selects: codes of {size} B a key fit"
            return DeviceSelect(size, count, search, why)
    least, count = min(needed.items())
    lacking = f"{count / 2**30:.1f} GiB, {max(0, free) / 2**30:.1f} are free"
    if select == "device":
        why = f"the device selects, as select says: {lacking}"
        return DeviceSelect(least, count, search, why)
    return DeviceSelect(None, 0, 0, f"the host searches: codes of {least} B a key take {lacking}")


def codes_bytes(layers: Sequence[LayerShape], size: int, cold: int, itemsize: int) -> int:
    """Bytes in all layers of codes of `size` bytes at 128 channels, and of what goes with them."""
    return sum(
        device_bytes(
            cold, one.num_kv_heads, one.head_dim, itemsize, -(-size * one.head_dim // _DIM)
        )
        for one in layers
    )


def searching_bytes(layers: Sequence[LayerShape], cold: int) -> int:
    """Bytes that the search of one layer holds; layers are searched one after another."""
    sizes = (search_bytes(cold, one.num_kv_heads, one.group_size) for one in layers)
    return max(sizes, default=0)


class SelectBytes(NamedTuple):
    """Bytes that selection on a device reads for a token, in all layers.

    coded: codes, those of the sample a second time, on the device. ranked: keys that are ranked
    exactly, over the bus; attended: values of the best, over the bus.
    """

    coded: float
    ranked: float
    attended: float


def select_bytes(
    layers: Sequence[LayerShape], size: int, cold: int, top_k: int, itemsize: int
) -> SelectBytes:
    """For codes of `size` bytes at 128 channels, with as many candidates as the runtime aims at."""
    coded = ranked = attended = 0.0
    for one in layers:
        row = one.num_kv_heads * one.head_dim * itemsize
        coded += cold * one.num_kv_heads * (-(-size * one.head_dim // _DIM)) * (1 + _SAMPLED)
        wanted = MARGIN * _RANKED[size] * max(1.0, top_k / 100)
        ranked += row * min(cold, wanted * one.group_size * _SHARED)
        attended += row * min(cold, top_k * max(1.0, one.group_size * _SHARED))
    return SelectBytes(coded, ranked, attended)


def select_ms(
    layers: Sequence[LayerShape], size: int, cold: int, top_k: int, itemsize: int, rates: Rates
) -> Mapping[str, float]:
    """Milliseconds of a token at the least: codes from the device's memory, rows over the bus."""
    bus, read = rates.h2d or rates.dram, select_bytes(layers, size, cold, top_k, itemsize)
    return {
        "search": (read.coded / rates.device + read.ranked / bus) / 1e6,
        "cold_attention": read.attended / bus / 1e6,
        "transfer": 0.0,
    }


ATTAINED_PRODUCTS, ATTAINED_ATTENTION = 0.7, 0.5
"""Shares of a card's specified rate in 16 bit (assumptions, not measurements)."""

SPARSE_DENSITY, _CHOICE = 0.3, 0.04
"""Share of the key blocks that sparse prefill reads (an assumption: what SmolLM2 reads at an error
of .05, of 4K to 8K tokens), and what it costs to choose them, of exact attention."""

_TOKENS, _OUTPUTS, _INPUTS = 256, 1024, 2048
"""Of a measured product, at most: a chunk of a prompt, and as much of a matrix as takes 10 ms."""
_ATTENDED, _HEADS = 2048, 2
"""Tokens and query heads of a measured attention; longer prompts attend somewhat faster."""

_PLAIN = {str(dtype): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32)}


def prompt_rates_of_card(card: Card, facts: ModelFacts) -> PromptRates | None:
    """Rates that a card would reach in 16 bit; None for a model that computes in 32."""
    if facts.dtype_bytes != 2:
        return None
    return PromptRates(
        products=ATTAINED_PRODUCTS * 1e3 * card.tflops,
        attention=ATTAINED_ATTENTION * 1e3 * card.tflops,
        assumed=True,
    )


def measure_prompt_rates(facts: ModelFacts, device: torch.device) -> PromptRates | None:
    """Measures this machine in about .3 seconds.

    None where weights have a layout whose products are a library's, which is not loaded here.
    """
    products = _measured_products(facts, device)
    if products is None or not facts.layers:
        return None
    shape, dtype = facts.layers[0], _dtype(facts)
    q = torch.ones(1, _HEADS, _ATTENDED, shape.head_dim, dtype=dtype, device=device)
    k, v = q[:, :1].contiguous(), q[:, :1].contiguous()
    scale = shape.head_dim**-0.5
    attend: Callable[[], object]
    if device.type == "cpu":
        attend = partial(get_ops("auto").attend_causal, q, k, v, scale=scale)
    else:
        wide = k.expand_as(q)
        attend = partial(scaled_dot_product_attention, q, wide, wide, is_causal=True, scale=scale)
    work = _attention_work(_HEADS * shape.head_dim, _ATTENDED)
    return PromptRates(products, work / median_seconds(attend, device) / 1e9)


def _measured_products(facts: ModelFacts, device: torch.device) -> float | None:
    """A layer's largest product in the layout of most weights, in 1e9 operations a second."""
    inputs, outputs = min(facts.hidden_size, _INPUTS), min(facts.intermediate_size, _OUTPUTS)
    layout, dtype = _layout(facts), _dtype(facts)
    x = torch.ones(_TOKENS, inputs, dtype=dtype, device=device)
    multiply: Callable[[], Tensor]
    if layout in PACKED_KINDS and multiplies_packed(layout, device):
        row_bytes = PACKED_KINDS[layout].row_bytes(inputs)
        blocks = torch.zeros(outputs, row_bytes, dtype=torch.uint8)
        weight = PackedWeight(layout, blocks, inputs)
        multiply = partial(product, x, weight, pool=pool_here())
    elif f"torch.{layout}" == str(dtype):
        if device.type == "cpu" and dtype != torch.float32 and trial(dtype, _TOKENS).pays:
            x = x.float()  # as `models.prompt_layers`, whose copy of a weight serves all chunks
        multiply = partial(linear, x, torch.ones(outputs, inputs, dtype=x.dtype, device=device))
    else:
        return None
    work = 2 * _TOKENS * inputs * outputs
    return work / median_seconds(multiply, device) / 1e9


def _layout(facts: ModelFacts) -> str:
    """Name of the layout that most weights have; "" where nothing is known of them."""
    return max(facts.weights, key=facts.weights.__getitem__, default="")


def _dtype(facts: ModelFacts) -> torch.dtype:
    """Dtype of activations."""
    known = torch.float32 if facts.dtype_bytes == 4 else torch.bfloat16
    return _PLAIN.get(f"torch.{_layout(facts)}", known)


def first_token_seconds(
    facts: ModelFacts,
    tokens: int,
    prompt: PromptRates | None,
    rates: Rates,
    *,
    cold_tokens: int = 0,
    sparse: bool = False,
) -> dict[str, float]:
    """Seconds of a prompt by part; {} where the machine's rates are not known.

    Not counted: attention within windows and states of fixed size, norms and the like, unpacking
    of weights on a card, and what an index learns from the prompt and takes to be built.

    Args:
        cold_tokens: entries that leave for the cold tier. Over a bus they travel while the next
            layer is computed, and what takes longer shows; on the CPU they are copied.
        sparse: whether attention is block-sparse; exact otherwise.
    """
    if prompt is None or not facts.products:
        return {}
    widths = [shape.num_q_heads * shape.head_dim for shape in facts.layers]
    products = 2 * tokens * facts.products / prompt.products / 1e9
    attention = sum(_attention_work(width, tokens) for width in widths) / prompt.attention / 1e9
    if sparse:
        attention *= SPARSE_DENSITY + _CHOICE
    left = cold_tokens * facts.kv_bytes_per_token / 1e9
    if rates.d2h is None:
        leaving = 2 * left / rates.dram  # read and written
    else:
        depth, travels = max(1, len(facts.layers)), left / rates.d2h
        leaving = max(travels / depth, travels - (products + attention) * (depth - 1) / depth)
    name = "sparse attention" if sparse else "attention"
    return {"products": products, name: attention, "leaving": leaving}


def _attention_work(width: int, tokens: int) -> float:
    """Operations of causal attention over query heads of `width` channels together: q.k and p.v of
    half of all pairs.
    """
    return 2.0 * width * tokens * (tokens + 1)
