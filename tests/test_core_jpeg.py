"""JPEG files decoded by the core through Pillow's libjpeg-turbo: pixels and errors are Pillow's, also for boxes.

``.ci/run`` also runs these tests under AddressSanitizer and UBSan. ``FASTDATA_FUZZ`` is the number of damaged files.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile, ImageOps
from torchvision import transforms as v1

from data import ArrayStore
from fastdata.pixels.core.calls import Samples
from fastdata.pixels.core.jpeg import Jpeg
from fastdata.pixels.core.library import load
from fastdata.pixels.decode import OpenedImages, decode_image, open_libjpeg
from fastdata.pixels.program import Program
from fastdata.pixels.samples import SampleSpec, addresses_of
from fastdata.pixels.split import split_transform
from fastdata.pixels.steps import Step
from levels import Levels
from test_core_programs import FILTERS, GEOMETRY, SIDES

pytestmark = [
    pytest.mark.skipif(
        open_libjpeg()[0] is None, reason="Pillow is linked to no shared libjpeg-turbo"
    ),
    pytest.mark.usefixtures("levels_agree"),  # pixels of all levels of instruction sets
]

FUZZ = int(os.environ.get("FASTDATA_FUZZ", "400"))
SAMPLINGS = {
    "4:4:4": (0, None),
    "4:2:2": (1, None),
    "4:2:0": (2, None),
    "4:4:0": (1, 0x12),
    "4:1:1": (2, 0x41),
}
"""Subsampling -> Pillow's number for the file, and the factors that its header then gets, if Pillow cannot write them.
These factors have as many blocks as Pillow's, in another order."""
KINDS: dict[str, dict[str, Any]] = {
    "baseline": {},
    "progressive": {"progressive": True},
    "restarts": {"restart_marker_blocks": 1},
    "best tables": {"optimize": True, "quality": 98},
}
SIZES = [(1, 1), (1, 9), (8, 8), (16, 16), (17, 33), (40, 31), (61, 90)]
BOXES = 40
PIL_SPEC = SampleSpec(shape=None, dtype="uint8", form="pil")


def photo(height: int, width: int, seed: int = 0) -> Image.Image:
    """Waves and noise."""
    y, x = np.mgrid[0:height, 0:width][..., None] / (5.0, 9.0, 14.0)
    noise = np.random.default_rng([seed, height, width]).normal(0, 20, (height, width, 3))
    return Image.fromarray(np.clip(128 + 90 * np.sin(x + 2 * y) + noise, 0, 255).astype(np.uint8))


def saved(image: Image.Image, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "JPEG", **options)
    return stream.getvalue()


def jpeg_file(sampling: str, kind: str, height: int, width: int) -> bytes:
    """Return a file with a subsampling. If Pillow cannot write it, the header of another file is changed."""
    if sampling == "grey":
        return saved(photo(height, width).convert("L"), **KINDS[kind])
    number, factors = SAMPLINGS[sampling]
    if factors is None:
        return saved(photo(height, width), subsampling=number, **KINDS[kind])
    across, down = factors >> 4, factors & 15
    columns, rows = -(-width // (8 * across)), -(-height // (8 * down))
    drawn = photo(rows * (8 if number == 1 else 16), columns * 16)
    data = bytearray(saved(drawn, subsampling=number, **KINDS[kind]))
    frame = next(at for at in range(len(data)) if data[at] == 0xFF and data[at + 1] in (0xC0, 0xC2))
    data[frame + 11] = factors
    if kind != "progressive":  # whose scans of one colour have no blocks beside the image
        data[frame + 5 : frame + 9] = height.to_bytes(2, "big") + width.to_bytes(2, "big")
    else:
        size = (rows * 8 * down).to_bytes(2, "big") + (columns * 8 * across).to_bytes(2, "big")
        data[frame + 5 : frame + 9] = size
    return bytes(data)


def pixels_of(data: bytes) -> np.ndarray:
    """Return the planes (3, H, W) of a file, decoded by Pillow."""
    pixels = np.array(Image.open(io.BytesIO(data)).convert("RGB"))
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def held(pixels: np.ndarray) -> Samples:
    """Return one sample for the core; the caller must keep the array alive."""
    return Samples(addresses_of([pixels]), np.array([pixels.shape], np.int32))


def refuse(b: int) -> Any:
    raise AssertionError(f"file {b} went to Pillow")


def boxes(rng: np.random.Generator, height: int, width: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield boxes that touch all borders, some or none, down to one pixel."""
    yield 0, 0, height, width
    for _ in range(BOXES):
        top, left = int(rng.integers(height)), int(rng.integers(width))
        h, w = int(rng.integers(height - top)) + 1, int(rng.integers(width - left)) + 1
        yield from ((top, left, h, w), (top, left, height - top, width - left))
        yield from ((0, left, top + 1, w), (top, 0, h, left + 1))


def cut(opened: OpenedImages, box: tuple[int, int, int, int]) -> np.ndarray:
    """Return a box of the only image, (3, h, w)."""
    _, height, width = opened.shapes_B3[0].tolist()
    top, left, h, w = box
    border = {"left": -left, "top": -top, "right": left + w - width, "bottom": top + h - height}
    program = Program((Step("pad", {"border": border}),), PIL_SPEC)
    out = np.empty((1, 3, h, w), np.uint8)
    program.run(opened, np.zeros(1, np.int64), 0, 0, out)
    return out[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampling", [*SAMPLINGS, "grey"])
def test_any_box_has_the_pixels_of_the_whole(
    sampling: str, kind: str, levels_agree: Levels
) -> None:
    """The pixels of a box equal those of the whole image, decoded by Pillow, for each subsampling and kind."""
    if kind != "baseline":  # a kind is libjpeg's part, which has no levels
        levels_agree.uninstall()
    rng = np.random.default_rng([len(sampling), len(kind)])
    for height, width in SIZES:
        data = jpeg_file(sampling, kind, height, width)
        opened, wanted = OpenedImages.of_files([data], refuse), pixels_of(data)
        for top, left, h, w in boxes(rng, *wanted.shape[1:]):
            found = cut(opened, (top, left, h, w))
            assert np.array_equal(found, wanted[:, top : top + h, left : left + w]), (
                height,
                width,
                top,
                left,
                h,
                w,
            )


def test_a_program_reads_only_what_it_needs_and_serves_the_same() -> None:
    """Random geometry on a file gives the same as on the pixels of the whole image, for one view and for two."""
    rng = np.random.default_rng(3)

    def pick(*of: Any) -> Any:
        return of[rng.integers(len(of))]

    served = 0
    for _ in range(400):
        height, width = pick(*SIDES, 200, 333), pick(*SIDES, 200, 333)
        data = saved(photo(height, width), subsampling=pick(0, 1, 2), progressive=pick(False, True))
        programs = []
        for first in range(2):
            names = [
                pick(
                    "RandomResizedCrop",
                    "RandomCrop",
                    "Resize",
                    "CenterCrop",
                    "RandomHorizontalFlip",
                )
            ]
            names += [pick(*GEOMETRY) for _ in range(rng.integers(3))]
            steps = tuple(GEOMETRY[name](v1, pick) for name in names)
            plan = split_transform(steps, channels=3, prepared=0, first=10 * first)
            programs.append(Program(plan.batch_ops, PIL_SPEC))
        one, other = programs
        decoded = ArrayStore([pixels_of(data)] * 8)
        opened = OpenedImages.of_files([data], refuse)
        try:
            wanted = [program.run_one(decoded, 7, 1, 2) for program in programs]
        except ValueError:
            continue
        outs = [np.empty_like(each)[None] for each in wanted]
        one.run(opened, np.array([7]), 1, 2, outs[0], others=[(other, outs[1])])
        assert np.array_equal(outs[0][0], wanted[0])
        assert np.array_equal(outs[1][0], wanted[1])
        alone = np.empty_like(outs[0])
        one.run(opened, np.array([7]), 1, 2, alone)
        assert np.array_equal(alone[0], wanted[0])
        served += 1
    assert served > 100


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("size", [40, (70, 50), (200, 300)])
def test_a_crop_after_a_resize_reads_only_its_support(name: str, size: Any) -> None:
    """Resize and CenterCrop give the same pixels from a file as from its whole image, in every filter and domain."""
    data = saved(photo(260, 310))
    for crop in ((32, 24), (1, 40), (40, 1)):
        for form in ("pil", "tensor"):
            steps = (
                v1.Resize(size, v1.InterpolationMode(name), antialias=True),
                v1.CenterCrop(crop),
            )
            plan = split_transform(steps, channels=3, prepared=0, form=form)
            program = Program(plan.batch_ops, SampleSpec(shape=None, dtype="uint8", form=form))
            found = next(program.prepare(OpenedImages.of_files([data], refuse))).copy()
            pixels = pixels_of(data)
            assert np.array_equal(found, next(program.prepare(held(pixels))))


@pytest.mark.parametrize("order", ["II", "MM"])
@pytest.mark.parametrize("orientation", range(10))
def test_exif_turns_the_box(orientation: int, order: str) -> None:
    """Boxes of an upright image equal those of exif_transpose's result, for EXIF data of both byte orders."""
    exif = Image.Exif()
    exif.endian = {"II": "<", "MM": ">"}[order]
    exif[0x112] = orientation
    data = saved(photo(50, 75), exif=exif)
    assert b"Exif\0\0" + order.encode() in data
    upright = np.array(ImageOps.exif_transpose(Image.open(io.BytesIO(data)))).transpose(2, 0, 1)
    opened = OpenedImages.of_files([data], refuse, upright=True)
    assert tuple(opened.shapes_B3[0]) == upright.shape
    for top, left, h, w in boxes(np.random.default_rng(orientation), *upright.shape[1:]):
        assert np.array_equal(
            cut(opened, (top, left, h, w)), upright[:, top : top + h, left : left + w]
        )


def test_files_with_xmp_go_to_pillow_if_images_are_turned() -> None:
    """XMP data may have an orientation. If images are not turned, the core decodes such files."""
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf tiff:Orientation="6"/></x:xmpmeta>'
    data = saved(photo(9, 16), xmp=xmp)
    with pytest.raises(AssertionError, match="file 0 went to Pillow"):
        OpenedImages.of_files([data], refuse, upright=True)
    assert OpenedImages.of_files([data], refuse).shapes_B3.tolist() == [[3, 9, 16]]


def verdict(open_it: Callable[[], Any]) -> Any:
    """Return the bytes of the pixels, or the type and the text of the error."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return np.array(open_it()).tobytes()
    except Exception as error:  # noqa: BLE001  the comparison is of whatever is raised
        return type(error).__name__, str(error).partition(" <")[0]


def damaged(data: bytes, rng: np.random.Generator) -> bytes:
    """Return a file with some bytes changed, removed or added, or with its end missing."""
    changed = bytearray(data)
    for _ in range(rng.integers(1, 5)):
        at = int(
            rng.integers(len(changed))
            if rng.random() < 0.6
            else rng.integers(min(700, len(changed)))
        )
        match rng.integers(6):
            case 0:
                del changed[at:]
            case 1:
                del changed[at : at + int(rng.integers(1, 30))]
            case 2:
                changed[at:at] = rng.bytes(int(rng.integers(1, 9)))
            case 3:
                changed[at : at + 2] = bytes([0xFF, int(rng.integers(0xC0, 0x100))])
            case _:
                changed[at : at + 1] = rng.bytes(1)
        if len(changed) < 4:
            break
    return bytes(changed)


def test_damaged_files_are_judged_by_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the damage is, pixels, boxes and errors are Pillow's, and nothing crashes."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1 << 20)
    files = [
        jpeg_file(sampling, kind, 40, 61) for sampling in (*SAMPLINGS, "grey") for kind in KINDS
    ]
    exif = Image.Exif()
    exif[0x112], exif[0x11A] = 6, 72.0
    files += [
        saved(photo(50, 31), exif=exif, icc_profile=b"x" * 90, comment=b"hello", dpi=(72, 72))
    ]
    decoded = 0
    for number in range(FUZZ):
        rng = np.random.default_rng(number)
        data = damaged(files[rng.integers(len(files))], rng)
        wanted = verdict(lambda data=data: Image.open(io.BytesIO(data)).convert("RGB"))
        assert verdict(lambda data=data: decode_image(data)) == wanted, number
        asked: list[int] = []

        def by_pillow(b: int, data: bytes = data, asked: list[int] = asked) -> np.ndarray:
            asked.append(b)
            return pixels_of(data)

        def crop(data: bytes = data, by_pillow: Any = by_pillow) -> np.ndarray:
            opened = OpenedImages.of_files([data], by_pillow)
            _, height, width = opened.shapes_B3[0].tolist()
            crop = v1.CenterCrop((-(-height // 3), -(-width // 2)))
            program = Program(split_transform(crop, channels=3, prepared=0).batch_ops, PIL_SPEC)
            return next(program.prepare(opened))

        found = verdict(crop)
        if isinstance(wanted, bytes):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                whole = pixels_of(data)
            assert found == verdict(lambda whole=whole: crop_of(whole)), number
        else:
            assert found == wanted, number
        decoded += not asked
    assert decoded > FUZZ // 20


def crop_of(whole: np.ndarray) -> np.ndarray:
    _, height, width = whole.shape
    crop = v1.CenterCrop((-(-height // 3), -(-width // 2)))
    return np.array(crop(Image.fromarray(whole.transpose(1, 2, 0)))).transpose(2, 0, 1)


def test_a_file_with_more_pixels_than_pillow_allows_goes_to_pillow() -> None:
    """The core reads the size from the header, and leaves the error to Pillow."""
    data = bytearray(saved(photo(8, 8)))
    frame = data.index(b"\xff\xc0")
    data[frame + 5 : frame + 9] = b"\xff\xff\xff\xff"
    with pytest.raises(Image.DecompressionBombError):
        OpenedImages.of_files([bytes(data)], lambda _: pixels_of(bytes(data)))


def test_a_damaged_file_stays_a_file() -> None:
    """Pillow's error for a damaged file is raised each time: its bytes are never used as pixels."""
    data = saved(photo(61, 90))[:-400]
    opened = OpenedImages.of_files([data], lambda _: pixels_of(data))
    for _ in range(2):
        with pytest.raises(OSError, match="truncated"):
            cut(opened, (11, 20, 30, 41))


def without(data: bytes, marker: int) -> bytes:
    """Return a file without its tables of one kind."""
    kept = data[:2]
    at = 2
    while data[at + 1] != 0xDA:  # the scan
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        kept += data[at:end] if data[at + 1] != marker else b""
        at = end
    return kept + data[at:]


@pytest.mark.parametrize("marker", [0xC4, 0xDB], ids=["Huffman", "quantisation"])
def test_a_file_is_not_decoded_by_the_tables_of_another_file(marker: int) -> None:
    """One decoder decodes all files: without Huffman tables a file has the standard ones, without quanta it fails."""
    jpeg, _ = open_libjpeg()
    assert jpeg is not None
    data = without(saved(photo(40, 61)), marker)
    for other in ({"optimize": True, "quality": 20}, {"progressive": True, "quality": 98}):
        out = np.empty((3, 40, 61), np.uint8)
        before = np.frombuffer(saved(photo(40, 61), **other), np.uint8)
        assert jpeg.decode(before, out)
        is_decoded = jpeg.decode(np.frombuffer(data, np.uint8), out)
        assert is_decoded == (marker == 0xC4)
        assert not is_decoded or np.array_equal(out, pixels_of(data))


def test_a_file_that_lacks_scans_is_smoothed_as_pillow_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A box of a progressive file that ends early has the pixels of Pillow's whole image."""
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    data = saved(photo(61, 90), progressive=True)
    scans = [at for at in range(len(data)) if data[at : at + 2] == b"\xff\xda"]
    for end in scans[1:]:
        cut_off = data[:end] + b"\xff\xd9"
        wanted = pixels_of(cut_off)
        opened = OpenedImages.of_files([cut_off], lambda _, data=cut_off: pixels_of(data))
        assert np.array_equal(cut(opened, (11, 20, 30, 41)), wanted[:, 11:41, 20:61])


def test_a_library_without_libjpeg_is_an_error() -> None:
    """The error names a Pillow without a shared libjpeg-turbo, such as its wheels for Windows."""
    with pytest.raises(
        OSError, match=r"is not linked to a shared libjpeg-turbo: it has no jpeg_CreateDecompress"
    ):
        Jpeg(load().functions._name)
