"""Full attention over one context with many questions: prefill once, ask them all at once.

This is the reference that every method is compared with. It runs a transformers Llama layer by
layer with attention of its own, so that a batch of questions shares one copy of the context's
keys and values; a 128K context then costs one prefill and 128 MiB of bf16 keys and values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, apply_rotary_pos_emb

from hybrid_kv.eval.needle import is_correct
from hybrid_kv.eval.needle.facts import Question

KeysValues = tuple[Tensor, Tensor]
"""k and v of one layer, each [B, Hkv, N, D]."""


def sinks_and_window(num_tokens: int, sink_tokens: int = 4, window_tokens: int = 512) -> Tensor:
    """Ids of the first `sink_tokens` and the last `window_tokens` positions (StreamingLLM)."""
    ids = torch.arange(num_tokens)
    return ids[(ids < sink_tokens) | (ids >= num_tokens - window_tokens)]


class DenseReader:
    """Keys and values of one context under full attention, and answers to questions about it.

    Args:
        model: any Llama without bias in its projections, on the CPU; its dtype is used.
        context: token ids [N].
        chunk_tokens: queries of one attention call during prefill.
    """

    @torch.inference_mode()
    def __init__(
        self, model: LlamaForCausalLM, context: NDArray[np.int64], chunk_tokens: int = 1024
    ) -> None:
        self._model = model
        self.num_tokens = len(context)
        self._layers: list[KeysValues] = []
        x = model.model.embed_tokens(torch.from_numpy(context)[None])
        positions = torch.arange(self.num_tokens)[None]
        for layer in model.model.layers:
            q, k, v = self._query_key_value(layer, x, positions)
            self._layers.append((k, v))
            x = x.clone()
            for start in range(0, self.num_tokens, chunk_tokens):
                part = slice(start, min(start + chunk_tokens, self.num_tokens))
                out = _causal_chunk(q[:, :, part], k, v, start)
                x[:, part] = _finish_layer(layer, x[:, part], out)

    def _query_key_value(
        self, layer: LlamaDecoderLayer, x: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, Hq, N, D], keys and values [B, Hkv, N, D] of x [B, N, H]."""
        h = layer.input_layernorm(x)
        attention = layer.self_attn
        q, k, v = (
            projection(h).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        cos, sin = self._model.model.rotary_emb(x, positions)
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return q, k.contiguous(), v.contiguous()

    @torch.inference_mode()
    def answer(
        self, questions: Sequence[Question], visible: Tensor | None = None
    ) -> list[tuple[int, ...]]:
        """Greedy continuations, each as long as the expected answer.

        Args:
            questions: asked independently of each other.
            visible: context positions that the questions may attend to; None for all.
        """
        seen = self._layers
        if visible is not None:
            seen = [(k[:, :, visible], v[:, :, visible]) for k, v in seen]
        by_length: dict[int, list[int]] = defaultdict(list)
        for index, question in enumerate(questions):
            by_length[len(question.ids)].append(index)
        answers: list[tuple[int, ...]] = [()] * len(questions)
        for indices in by_length.values():
            ids = torch.tensor([questions[index].ids for index in indices])
            longest = max(len(questions[index].answer) for index in indices)
            generated = self._generate(ids, longest, seen).tolist()
            for index, row in zip(indices, generated, strict=True):
                answers[index] = tuple(row[: len(questions[index].answer)])
        return answers

    def accuracy(self, questions: Sequence[Question], visible: Tensor | None = None) -> float:
        """Share of the questions answered exactly."""
        answers = self.answer(questions, visible)
        return float(np.mean([is_correct(q, a) for q, a in zip(questions, answers, strict=True)]))

    def _generate(self, ids: Tensor, num_new: int, seen: list[KeysValues]) -> Tensor:
        own: list[KeysValues | None] = [None] * len(seen)
        position, generated = self.num_tokens, []
        for _ in range(num_new):
            positions = torch.arange(position, position + ids.shape[1])[None]
            x = self._model.model.embed_tokens(ids)
            for index, layer in enumerate(self._model.model.layers):
                q, k, v = self._query_key_value(layer, x, positions)
                before = own[index]
                if before is not None:
                    k, v = torch.cat([before[0], k], dim=2), torch.cat([before[1], v], dim=2)
                own[index] = (k, v)
                x = _finish_layer(layer, x, _shared_context_attention(q, seen[index], k, v))
            position += ids.shape[1]
            ids = self._model.lm_head(self._model.model.norm(x[:, -1:])).argmax(-1)
            generated.append(ids)
        return torch.cat(generated, dim=1)


def _finish_layer(layer: LlamaDecoderLayer, x: Tensor, out: Tensor) -> Tensor:
    """The rest of a decoder layer after attention: out [B, Hq, N, D], x [B, N, H]."""
    x = x + layer.self_attn.o_proj(out.transpose(1, 2).flatten(2))
    finished: Tensor = x + layer.mlp(layer.post_attention_layernorm(x))
    return finished


def _attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> tuple[Tensor, Tensor]:
    """Attention output in the dtype of q, and its log-sum-exp (natural, float32)."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return out, lse


def _merge(near: tuple[Tensor, Tensor], far: tuple[Tensor, Tensor]) -> Tensor:
    """Attention over the union of two disjoint key sets."""
    lse = torch.logaddexp(near[1], far[1])
    parts = (out * (part - lse).exp()[..., None] for out, part in (near, far))
    return sum(parts, torch.zeros(())).to(near[0].dtype)


def _causal_chunk(q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
    """Attention of queries at `start`.. over all keys up to each of them, [B, Hq, n, D]."""
    num_q_heads, num_new = q.shape[1], q.shape[2]
    num_kv_heads = k.shape[1]
    group = num_q_heads // num_kv_heads
    near_k, near_v = (
        t[:, :, start : start + num_new].repeat_interleave(group, dim=1) for t in (k, v)
    )
    near = _attend(q, near_k, near_v, causal=True)
    if start == 0:
        return near[0]
    # Heads of a group share their keys, so they count as more queries of one KV head.
    far_out, far_lse = _attend(
        q.reshape(1, num_kv_heads, group * num_new, -1), k[:, :, :start], v[:, :, :start]
    )
    return _merge(near, (far_out.reshape(near[0].shape), far_lse.reshape(near[1].shape)))


def _shared_context_attention(
    q: Tensor, context: KeysValues, own_k: Tensor, own_v: Tensor
) -> Tensor:
    """Attention of B questions over one shared context and their own tokens, [B, Hq, n, D]."""
    batch, num_q_heads, num_new, width = q.shape
    num_kv_heads = own_k.shape[1]
    group = num_q_heads // num_kv_heads
    grouped = q.reshape(batch, num_kv_heads, group * num_new, width)
    rows = grouped.transpose(0, 1).reshape(1, num_kv_heads, -1, width)
    far_out, far_lse = _attend(rows, *context)
    far_out = far_out.reshape(num_kv_heads, batch, group * num_new, width).transpose(0, 1)
    far_lse = far_lse.reshape(num_kv_heads, batch, group * num_new).transpose(0, 1)
    logits = (grouped @ own_k.transpose(2, 3)).float() * width**-0.5
    num_own = own_k.shape[2]
    mask = torch.ones(num_new, num_own, dtype=torch.bool).tril(num_own - num_new)
    logits = logits.masked_fill(~mask.repeat(group, 1), float("-inf"))
    own = (torch.softmax(logits, -1).to(q.dtype) @ own_v, torch.logsumexp(logits, -1))
    return _merge(own, (far_out, far_lse)).reshape(batch, num_q_heads, num_new, width)
