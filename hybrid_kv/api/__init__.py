"""Public interface of the Python package."""

from hybrid_kv.api.context import Context
from hybrid_kv.api.generation import Generation, TextStream
from hybrid_kv.api.llm import LLM, Conversation, load
from hybrid_kv.api.planning import plan
from hybrid_kv.models.attach import HybridCache, attach, detach

__all__ = [
    "LLM",
    "Context",
    "Conversation",
    "Generation",
    "HybridCache",
    "TextStream",
    "attach",
    "detach",
    "load",
    "plan",
]
