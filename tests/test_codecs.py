"""Every codec passes one contract, and the byte formats do not change unnoticed."""

from __future__ import annotations

import json
import multiprocessing
import pickle
import threading
from pathlib import Path

import numpy as np
import pytest
import zstandard
from PIL import ImageFile

from children import run_elsewhere
from conftest import shown
from fastdata import FastDataError
from fastdata.errors import CodecError
from fastdata.stores.codecs import (
    KNOWN_CODECS,
    Codec,
    JpegCodec,
    Lz4Codec,
    ZstdCodec,
    codec_of,
    find_codec,
)
from fastdata.stores.prediction import ABOVE, GREEN, LEFT, apply_filter, layout_of, undo_filter

GOLDEN = Path(__file__).parent / "golden"


class Inverted:
    """A user's codec with only the two methods."""

    def encode(self, sample: np.ndarray) -> bytes:
        return bytes(255 - byte for byte in sample.tobytes())

    def decode(self, data: memoryview, out: np.ndarray) -> None:
        out[...] = np.frombuffer(bytes(255 - byte for byte in data), out.dtype).reshape(out.shape)


OWN = {
    "lz4": Lz4Codec(),
    "zstd": ZstdCodec(),
    "zstd -5": ZstdCodec(level=-5),
    "zstd 9": ZstdCodec(level=9),
    "jpeg": JpegCodec(),
    "jpeg 4:2:0": JpegCodec(quality=50, subsampling="4:2:0"),
}
CODECS: dict[str, Codec] = {**OWN, "user": find_codec(Inverted())}
LOSSLESS = {name: codec for name, codec in CODECS.items() if codec.lossless}
SHAPES = [
    *((3, 5, 6), (3, 37, 41), (3, 16, 64), (1, 9, 33), (4, 7, 40), (2, 3, 4, 36)),
    *((7, 50), (5, 1), (3, 70, 1), (19,), (1,), (), (0,), (3, 0, 6)),
]
DTYPES = [
    *(
        "uint8",
        "int8",
        "bool",
        "uint16",
        "int16",
        "int32",
        "int64",
        "float16",
        "float32",
        "float64",
    ),
    *("complex64", "complex128", "longdouble", ">u2", ">f8", "S3", "M8[s]"),
]


def sample_of(shape: tuple[int, ...], dtype: str = "uint8") -> np.ndarray:
    """Return a smooth sample with some noise: filters gain, and every element differs from its neighbours."""
    rng = np.random.default_rng(7)
    count = int(np.prod(shape))
    values = np.cumsum(rng.integers(-3, 5, count)) % 251
    return values.astype("M8[s]" if dtype == "M8[s]" else dtype).reshape(shape)


def images_of(codec: Codec, shape: tuple[int, ...] = (3, 11, 14)) -> np.ndarray:
    """Return a sample that every codec can store."""
    return np.linspace(0, 255, int(np.prod(shape))).astype(np.uint8).reshape(shape)


def decoded(codec: Codec, data: bytes | memoryview, like: np.ndarray) -> np.ndarray:
    """Decode into memory that holds other bytes before."""
    out = np.empty_like(like)
    out.reshape(-1).view(np.uint8)[...] = 0xA5
    codec.decode(memoryview(data), out)
    return out


def same_bits(found: np.ndarray, wanted: np.ndarray) -> bool:
    return (
        found.dtype == wanted.dtype
        and found.shape == wanted.shape
        and found.tobytes() == wanted.tobytes()
    )


@pytest.fixture(params=CODECS.values(), ids=CODECS)
def codec(request: pytest.FixtureRequest) -> Codec:
    return request.param


@pytest.fixture(params=OWN.values(), ids=OWN)
def own(request: pytest.FixtureRequest) -> Codec:
    return request.param


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize("shape", SHAPES, ids=shown)
def test_lossless_samples_come_back_bit_for_bit(name: str, shape: tuple[int, ...]) -> None:
    """Any dtype, byte order and shape comes back equal, including odd widths, no axes and no elements."""
    for dtype in DTYPES:
        sample = sample_of(shape, dtype)
        assert same_bits(decoded(LOSSLESS[name], LOSSLESS[name].encode(sample), sample), sample), (
            dtype
        )


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *(((3, 256, 256), "u1"), ((3, 200, 201), "u1"), ((200_001,), "u1"), ((90_000, 3), "u1")),
        *(((3, 1, 50_001), "u1"), ((3, 90_001, 1), "u1"), ((200, 300), "f4"), ((64, 40, 40), "u2")),
    ],
)
def test_large_samples_come_back_bit_for_bit(shape: tuple[int, ...], dtype: str) -> None:
    """Large samples, whose filter is chosen on a strip, come back equal."""
    sample = sample_of(shape, dtype)
    assert same_bits(decoded(ZstdCodec(), ZstdCodec().encode(sample), sample), sample)


@pytest.mark.parametrize("dtype", ["u1", "u2", "f4", "f8"])
@pytest.mark.parametrize("shape", [(3, 8, 40), (3, 9, 35), (3, 6, 2), (3, 1, 33)], ids=shown)
def test_every_filter_is_undone(dtype: str, shape: tuple[int, ...]) -> None:
    """Each combination of filters returns the sample, also for random bits and carries between bytes."""
    layout = layout_of(shape, np.dtype(dtype))
    for chosen in range(1, 16):
        raw = np.random.default_rng(chosen).integers(
            0, 256, int(np.prod(shape)) * np.dtype(dtype).itemsize, np.uint8
        )
        filtered = np.zeros(layout.size, np.uint8)
        filtered[...] = apply_filter(raw, layout, chosen)
        out = np.full(raw.size, 0xA5, np.uint8)
        undo_filter(filtered, layout, chosen, out)
        assert np.array_equal(out, raw), chosen


def test_the_filters_are_the_documented_arithmetic() -> None:
    """ABOVE subtracts the row above and LEFT the left element of the word, both as little-endian integers."""
    sample = np.random.default_rng(0).integers(0, 256, (2, 4, 40), np.uint8)
    layout = layout_of(sample.shape, sample.dtype)
    assert layout.words == (2, 4, 5)
    words = [
        [[int.from_bytes(row[k : k + 8], "little") for k in range(0, 40, 8)] for row in plane]
        for plane in sample
    ]
    above = [
        [
            [(w - (plane[r - 1][k] if r else 0)) % 2**64 for k, w in enumerate(row)]
            for r, row in enumerate(plane)
        ]
        for plane in words
    ]
    wanted = b"".join(
        ((w - (w << 8)) % 2**64).to_bytes(8, "little")
        for plane in above
        for row in plane
        for w in row
    )
    assert apply_filter(sample.reshape(-1), layout, ABOVE | LEFT).tobytes() == wanted


def test_photographs_shrink_by_prediction() -> None:
    """Smooth noisy colours get the filter with all three steps; a mask with few values gets none."""
    y, x = np.mgrid[:96, :96]
    grey = (
        90 + 40 * np.sin(x / 9) * np.cos(y / 11) + np.random.default_rng(0).normal(0, 2, (96, 96))
    )
    photo = np.stack([grey + 20, grey, grey - 30]).clip(0, 255).astype(np.uint8)
    codec = ZstdCodec()
    assert codec.encode(photo)[0] == GREEN | ABOVE | LEFT
    assert len(codec.encode(photo)) < 0.5 * photo.nbytes
    mask = (
        np.random.default_rng(0).integers(0, 3, (12, 12)).astype(np.uint8).repeat(8, 0).repeat(8, 1)
    )
    assert len(codec.encode(mask)) < 0.03 * mask.nbytes


def test_wide_samples_shrink_by_prediction() -> None:
    """A smooth 16-bit image takes less than half, while plain zstd gains little."""
    y, x = np.mgrid[:96, :96]
    depth = (20_000 + 90 * x + 55 * y + np.random.default_rng(0).normal(0, 9, (96, 96))).astype(
        np.uint16
    )
    assert len(ZstdCodec().encode(depth)) < 0.5 * depth.nbytes < len(Lz4Codec().encode(depth))


def test_jpeg_changes_little(own: Codec) -> None:
    """The pixels of a lossy codec are near the sample's; those of all others are equal."""
    sample = images_of(own, (3, 33, 47))
    difference = np.abs(decoded(own, own.encode(sample), sample).astype(int) - sample)
    assert difference.mean() <= (0 if own.lossless else 4)


@pytest.mark.parametrize("channels", [1, 3])
def test_both_jpeg_decoders_give_the_same_pixels(
    channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The core with PIL's libjpeg-turbo, and PIL alone, decode a file to the same pixels."""
    sample = np.random.default_rng(0).integers(0, 256, (channels, 19, 23), np.uint8)
    for subsampling in ("4:4:4", "4:2:2", "4:2:0"):
        codec = JpegCodec(subsampling=subsampling)
        data = codec.encode(sample)
        here = decoded(codec, data, sample)
        with monkeypatch.context() as without:
            without.setattr("fastdata.pixels.decode.open_libjpeg", lambda: (None, "none"))
            assert np.array_equal(decoded(codec, data, sample), here)


def test_data_may_lie_anywhere(codec: Codec) -> None:
    """Data at an odd offset of a read-only view are decoded into memory at an odd address."""
    sample = images_of(codec, (3, 16, 64))
    data = codec.encode(sample)
    view = memoryview(b"x" * 3 + data + b"y" * 5)[3 : 3 + len(data)]
    out = np.zeros(sample.size + 1, np.uint8)[1:].reshape(sample.shape)
    codec.decode(view, out)
    assert np.array_equal(out, decoded(codec, data, sample))


def test_only_the_samples_memory_is_written(codec: Codec) -> None:
    """Decoding into one sample of a batch does not change its neighbours."""
    sample = images_of(codec)
    batch = np.full((3, *sample.shape), 0xA5, np.uint8)
    codec.decode(memoryview(codec.encode(sample)), batch[1])
    assert np.array_equal(batch[1], decoded(codec, codec.encode(sample), sample))
    assert (batch[0] == 0xA5).all()
    assert (batch[2] == 0xA5).all()


def test_encode_leaves_the_sample_alone(codec: Codec) -> None:
    """A read-only sample can be encoded, and gives the same bytes again."""
    sample = images_of(codec)
    sample.flags.writeable = False
    assert isinstance(codec.encode(sample), bytes)
    assert codec.encode(sample) == codec.encode(sample)


def test_threads_work_at_once(codec: Codec) -> None:
    """Four threads that use one codec for different samples get the results of one thread."""
    samples = [images_of(codec, (3, 16, 40)) // (k + 1) for k in range(4)]
    alone = [decoded(codec, codec.encode(sample), sample) for sample in samples]
    wrong: list[int] = []
    start = threading.Barrier(4)

    def work(k: int) -> None:
        start.wait()
        results = (decoded(codec, codec.encode(samples[k]), samples[k]) for _ in range(50))
        wrong.extend(k for result in results if not np.array_equal(result, alone[k]))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def check_in_child(codec: Codec, data: bytes, wanted: np.ndarray) -> None:
    """Exit with an error unless the codec works here."""
    if not np.array_equal(decoded(codec, data, wanted), wanted) or codec.encode(wanted) is None:
        raise SystemExit(3)


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_codecs_work_in_other_processes(method: str) -> None:
    """A codec that was used before a fork, or is pickled to a new process, decodes there."""
    codec = ZstdCodec()
    sample = images_of(codec)
    data = codec.encode(sample)
    decoded(codec, data, sample)
    child = multiprocessing.get_context(method).Process(
        target=check_in_child, args=(codec, data, sample)
    )
    child.start()
    child.join()
    assert child.exitcode == 0


def test_codecs_pickle(codec: Codec) -> None:
    """A copy decodes data of the original, and a pickle has a few hundred bytes however much the codec was used."""
    sample = images_of(codec, (3, 64, 64))
    data = codec.encode(sample)
    pickled = pickle.dumps(codec)
    assert len(pickled) < 300
    assert np.array_equal(
        decoded(pickle.loads(pickled), data, sample), decoded(codec, data, sample)
    )


def test_cut_off_data_raise(own: Codec) -> None:
    """Any number of missing bytes at the end is a CodecError, and the codec still works afterwards."""
    sample = images_of(own, (3, 9, 40))
    data = own.encode(sample)
    for length in range(
        len(data) - 2 * (own.name == "jpeg")
    ):  # without its end mark a JPEG is complete all the same
        with pytest.raises(CodecError, match="repare the samples again"):
            decoded(own, data[:length], sample)
    decoded(own, data, sample)


def test_a_frame_that_ends_early_raises() -> None:
    """A zstd frame that was cut before its length was written is a CodecError for every filter."""
    for sample in (images_of(ZstdCodec(), (3, 9, 40)), sample_of((40_000,))):
        data = ZstdCodec().encode(sample)
        for kept in range(min(len(data) - 5, 200)):
            cut = data[:1] + kept.to_bytes(4, "little") + data[5 : 5 + kept]
            with pytest.raises(CodecError, match="damaged"):
                decoded(ZstdCodec(), cut, sample)


def test_too_long_data_raise() -> None:
    """Bytes after the end are a CodecError; for a JPEG its own end mark counts."""
    for codec in (Lz4Codec(), ZstdCodec()):
        sample = images_of(codec)
        with pytest.raises(CodecError):
            decoded(codec, codec.encode(sample) + b"\0\0", sample)


def test_flipped_bits_never_crash(own: Codec) -> None:
    """Each inverted byte gives a CodecError or a complete sample, and no other memory is written."""
    sample = images_of(own, (3, 6, 40))
    data = bytearray(own.encode(sample))
    batch = np.full((3, *sample.shape), 0xA5, np.uint8)
    errors = 0
    for position in range(len(data)):
        data[position] ^= 0xFF
        try:
            own.decode(memoryview(data), batch[1])
        except CodecError:
            errors += 1
        data[position] ^= 0xFF
    assert errors
    assert (batch[[0, 2]] == 0xA5).all()


@pytest.mark.parametrize(
    "shape", [(3, 11, 13), (3, 11, 15), (3, 12, 14), (1, 11, 14), (3, 110, 140)], ids=shown
)
def test_another_size_raises(own: Codec, shape: tuple[int, ...]) -> None:
    """Data of one sample do not fill memory of another size, smaller or larger."""
    data = own.encode(images_of(own))
    with pytest.raises(CodecError, match="damaged"):
        decoded(own, data, np.empty(shape, np.uint8))


def test_impossible_filters_raise() -> None:
    """A filter that samples of this shape cannot have is a CodecError."""
    sample = sample_of((16, 64))
    data = ZstdCodec().encode(sample)
    with pytest.raises(CodecError, match=r"shape .16, 64. and uint8: filter 7 "):
        decoded(ZstdCodec(), bytes((7,)) + data[1:], sample)
    with pytest.raises(CodecError, match="filter 200"):
        decoded(ZstdCodec(), bytes((200,)) + data[1:], sample)


def test_bombs_are_refused_before_memory_is_taken() -> None:
    """A frame that states more bytes than the sample has, or hides its size, is not decompressed."""
    out = np.empty((3, 5, 6), np.uint8)
    for frame, found in (
        (
            zstandard.ZstdCompressor().compress(bytes(100_000_000)),
            "the frame has 100,000,000 bytes, but 90",
        ),
        (
            zstandard.ZstdCompressor(write_content_size=False).compress(bytes(90)),
            "the frame has -1 bytes|no content size",
        ),
    ):
        with pytest.raises(CodecError, match=found):
            decoded(ZstdCodec(), b"\0" + len(frame).to_bytes(4, "little") + frame, out)


def test_jpeg_headers_are_checked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A JPEG with 65,000 x 65,000 px in its header is refused with its size before any pixel is decoded."""
    data = bytearray(JpegCodec().encode(np.zeros((3, 8, 8), np.uint8)))
    frame = data.index(b"\xff\xc0")
    data[frame + 5 : frame + 9] = (65_000).to_bytes(2, "big") * 2
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda image: pytest.fail("decoded"))
    with pytest.raises(CodecError, match="a JPEG of 65000 x 65000 px in mode RGB"):
        decoded(JpegCodec(), bytes(data), np.zeros((3, 8, 8), np.uint8))


def test_other_image_files_are_no_jpeg() -> None:
    """Damaged data never reach PIL's other decoders."""
    with pytest.raises(CodecError, match="not a JPEG file"):
        decoded(JpegCodec(), b"\x89PNG\r\n\x1a\n" + bytes(50), np.zeros((3, 8, 8), np.uint8))


def test_memory_that_cannot_be_filled_raises(own: Codec) -> None:
    """Read-only memory and memory with gaps are a ValueError that is not a CodecError."""
    sample = images_of(own)
    data = memoryview(own.encode(sample))
    fixed = np.zeros_like(sample)
    fixed.flags.writeable = False
    for out in (fixed, np.zeros((3, 11, 28), np.uint8)[..., ::2]):
        with pytest.raises(ValueError, match="writeable, C-contiguous") as raised:
            own.decode(data, out)
        assert not isinstance(raised.value, CodecError)


@pytest.mark.parametrize("codec", [Lz4Codec(), ZstdCodec()], ids=lambda codec: codec.name)
def test_python_objects_are_refused(codec: Codec) -> None:
    """Arrays of Python objects are refused, because their bytes are pointers."""
    with pytest.raises(TypeError, match="references"):
        codec.encode(np.array([{}, None]))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((3, 8, 8), "uint16"),
        ((8, 8), "uint8"),
        ((4, 8, 8), "uint8"),
        ((3, 0, 8), "uint8"),
        ((3, 1, 65_501), "uint8"),
    ],
)
def test_jpeg_refuses_what_it_would_spoil(shape: tuple[int, ...], dtype: str) -> None:
    """Labels, depths and samples that are not images are a ValueError."""
    with pytest.raises(ValueError, match=r"it would change labels or depths|empty image"):
        JpegCodec().encode(np.zeros(shape, dtype))


def test_settings_rebuild_the_codec(own: Codec) -> None:
    """Settings survive JSON, contain the format's version, and give an equal codec."""
    settings = json.loads(json.dumps(own.settings()))
    assert settings["format"] == 1
    assert codec_of(settings) == own


def test_foreign_settings_are_refused() -> None:
    """Another format, an unknown argument and an unknown codec raise an error with the known ones."""
    settings = ZstdCodec().settings()
    with pytest.raises(
        ValueError, match="codec 'zstd', format 2, but this fastdata reads only format 1"
    ):
        codec_of({**settings, "format": 2})
    with pytest.raises(TypeError, match="unexpected keyword argument 'dictionary'"):
        codec_of({**settings, "dictionary": "x"})
    with pytest.raises(ValueError, match=r"'Inverted', format None.* of lz4, zstd, jpeg"):
        codec_of(find_codec(Inverted()).settings())


def test_names_find_codecs() -> None:
    """Each known name gives its codec; a codec object is returned unchanged."""
    assert [find_codec(name).name for name in KNOWN_CODECS] == ["lz4", "zstd", "jpeg"]
    codec = JpegCodec(quality=80)
    assert find_codec(codec) is codec
    assert find_codec(find_codec(user := Inverted())).codec is user


def test_wrong_codecs_are_explained() -> None:
    """Unknown names, incomplete objects, classes and wrong arguments raise an error with what is needed."""
    for wrong in ("gzip", 5):
        with pytest.raises(
            ValueError, match=f"codec={wrong!r} is neither one of .*'lz4', 'zstd', 'jpeg'"
        ):
            find_codec(wrong)


def test_users_objects_are_asked() -> None:
    """The name and the lossless flag of a user's object are used if it has them."""
    plain = find_codec(Inverted())
    assert (plain.name, plain.lossless) == ("Inverted", True)

    class Rough(Inverted):
        name, lossless = "rough", False

    rough = find_codec(Rough())
    assert (rough.name, rough.lossless) == ("rough", False)


@pytest.mark.parametrize(("name", "library"), [("lz4", "lz4"), ("zstd", "zstandard")])
def test_a_missing_library_is_an_obstacle_that_says_what_to_install(
    name: str, library: str, tmp_path: Path
) -> None:
    """Without lz4 or zstandard, its codec is refused with a cure, and all others work."""
    code = f"""
import sys
sys.modules[{library!r}] = sys.modules[{library + ".block"!r}] = None
import numpy as np
from fastdata import CachedDataset
samples = [(np.zeros((4, 4, 3), np.uint8), 0)] * 3
with CachedDataset(samples, storage="shared") as dataset:
    trials = dataset.storage_report().trials
print([trial.codec for trial in trials if trial.obstacle is None])
try:
    CachedDataset(samples, storage="compressed", codec={name!r})
except ValueError as error:
    print(error)
"""
    done = run_elsewhere(tmp_path, exec, code, {})
    others, error = done.stdout.splitlines()
    assert others == str([other for other in KNOWN_CODECS if other != name])
    cure = f"the codec needs the package {library}: pip install {library}, or use another codec"
    assert f"{name}: {cure}" in error


def test_codec_errors_are_fastdatas() -> None:
    """Damaged data raise an error that is both a FastDataError and a ValueError."""
    assert issubclass(CodecError, FastDataError)
    assert issubclass(CodecError, ValueError)


def golden_samples() -> dict[str, tuple[Codec, np.ndarray]]:
    """Return the samples of the files in tests/golden, made by integer arithmetic only."""
    image = (np.arange(3 * 5 * 6) * 7 % 251).astype(np.uint8).reshape(3, 5, 6)
    plane, y, x = np.indices((3, 24, 40))
    photo = (90 + 3 * x + 2 * y + plane * 5 + (x * x + y * 7 + x * y) % 5).astype(np.uint8)
    depth = (1000 + 37 * x + 59 * y + (x * y) % 7).astype(np.uint16)[0]
    return {
        "lz4_image.bin": (Lz4Codec(), image),
        "lz4_depth.bin": (Lz4Codec(), depth),
        "zstd_image.bin": (ZstdCodec(), image),
        "zstd_photo.bin": (ZstdCodec(), photo),
        "zstd_odd.bin": (ZstdCodec(), np.ascontiguousarray(photo[..., :35])),
        "zstd_depth.bin": (ZstdCodec(), depth),
        "zstd_empty.bin": (ZstdCodec(), np.empty((3, 0, 6), np.float32)),
        "jpeg_image.bin": (JpegCodec(), image),
        "jpeg_grey.bin": (JpegCodec(), image[:1]),
    }


@pytest.mark.parametrize("name", golden_samples())
def test_golden_files_decode(name: str) -> None:
    """Bytes that an earlier version wrote decode to the same sample; JPEG to its pixels within 1 level."""
    codec, sample = golden_samples()[name]
    sample = np.ascontiguousarray(sample)
    out = decoded(codec, (GOLDEN / name).read_bytes(), sample)
    if codec.lossless:
        assert same_bits(out, sample)
    else:
        wanted = np.load(GOLDEN / name.replace(".bin", ".npy"))
        # A libjpeg may round its inverse DCT otherwise.
        assert np.abs(out.astype(int) - wanted).max() <= 1
    assert codec.encode(sample)
