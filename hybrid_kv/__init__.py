"""hybrid_kv: long contexts on one small GPU, by a KV cache in two tiers.

    import hybrid_kv as hkv
    llm = hkv.load("path-or-id", config=hkv.HybridConfig(window_tokens=4096))
    print(llm.generate("...", max_new_tokens=64).text)

Importing the package changes no other and probes nothing; heavy modules load on first use.
"""

from __future__ import annotations

import logging
import sys
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
    from hybrid_kv.former import moved

    unknown = f"module 'hybrid_kv' has no attribute '{name}'"
    raise AttributeError(moved().get(f"{__name__}.{name}", unknown))


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])


class _OldNames:
    """Last finder of Python's imports: refuses an old name of the package with its new one.

    Python asks it for what no other finder has: a module that moved, or, for `from hybrid_kv import
    Method`, an attribute that there is none of.
    """

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.startswith(f"{__name__}."):
            from hybrid_kv.former import moved

            if (why := moved().get(name)) is not None:
                # A `from` import would replace a ModuleNotFoundError of this name by its own.
                raise ImportError(why, name=name)


sys.meta_path.append(_OldNames())
