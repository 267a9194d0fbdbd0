"""From the bytes of an image to a batch of pixels; this wing does not know datasets.

Planning a transform:

* ``split``: cuts the user's transform in what runs once, on whole batches, and per sample.
* ``plan``: the result, a ``TransformPlan``.
* ``compose``: the single transforms of a nested one.
* ``known``: names of torchvision's, timm's, albumentations' and Pillow's transforms.
* ``albumentations_objects``: which objects of albumentations are known.
* ``callables``, ``published``: the user's own callables that are understood by their code.
* ``own_transforms``: ``Views``, ``AlternatingFlip``, and wrappers of others' transforms.
* ``buckets``: ``ResizeToBucket``.
* ``draws``: which transforms and callables draw random numbers.
* ``fingerprint``, ``transform_keys``: hashes and texts that tell values and transforms apart.
* ``bytecode``: names and instructions of Python code.

Compiling and running it:

* ``readers``: read a known transform as steps, with ``geometry``, ``colours``, ``policies`` and
  ``conversions``.
* ``albumentations_readers``: the same for albumentations' transforms, with
  ``albumentations_geometry``, ``albumentations_sizes``, ``albumentations_colours``,
  ``albumentations_blurs``, ``albumentations_dropouts`` and ``albumentations_warps``.
* ``opencv_filters``: the filters by which the installed OpenCV resizes.
* ``opencv_variants``: which arithmetic the installed OpenCV uses.
* ``opencv_warps``: the program by which the installed OpenCV warps.
* ``opencv_trials``: one step of the core on one image, to compare with OpenCV.
* ``arguments``, ``state``: what the attributes of a transform mean, and what a sample is before it.
* ``steps``: the records of steps, and the table that they are compiled to.
* ``program``: draws and serves batches by that table.
* ``blend``: rows of a batch that are mixed with each other.
* ``readable``: the interface of a store that it reads.
* ``refusals``: errors for samples that the core refuses.
* ``random_numbers``: random numbers from (seed, epoch, index).
* ``arrays``: types of arrays and shapes.
* ``core/``: the compiled core, in C, and its interface.

Images and samples:

* ``decode``: files and bytes to images; the only interface to Pillow and its libjpeg.
* ``openings``: loaders that fastdata knows.
* ``resize``: Resize and RGB of PIL images.
* ``samples``: samples to stored arrays, and back.
* ``scratch``: memory of each thread for intermediate images.
"""
