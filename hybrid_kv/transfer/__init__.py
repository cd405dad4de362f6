"""Moving entries between tiers and running work beside the device, behind one protocol.

The executor of a GPU is `transfer.cuda`, which is loaded where there is one.
"""

from hybrid_kv.transfer.executor import Executor, SyncExecutor, ThreadExecutor, Transfer

__all__ = ["Executor", "SyncExecutor", "ThreadExecutor", "Transfer"]
