"""torchvision's datasets over a store, and the reader of an epoch's batches.

The datasets that users make:

- ``folder``, ``image_manifest``: ``ImageFolder`` and ``ImageManifest``; ``image_files`` is their
  base
- ``cached``: ``CachedDataset``
- ``dataset``: the base of all three, with torch's protocol and torchvision's attributes
- ``added_property``: properties that fastdata adds to these attributes
- ``descriptions``: texts of datasets, and tables for notebooks
- ``showing``: figures of images with their labels

The state of a dataset:

- ``samples``: ``DatasetSamples``, which holds everything below; ``files`` is its kind for image
  files
- ``stored``: frozen values: prepared samples, and the user's transforms
- ``preparing``: from a source to stored samples
- ``lifting``: takes over the transform of a dataset that calls it itself
- ``origin``: the source of samples, and its description for a cache
- ``snapshot``: detects transforms that were changed in place

Reading:

- ``compiler``: from stored samples and transforms to a reader
- ``reader``, ``column``: read batches and items; a column is one view of the images, or the masks
- ``reading``: the samples of an epoch, their targets and programs, as one value
- ``sizes``: the sizes of all samples, without decoding them
- ``visits``: the indices of a batch, and the numbers that determine its random draws
- ``draws``: random draws of collate functions
- ``buffers``: memory for batches, which is reused

Batches:

- ``batch``: a list of samples that remembers its stacked tensors; ``collate``
- ``mixed_sizes``: the error for a batch whose samples differ in shape
- ``trees``: finds or replaces the tensors in any nesting of containers
- ``held_tensors``: tensors in objects of any class

Batches from worker processes:

- ``transport``: ``RingCollate`` and the worker's end
- ``slots``: shared memory that batches are packed into
- ``receiver``: the training loop's end
"""
