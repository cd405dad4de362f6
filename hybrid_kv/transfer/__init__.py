"""Moving entries between tiers and running work beside the device, behind one protocol."""

from hybrid_kv.transfer.executor import Executor
from hybrid_kv.transfer.sync import SyncExecutor

__all__ = ["Executor", "SyncExecutor"]
