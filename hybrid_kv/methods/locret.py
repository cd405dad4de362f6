"""Locret: trained heads say how much an entry will be attended."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import silu

from hybrid_kv.config import BudgetField
from hybrid_kv.entries import Entries
from hybrid_kv.errors import ConfigError
from hybrid_kv.methods.evicting import Evicting, EvictingParams, best
from hybrid_kv.plugins import METHODS
from hybrid_kv.types import Evidence, LayerShape, ModelInfo, Needs

_EVERY = 1 << 40
"""Queries: those of the whole prompt."""

_TOKENS = 4096
"""Scored at once: what the heads read of a token is as large as several KV entries in float32."""


@METHODS.register("locret", paper="Huang et al. 2024, arXiv:2410.01805, section 3")
class Locret(Evicting):
    """Keeps what heads that were trained for it say will be attended, and DROPS the rest.

    score[n] of a KV head is an output of fc2(silu(fc1([q, k, v]))), of all query, key and value
    channels of token n in its layer, before RoPE; the best of a head stay, and everything later.

    Kept: of the prompt the best of each KV head; sinks, window and all of the answer.
    Lost: with demote "drop" the prompt's others; with "offload" nothing.
    Deviations: the authors evict while they read, chunk by chunk, so that later chunks do not see
    what was dropped, and hold the last 2500 tokens back for that; here the prompt is computed
    exactly and chosen from once. Their window is of 100 tokens, ours of 32.
    """

    class Params(EvictingParams):
        """heads: a .safetensors or PyTorch file of the trained heads, fc1 and fc2 by layer."""

        heads: str = ""
        budget_tokens: BudgetField = 6000

    @classmethod
    def lacks(cls, params: Any) -> str | None:
        chooses = params.budget_tokens != "all"
        return NO_HEADS if chooses and not params.heads else None

    @property
    def needs(self) -> Needs:
        scores = Needs(sampled_queries=_EVERY, rotary=True)
        return super().needs | (Needs() if self.params.budget_tokens == "all" else scores)

    def open(self, info: ModelInfo) -> None:
        if self.params.budget_tokens == "all":
            return
        for one in info.layers:
            rotary = info.rotary_of(one.layer_idx)
            if rotary.reason and not rotary.still:
                raise ConfigError(
                    "method 'locret' scores queries and keys before RoPE, got a model whose layer "
                    f"{one.layer_idx} cannot be turned back: {rotary.reason}; choose 'snapkv'"
                )
        self._info, self._heads = info, RetainingHeads.load(self.params.heads, info)

    def absorb(
        self, layer_idx: int, row: int, kept: Entries | None, left: Entries, seen: Evidence | None
    ) -> Entries:
        if seen is None:
            return (kept or Entries.empty(left)).extended(left)
        count = left.lengths[0]
        if (room := self.room(count)) >= count:
            return left.copied()
        return left.select(best(self._scores(layer_idx, left, seen), room))

    def _scores(self, layer_idx: int, left: Entries, seen: Evidence) -> Tensor:
        """[Hkv, N] of what left the window."""
        at, rotary = left.split("positions")[0], self._info.rotary_of(layer_idx)
        k, v = (torch.stack(left.split(column)) for column in ("k", "v"))
        assert seen.sampled_queries is not None, "all of the prompt's"
        into, out = self._heads.of(layer_idx, k.device)
        scores = k.new_empty(len(out), len(at), dtype=torch.float32)
        for some in torch.arange(len(at)).split(_TOKENS):
            own, of = at[some], slice(int(some[0]), int(some[-1]) + 1)
            q = rotary.turn(seen.sampled_queries[:, own].float(), -own)
            states = torch.cat([q, rotary.turn(k[:, of].float(), -own), v[:, of].float()])
            hidden = silu(states.transpose(0, 1).flatten(1) @ into.mT)  # from [N, (Hq + 2 Hkv) * D]
            scores[:, of] = out @ hidden.mT
        return scores


_WAY_OUT = (
    "name a .safetensors or PyTorch file with layers.N.self_attn.fc1.weight and fc2.weight for "
    "each layer N, as Locret's training writes it, or choose 'snapkv', which needs none"
)

NO_HEADS = f"heads must be a file of trained heads, got none; {_WAY_OUT}"


class RetainingHeads:
    """By layer fc1 [R, (Hq + 2 Hkv) * D] and fc2 [Hkv, R], float32 (Locret, section 3.1)."""

    def __init__(self, weights: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        self._weights = dict(weights)

    @classmethod
    def load(cls, path: str, info: ModelInfo) -> RetainingHeads:
        """Trained heads of a model.

        Raises:
            ConfigError: there is no such file, or these are no heads of this model.
        """
        if not path:
            raise ConfigError(NO_HEADS)
        name = f"heads '{path}'"
        try:
            file = Path(path)
            safe = file.suffix == ".safetensors"
            found = load_file(file) if safe else torch.load(file, "cpu", weights_only=True)
        except (OSError, SafetensorError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            reason = getattr(error, "strerror", None) or "it is no such file"
            raise ConfigError(
                f"{name} must be a file of trained heads, got none: {reason}; {_WAY_OUT}"
            ) from None
        if not isinstance(found, Mapping):
            kind = type(found).__name__
            raise ConfigError(f"{name} must hold named tensors, got a {kind}; {_WAY_OUT}")
        by_end = {".".join(str(key).split(".")[-5:]): value for key, value in found.items()}
        return cls({one.layer_idx: _of_layer(by_end, one, name) for one in info.layers})

    def of(self, layer_idx: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """fc1 and fc2 of a layer, on a device, where they stay."""
        first, second = self._weights[layer_idx]
        self._weights[layer_idx] = first.to(device), second.to(device)
        return self._weights[layer_idx]


def _of_layer(found: Mapping[str, object], shape: LayerShape, name: str) -> tuple[Tensor, Tensor]:
    both = []
    for part in ("fc1", "fc2"):
        key = f"layers.{shape.layer_idx}.self_attn.{part}.weight"
        weight = found.get(key)
        if not isinstance(weight, Tensor):
            raise ConfigError(f"{name} must hold {key}, got no tensor of that name; {_WAY_OUT}")
        both.append(weight.float())
    channels = (shape.num_q_heads + 2 * shape.num_kv_heads) * shape.head_dim
    into, out = both
    width = into.shape[0] if into.dim() == 2 else 0
    if into.shape != (width, channels) or out.shape != (shape.num_kv_heads, width):
        raise ConfigError(
            f"{name} must be of this model: of layer {shape.layer_idx} fc1 [R, {channels}] and fc2 "
            f"[{shape.num_kv_heads}, R], got {list(into.shape)} and {list(out.shape)}; {_WAY_OUT}"
        )
    return into, out
