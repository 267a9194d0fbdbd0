"""Batches from a worker process to the training loop without fresh memory.

torch's queue puts every tensor of every batch into a new shared file, whose pages are faulted in twice. Here a worker
lays a batch out in a slot, a shared block that it uses again and again, and sends where the parts lie. The training
loop gets tensors over the slot; the slot is free again when the last of them has died.

    worker:  samples -> collate, stacking into a free slot -> Parcel (pickle of the structure, place of the slot)
    parent:  unpickling a Parcel -> the structure, with tensors and arrays over the mapped slot

The first byte of a slot says whose turn it is. Only its owner writes it: the worker lends, the parent gives back. The
slots belong to the worker, so that those of a killed one are garbage that the kernel collects with its last mapping.
"""

from fastdata.transport.arrivals import Arrivals, LostBatchError
from fastdata.transport.collate import RingCollate
from fastdata.transport.packing import address_of, is_plain

__all__ = ["Arrivals", "LostBatchError", "RingCollate", "address_of", "is_plain"]
