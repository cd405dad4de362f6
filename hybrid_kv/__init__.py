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
    from hybrid_kv.attended import Attended
    from hybrid_kv.config import HybridConfig, IndexConfig, Params
    from hybrid_kv.entries import Entries
    from hybrid_kv.errors import HybridKVError, MethodError
    from hybrid_kv.plugins import INDEXES, METHODS, Index, Method, Placement
    from hybrid_kv.ragged import Ragged
    from hybrid_kv.types import (
        Demotion,
        Evidence,
        LayerShape,
        ModelInfo,
        Needs,
        Read,
        SearchResult,
        Tiers,
        TokenBudget,
    )

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
    "INDEXES": "hybrid_kv.plugins",
    "METHODS": "hybrid_kv.plugins",
    "Index": "hybrid_kv.plugins",
    "Method": "hybrid_kv.plugins",
    "Attended": "hybrid_kv.attended",
    "Params": "hybrid_kv.config",
    "Entries": "hybrid_kv.entries",
    "Ragged": "hybrid_kv.ragged",
    "MethodError": "hybrid_kv.errors",
    "Placement": "hybrid_kv.plugins",
    "Demotion": "hybrid_kv.types",
    "Evidence": "hybrid_kv.types",
    "LayerShape": "hybrid_kv.types",
    "ModelInfo": "hybrid_kv.types",
    "Needs": "hybrid_kv.types",
    "Read": "hybrid_kv.types",
    "SearchResult": "hybrid_kv.types",
    "Tiers": "hybrid_kv.types",
    "TokenBudget": "hybrid_kv.types",
}

__all__ = [
    "INDEXES",
    "LLM",
    "METHODS",
    "Attended",
    "Context",
    "Conversation",
    "Demotion",
    "Entries",
    "Evidence",
    "Generation",
    "HybridCache",
    "HybridConfig",
    "HybridKVError",
    "Index",
    "IndexConfig",
    "LayerShape",
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
    "attach",
    "detach",
    "load",
    "plan",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'hybrid_kv' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
