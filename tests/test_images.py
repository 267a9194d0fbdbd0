"""Decoding against torchvision's loader, pixel for pixel, and the way to stored arrays and back."""

from __future__ import annotations

import io
import math
import pickle
import struct
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile, ImageOps

from data import photo
from fastdata import DataLoader, ImageFolder
from fastdata.errors import SampleError
from fastdata.faults import sample_error
from fastdata.pixels.decode import (
    IMAGE_EXTENSIONS,
    OpenedImages,
    decode_image,
    load_image,
    open_libjpeg,
)
from fastdata.pixels.openings import Opening, opening_of
from fastdata.pixels.program import Program
from fastdata.pixels.resize import Resize
from fastdata.pixels.samples import SampleSpec, from_stored, to_pil, to_stored, without_exif

folder = pytest.importorskip("torchvision.datasets.folder", reason="the reference is torchvision's")
functional = pytest.importorskip(
    "torchvision.transforms.functional", reason="the reference is torchvision's"
)

transforms = pytest.importorskip("torchvision.transforms")

pil_loader = folder.pil_loader


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def with_marker(jpeg: bytes, code: int, payload: bytes) -> bytes:
    """The JPEG with one more segment after its start."""
    return jpeg[:2] + struct.pack(">BBH", 0xFF, code, len(payload) + 2) + payload + jpeg[2:]


def adobe_rgb() -> bytes:
    """A JPEG whose components are R, G and B: no JFIF segment, and Adobe's transform 0."""
    return saved(photo(), "JPEG", keep_rgb=True, quality=90)


def rotated() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return saved(photo(), "JPEG", exif=exif)


FILES: dict[str, Callable[[], bytes]] = {
    "baseline_420.jpg": lambda: saved(photo(), "JPEG", quality=85, subsampling=2),
    "422.jpg": lambda: saved(photo(), "JPEG", quality=95, subsampling=1),
    "444.jpg": lambda: saved(photo(), "JPEG", quality=50, subsampling=0),
    "progressive.jpg": lambda: saved(photo(), "JPEG", progressive=True),
    "optimised.jpg": lambda: saved(photo(), "JPEG", optimize=True, restart_marker_blocks=2),
    "gray.jpg": lambda: saved(photo("L"), "JPEG"),
    "cmyk.jpg": lambda: saved(photo("CMYK"), "JPEG"),
    "adobe_rgb.jpg": adobe_rgb,
    "adobe_ycc.jpg": lambda: with_marker(saved(photo(), "JPEG"), 0xEE, b"Adobe\0\x64\0\0\0\0\x01"),
    "icc.jpg": lambda: saved(photo(), "JPEG", icc_profile=b"not a real profile" * 20),
    "exif_rotated.jpg": rotated,
    "one_pixel.jpg": lambda: saved(photo(size=(1, 1)), "JPEG"),
    "one_column.jpg": lambda: saved(photo(size=(1, 50)), "JPEG", subsampling=2),
    "one_row.jpg": lambda: saved(photo(size=(17, 1)), "JPEG", subsampling=2),
    "trailing_bytes.jpg": lambda: saved(photo(), "JPEG") + b"and more" * 10,
    "two_in_one.mpo": lambda: saved(photo(), "MPO", save_all=True, append_images=[photo(seed=1)]),
    "rgb.png": lambda: saved(photo(), "PNG"),
    "alpha.png": lambda: saved(photo("RGBA"), "PNG"),
    "la.png": lambda: saved(photo("LA"), "PNG"),
    "palette.png": lambda: saved(photo().quantize(16), "PNG"),
    "palette_transparent.png": lambda: saved(photo().quantize(16), "PNG", transparency=3),
    "bilevel.png": lambda: saved(photo("L").convert("1"), "PNG"),
    "16bit.png": lambda: saved(
        Image.fromarray(np.arange(35 * 53, dtype=np.uint16).reshape(35, 53) * 7), "PNG"
    ),
    "animated.gif": lambda: saved(photo(), "GIF", save_all=True, append_images=[photo(seed=1)]),
    "lossy.webp": lambda: saved(photo(), "WEBP", quality=70),
    "alpha.webp": lambda: saved(photo("RGBA"), "WEBP", lossless=True),
    "rgb.bmp": lambda: saved(photo(), "BMP"),
    "gray.pgm": lambda: saved(photo("L"), "PPM"),
    "deflate.tif": lambda: saved(photo(), "TIFF", compression="tiff_deflate"),
    "cmyk.tif": lambda: saved(photo("CMYK"), "TIFF"),
    "float.tif": lambda: saved(photo("L").convert("F"), "TIFF"),
    "jpeg.tif": lambda: saved(photo(), "TIFF", compression="jpeg"),
    "png_named.jpg": lambda: saved(photo(), "PNG"),
}

BAD_FILES: dict[str, Callable[[], bytes]] = {
    "zero.jpg": lambda: b"",
    "text.jpg": lambda: b"hello, I am no image at all\n" * 20,
    "start_only.jpg": lambda: b"\xff\xd8\xff",
    "header_cut.jpg": lambda: saved(photo(), "JPEG")[:200],
    "data_cut.jpg": lambda: saved(photo(), "JPEG")[:-200],
    "cut.png": lambda: saved(photo(), "PNG")[:-300],
    "html.png": lambda: b"<!DOCTYPE html><html>404</html>",
    "zeros.jpg": lambda: bytes(1000),
}


def outcome(load: Callable[[Any], Image.Image], path: Any) -> Any:
    """Mode, size, pixels and what else is known of the image, or the error with its text."""
    try:
        image = load(path)
    except Exception as error:  # noqa: BLE001  the comparison is of whatever is raised
        return type(error).__name__, str(error)
    return image.mode, image.size, image.tobytes(), image.info, dict(image.getexif())


@pytest.fixture(params=["core", "pil"])
def road(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to decode JPEG."""
    if request.param == "pil":
        monkeypatch.setattr("fastdata.pixels.decode.open_libjpeg", lambda: (None, "none"))
    elif open_libjpeg()[0] is None:
        pytest.skip("Pillow is linked to no shared libjpeg-turbo")
    return str(request.param)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.filterwarnings("ignore:Palette images with Transparency:UserWarning")
def test_every_file_gives_torchvisions_pixels(tmp_path: Path, name: str, road: str) -> None:
    """Mode, size, pixels, info and EXIF equal torchvision's loader, from a file and from bytes."""
    path = tmp_path / name
    path.write_bytes(FILES[name]())
    expected = outcome(pil_loader, path)
    assert expected[0] == "RGB"
    assert outcome(load_image, path) == expected
    assert outcome(decode_image, path.read_bytes()) == expected
    assert outcome(decode_image, memoryview(path.read_bytes())) == expected


@pytest.mark.parametrize("name", BAD_FILES)
def test_every_bad_file_gives_torchvisions_error(tmp_path: Path, name: str, road: str) -> None:
    """Type and text of the error are PIL's, on both roads."""
    path = tmp_path / name
    path.write_bytes(BAD_FILES[name]())
    ours, theirs = outcome(load_image, path), outcome(pil_loader, path)
    assert theirs[0] in {"OSError", "UnidentifiedImageError", "SyntaxError"}
    # PIL's message about an unknown format ends in the stream's name, in which only the address could differ.
    assert ours == theirs


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    """The error is FileNotFoundError, as with torchvision, not one of an unidentified image."""
    with pytest.raises(FileNotFoundError, match=r"gone\.jpg"):
        load_image(tmp_path / "gone.jpg")


def test_truncated_files_load_where_pil_is_told_so(
    tmp_path: Path, road: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PIL's LOAD_TRUNCATED_IMAGES is respected, with its very pixels."""
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    path = tmp_path / "cut.jpg"
    path.write_bytes(BAD_FILES["data_cut.jpg"]())
    expected = outcome(pil_loader, path)
    assert expected[0] == "RGB"
    assert outcome(load_image, path) == expected


def test_decompression_bombs_are_pils_to_refuse(
    tmp_path: Path, road: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A JPEG of more than twice PIL's limit raises PIL's error."""
    path = tmp_path / "bomb.jpg"
    path.write_bytes(FILES["444.jpg"]())
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(Image.DecompressionBombError):
        load_image(path)


@pytest.mark.parametrize(
    ("name", "decoded"),
    [
        ("baseline_420.jpg", True),
        ("progressive.jpg", True),
        ("gray.jpg", True),
        ("exif_rotated.jpg", True),
        ("adobe_rgb.jpg", True),
        ("cmyk.jpg", False),
        ("rgb.png", False),
        ("png_named.jpg", False),
    ],
)
def test_the_core_decodes_ordinary_jpeg(
    name: str, decoded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a JPEG of one or three colours PIL reads only the header; PIL decodes all other files."""
    if open_libjpeg()[0] is None:
        pytest.skip("Pillow is linked to no shared libjpeg-turbo")
    data, loaded, load = FILES[name](), [], ImageFile.ImageFile.load
    monkeypatch.setattr(
        ImageFile.ImageFile, "load", lambda image: loaded.append(image) or load(image)
    )
    spec = SampleSpec(shape=None, dtype="uint8", form="pil")
    opened = OpenedImages.of_files([data], lambda _: Opening().decode_pixels(data, upright=False))
    list(Program((), spec).prepare(opened))
    assert (not loaded) == decoded


def of_tensors(path_or_bytes: Any, mode: str = "UNCHANGED", turns: bool = False) -> torch.Tensor:
    """Return what torchvision's ``decode_image`` does, or with ``turns`` torchcodec's, which is not installed."""
    is_tensor = isinstance(path_or_bytes, torch.Tensor)
    data = path_or_bytes.numpy().tobytes() if is_tensor else Path(path_or_bytes).read_bytes()
    image = Image.open(io.BytesIO(data))
    image = ImageOps.exif_transpose(image) if turns else image
    array = np.atleast_3d(np.array(image.convert("RGB") if mode == "RGB" else image))
    return torch.from_numpy(np.ascontiguousarray(array.transpose(2, 0, 1)))


@pytest.fixture
def decode_tensor(monkeypatch: pytest.MonkeyPatch) -> Callable[..., torch.Tensor]:
    """The same function under the name of torchvision's."""
    monkeypatch.setattr(of_tensors, "__module__", "torchvision.io.image")
    monkeypatch.setattr(of_tensors, "__name__", "decode_image")
    return of_tensors


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (False, None)),
        ({"mode": "RGB"}, (False, 3)),
        ({"mode": "RGB", "turns": True}, (True, 3)),
    ],
)
def test_loaders_of_tensors_are_known_by_what_they_do(
    decode_tensor: Callable[..., torch.Tensor], options: dict[str, Any], expected: Any, road: str
) -> None:
    """decode_image of torchvision, a partial of it, and torchcodec's, which turns images."""
    opening = opening_of(partial(decode_tensor, **options) if options else decode_tensor)
    assert opening is not None
    assert (opening.form, opening.is_upright, opening.channels) == ("tensor", *expected)


def test_a_loader_of_tensors_that_warns_is_known(
    decode_tensor: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torchvision's next version warns of its own function. Where warnings are errors it is known all the same."""

    def warning(given: Any) -> torch.Tensor:
        warnings.warn("it moves to torchcodec", DeprecationWarning, stacklevel=2)
        return decode_tensor(given)

    warning.__module__, warning.__name__ = "torchvision.io.image", "decode_image"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opening = opening_of(warning)
    assert opening is not None
    assert opening.form == "tensor"


def test_a_loader_of_tensors_with_other_pixels_is_the_users_own(
    decode_tensor: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decoder that rounds in another way, takes no bytes, or has another name, is asked for each file."""

    def rounded(given: Any) -> torch.Tensor:
        return decode_tensor(given) // 2 * 2

    def of_paths(path: str) -> torch.Tensor:
        return decode_tensor(open(path, "rb"))

    for other in (rounded, of_paths):
        assert opening_of(other) is None
        other.__module__, other.__name__ = "torchcodec.decoders", "decode_jpeg"
        assert opening_of(other) is None
    monkeypatch.setattr(of_tensors, "__module__", "mine")
    assert opening_of(decode_tensor) is None


@pytest.mark.parametrize("options", [{}, {"mode": "RGB"}, {"mode": "RGB", "turns": True}], ids=str)
@pytest.mark.parametrize("storage", ["none", "shared", "source"])
def test_a_known_loader_of_tensors_gives_its_own_samples(
    tmp_path: Path,
    decode_tensor: Callable[..., torch.Tensor],
    options: dict[str, Any],
    storage: Any,
    road: str,
) -> None:
    """Gray and turned JPEG files, PNG and damaged ones come out as the loader itself has them, alone and in batches."""
    loader = partial(decode_tensor, **options) if options else decode_tensor
    (tmp_path / "a").mkdir()
    names = ["baseline_420.jpg", "gray.jpg", "exif_rotated.jpg", "progressive.jpg", "rgb.png"]
    for name in names:
        (tmp_path / "a" / name).write_bytes(FILES[name]())
    chosen = {"codec": "source"} if storage == "source" else {"storage": storage}
    crop = transforms.CenterCrop(9)
    is_rgb = options.get("mode") == "RGB"
    with ImageFolder(tmp_path, loader=loader, **chosen) as dataset:
        wanted = [loader(path) for path, _ in dataset.samples]
        assert all(torch.equal(dataset[i][0], image) for i, image in enumerate(wanted))
    with ImageFolder(tmp_path, crop, loader=loader, **chosen) as dataset:
        if is_rgb:
            (batch,) = DataLoader(dataset, batch_size=5)
            assert torch.equal(batch[0], torch.stack(list(map(crop, wanted))))
        assert all(torch.equal(dataset[i][0], crop(image)) for i, image in enumerate(wanted))
    (tmp_path / "a" / "baseline_420.jpg").write_bytes(BAD_FILES["data_cut.jpg"]())
    with (
        pytest.raises(SampleError, match=r"baseline_420.jpg.* truncated"),
        ImageFolder(tmp_path, loader=loader, **chosen).prepare() as dataset,
    ):
        dataset.__getitems__([0])


def test_a_report_says_where_pillow_decodes(image_folder: Any, road: str) -> None:
    """Without a shared libjpeg-turbo batches are the same, and report() says why they take longer."""
    steps = transforms.Compose([transforms.CenterCrop(5), transforms.PILToTensor()])
    with ImageFolder(image_folder(), steps, storage="none") as dataset:
        path = DataLoader(dataset, batch_size=6).report().path
        assert ("of files that Pillow decodes whole (none)" in path) == (road == "pil")
        wanted = [
            transforms.PILToTensor()(steps.transforms[0](pil_loader(path)))
            for path, _ in dataset.samples
        ]
        assert torch.equal(dataset.__getitems__(range(6)).stacked[0], torch.stack(wanted))


# Resizing


@pytest.mark.parametrize("size", [20, 35, 60, (20, 30), (35, 53)])
def test_resize_gives_torchvisions_pixels(size: Any) -> None:
    """An int is the shorter side, a pair is (height, width), bit for bit."""
    image = photo()
    expected = functional.resize(image, [size] if isinstance(size, int) else size)
    assert Resize(size)(image).tobytes() == expected.tobytes()
    assert Resize(size)(image).size == expected.size


@pytest.mark.parametrize("size", [0, -3, (3, 3, 3), (3,), (), (20, 0), (2.5, 3), "64"])
def test_resize_refuses_what_is_no_size(size: Any) -> None:
    """The error shows what was given, at once and not at the first sample."""
    with pytest.raises(
        ValueError, match=r"is not a size\. Give the shorter side in pixels, "
    ) as caught:
        Resize(size)
    assert repr(size) in str(caught.value)


def test_resize_refuses_what_is_no_image() -> None:
    """A tensor is not resized in silence by another rule."""
    with pytest.raises(
        TypeError,
        match=r"resize= needs PIL images, but the sample is a Tensor\. Leave resize= out, and resize",
    ):
        Resize(4)(torch.zeros(3, 5, 6))


def test_extensions_are_torchvisions() -> None:
    """The same files count as images."""
    assert IMAGE_EXTENSIONS == folder.IMG_EXTENSIONS


# Stored arrays


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L"])
def test_pil_images_are_stored_planar_and_come_back(mode: str) -> None:
    """Planes are the channels in order; to_pil restores every pixel from strided memory too."""
    image = photo(mode, (6, 5))
    array, form = to_stored(image)
    bands = len(image.getbands())
    assert form == "pil"
    assert array.flags.c_contiguous
    assert np.array_equal(array, np.asarray(image).reshape(5, 6, bands).transpose(2, 0, 1))
    back = to_pil(array)
    assert (back.mode, back.size, back.tobytes()) == (image.mode, image.size, image.tobytes())
    mirrored = to_pil(array[:, :, ::-1])
    assert mirrored.tobytes() == image.transpose(Image.Transpose.FLIP_LEFT_RIGHT).tobytes()


@pytest.mark.parametrize(("mode", "dtype"), [("I;16", "uint16"), ("I", "int32"), ("F", "float32")])
def test_wide_pil_images_keep_their_values(mode: str, dtype: str) -> None:
    """One channel of 16 or 32 bits goes to (1, H, W) and back unchanged."""
    values = (np.arange(30).reshape(5, 6) * 2001).astype(dtype)
    array, form = to_stored(Image.fromarray(values))
    assert (array.shape, array.dtype.name, form) == ((1, 5, 6), dtype, "pil")
    assert np.array_equal(array[0], values)
    assert to_pil(array).mode == mode
    assert np.array_equal(np.asarray(to_pil(array)), values)


@pytest.mark.parametrize(
    "look",
    [
        ImageOps.exif_transpose,
        lambda image: image.copy().getexif(),
        lambda image: image.crop((1, 1, 4, 3)).resize((9, 8)).convert("L").getexif(),
        lambda image: image.info.get("exif") or b"",
        lambda image: pickle.loads(pickle.dumps(image)).getexif(),
    ],
)
def test_an_image_without_its_exif_says_so(look: Any) -> None:
    """Using the EXIF of a stored image, or of one made from it, raises; it can be saved in any format."""
    image, pair = to_pil(np.zeros((3, 5, 6), np.uint8)), (to_pil(np.zeros((1, 5, 6), np.uint8)), 3)
    assert without_exif(image) is image
    assert without_exif(pair) is pair
    for lost in (image, pair[0]):
        with pytest.raises(
            LookupError,
            match=r"from a store, which does not keep EXIF data .*exif_transpose as the first",
        ):
            look(lost)
    assert pickle.loads(pickle.dumps(image)) == image
    assert str(image.info) == "{'exif': <not stored>}"
    for kind in ("JPEG", "PNG", "WEBP", "TIFF"):
        assert saved(image, kind)


def test_an_image_made_from_the_store_owns_its_pixels() -> None:
    """Overwriting the array later does not change the image."""
    for bands in (1, 3):
        array = np.full((bands, 5, 6), 7, np.uint8)
        image = to_pil(array)
        array[:] = 9
        assert np.asarray(image).max() == 7


@pytest.mark.parametrize("mode", ["P", "1", "CMYK", "LA", "YCbCr", "HSV"])
def test_other_modes_are_refused_with_their_cure(mode: str) -> None:
    """The error names the mode, the modes that work and the prepare= that converts."""
    with pytest.raises(
        TypeError,
        match=rf"mode '{mode}' cannot be stored.*prepare= of CachedDataset: im.convert\('RGB'\)",
    ):
        to_stored(Image.new(mode, (6, 5)))


def test_tensors_and_arrays_are_views() -> None:
    """No copy is made, gradients are looked through, and the form comes back."""
    tensor = torch.arange(30.0).reshape(5, 6).requires_grad_()
    array, form = to_stored(tensor)
    assert form == "tensor"
    array[0, 0] = 99
    assert tensor[0, 0] == 99
    assert torch.equal(from_stored(array, "tensor"), tensor.detach())
    values = np.arange(4)
    array, form = to_stored(values)
    assert array is values
    assert form == "array"
    assert from_stored(values, "array") is values
    assert from_stored(np.zeros((3, 5, 6), np.uint8), "pil").size == (6, 5)


@pytest.mark.parametrize(
    ("name", "shape"), [("Image", (3, 5, 6)), ("Mask", (5, 6)), ("Video", (2, 3, 5, 6))]
)
def test_tv_tensors_come_back_over_their_memory(name: str, shape: tuple[int, ...]) -> None:
    """Torchvision's tensors give a view of their memory, and come back with their class, if that is imported."""
    tv_tensors = pytest.importorskip(
        "torchvision.tv_tensors", reason="the subject is torchvision's"
    )
    sample = getattr(tv_tensors, name)(
        torch.arange(math.prod(shape), dtype=torch.uint8).reshape(shape)
    )
    array, form = to_stored(sample)
    assert array.__array_interface__["data"][0] == sample.data_ptr()
    again = from_stored(array, form)
    assert type(again) is type(sample)
    assert torch.equal(again, sample)
    with pytest.MonkeyPatch.context() as patched:
        patched.delitem(sys.modules, "torchvision.tv_tensors")
        with pytest.raises(
            ImportError, match=rf"tv_tensors\.{name}, but this process .* `import torchvision"
        ):
            from_stored(array, form)


class _Named(torch.Tensor):
    """A user's own class."""


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (
            [1, 2],
            r"sample of type list cannot be stored, only PIL images, tensors and NumPy arrays",
        ),
        (np.array([None]), r"array of object cannot be stored\. Convert it to a numeric dtype"),
        (np.array(["a"]), r"array of <U1 cannot be stored\. Convert it to a numeric dtype"),
        (np.array(["2020"], "M8[Y]"), r"array of datetime64\[Y\] cannot be stored"),
        (
            torch.zeros(2, dtype=torch.bfloat16),
            r"tensor of torch\.bfloat16.* Return its \.float\(\)",
        ),
        (torch.zeros(2).to_sparse(), r"torch\.sparse_coo, .* or \.to_dense\(\)"),
        (torch.zeros(2, device="meta"), r"tensor on meta cannot be stored\. Return its \.cpu\(\)"),
        (
            torch.zeros(2).as_subclass(_Named),
            r"a _Named cannot be stored as a sample, .* its \.as_subclass\(torch.Tensor\)",
        ),
    ],
    ids=["list", "objects", "texts", "times", "bfloat16", "sparse", "device", "subclass"],
)
def test_samples_that_cannot_be_stored_say_why(sample: Any, message: str) -> None:
    """Each refusal names what was found and what to do."""
    with pytest.raises(TypeError, match=message):
        to_stored(sample)


@pytest.mark.parametrize("array", [np.zeros((2, 5, 6), np.uint8), np.zeros((3, 5, 6), np.float32)])
def test_arrays_that_are_no_image_are_refused(array: np.ndarray) -> None:
    """Two channels, or three of float, have no PIL mode."""
    with pytest.raises(
        TypeError, match=r"cannot be a PIL image\. Store 1, 3 or 4 channels of uint8"
    ):
        to_pil(array)


# Errors of one sample


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "an empty file (0 bytes)"),
        (
            b"hello world, no image",
            "a file of 21 bytes, of no known image format: it starts with b'hello world, no '",
        ),
        (BAD_FILES["data_cut.jpg"](), "a JPEG without its end, probably cut off"),
        (FILES["444.jpg"](), "a JPEG."),
        (BAD_FILES["cut.png"](), "a damaged PNG"),
        (FILES["lossy.webp"]()[:-50], "a damaged WebP"),
        (b"\n <HTML><body>404", "an HTML page, probably a failed download"),
        (b"\0\0\0\x18ftypheic", "a HEIC or AVIF image, which Pillow may open only with a plugin"),
        (
            b"version https://git-lfs.github.com/spec/v1\n",
            "a Git LFS pointer; fetch the file with `git lfs pull`",
        ),
        (bytes(4096), "a file of 4,096 bytes, only zeros at its start"),
        (None, "a file that cannot be opened (No such file or directory)"),
    ],
    ids=lambda value: value.split(",")[0][-24:] if isinstance(value, str) else "",
)
def test_a_bad_file_is_described(tmp_path: Path, content: bytes | None, found: str) -> None:
    """The error has index, path, PIL's words, what the file is, and the cure."""
    path = tmp_path / "x.jpg"
    if content is not None:
        path.write_bytes(content)
    error = sample_error(str(path), 17, OSError("broken data stream."))
    assert isinstance(error, SampleError)
    assert (error.index, error.path) == (17, str(path))
    assert str(error).startswith(
        f"sample 17, {path}, cannot be read: OSError: broken data stream. It is "
    )
    assert found in str(error)
    assert str(error).endswith("Delete or replace the file, or leave it out with on_error='skip'.")


def test_a_sample_without_a_file_is_described() -> None:
    """Without a path the dataset is what to correct."""
    assert str(sample_error(None, 3, KeyError("x"))) == (
        "sample 3 cannot be read: KeyError: 'x'. Correct the dataset, or leave it out with on_error='skip'."
    )


@pytest.mark.parametrize("path", [None, "x.jpg"])
def test_a_type_is_not_cured_by_leaving_samples_out(path: str | None) -> None:
    """An error of the user's code is raised under on_error="skip", which would otherwise leave out every sample."""
    text = str(sample_error(path, 3, TypeError("a sample of type dict cannot be stored")))
    assert "Correct " in text
    assert "on_error" not in text
