"""vLLM's attention backend CUSTOM on CUDA: prompts by vLLM's own, decoding over chosen blocks.

    FlashAttention (compute capability 8.0 and above) or Triton ─► prompts, whole contexts, windows
                                                               └─► one head over chosen blocks

It was never run on a GPU. Attention is vLLM's own in all that is attended: its classes are
inherited, and once more made for one KV head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec

from hybrid_kv.ops.dispatch import get_ops
from hybrid_kv.vllm.audit import engine_turns
from hybrid_kv.vllm.counters import process_counts
from hybrid_kv.vllm.page_step import PageStep, SequenceRow
from hybrid_kv.vllm.pages import PageLayer
from hybrid_kv.vllm.settings import check_config, check_layer, say_once, settings_of

_PLATFORM = "cuda"
NEVER_RUN = "hybrid_kv inside vLLM was never run on a GPU; compare its answers with budget 'all'"


def _used_impl(stock: type, ours: type) -> type:
    """Class of a layer's attention; called where vLLM's configuration is current."""
    config = get_current_vllm_config()
    settings = settings_of(config.additional_config, _PLATFORM)
    if settings is None:
        return stock
    check_config(config)
    say_once(f"hybrid_kv decodes with {settings!r}")
    say_once(NEVER_RUN, is_warning=True)
    return ours


class _OnlyWritten:
    """Features of vLLM's backends that ours has not, for its own refusals."""

    @staticmethod
    def get_name() -> str:
        """The name that `--attention-backend` takes."""
        return "CUSTOM"

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """Prompts that attend in both directions."""
        return False

    @classmethod
    def supports_rswa(cls) -> bool:
        """Windows behind a prompt that stays visible."""
        return False

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Decoders that attend in both directions."""
        return False

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Results that are the same in every batch."""
        return False

    @classmethod
    def supports_alibi_sqrt(cls) -> bool:
        """A kind of ALiBi."""
        return False

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        """Quantised keys."""
        return False


class _PageBuilder:
    """Describes each step as vLLM's builder does, with a `PageStep` as `pages` where there is one.

    The stock description stays that of all sequences, as layers of one group may have windows; what
    is left to vLLM's attention beside chosen blocks is `others`, by a second builder, as each keeps
    buffers of its own.
    """

    stock: ClassVar[Callable[..., Any]]
    supports_update_block_table = False  # tables of ours would be those of another group

    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        args = kv_cache_spec, layer_names, vllm_config, device
        super().__init__(*args)  # type: ignore[call-arg]
        self.supports_draft_decode_metadata_update = False
        self._settings = settings_of(vllm_config.additional_config, _PLATFORM)
        self._others: Any = None
        # Kinds of its own, such as chunks or static sinks, are other attention than ours.
        if self._settings is not None and type(kv_cache_spec) is FullAttentionSpec:
            self._others = type(self).stock(*args)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """None with settings: lists of blocks are made anew for each step."""
        if settings_of(vllm_config.additional_config, _PLATFORM) is not None:
            return AttentionCGSupport.NEVER
        return super().get_cudagraph_support(vllm_config, kv_cache_spec)  # type: ignore[misc]

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        """Describe a step."""
        own = common_attn_metadata
        stock = super().build(common_prefix_len, own, fast_build)  # type: ignore[misc]
        stock.pages = stock.others = None
        if self._others is None or own.causal is not True:
            return stock
        assert self._settings is not None
        known, prefilling = own.seq_lens_cpu_upper_bound, own.is_prefilling
        lengths = (own.seq_lens if known is None else known).tolist()
        starts = own.query_start_loc_cpu.tolist()
        sequences = [
            SequenceRow(row, starts[row], starts[row + 1], lengths[row],
                        prefilling is not None and bool(prefilling[row]))
            for row in range(own.num_reqs) if starts[row + 1] > starts[row]
        ]  # fmt: skip
        size = self.kv_cache_spec.block_size  # type: ignore[attr-defined]
        stock.pages = PageStep.of(sequences, own.block_table_tensor, size, self._settings)
        decodes, longest = stock.pages.decodes, stock.pages.longest
        if decodes is not None and longest:
            # To vLLM's kernel ours are contexts of one token, whose output is written over.
            seq_lens = own.seq_lens.index_fill(0, decodes.device_rows, 1)
            others = own.replace(
                seq_lens=seq_lens, seq_lens_cpu_upper_bound=None, max_seq_len=longest
            )
            stock.others = self._others.build(common_prefix_len, others, fast_build)
        return stock


class _PageImpl:
    """Attention of one layer: chosen blocks where a decoder attends its whole context, else vLLM's.

    stock: vLLM's class. unplanned: fields of its description that hold a plan for other sequences.
    """

    stock: ClassVar[Callable[..., Any]]
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    attn_type: str
    sliding_window: tuple[int, int]
    alibi_slopes: Any
    kv_cache_dtype: str
    kv_sharing_target_layer_name: str | None
    logits_soft_cap: float
    sinks: Tensor | None
    unplanned: ClassVar[dict[str, Any]] = {"scheduler_metadata": None}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.pages: PageLayer | None = None
        if self.attn_type != AttentionType.DECODER or self.sliding_window != (-1, -1):
            return
        check_layer(self.alibi_slopes, self.kv_sharing_target_layer_name)
        config = get_current_vllm_config()
        settings = settings_of(config.additional_config, _PLATFORM)
        every = 0 if settings is None else settings.audit_every
        self.pages = PageLayer(
            self.scale,
            self.logits_soft_cap,
            get_ops("auto"),
            process_counts(),
            engine_turns(config, every) if every else None,
        )
        group = self.num_heads // self.num_kv_heads
        self._one_head = type(self).stock(
            *(group, self.head_size, self.scale, 1, None, None, self.kv_cache_dtype),
            *(self.logits_soft_cap, self.attn_type, None),
            sinks=None if self.sinks is None else self.sinks[:group],
        )

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Nothing quantises our output."""
        return False

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Store new keys and values."""
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)  # type: ignore[misc]
        if self.pages is not None:
            self.pages.write(kv_cache, key, slot_mapping)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend the tokens of a step; see vLLM's own."""
        how = (query, key, value, kv_cache)
        attend = partial(super().forward, layer, *how)  # type: ignore[misc]
        step: PageStep | None = None
        if self.pages is not None and attn_metadata is not None:
            step = attn_metadata.pages
        if self.pages is None or step is None:
            attend(attn_metadata, output, output_scale, output_block_scale)
            return output
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("hybrid_kv does not quantise the output of attention")
        step.count(self.pages.counts)
        decodes = step.decodes
        if decodes is None:
            attend(attn_metadata, output)
            return output
        if attn_metadata.others is not None:
            attend(attn_metadata.others, output)
        kernel = partial(self._attend_heads, layer, attn_metadata, decodes.width)
        out = output.view(-1, self.num_heads, self.head_size)
        self.pages.forward(kv_cache, query, out, decodes, kernel, self.sinks)
        return output

    def _attend_heads(
        self,
        layer: Any,
        metadata: Any,
        width: int,
        queries: Tensor,
        cache: Tensor,
        tables: Tensor,
        lengths: Tensor,
    ) -> Tensor:
        """See `HeadKernel`; each KV head alone where sinks differ from one to the next."""
        out = torch.empty_like(queries)
        heads = self.num_kv_heads
        apart = (
            [slice(None)] if self.sinks is None else [slice(h, None, heads) for h in range(heads)]
        )
        for head, rows in enumerate(apart):
            own, count = queries[rows].contiguous(), len(lengths[rows])
            described = replace(
                metadata,
                num_actual_tokens=count,
                max_query_len=1,
                query_start_loc=torch.arange(count + 1, dtype=torch.int32, device=own.device),
                max_seq_len=width * cache.shape[2],
                seq_lens=lengths[rows].contiguous(),
                block_table=tables[rows].contiguous(),
                **self.unplanned,
            )
            if self.sinks is not None:
                self._one_head.sinks = self.sinks.view(heads, -1)[head]
            found = torch.empty_like(own)
            self._one_head.forward(layer, own, None, None, cache, described, found)
            out[rows] = found
        return out


class FlashPageImpl(_PageImpl, FlashAttentionImpl):
    """Over vLLM's FlashAttention."""

    stock = FlashAttentionImpl
    unplanned: ClassVar = {"scheduler_metadata": None, "max_num_splits": 0}


class TritonPageImpl(_PageImpl, TritonAttentionImpl):
    """Over vLLM's Triton kernel."""

    stock = TritonAttentionImpl


class FlashPageBuilder(_PageBuilder, FlashAttentionMetadataBuilder):
    """Over vLLM's builder for FlashAttention."""

    stock = FlashAttentionMetadataBuilder


class TritonPageBuilder(_PageBuilder, TritonAttentionMetadataBuilder):
    """Over vLLM's builder for its Triton kernel."""

    stock = TritonAttentionMetadataBuilder


class FlashPageBackend(_OnlyWritten, FlashAttentionBackend):
    """FlashAttention, where hybrid_kv has settings with decoding over chosen blocks."""

    @staticmethod
    def get_impl_cls() -> type:
        """See `_used_impl`."""
        return _used_impl(FlashAttentionImpl, FlashPageImpl)

    @staticmethod
    def get_builder_cls() -> type:
        """Class that describes a step; it looks for settings itself."""
        return FlashPageBuilder


class TritonPageBackend(_OnlyWritten, TritonAttentionBackend):
    """vLLM's Triton attention, where hybrid_kv has settings with decoding over chosen blocks."""

    @staticmethod
    def get_impl_cls() -> type:
        """See `_used_impl`."""
        return _used_impl(TritonAttentionImpl, TritonPageImpl)

    @staticmethod
    def get_builder_cls() -> type:
        """Class that describes a step; it looks for settings itself."""
        return TritonPageBuilder
