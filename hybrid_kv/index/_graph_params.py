"""Settings of graphs, and the memory that they take."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from hybrid_kv import config
from hybrid_kv.ops.graph_lists import list_bytes

_ROW_ALIGNMENT = 64


class GraphParams(config.Params):
    """max_degree: longest list of neighbours; list_length: keys that a sampled query names;
    candidates, cap: neighbours considered per key, and the queries they are taken from; alpha:
    how much nearer one neighbour must be to stand for another; sampled_queries,
    recent_queries: prefill queries per query head to learn from, spread evenly (up to twice as
    many) and from the prompt's end; horizon_tokens: they are turned to so many positions behind
    the prompt (RoPE), and the graph is learned again, in the background, when so many further
    keys have come; 0 for neither; min_keys: fewer are scanned; beam: keys expanded per query,
    "auto" for what the self-check found; target_recall, target_mass: goals of the self-check,
    one of which has to be reached; check_positions: held out for it; check_top_k: the best keys
    that it asks for; max_scanned: largest share of the keys that a search may score; link_keys:
    later keys that are linked together, 0 for never; link_positions: the latest positions whose
    searches link them.
    """

    max_degree: int = Field(default=64, ge=2, le=256)
    list_length: config.Count = 100
    candidates: config.Count = 512
    cap: int = Field(default=32, ge=2, le=255)
    alpha: float = Field(default=1.2, gt=0)
    sampled_queries: config.Tokens = 2048
    recent_queries: config.Tokens = 2048
    horizon_tokens: config.Tokens = 4096
    min_keys: config.Count = 16384
    beam: config.Count | Literal["auto"] = "auto"
    target_recall: float = Field(default=0.95, gt=0, le=1)
    target_mass: float = Field(default=0.999, gt=0)
    check_positions: config.Count = 128
    check_top_k: config.Count = 100
    max_scanned: float = Field(default=0.12, gt=0, le=1)
    link_keys: config.Tokens = 0
    link_positions: config.Count = 1024

    def without_effect(self) -> dict[str, str]:
        return {} if self.link_keys else {"link_positions": "with link_keys 0"}


def bytes_per_key(params: Any, num_keys: int, head_dim: int) -> int:
    """See `Index.bytes_per_key`."""
    codes = -(-head_dim // _ROW_ALIGNMENT) * _ROW_ALIGNMENT + 1
    if num_keys < params.min_keys:
        return codes
    return codes + list_bytes(int(params.max_degree), num_keys) + 4  # if all keys are nodes
