"""The ops of a requested back end: every call is computed by what `choose_backend` says."""

from __future__ import annotations

from hybrid_kv.errors import BackendUnavailable, unknown_name
from hybrid_kv.ops.attention_ops import AttentionOps
from hybrid_kv.ops.choice import BACKENDS
from hybrid_kv.ops.chosen import why_unavailable
from hybrid_kv.ops.page_ops import PageOps
from hybrid_kv.ops.search_ops import SearchOps


class Ops(AttentionOps, PageOps, SearchOps):
    """The ops of one requested back end; shapes and meaning as in `reference`."""

    __slots__ = ()


def get_ops(backend: str) -> Ops:
    """The ops of a back end.

    Raises:
        ConfigError: no such back end; the message lists the known ones.
        BackendUnavailable: a back end was asked for by name and cannot serve here.
    """
    if backend not in BACKENDS:
        raise unknown_name("backend", backend, BACKENDS)
    if (reason := why_unavailable(backend)) is not None:
        raise BackendUnavailable(
            f"backend '{backend}' cannot serve here: {reason}; use backend='auto'"
        )
    return Ops(backend)
