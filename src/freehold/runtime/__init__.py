"""The runtime: a plan executed on torch.distributed, with reductions and gathers overlapped."""

from freehold.runtime.describe import MemoryReport, predict_memory
from freehold.runtime.optimizer import LayerwiseOptimizer
from freehold.runtime.routing import Group

__all__ = ["Group", "LayerwiseOptimizer", "MemoryReport", "predict_memory"]
