"""Moving entries between tiers and running work beside the device, behind one protocol."""

from hybrid_kv.transfer.executor import Executor
from hybrid_kv.transfer.sync import SyncExecutor
from hybrid_kv.transfer.threads import ThreadExecutor

__all__ = ["Executor", "SyncExecutor", "ThreadExecutor"]
