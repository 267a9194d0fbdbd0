"""Batches on the device before the training loop asks for them.

A thread reads the loader, finds the batch pinned or pins it, and copies it on a stream of its own (``feed``). Who may
write to memory when:

    pinned host memory   held by the thread until the event after its copy is done (``staging.Flight``)
    device memory        made on the thread's stream; the training loop's stream waits for the copy before it reads, and
                         ``record_stream`` keeps the memory until that stream has done what it was given
    a store on a device  made, read and given back on the thread's stream only (``mirror.Mirror``)
    the whole device     the thread copies a batch when the device has left the one ``depth + 1`` before it

Batch ops of fastdata's loaders run on the thread's stream, behind the copies (``ops``).
Everything an accelerator does goes through ``backends.Backend``.
"""

from fastdata.prefetch.prefetcher import CudaPrefetcher, DevicePrefetcher, Prefetcher
from fastdata.prefetch.report import PrefetchReport

__all__ = ["CudaPrefetcher", "DevicePrefetcher", "PrefetchReport", "Prefetcher"]
