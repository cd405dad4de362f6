"""vLLM's attention backend of the CPU with decoding by hybrid_kv, in the classes vLLM wants."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from hybrid_kv.ops.native.library import Pool
from hybrid_kv.vllm.audit import engine_turns
from hybrid_kv.vllm.batch import CacheShape, Prompts, Scratch, StepBatch, StepSequence, as_blocks
from hybrid_kv.vllm.counters import process_counts
from hybrid_kv.vllm.layer import Kernel, PagedLayer
from hybrid_kv.vllm.settings import check_config, check_layer, say_once, settings_of


class HybridBackend(CPUAttentionBackend):
    """vLLM's backend, where hybrid_kv has settings ours."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        """Class of a layer's attention; called where vLLM's configuration is current."""
        config = get_current_vllm_config()
        settings = settings_of(config.additional_config)
        if settings is None:
            return CPUAttentionBackendImpl  # type: ignore[no-any-return]
        check_config(config)
        say_once(f"hybrid_kv decodes with {settings!r}")
        return HybridImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        """Class that describes a step; it looks for settings itself."""
        return HybridMetadataBuilder


@dataclass
class HybridMetadata(CPUAttentionMetadata):
    """vLLM's description of a step, and ours; None where no layer is ours."""

    batch: StepBatch | None = None


class HybridMetadataBuilder(CPUAttentionMetadataBuilder):
    """Describes each step for the layers of one group."""

    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._settings = settings_of(vllm_config.additional_config)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        """Describe a step."""
        stock = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if self._settings is None or stock.causal is not True or self.is_encoder_only_attention:
            return stock
        own = common_attn_metadata
        starts, lengths = own.query_start_loc_cpu.tolist(), own.seq_lens.tolist()
        tables, prefilling = own.block_table_tensor.numpy(), own.is_prefilling
        rows = [row for row in range(own.num_reqs) if starts[row + 1] > starts[row]]
        sequences = [
            StepSequence(starts[row], starts[row + 1], lengths[row], tables[row]) for row in rows
        ]
        batch = StepBatch.of(
            sequences,
            [prefilling is not None and bool(prefilling[row]) for row in rows],
            CacheShape(self.num_kv_heads, self.block_size),
            self._settings,
            self._plan,
        )
        return HybridMetadata(**vars(stock), batch=batch)

    def _plan(self, starts: Tensor, lengths: Tensor) -> Tensor:
        planned: Tensor = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(lengths),
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            seq_lens=lengths,
            dtype=self.dtype,
            query_start_loc=starts,
            causal=True,
            sliding_window_size=-1,
            isa=self.isa,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
            dynamic_causal=None,
            kv_cache_dtype=self.kv_cache_dtype,
        )
        return planned


class HybridImpl(CPUAttentionBackendImpl):
    """Attention of one layer: ours where a decoder attends its whole context, else vLLM's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.hybrid: PagedLayer | None = None
        if self.attn_type != AttentionType.DECODER or self.sliding_window != -1:
            return
        check_layer(self.alibi_slopes, self.kv_sharing_target_layer_name)
        how = self.scale, self.logits_soft_cap
        config = get_current_vllm_config()
        settings = settings_of(config.additional_config)
        every = 0 if settings is None else settings.audit_every
        turns = engine_turns(config, every) if every else None
        self.hybrid = PagedLayer(*how, _scratch(), _pool(), self.sinks, process_counts(), turns)

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Store new keys and values."""
        if self.hybrid is None:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            return
        count = len(slot_mapping)  # tokens beyond are padding, and so are slots below 0
        if bool((slot_mapping < 0).any()):
            there = slot_mapping >= 0
            key, value, slot_mapping = key[:count][there], value[:count][there], slot_mapping[there]
        self.hybrid.write(as_blocks(kv_cache), key[:count], value[:count], slot_mapping)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend the tokens of a step; see vLLM's own."""
        if self.hybrid is None or attn_metadata is None:
            super().forward(
                *(layer, query, key, value, kv_cache, attn_metadata, output),
                *(output_scale, output_block_scale),
            )
            return output
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("hybrid_kv does not quantise the output of attention")
        kernel = Kernel(
            partial(self._attend_prompts, layer), ops.cpu_attn_reshape_and_cache, layer.isa
        )
        out = output.view(-1, self.num_heads, self.head_size)
        self.hybrid.forward(as_blocks(kv_cache), query, out, attn_metadata.batch, kernel)
        return output

    def _attend_prompts(
        self,
        layer: Any,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        out: Tensor,
        prompts: Prompts,
    ) -> None:
        ops.cpu_attention_with_kv_cache(
            query=query,
            key_cache=key_cache,
            value_cache=value_cache,
            output=out,
            query_start_loc=prompts.starts,
            seq_lens=prompts.lengths,
            scale=self.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=prompts.contexts.table,
            softcap=self.logits_soft_cap,
            scheduler_metadata=prompts.plan,
            s_aux=_readable(self.sinks),
            dynamic_causal=None,
            k_scale=layer._k_scale_float,
            v_scale=layer._v_scale_float,
            kv_cache_dtype=self.kv_cache_dtype,
        )


def _readable(sinks: Tensor | None) -> Tensor | None:
    """In a dtype that vLLM's kernel reads, as its own backend passes them."""
    if sinks is None or sinks.dtype in (torch.bfloat16, torch.float32):
        return sinks
    return sinks.float()


@cache
def _scratch() -> Scratch:
    return Scratch()


@cache
def _pool() -> Pool | None:
    """Threads of the engine, on the CPUs that vLLM has bound its own to."""
    threads = torch.get_num_threads()
    if threads == 1:
        return None
    here = os.sched_getaffinity(0)
    bound = [os.sched_getaffinity(int(task)) for task in os.listdir("/proc/self/task")]
    others = sorted({cpu for cpus in bound if len(cpus) == 1 for cpu in cpus - here})
    return Pool(threads, others if len(others) == threads - 1 else ())
