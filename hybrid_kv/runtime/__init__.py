"""The running cache: prefill, one decode step, seal, and what they cost."""

from hybrid_kv.runtime.cache import KVCache, make_executor
from hybrid_kv.runtime.layer import LayerCache
from hybrid_kv.runtime.step import PlanReason
from hybrid_kv.store.memory import (
    Stage,
    check_host_memory,
    check_weights_memory,
    memory_errors,
    spare_host_memory,
)

__all__ = [
    "KVCache",
    "LayerCache",
    "PlanReason",
    "Stage",
    "check_host_memory",
    "check_weights_memory",
    "make_executor",
    "memory_errors",
    "spare_host_memory",
]
