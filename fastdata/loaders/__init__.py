"""Indices to batches to the device. Here the DataLoader: torch's, with an engine of threads.

Threads start in microseconds, share the dataset without copying anything, and hand batches over by
reference. Kernels leave the GIL while they copy, so threads run side by side.
"""
