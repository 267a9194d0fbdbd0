"""From the bytes of an image to a batch of pixels. This wing imports nothing about datasets.

Planning a transform:

* ``split``: splits the user's transform into what runs once, on whole batches, and per sample.
* ``plan``: the result, a ``TransformPlan``.
* ``compose``: the single transforms inside a nested one.
* ``known``: names of the transforms of torchvision, timm, albumentations and Pillow.
* ``albumentations_objects``: objects of albumentations that are known.
* ``callables``, ``published``: the user's own callables that are recognised by their code.
* ``own_transforms``: ``Views``, ``AlternatingFlip``, and wrappers for transforms of albumentations.
* ``buckets``: ``ResizeToBucket``.
* ``draws``: finds out which transforms and callables draw random numbers.
* ``fingerprint``, ``transform_keys``: hashes and texts that identify values and transforms.
* ``bytecode``: names and instructions of Python code.

Compiling and running it:

* ``readers``: read a known transform as steps, with ``geometry``, ``colours``, ``policies`` and
  ``conversions``.
* ``albumentations_readers``: the same for albumentations' transforms, with
  ``albumentations_geometry``, ``albumentations_sizes``, ``albumentations_colours``,
  ``albumentations_blurs``, ``albumentations_dropouts`` and ``albumentations_warps``.
* ``opencv_filters``: the filters with which the installed OpenCV resizes.
* ``opencv_variants``: the arithmetic that the installed OpenCV uses.
* ``opencv_warps``: the program with which the installed OpenCV warps.
* ``opencv_trials``: one step of the core on one image, to compare with OpenCV.
* ``arguments``, ``state``: the arguments of a transform, and the kind of sample that it gets.
* ``steps``: the records of steps, and the table that they are compiled to.
* ``program``: runs that table on batches.
* ``blend``: mixes rows of a batch with each other.
* ``readable``: the interface of a store that a program reads.
* ``refusals``: errors for samples that the core refuses.
* ``random_numbers``: random numbers from (seed, epoch, index).
* ``arrays``: types of arrays and shapes.
* ``core/``: the compiled core, in C, and its interface.

Images and samples:

* ``decode``: files and bytes to images; the only interface to Pillow and its libjpeg.
* ``openings``: loaders of files that the core can replace.
* ``resize``: Resize and RGB for PIL images.
* ``samples``: conversion of samples to stored arrays, and back.
* ``scratch``: memory of each thread for intermediate images.
"""
