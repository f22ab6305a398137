"""The runtime: a plan executed on torch.distributed, with reductions and gathers overlapped.

What saves and loads is in ``freehold.runtime.checkpoint``, and imported when it is first used: half a second of
torch.distributed.checkpoint that a run without checkpoints need not pay.
"""

from freehold.runtime.describe import MemoryReport, predict_memory
from freehold.runtime.optimizer import LayerwiseOptimizer
from freehold.runtime.routing import Group
from freehold.runtime.scaler import GradScaler

__all__ = ["GradScaler", "Group", "LayerwiseOptimizer", "MemoryReport", "predict_memory"]
