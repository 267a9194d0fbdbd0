"""Indices to batches to the device: the loader, its epochs and orders, the prefetcher."""
