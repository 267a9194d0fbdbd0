"""Sizes of all samples of a dataset, without decoding them: from the store, or from file headers.

Shape letters: N samples, D dimensions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fastdata.errors import kind_of
from fastdata.pixels.decode import read_size
from fastdata.pixels.split import split_upright
from fastdata.report import progress_bar
from fastdata.sources.files import FileSource
from fastdata.stores.preparer import naming_sample

if TYPE_CHECKING:
    from fastdata.datasets.dataset import PreparedDataset
    from fastdata.pixels.arrays import Int32s


def served_shapes(dataset: PreparedDataset) -> Int32s:
    """Return the shape of each sample after the transform, int32 (N, D).

    The shapes of several columns, such as views, are next to each other. A size that is drawn at
    random is 0. Samples that are not prepared yet are prepared first.

    Raises:
        ValueError: the shapes are not known before samples are read.
    """
    reader = dataset.reader()
    kept = reader.kept
    columns = reader.columns
    if kept is not None and not reader.programs:
        return np.hstack([store.shapes for store in kept.stores])
    if kept is not None:
        stored = [kept.stores[column.part].shapes for column in columns]
    elif reader.programs:
        sizes_N2 = _file_sizes(reader.stored.samples, upright=reader.is_upright)
        shapes_N3 = np.full((len(sizes_N2), 3), reader.stored.samples.opening.channels, np.int32)
        shapes_N3[:, 1:] = sizes_N2
        stored = [shapes_N3] * len(columns)
    else:
        raise ValueError(
            f"the sizes of the samples of {kind_of(dataset)} are not known before they are read: "
            f"{reader.obstacle}. Use storage='auto', or steps that fastdata runs on whole batches."
        )
    served = []
    for column, shapes_ND in zip(columns, stored, strict=True):
        assert column.program is not None
        # Photographs have few sizes, so each size is computed only once.
        sizes, number_N = np.unique(shapes_ND, axis=0, return_inverse=True)
        served.append(column.program.served_shapes(sizes)[number_N.reshape(-1)])
    return np.hstack(served)


def image_sizes(dataset: PreparedDataset) -> Int32s:
    """Return the height and width of each image before the transform, int32 (N, 2).

    They are those of the stored images or, if images are not stored (yet), of the files.

    Raises:
        ValueError: the sizes are not known before samples are read.
    """
    samples = dataset._fastdata
    kept = samples.stored.kept
    if kept is not None:
        return kept.images.shapes[:, -2:]
    steps = (*samples.stored.first_steps, samples.transforms.of_sample)
    return _file_sizes(samples.stored.samples, upright=split_upright(steps)[0])


def _file_sizes(source: object, *, upright: bool) -> Int32s:
    """Return the height and width of image files, int32 (N, 2), from their headers."""
    if not isinstance(source, FileSource) or source.is_remote:
        raise ValueError(
            "the sizes of images are not known before they are read, because they are neither "
            "stored nor files of this machine. Use another storage= than 'none'."
        )
    sizes_N2 = np.empty((len(source), 2), np.int32)
    with progress_bar(len(source), "reading sizes") as bar:
        for index, path in enumerate(source.paths):
            with naming_sample(source, index):
                sizes_N2[index] = read_size(path, upright=upright)
            bar.update()
    return sizes_N2
