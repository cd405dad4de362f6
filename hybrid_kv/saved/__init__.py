"""Contexts in files (`NAME.hkv`), written whole or not at all, and read as they are needed."""

from hybrid_kv.saved.file_blocks import Verified, verify_context
from hybrid_kv.saved.opening import LoadedContext, open_context
from hybrid_kv.saved.registry import ContextRegistry, RegistryCounters
from hybrid_kv.saved.saving import save_context

__all__ = [
    "ContextRegistry",
    "LoadedContext",
    "RegistryCounters",
    "Verified",
    "open_context",
    "save_context",
    "verify_context",
]
