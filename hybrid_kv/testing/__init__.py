"""Checks of methods and indexes for the authors of plug-ins, without a model.

check_method("heaviest", budget=64)    # nothing is lost at a full budget, budgets are kept
check_index("strided")                 # true scores, best first, later keys are found
drive(method, prompt=173, new=40)      # a prompt and an answer of one layer, step by step
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hybrid_kv.config import HybridConfig, IndexConfig
from hybrid_kv.entries import Attended, Entries
from hybrid_kv.errors import NoBudgetError
from hybrid_kv.masses import causal_masses
from hybrid_kv.plugins import Method, Placement
from hybrid_kv.rotary import UNKNOWN, Rotary
from hybrid_kv.types import Demotion, Evidence, LayerShape, ModelInfo

__all__ = [
    "ROTARY",
    "Driven",
    "check_index",
    "check_method",
    "drive",
    "heads",
    "softmax_attention",
]


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


# What every method and every index promises -------------------------------------------------------

_PROMPT, _NEW = 601, 40
_CLOSE = 1e-5
"""Float32 of the method against float64 of the check."""


def check_method(name: str, **settings: Any) -> None:
    """Drives a registered method through a prompt and an answer of one layer.

    A full budget loses nothing and gives full attention. A budget of tokens (`at_budget`, where the
    method has it) is the mean of what a head attends, to a page. The settings can be written and
    read.

    Args:
        settings: of the method, and page_size.

    Raises:
        AssertionError: a promise is not kept; the message has the figures.
        ConfigError: the method or a setting is unknown.
    """
    config = HybridConfig(method=name, **settings)
    assert HybridConfig(**config.flat()) == config, f"{name}: settings must be read as written"
    opened = drive(
        config.opened().build(), prompt=_PROMPT, new=_NEW, page_size=config.page_size, rotary=ROTARY
    )
    error = max(opened.error)
    assert error < _CLOSE, (
        f"{name}: a full budget must give full attention, got outputs off by {error:.2g}; see "
        "full_budget"
    )
    assert not opened.lost.any(), (
        f"{name}: a full budget must lose nothing, got {int(opened.lost.sum())} entries lost"
    )
    _check_budget(name, config)


def _check_budget(name: str, config: HybridConfig) -> None:
    """Of a method that drops: how many entries a head attends in a step, on average."""
    wanted = _PROMPT // 4
    try:
        given = config.at_budget(str(wanted), _PROMPT)
    except NoBudgetError:
        return
    assert HybridConfig(**given.flat()) == given, f"{name}: at_budget must give valid settings"
    driven = drive(
        given.build(), prompt=_PROMPT, new=_NEW, page_size=given.page_size, rotary=ROTARY
    )
    if given == config or driven.placement.rest not in (Demotion.DROP, Demotion.ABSORB):
        return  # what is read is cut by the runtime, from a budget that `read` names
    if driven.placement.offload:
        return
    kept = float((~driven.lost).sum(1).float().mean())
    most = wanted + _NEW + 2 * given.page_size
    assert kept <= most, (
        f"{name}: at_budget must give at most {wanted} tokens and those of the answer, got "
        f"{kept:.0f} of {_PROMPT + _NEW} attended"
    )


def check_index(kind: str, *, recall: float = 0.5, **settings: Any) -> None:
    """Builds a registered index over random keys, adds more and searches.

    Scores are the true products, best first, of keys that are there; `scored` counts at least what
    was returned; later keys are found; an index that says `exact` finds the best.

    Args:
        recall: share of the best ten that has to be found.

    Raises:
        AssertionError: a promise is not kept; the message has the figures.
        ConfigError: the kind or a setting is unknown.
    """
    q, keys, _ = heads(701, num_q_heads=6, num_kv_heads=2, head_dim=72)
    samples = q[:, :600:10].unflatten(0, (2, 3))
    index = IndexConfig(kind=kind, **settings).build()
    index.build(keys[:, :600], samples)
    index.add(keys)
    assert len(index) == 701, f"{kind}: must hold 701 keys after add, got {len(index)}"
    queries = q[:, 600:].unflatten(0, (2, 3)).flatten(1, 2)
    found = index.search(queries, 10)
    assert (found.ids < 701).all(), f"{kind}: ids must be below 701, got {int(found.ids.max())}"
    held = found.ids >= 0
    exact = torch.einsum("hmd,hnd->hmn", queries, keys)
    true = exact.gather(2, found.ids.clamp_min(0))
    off = float((found.scores - true)[held].abs().max()) if held.any() else 0.0
    assert off < 1e-3, f"{kind}: scores must be the true products, got some off by {off:.2g}"
    falls = found.scores.masked_fill(~held, -torch.inf).diff(dim=-1).nan_to_num(0)
    assert (falls <= 0).all(), f"{kind}: results must come best first"
    assert found.scored >= int(held.any(1).sum()), (
        f"{kind}: scored must count every key that was multiplied, got {found.scored} for "
        f"{int(held.sum())} results"
    )
    wide = index.search(queries, len(index)).ids
    assert (wide >= 600).any(), f"{kind}: keys that are added later must be found, got none of 101"
    best = exact.topk(10).indices
    share = float((best[..., None] == found.ids[:, :, None]).any(-1).float().mean())
    wanted = 1.0 if index.exact else recall
    assert share >= wanted, f"{kind}: recall must be at least {wanted}, got {share:.2f}"
