"""hybrid_kv: long contexts on one small GPU, by a KV cache in two tiers.

    import hybrid_kv as hkv
    llm = hkv.load("path-or-id", config=hkv.HybridConfig(window_tokens=4096))
    print(llm.generate("...", max_new_tokens=64).text)

Importing the package patches and probes nothing; heavy modules load on first use.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybrid_kv.api import (
        LLM,
        Context,
        Conversation,
        Generation,
        HybridCache,
        attach,
        detach,
        load,
        plan,
    )
    from hybrid_kv.config import HybridConfig, IndexConfig
    from hybrid_kv.errors import HybridKVError

__version__ = "0.1.0"

logging.getLogger(__name__).addHandler(logging.NullHandler())  # who listens is up to the user

_HOME = {
    "LLM": "hybrid_kv.api",
    "Context": "hybrid_kv.api",
    "Conversation": "hybrid_kv.api",
    "Generation": "hybrid_kv.api",
    "HybridCache": "hybrid_kv.api",
    "attach": "hybrid_kv.api",
    "detach": "hybrid_kv.api",
    "load": "hybrid_kv.api",
    "plan": "hybrid_kv.api",
    "HybridConfig": "hybrid_kv.config",
    "IndexConfig": "hybrid_kv.config",
    "HybridKVError": "hybrid_kv.errors",
}

_OF_PLUG_INS = frozenset(
    [
        "Attended",
        "Demotion",
        "Entries",
        "Evidence",
        "INDEXES",
        "Index",
        "LayerShape",
        "METHODS",
        "Method",
        "MethodError",
        "ModelInfo",
        "Needs",
        "Params",
        "Placement",
        "Ragged",
        "Read",
        "SearchResult",
        "Tiers",
        "TokenBudget",
    ]
)
"""Names that moved to `hybrid_kv.plugin`, refused with their new place until 1.0."""

__all__ = [
    "LLM",
    "Context",
    "Conversation",
    "Generation",
    "HybridCache",
    "HybridConfig",
    "HybridKVError",
    "IndexConfig",
    "attach",
    "detach",
    "load",
    "plan",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    if name in _OF_PLUG_INS:
        # Python hides the text of an AttributeError behind its own in `from hybrid_kv import ...`.
        raise ImportError(f"'{name}' is for authors of plug-ins; import it from hybrid_kv.plugin")
    raise AttributeError(f"module 'hybrid_kv' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
