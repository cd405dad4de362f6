"""The running cache: prefill, one decode step, seal, and what they cost."""

from hybrid_kv.runtime.cache import KVCache, make_executor
from hybrid_kv.runtime.capacity import check_host_memory
from hybrid_kv.runtime.stats import Phases

__all__ = ["KVCache", "Phases", "check_host_memory", "make_executor"]
