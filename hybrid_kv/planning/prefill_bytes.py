"""Bytes that a layer-major prefill holds beside weights and KV."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_kv.planning.plan import ModelFacts


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
    def of(cls, facts: ModelFacts, num_tokens: int, chunk_tokens: int) -> PrefillBytes:
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
            working=int(chunk * max(mlp, attention, linear)),
        )
