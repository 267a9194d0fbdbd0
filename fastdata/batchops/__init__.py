"""Batch ops: what a plan's batch part does to stored samples, on whole batches.

``Program`` runs on the CPU, in the caller's memory, and with NumPy only on its hot path: torch's CPU ops would start a
pool of threads inside each thread that serves batches. ``DeviceProgram`` does the same to tensors on a device.
"""

from fastdata.batchops.device import DeviceProgram, compile_device_ops, device_obstacle
from fastdata.batchops.program import Program, compile_ops

__all__ = ["DeviceProgram", "Program", "compile_device_ops", "compile_ops", "device_obstacle"]
