"""Batch ops: what a plan's batch part does to stored samples, on whole batches, in the caller's memory.

NumPy only on the hot path: torch's CPU ops would start a pool of threads inside each thread that serves batches.
"""

from fastdata.batchops.program import Program, compile_ops

__all__ = ["Program", "compile_ops"]
