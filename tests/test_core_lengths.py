"""Arrays whose lengths do not fit are refused, and the core writes no memory outside of a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torchvision import transforms as v1

from data import ArrayStore
from fastdata.pixels.decode import OpenedImages, encode_jpeg, open_libjpeg
from fastdata.pixels.program import Program
from fastdata.pixels.samples import addresses_of
from fastdata.pixels.split import split_transform
from test_transforms import images as make_images

pytestmark = pytest.mark.usefixtures("levels_agree")  # pixels of all levels of instruction sets

SIDE_PX, CROP_PX, BATCH, GUARD = 9, 6, 4, 170
STEPS: dict[str, list[Any]] = {
    "uint8": [v1.RandomCrop(CROP_PX), v1.RandomHorizontalFlip(), v1.PILToTensor()],
    "float32": [v1.RandomCrop(CROP_PX), v1.ToTensor()],
}


def program_of(dtype: str, store: ArrayStore) -> Program:
    plan = split_transform(v1.Compose(STEPS[dtype]), prepared=0)
    return Program(plan.batch_ops, store.spec)


def guarded(rows: int, dtype: Any = np.uint8) -> tuple[np.ndarray, np.ndarray]:
    """Return memory for a batch in the middle of a larger block, and the whole block as bytes."""
    whole = np.full((3 * BATCH, 3, CROP_PX, CROP_PX), 0, dtype)
    every_byte = whole.view(np.uint8)
    every_byte[...] = GUARD
    return whole[BATCH : BATCH + rows], every_byte


OK = np.arange(BATCH, dtype=np.int64)
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no room": ({"rows": 0}, r"sample 0 of a batch of 4 .* row 0, but .* has 0 rows"),
    "too little room": ({"rows": 3}, r"sample 3 of a batch of 4 .* row 3, but .* has 3 rows"),
    "a row behind the last": ({"rows_B": OK + 1}, r"sample 3 .* row 4, but .* has 4 rows"),
    "a row before the first": ({"rows_B": OK - 1}, r"sample 0 .* row -1, but .* has 4 rows"),
    "a row far away": ({"rows_B": OK + 2**61}, r"sample 0 .* row \d+, but .* has 4 rows"),
    "too few rows": ({"rows_B": OK[:3]}, r"a batch of 4 samples came with .* 3 rows"),
    "too many rows": ({"rows_B": np.arange(5)}, r"a batch of 4 samples came with .* 5 rows"),
    "too few visits": ({"visits_B": OK[:2]}, "a batch of 4 indices came with 2 visits"),
    "too many visits": ({"visits_B": np.arange(9)}, "a batch of 4 indices came with 9 visits"),
}


@pytest.mark.parametrize("gives_views", [True, False], ids=["views", "decoded"])
@pytest.mark.parametrize("name", WRONG)
def test_lengths_that_do_not_fit_are_refused(name: str, gives_views: bool) -> None:
    """If rows, visits or memory do not fit the indices, there is an error, and the bytes around do not change."""
    store = ArrayStore(make_images(BATCH, (SIDE_PX, SIDE_PX)), gives_views=gives_views)
    changed, match = WRONG[name]
    out, every_byte = guarded(changed.get("rows", BATCH))
    with pytest.raises(ValueError, match=match):
        program_of("uint8", store).run(
            store, OK, changed.get("visits_B", 0), 0, out, changed.get("rows_B")
        )
    assert (every_byte[:BATCH] == GUARD).all()
    assert (every_byte[BATCH + len(out) :] == GUARD).all()


def test_a_batch_of_another_dtype_is_no_room() -> None:
    """Memory of uint8 for a program that serves float32 has a fourth of the rows."""
    store = ArrayStore(make_images(BATCH, (SIDE_PX, SIDE_PX)))
    out, every_byte = guarded(BATCH)
    with pytest.raises(ValueError, match=r"sample 1 of a batch of 4 .* row 1, but .* has 1 rows"):
        program_of("float32", store).run(store, OK, 0, 0, out)
    assert (every_byte[2 * BATCH :] == GUARD).all()


def test_rows_that_are_not_contiguous_are_read_as_they_are() -> None:
    """Rows, visits and indices may be views with strides, or of another type."""
    store = ArrayStore(make_images(2 * BATCH, (SIDE_PX, SIDE_PX)))
    program = program_of("uint8", store)
    outs = [guarded(BATCH)[0] for _ in range(2)]
    program.run(store, OK * 2, OK + 3, 5, outs[0], OK[::-1].copy())
    strided = np.arange(2 * BATCH)
    program.run(store, strided[::2], strided[3 : 3 + BATCH], 5, outs[1], OK[::-1].astype(np.int32))
    assert np.array_equal(*outs)


def test_read_only_memory_is_refused() -> None:
    store = ArrayStore(make_images(BATCH, (SIDE_PX, SIDE_PX)))
    out, _ = guarded(BATCH)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="the memory for a batch is read-only"):
        program_of("uint8", store).run(store, OK, 0, 0, out)


def test_every_random_set_of_lengths_is_served_or_refused() -> None:
    """Whatever rows, room and lengths are given, only rows that were asked for are written."""
    store = ArrayStore(make_images(BATCH, (SIDE_PX, SIDE_PX)))
    program, rng, served = program_of("uint8", store), np.random.default_rng(0), 0
    for _ in range(300):
        out, every_byte = guarded(int(rng.integers(BATCH + 1)))
        index_B = rng.integers(BATCH, size=rng.integers(1, BATCH + 1))
        lengths = [len(index_B) + int(rng.integers(-1, 2)) * (rng.random() < 0.2) for _ in range(2)]
        visits_B = np.arange(lengths[0])
        rows_B = rng.integers(-1, BATCH + 1, lengths[1]) if rng.random() < 0.7 else None
        try:
            program.run(store, index_B, visits_B, 0, out, rows_B)
        except ValueError:
            pass
        else:
            served += 1
            assert (every_byte != GUARD).any()
        every_byte[BATCH : BATCH + len(out)] = GUARD
        assert (every_byte == GUARD).all()
    assert 20 < served < 280


@pytest.mark.skipif(open_libjpeg()[0] is None, reason="Pillow has no shared libjpeg-turbo")
def test_jpeg_files_need_their_sizes_and_fitting_memory() -> None:
    """Each file needs a size, and its pixels need contiguous memory of uint8."""
    jpeg, _ = open_libjpeg()
    assert jpeg is not None
    [planes] = make_images(1, (SIDE_PX, SIDE_PX))
    data = np.frombuffer(encode_jpeg(planes, 75, "4:2:0"), np.uint8)
    files_B = addresses_of([data, data])
    with pytest.raises(ValueError, match="2 JPEG files came with 1 sizes"):
        OpenedImages(files_B, np.array([data.size]), lambda b: planes)
    for out in (planes.astype(np.float32), planes.transpose(0, 2, 1), planes[0]):
        with pytest.raises(ValueError, match="it must be C-contiguous uint8"):
            jpeg.decode(data, out)


def test_a_sample_without_pixels_is_named() -> None:
    """The error has the shape of the sample, also if its neighbours could be served."""
    samples = make_images(BATCH, (SIDE_PX, SIDE_PX))
    samples[2] = samples[2][:, :0]
    store = ArrayStore(samples)
    out, _ = guarded(BATCH)
    with pytest.raises(
        ValueError, match=r"sample 2, of shape \(3, 0, 9\), .* no pixel of it, or it has none"
    ):
        program_of("uint8", store).run(store, OK, 0, 0, out)
