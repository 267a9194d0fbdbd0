"""JPEGs with odd metadata: the core decides only what Pillow would decide, in every storage."""

from __future__ import annotations

import io
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from fastdata import ImageFolder
from fastdata.pixels.decode import OpenedImages, open_libjpeg
from fastdata.pixels.program import Program
from fastdata.pixels.samples import SampleSpec

ORIENTATION, RESOLUTION, UNIT, MAKER = 0x112, 0x11A, 0x128, 0x10F
BYTES_OF_TYPES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8}
USUAL = {ORIENTATION: (3, 1), RESOLUTION: (5, 1), UNIT: (3, 1), MAKER: (2, 9), 0x8769: (4, 1)}
"""Type and count that cameras write."""
HEIGHT, WIDTH = 9, 14
APP1, APP2, APP13 = 0xE1, 0xE2, 0xED
DIRECTORIES = 600

needs_libjpeg = pytest.mark.skipif(
    open_libjpeg()[0] is None, reason="Pillow is linked to no shared libjpeg-turbo"
)


def plain_jpeg(seed: int = 0) -> bytes:
    stream = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8)
    Image.fromarray(pixels).save(stream, "JPEG")
    return stream.getvalue()


JPEG = plain_jpeg()
JFIF_BYTES = 18


def with_segment(marker: int, data: bytes, *, jfif: bool = True) -> bytes:
    """A JPEG with one more segment, after JFIF's resolution or in its place."""
    head = JPEG[2 : 2 + JFIF_BYTES] if jfif else b""
    segment = bytes([0xFF, marker]) + struct.pack(">H", len(data) + 2) + data
    return JPEG[:2] + head + segment + JPEG[2 + JFIF_BYTES :]


def tiff(entries: list[tuple[int, int, int, bytes]], *, big: bool = False) -> bytes:
    """A directory of tags, types, counts and values, and behind it values of more than 4 bytes."""
    order = ">" if big else "<"
    end = 8 + 2 + 12 * len(entries) + 4
    directory, values = struct.pack(f"{order}H", len(entries)), b""
    for tag, kind, count, value in entries:
        field = value.ljust(4, b"\0")
        if len(value) > 4:
            field = struct.pack(f"{order}L", end + len(values))
            values += value
        directory += struct.pack(f"{order}HHL", tag, kind, count) + field
    head = (b"MM\0*" if big else b"II*\0") + struct.pack(f"{order}L", 8)
    return head + directory + bytes(4) + values


def random_entry(rng: np.random.Generator, oddness: float, order: str) -> Any:
    tag = int(rng.choice([*USUAL, ORIENTATION, RESOLUTION, UNIT, 0x9999]))
    kind, count = USUAL.get(tag, (7, 3))
    if rng.random() < oddness:
        kind = int(rng.choice([*BYTES_OF_TYPES, 0, 14, 129]))
    if rng.random() < oddness:
        count = int(rng.choice([0, 1, 2, 3, 5, 70000, 2**32 - 1]))
    size = BYTES_OF_TYPES.get(kind, 1) * min(count, 6)
    value = rng.choice(list(b"\0\0\0019"), size).astype(np.uint8).tobytes()
    if kind == 3 and count:
        number = int(rng.choice([1, 2, 3, 5, 6, 8, 0, 9, 300]))
        value = struct.pack(f"{order}H", number) * min(count, 6)
    return tag, kind, count, value


def random_exif(rng: np.random.Generator) -> bytes:
    """EXIF as cameras write it, or with a few odd entries, or damaged."""
    oddness = float(rng.choice([0, 0, 0.1, 0.5]))
    big = bool(rng.integers(2))
    entries = [random_entry(rng, oddness, ">" if big else "<") for _ in range(rng.integers(6))]
    if not oddness:
        entries = list({tag: (tag, *rest) for tag, *rest in entries}.values())
    data = bytearray(tiff(entries, big=big))
    if rng.random() < oddness:
        match rng.integers(3):
            case 0:
                del data[int(rng.integers(len(data))) :]
            case 1:
                data[int(rng.integers(len(data)))] = int(rng.integers(256))
            case 2:
                data[4:8] = struct.pack(">L" if big else "<L", int(rng.integers(40)))
    prefix = b"Exif\0\0" * (2 if rng.random() < 0.2 * oddness else 1)
    return prefix + bytes(data)


def planes(image: Image.Image) -> np.ndarray:
    return np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))


def pillow_reads(data: bytes, *, upright: bool) -> np.ndarray:
    """Pixels as Pillow turns them; its copy of the EXIF, which nothing here keeps, is not written."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    if not upright:
        return planes(image)
    exif = Image.Exif()
    exif[ORIENTATION] = image.getexif().get(ORIENTATION, 1)
    alone = Image.fromarray(np.asarray(image))
    alone.info["exif"] = exif.tobytes()
    return planes(ImageOps.exif_transpose(alone))


def core_reads(data: bytes, *, upright: bool) -> np.ndarray | None:
    """Return what the core decodes from a file; None if Pillow must open it."""

    def refuse(b: int) -> Any:
        raise LookupError(b)

    try:
        opened = OpenedImages.of_files([data], refuse, upright=upright)
    except LookupError:
        return None
    out = np.empty((1, *opened.shapes_B3[0].tolist()), np.uint8)
    spec = SampleSpec(shape=None, dtype="uint8", form="pil")
    program = Program((), spec)
    program.run(opened, np.zeros(1, np.int64), 0, 0, out)
    return out[0]


def assert_pillow_agrees(data: bytes) -> bool:
    """Check that Pillow reads the same pixels, without error or warning, from a file that the core decodes."""
    decided = []
    for upright in (False, True):
        found = core_reads(data, upright=upright)
        decided.append(found is not None)
        if found is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                assert np.array_equal(found, pillow_reads(data, upright=upright))
    return any(decided)


@needs_libjpeg
def test_random_exif_directories_are_read_as_pillow_reads_them() -> None:
    """The core turns as Pillow does, or asks it; and it need not ask for what cameras write."""
    decided = 0
    for number in range(DIRECTORIES):
        rng = np.random.default_rng(number)
        data = with_segment(APP1, random_exif(rng), jfif=bool(rng.integers(2)))
        decided += assert_pillow_agrees(data)
    assert DIRECTORIES // 3 < decided < DIRECTORIES * 5 // 6


def entry_of(order: str, tag: int, value: int) -> tuple[int, int, int, bytes]:
    return tag, 3, 1, struct.pack(f"{order}H", value)


@needs_libjpeg
@pytest.mark.parametrize("big", [False, True])
def test_usual_exif_is_not_left_to_pillow(big: bool) -> None:
    """A directory as a camera writes it costs no more than one that is not there."""
    order = ">" if big else "<"
    resolution = RESOLUTION, 5, 1, struct.pack(f"{order}LL", 72, 1)
    camera = [(MAKER, 2, 7, b"Camera\0"), entry_of(order, ORIENTATION, 6), resolution]
    camera += [entry_of(order, UNIT, 2), (0x8769, 4, 1, struct.pack(f"{order}L", 8))]
    for jfif in (False, True):
        data = with_segment(APP1, b"Exif\0\0" + tiff(camera, big=big), jfif=jfif)
        assert core_reads(data, upright=False) is not None
        found = core_reads(data, upright=True)
        assert found is not None
        assert found.shape == (3, WIDTH, HEIGHT)
        assert assert_pillow_agrees(data)


def index_of_images(*, count: int = 2, listed: int = 2, data_format: int = 0) -> bytes:
    entries = b"".join(struct.pack("<LLLHH", data_format << 24, 9, 9, 0, 0) for _ in range(listed))
    return b"MPF\0" + tiff(
        [
            (0xB000, 7, 4, b"0100"),
            (0xB001, 4, 1, struct.pack("<L", count)),
            (0xB002, 7, len(entries), entries),
        ]
    )


RESOURCE = b"8BIM\x04\x04\0\0" + struct.pack(">L", 5) + b"hello\0"
BLOCKS = {
    "an index of images": (APP2, index_of_images(), True),
    "an index that lists too few": (APP2, index_of_images(listed=1), False),
    "an index of another format": (APP2, index_of_images(data_format=1), False),
    "an index that is cut off": (APP2, index_of_images()[:30], False),
    "Photoshop": (APP13, b"Photoshop 3.0\0" + 2 * RESOURCE, True),
    "Photoshop with more behind it": (APP13, b"Photoshop 3.0\0" + RESOURCE + b"more", True),
    "Photoshop cut off in a value": (APP13, b"Photoshop 3.0\0" + RESOURCE[:-3], True),
    "Photoshop cut off in a size": (APP13, b"Photoshop 3.0\0" + RESOURCE[:10], False),
    "Photoshop cut off behind a code": (APP13, b"Photoshop 3.0\0" + RESOURCE[:6], False),
}


@needs_libjpeg
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_other_programs_are_read_as_pillow_reads_them(name: str) -> None:
    """The core decodes files with sound blocks of other programs; Pillow opens all others."""
    marker, block, is_plain = BLOCKS[name]
    data = with_segment(marker, block)
    assert assert_pillow_agrees(data) == is_plain
    for end in range(len(block)):
        assert_pillow_agrees(with_segment(marker, block[:end]))


class Keep:
    """A step of the user's own."""

    def __call__(self, image: Any) -> Any:
        return image


REFUSED = {
    "Photoshop": with_segment(*BLOCKS["Photoshop cut off behind a code"][:2]),
    "a resolution of one letter": with_segment(
        APP1, b"Exif\0\0" + tiff([(RESOLUTION, 2, 2, b"7\0"), entry_of("<", UNIT, 2)]), jfif=False
    ),
}
STORAGES: dict[str, dict[str, Any]] = {
    "none": {"storage": "none"},
    "shared": {"storage": "shared"},
    "source": {"storage": "compressed", "codec": "source"},
    "zstd": {"storage": "compressed", "codec": "zstd"},
    "cache": {"cache_key": "odd"},
}


@pytest.mark.parametrize("step", [ImageOps.exif_transpose, Keep()], ids=["turned", "kept"])
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_pillow_refuses_is_refused_in_every_storage(
    name: str, storage: str, step: Callable[[Any], Any], tmp_path: Path
) -> None:
    """Metadata for which Image.open raises give the same error in every storage."""
    (tmp_path / "root" / "a").mkdir(parents=True)
    for number in range(2):
        (tmp_path / "root" / "a" / f"{number}.jpg").write_bytes(REFUSED[name])
    with pytest.raises(OSError, match="cannot identify image file"):
        Image.open(tmp_path / "root" / "a" / "0.jpg")
    options = STORAGES[storage] | ({"cache_dir": tmp_path / "c"} if storage == "cache" else {})
    with (
        pytest.raises(OSError, match=r"0\.jpg"),
        ImageFolder(tmp_path / "root", transform=step, **options) as dataset,
    ):
        dataset[0]


@pytest.mark.parametrize("storage", ["none", "shared"])
@pytest.mark.parametrize("values", [(1, 6), (0, 6), (6, 1), (3, 8)])
def test_the_first_of_two_orientations_counts(
    values: tuple[int, int], storage: str, tmp_path: Path
) -> None:
    """Pillow keeps the first entry of a tag."""
    (tmp_path / "a").mkdir()
    for big in (False, True):
        entries = [entry_of(">" if big else "<", ORIENTATION, value) for value in values]
        data = with_segment(APP1, b"Exif\0\0" + tiff(entries, big=big))
        (tmp_path / "a" / f"{big}.jpg").write_bytes(data)
    wanted = pillow_reads(data, upright=True)
    with ImageFolder(tmp_path, transform=ImageOps.exif_transpose, storage=storage) as dataset:
        for image, _ in dataset:
            assert np.array_equal(planes(image), wanted)
