"""The way from indices to batches on the device.

A loader:

- ``loader``: ``DataLoader``, its arguments and methods
- ``internals``: the state that fastdata adds to a loader, and the start of an epoch
- ``engine``: the choice between threads and processes, and of pinning, with its reasons
- ``fallbacks``: warnings at the first epoch, such as of samples that are read one by one
- ``parts``: the datasets inside ``Subset`` and ``ConcatDataset``, read as one
- ``iterators``, ``worker_processes``: the batches of one epoch, from threads and from processes
- ``mixing``, ``mixers``: MixUp and CutMix of a ``collate_fn``, on whole batches, and their draws

Its order:

- ``resume``: the indices of each epoch, and states from which an epoch is resumed
- ``progress``: the position in an epoch
- ``sampler_chain``: the samplers of a loader, and their states
- ``samplers``, ``orders``: ``RankSampler``, and the orders that it divides among ranks
- ``buckets``: ``BucketSampler``: all images of a batch have one size
- ``bucket_sizes``: ``find_buckets``, sizes that fit the images of a dataset

Data larger than memory:

- ``chunked``: ``ChunkedLoader``
- ``chunk_plan``, ``chunk_order``, ``chunk_reader``: its memory, its order, and its reading ahead

The device:

- ``prefetch``: ``CudaPrefetcher``
- ``transfer``: copies of one epoch's batches to the device, and what each waits for
- ``copy_thread``, ``loop_copies``: copies by a thread, and by the training loop itself
- ``pinned``: pinned host memory for batches
- ``device``: devices, and batch ops that end on one
- ``floats``: the conversion to floats there
- ``resident``, ``window``: a store on the device, and the crops that are cut from it
- ``device_cut``, ``driver``: the cut by a CUDA kernel of the package, if the driver takes it
"""
