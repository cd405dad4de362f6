"""ZipCache: salient tokens in 4 bits, the others in 2: keys by channel, values by token."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor

from hybrid_kv.config import Count, Tokens, parse_count
from hybrid_kv.entries import Entries
from hybrid_kv.masses import causal_masses
from hybrid_kv.methods.codec import CodecParams, Kept, LearnedCodec, Seen
from hybrid_kv.methods.planes import PlaneEntries, channel_sizes
from hybrid_kv.methods.scores import best, group_sums
from hybrid_kv.plugins import METHODS
from hybrid_kv.types import Evidence, Needs


@METHODS.register("zipcache", paper="He et al. 2024, arXiv:2405.14256")
class ZipCache(LearnedCodec):
    """Keeps salient tokens that left the window in 4 bits, the others in 2; ROUNDS.

    Salient is a token of the highest normalised attention: the weights that probe queries gave it,
    divided by how many of them saw it. Keys are rounded by one scale for each channel of what
    leaves the window together; channels of values are divided by sqrt(max |x|), then a token's
    whole value is rounded by one scale (channel-separable tokenwise).

    Deviations: probes are spread, not random; the answer is salient, and leaves by pages, not by
    hundreds of tokens; 2 bits are the upper half of 4, so that salient keys and the others share
    the range of a channel.
    """

    class Params(CodecParams):
        """bits: of a number of a token that is not salient, or "all" to round nothing;
        salient_ratio: tokens in 4 bits, by KV head; probe_tokens, recent_probes: spread and last
        queries of the prompt that judge.
        """

        bits: Annotated[Literal[2, "all"], BeforeValidator(parse_count)] = 2
        salient_ratio: float = Field(default=0.6, ge=0, le=1)
        probe_tokens: Tokens = 64
        recent_probes: Count = 64

    lossless = ("bits", "all")

    @property
    def needs(self) -> Needs:
        return Needs(self.params.probe_tokens, self.params.recent_probes)

    def code(self, k: Tensor, v: Tensor, at: Tensor, kept: Kept, seen: Seen) -> Entries:
        if self.params.bits == "all":
            return Entries.of(k, v, at)
        salient = None
        if seen is not None:
            scores = normalised(seen, len(k))[:, int(at[0]) : int(at[0]) + k.shape[1]]
            salient = best(scores, round(self.params.salient_ratio * k.shape[1])).sort(-1).values
        sizes = kept.state["sizes"] if kept else channel_sizes(k, v)
        return PlaneEntries.coded(k, v, at, sizes, salient, kept, keys_by_channel=True)


def normalised(seen: Evidence, num_kv_heads: int) -> Tensor:
    """[Hkv, N]: the weights that probes gave each token, over how many probes saw it."""
    mass, count = seen.mass(), seen.num_tokens
    last = seen.last_queries.shape[1] if seen.last_queries is not None else 0
    asked = torch.arange(count - last, count)
    if seen.sampled_queries is not None and seen.sampled_positions is not None:
        q, more = seen.sampled_queries, seen.sampled_positions
        assert seen.keys is not None  # `mass` has used them
        rule = {"scale": seen.scale, "softcap": seen.softcap}
        mass = mass + causal_masses(q, seen.keys, positions=more, **rule)  # type: ignore[arg-type]
        asked = torch.cat([asked, more.cpu()])
    saw = torch.bincount(asked, minlength=count).flip(0).cumsum(0).flip(0)
    return group_sums(mass, num_kv_heads) / saw.clamp_min(1).to(mass.device)
