"""Moving entries between tiers and running work beside the device, behind one protocol."""

from hybrid_kv.transfer.cuda import CudaExecutor
from hybrid_kv.transfer.executor import Executor, Parcel
from hybrid_kv.transfer.sync import SyncExecutor
from hybrid_kv.transfer.threads import ThreadExecutor

__all__ = ["CudaExecutor", "Executor", "Parcel", "SyncExecutor", "ThreadExecutor"]
