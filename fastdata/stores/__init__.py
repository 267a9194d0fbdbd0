"""Prepared samples: written once, then read by index from memory or files.

Reading:

- ``store``: samples in memory or files, and the interface of every store
- ``lazy``: a store whose samples are prepared when they are first read
- ``disk``, ``disk_file``: a store in files, each sample checked once; the files, loaded and evicted
- ``mirror``, ``segments``: a store behind a URL, and its segments on the local disk
- ``kept``: samples and targets, put together from the stores of their parts

Preparing:

- ``options``: the options of a dataset, each defined once
- ``prepare``: the choice where samples are stored, and its execution
- ``forecast``, ``trials``: the size of all samples, from a few; codecs tried on these
- ``frozen``, ``generators``: datasets that draw at random, which must not be stored
- ``sharing``: one copy for the ranks of a machine
- ``preparer``: samples read, prepared and split into parts
- ``ingest``: workers that fill stores with samples
- ``writer``: a file or a memory block, written by several workers at once

Codecs:

- ``codecs``: lz4, zstd, jpeg, and the user's own
- ``prediction``: the reversible filter that makes photographs compressible without a loss
- ``source_codec``: the files' own bytes

Caches on disk or behind a URL:

- ``build``: the cache of a dataset, found or written
- ``listing``, ``manifest``: the files that it is made from; the description of its samples
- ``shards``, ``engines``: its parts, and the executors that write them
- ``cache``, ``targets``: its index, and targets as columns of the index
- ``find``: caches that are opened without their dataset
"""
