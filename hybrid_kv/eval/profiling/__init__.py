"""Decode latency by context and method: where the time goes, what is read, what is missed."""

from hybrid_kv.eval.profiling.arguments import ProfileArguments
from hybrid_kv.eval.profiling.bench import Bench, open_bench, sweep
from hybrid_kv.eval.profiling.row import Row
from hybrid_kv.watch.trace import chrome_trace

__all__ = ["Bench", "ProfileArguments", "Row", "chrome_trace", "open_bench", "sweep"]
