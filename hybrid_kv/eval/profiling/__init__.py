"""Decode latency by context and method: where the time goes, what is read, what is missed."""

from hybrid_kv.eval.profiling.arguments import ProfileArguments
from hybrid_kv.eval.profiling.bench import Bench, open_bench, sweep
from hybrid_kv.watch.recorder import chrome_trace

__all__ = ["Bench", "ProfileArguments", "chrome_trace", "open_bench", "sweep"]
