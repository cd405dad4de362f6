"""Drives a method through a prompt and an answer of one layer and row, without the runtime.

What the method names is attended by brute force in float64, so that a method can be tested alone:

    driven = drive(SnapKV(SnapKV.Params(...)), prompt=173, new=40)
    driven.kept                     # the Entries at the end
    driven.error                    # largest difference to full attention, by step

It says nothing of forks, crops and batches: the contract tests do, with the runtime. Attention by
brute force, `softmax_attention`, is what partial results are held against.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hybrid_kv.attended import Attended
from hybrid_kv.entries import Entries
from hybrid_kv.masses import causal_masses
from hybrid_kv.plugins import Method, Placement
from hybrid_kv.rotary import UNKNOWN, Rotary
from hybrid_kv.types import Demotion, Evidence, LayerShape, ModelInfo


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    visible: Tensor | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Output [..., M, D] and lse [..., M] in float64; a row that sees nothing gets 0 and -inf.

    Args:
        q: [..., M, D].
        k, v: [..., N, D].
        visible: bool, broadcastable to [..., M, N].
        bias: added to the logits after the softcap.
    """
    logits = torch.einsum("...md,...nd->...mn", q.double(), k.double()) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if bias is not None:
        logits = logits + bias.double()
    if visible is not None:
        logits = logits.masked_fill(~visible, -torch.inf)
    if logits.shape[-1] == 0:
        return torch.zeros_like(q, dtype=torch.float64), logits.new_full(q.shape[:-1], -torch.inf)
    lse = torch.logsumexp(logits, -1)
    weights = torch.exp(logits - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    return torch.einsum("...mn,...nd->...md", weights, v.double()), lse


ROTARY = Rotary(tuple(1e4 ** (-i / 36) for i in range(36)))
"""Of the model that is not there, for methods that turn keys: all 72 channels in halves."""


@dataclass
class Driven:
    """Record of a driven layer.

    q: [Hq, N, D]; k, v: [Hkv, N, D], prompt and answer. placement, kept: at the end.
    out, exact: [Hq, D] by step; steps: kept Entries after every step; lost: positions [Hkv, N] bool
    that the last step did not attend.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    placement: Placement
    kept: Entries | None = None
    out: list[Tensor] = field(default_factory=list)
    exact: list[Tensor] = field(default_factory=list)
    steps: list[Entries | None] = field(default_factory=list)
    lost: Tensor = field(default_factory=lambda: torch.zeros(0))

    @property
    def error(self) -> list[float]:
        """Largest difference to full attention, by step."""
        pairs = zip(self.out, self.exact, strict=True)
        return [float((out - exact).abs().max()) for out, exact in pairs]


def heads(
    tokens: int, *, num_q_heads: int, num_kv_heads: int, head_dim: int, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Random q [Hq, N, D], k, v [Hkv, N, D]."""
    draw = torch.Generator().manual_seed(seed)
    q = torch.randn(num_q_heads, tokens, head_dim, generator=draw)
    k, v = torch.randn(2, num_kv_heads, tokens, head_dim, generator=draw)
    return q, k, v


def drive(
    method: Method,
    *,
    prompt: int = 173,
    new: int = 40,
    num_q_heads: int = 6,
    num_kv_heads: int = 2,
    head_dim: int = 72,
    page_size: int = 16,
    layer_idx: int = 0,
    num_layers: int = 1,
    scale: float | None = None,
    softcap: float | None = None,
    given: tuple[Tensor, Tensor, Tensor] | None = None,
    rotary: Rotary = UNKNOWN,
    outputs: Tensor | None = None,
    seed: int = 0,
) -> Driven:
    """Prompt, then `new` tokens one by one, through `open`, `seal`, `absorb` and `after`.

    Args:
        given: q [Hq, prompt + new, D], k, v [Hkv, prompt + new, D] in the place of random ones.
        rotary: how all layers turn keys, where it is known (`ROTARY`).
        outputs: [hidden, Hq * D], the output projection of all layers, where it is known.
    """
    q, k, v = given or heads(
        prompt + new,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        seed=seed,
    )
    shape = LayerShape(layer_idx, len(q), len(k), q.shape[-1])
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    layers = tuple(LayerShape(i, len(q), len(k), q.shape[-1]) for i in range(num_layers))
    method.open(ModelInfo(layers, (rotary,) * num_layers, outputs=(outputs,) * num_layers))
    positions = torch.arange(k.shape[1])[None]
    k, v = (rows[0] for rows in method.write(layer_idx, k[None], v[None], positions))
    run = _Run(method, shape, page_size, scale, softcap, q, k, v, prompt)
    for at in range(prompt, prompt + new):
        run.step(at)
    return run.driven


class _Run:
    def __init__(
        self,
        method: Method,
        shape: LayerShape,
        page_size: int,
        scale: float,
        softcap: float | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        prompt: int,
    ) -> None:
        self.method, self.shape, self.page_size = method, shape, page_size
        self.scale, self.softcap = scale, softcap
        evidence = self._evidence(q[:, :prompt], k[:, :prompt])
        place = method.seal(shape.layer_idx, [evidence])
        self.driven = Driven(q, k, v, place)
        self.sinks = min(place.sink_tokens, prompt)
        stop = max(self.sinks, prompt - place.window_tokens)
        self.window = stop  # position of the first token of the window
        if place.rest is Demotion.KEEP:
            self.window = self.sinks
        else:
            self._leave(self.sinks, stop, evidence, k[:, :prompt])

    def _evidence(self, q: Tensor, k: Tensor) -> Evidence:
        needs, count = self.method.needs, q.shape[1]
        stride = max(1, count // needs.sampled_queries) if needs.sampled_queries else 1
        sums = causal_masses(q, k, scale=self.scale, softcap=self.softcap)
        return Evidence(
            count,
            q[:, ::stride] if needs.sampled_queries else None,
            q[:, -needs.last_queries :] if needs.last_queries else None,
            torch.arange(0, count, stride) if needs.sampled_queries else None,
            sums if needs.column_sums else None,
            self.scale,
            self.softcap,
        )

    def _leave(
        self, start: int, stop: int, evidence: Evidence | None = None, keys: Tensor | None = None
    ) -> None:
        """The positions start..stop leave the window."""
        driven, self.window = self.driven, stop
        if driven.placement.rest is not Demotion.ABSORB:
            return
        positions = torch.arange(start, stop)
        left = Entries.borrowed(driven.k[:, start:stop], driven.v[:, start:stop], positions)
        seen = None if evidence is None else replace(evidence, keys=keys)
        kept = self.method.absorb(self.shape.layer_idx, 0, driven.kept, left, seen)
        driven.kept = kept.copied() if kept is not None and kept.is_borrowed else kept

    def step(self, at: int) -> None:
        """The token at this position is stored and attended; then a page leaves if one may."""
        driven, place = self.driven, self.driven.placement
        q = driven.q[:, at].view(len(driven.k), -1, driven.q.shape[-1])
        parts, attended = self._attended(at)
        outs, lses = zip(
            *(
                softmax_attention(q[h], k, v, scale=self.scale, softcap=self.softcap, bias=bias)
                for h, (k, v, bias) in enumerate(parts)
            ),
            strict=True,
        )
        exact = softmax_attention(
            q, driven.k[:, : at + 1], driven.v[:, : at + 1], scale=self.scale, softcap=self.softcap
        )[0]
        driven.out.append(torch.stack(outs).flatten(0, 1))
        driven.exact.append(exact.flatten(0, 1))
        driven.lost = ~attended
        self._after(at, torch.stack(lses))
        page = self.page_size
        if place.rest is not Demotion.KEEP and at + 1 - self.window >= place.window_tokens + page:
            self._leave(self.window, self.window + page)
        driven.steps.append(driven.kept)

    def _attended(self, at: int) -> tuple[list[tuple[Tensor, Tensor, Tensor]], Tensor]:
        """By KV head k, v and bias; and which positions [Hkv, at + 1] they are."""
        driven, place, kept = self.driven, self.driven.placement, self.driven.kept
        owned = torch.zeros(len(driven.k), at + 1, dtype=torch.bool)
        owned[:, : self.sinks] = owned[:, self.window :] = True
        offloaded = place.rest is Demotion.OFFLOAD or place.offload
        parts = []
        for h in range(len(driven.k)):
            k, v, positions = driven.k[h, :0], driven.v[h, :0], torch.zeros(0, dtype=torch.int64)
            bias = torch.zeros(0)
            if kept is not None:
                k, v, positions = kept.seen_from(at).head(h)
                bias = torch.zeros(len(k)) if kept.bias is None else kept.split(kept.bias)[h]
            near = owned[h].clone()
            near[self.sinks : self.window] = offloaded
            near[positions] = False  # attended once, by the copies
            owned[h, positions] = True
            ids = near.nonzero()[:, 0]
            owned[h] |= near
            parts.append(
                (
                    torch.cat([k.float(), driven.k[h, ids]]),
                    torch.cat([v.float(), driven.v[h, ids]]),
                    torch.cat([bias, torch.zeros(len(ids))]),
                )
            )
        return parts, owned

    def _after(self, at: int, lse: Tensor) -> None:
        if type(self.method).after is Method.after:
            return
        driven = self.driven
        near = torch.cat([torch.arange(self.sinks), torch.arange(self.window, at + 1)])
        attended = Attended(
            driven.q[None, :, at : at + 1],
            lse.flatten()[None, :, None].float(),
            [driven.kept],
            [at + 1],
            self.scale,
            self.softcap,
            lambda _: (driven.k[:, near], near),
        )
        kept = self.method.after(self.shape.layer_idx, attended)
        if kept is not None:
            driven.kept = kept[0]
