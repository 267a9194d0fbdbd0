"""How small and how fast are photographs, drawings and masks with each codec?

For each kind of sample: its compression ratio, and the samples per second that one core encodes and decodes. Then the
codecs are compared with the libraries they use: undoing the prediction with ``np.cumsum``, LZ4 with bare
``lz4.block``, JPEG with plain Pillow, by one thread and by two. All samples are decoded in turn, into one array;
competitors take turns.
"""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import lz4.block
import numpy as np
from PIL import Image, ImageDraw

from _helper import Row, class_folders, in_turns, parser, print_rows, save_rows, transforms
from fastdata.pixels.scratch import Scratch
from fastdata.stores.codecs import Codec, JpegCodec, Lz4Codec, ZstdCodec
from fastdata.stores.prediction import ABOVE, GREEN, LEFT, apply_filter, layout_of, undo_filter

SIDE = 256
ROUND_S = 0.5
GB = 1e9
CODECS: dict[str, Codec] = {
    "lz4": Lz4Codec(),
    "zstd": ZstdCodec(),
    "zstd, level=9": ZstdCodec(level=9),
    "jpeg": JpegCodec(),
    "jpeg, 4:2:0": JpegCodec(subsampling="4:2:0"),
}

Samples = list[np.ndarray]


def photographs(root: Path) -> Samples:
    """Return every image of the folder, prepared at 256 x 256."""
    prepare = transforms.Compose([transforms.Resize(SIDE), transforms.CenterCrop(SIDE)])
    paths = sorted(path for path in root.rglob("*") if path.is_file())
    return [planar(prepare(Image.open(path).convert("RGB"))) for path in paths]


def drawings(count: int) -> Samples:
    """Return drawings (3, H, W) of filled shapes with antialiased edges on white."""
    return [
        planar(drawn(seed, "RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR))
        for seed in range(count)
    ]


def masks(count: int) -> Samples:
    """Return label masks (H, W) of uint8 with ten classes and a background."""
    return [
        np.asarray(drawn(seed, "L").resize((SIDE, SIDE), Image.Resampling.NEAREST)).copy()
        for seed in range(count)
    ]


def depths(count: int) -> Samples:
    """Return depth maps (1, H, W) of uint16: a tilted ground, shapes on it, noise of 1 in 1,000."""
    ground = np.linspace(40_000, 4_000, SIDE)[:, None]
    noise = np.random.default_rng(0).normal(1, 0.001, (count, SIDE, SIDE))
    return [
        ((ground - 300.0 * mask) * grain).clip(0, 65_535).astype("u2")[None]
        for mask, grain in zip(masks(count), noise, strict=True)
    ]


def drawn(seed: int, mode: str) -> Image.Image:
    rng = np.random.default_rng(seed)
    image = Image.new(mode, (2 * SIDE, 2 * SIDE), "white" if mode == "RGB" else 0)
    pen = ImageDraw.Draw(image)
    for label in range(1, 11):
        x, y, width, height = rng.integers(0, 2 * SIDE, 4) // (1, 1, 3, 3)
        fill = tuple(rng.integers(0, 256, 3).tolist()) if mode == "RGB" else label
        (pen.ellipse if label % 2 else pen.rectangle)((x, y, x + width, y + height), fill=fill)
    return image


def planar(image: Image.Image) -> np.ndarray:
    return np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))


def rate(action: Callable[[int], object], count: int, threads: int = 1) -> float:
    """Return how often a second the threads together call ``action(k)``; each counts its own k from 0 on."""
    done = [0] * threads

    def work(number: int) -> None:
        while time.perf_counter() - start < ROUND_S:
            for k in range(min(count, 50)):
                action((done[number] + k) % count)
            done[number] += min(count, 50)

    start = time.perf_counter()
    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(done) / (time.perf_counter() - start)


def decoding(codec: Codec, encoded: list[bytes], like: np.ndarray) -> Callable[[int], None]:
    """Return a function that decodes sample k into memory that belongs to its thread."""
    views, scratch = [memoryview(data) for data in encoded], Scratch()

    def decode(k: int) -> None:
        codec.decode(
            views[k], scratch.take("out", (like.nbytes,)).view(like.dtype).reshape(like.shape)
        )

    return decode


def sizes_and_rates(kind: str, samples: Samples, rounds: int) -> list[Row]:
    """Measure ratio, encoding and decoding on one core, for every codec that accepts such samples."""
    shape = " x ".join(map(str, samples[0].shape))
    section = f"{kind}, {len(samples)} of {shape} {samples[0].dtype}"
    rows, measures = [], {}
    for name, codec in CODECS.items():
        try:
            encoded = [codec.encode(sample) for sample in samples]
        except ValueError:  # JPEG refuses samples other than photographs
            continue
        ratio = sum(sample.nbytes for sample in samples) / sum(map(len, encoded))
        target = "1.7" if (kind, name) == ("photographs", "zstd") else ""
        rows.append(
            Row(
                section=section, name=f"{name}: ratio", unit="times", rounds=(ratio,), target=target
            )
        )
        measures[f"{name}: encode"] = partial(
            rate, lambda k, codec=codec: codec.encode(samples[k]), len(samples)
        )
        measures[f"{name}: decode"] = partial(
            rate, decoding(codec, encoded, samples[0]), len(samples)
        )
    for name, figures in in_turns(measures, rounds).items():
        target = "2,500" if (kind, name) == ("photographs", "zstd: decode") else ""
        rows.append(
            Row(section=section, name=name, unit="samples/s", rounds=figures, target=target)
        )
    return sorted(rows, key=lambda row: row.name.split(":")[0])


def undoing(samples: Samples, rounds: int) -> list[Row]:
    """Compare undoing the prediction a machine word at a time with ``np.cumsum`` of bytes along the row."""
    sample = samples[0]
    layout, out = layout_of(sample.shape, sample.dtype), np.empty_like(sample)
    chosen = GREEN | ABOVE | LEFT
    filtered = apply_filter(sample.reshape(-1), layout, chosen).copy()
    left_CHW = np.diff(sample, axis=2, prepend=sample.dtype.type(0))

    def in_words(k: int) -> None:
        undo_filter(filtered, layout, chosen, out.reshape(-1))

    def in_bytes(k: int) -> None:
        np.add.accumulate(left_CHW, axis=2, out=out)

    def copying(k: int) -> None:
        out[...] = sample

    competitors = {
        "copy": copying,
        "np.cumsum of bytes, left only": in_bytes,
        "words: green, above, left": in_words,
    }
    per_call = sample.nbytes / GB
    figures = in_turns(
        {
            name: lambda action=action: per_call * rate(action, 50)
            for name, action in competitors.items()
        },
        rounds,
    )
    rival = "np.cumsum of bytes, left only"
    row = partial(
        Row,
        section="undoing the prediction of 3 x 256 x 256 bytes, one core",
        unit="GB/s",
        against=rival,
    )
    targets = {"words: green, above, left": "1 GB/s"}
    return [
        row(name=name, rounds=figures[name], target=targets.get(name, "")) for name in competitors
    ]


def threads_of_lz4(samples: Samples, rounds: int) -> list[Row]:
    """Compare LZ4 into given memory with ``lz4.block.decompress`` alone."""
    encoded = [Lz4Codec().encode(sample) for sample in samples]
    size, decode = samples[0].nbytes, decoding(Lz4Codec(), encoded, samples[0])

    def bare(k: int) -> None:
        lz4.block.decompress(encoded[k], uncompressed_size=size)

    return against(
        "lz4 of photographs",
        "lz4.block.decompress",
        bare,
        decode,
        len(samples),
        rounds,
        "1.4: 0.7 a core",
    )


def threads_of_jpeg(samples: Samples, rounds: int) -> list[Row]:
    """Compare JPEG into planar memory with Pillow into an interleaved array."""
    encoded = [JpegCodec().encode(sample) for sample in samples]

    def plain(k: int) -> None:
        np.asarray(Image.open(io.BytesIO(encoded[k])).convert("RGB"))

    decode = decoding(JpegCodec(), encoded, samples[0])
    return against(
        "jpeg of photographs", "np.asarray of Pillow", plain, decode, len(samples), rounds, "1.7"
    )


def threads_of_zstd(samples: Samples, rounds: int) -> list[Row]:
    """Compare Zstandard in one thread and in two."""
    encoded = [ZstdCodec().encode(sample) for sample in samples]
    decode = decoding(ZstdCodec(), encoded, samples[0])
    figures = in_turns({n: partial(rate, decode, len(samples), n) for n in (1, 2)}, rounds)
    row = partial(
        Row, section="zstd of photographs, by threads", unit="images/s", against="codec, 1 thread"
    )
    return [
        row(name="codec, 1 thread", rounds=figures[1]),
        row(name="codec, 2 threads", rounds=figures[2]),
    ]


def against(
    section: str,
    rival: str,
    bare: Callable[[int], None],
    decode: Callable[[int], None],
    count: int,
    rounds: int,
    target: str,
) -> list[Row]:
    competitors = {f"{rival}, 1 thread": (bare, 1), f"{rival}, 2 threads": (bare, 2)}
    competitors |= {"codec, 1 thread": (decode, 1), "codec, 2 threads": (decode, 2)}
    figures = in_turns(
        {name: partial(rate, action, count, n) for name, (action, n) in competitors.items()}, rounds
    )
    row = partial(
        Row, section=f"{section}, by threads", unit="images/s", against=f"{rival}, 1 thread"
    )
    targets = {"codec, 2 threads": target}
    return [
        row(name=name, rounds=figures[name], target=targets.get(name, "")) for name in competitors
    ]


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument(
        "--count",
        type=int,
        default=200,
        help="number of drawings, masks and depth maps of each kind",
    )
    chosen = options.parse_args()
    with class_folders(chosen.images, count=None if chosen.images else chosen.count) as (
        root,
        what,
    ):
        photos = photographs(root)
    print(what)
    rows = sizes_and_rates("photographs", photos, chosen.rounds)
    for make in (drawings, masks, depths):
        rows += sizes_and_rates(make.__name__, make(chosen.count), chosen.rounds)
    for measure in (undoing, threads_of_lz4, threads_of_zstd, threads_of_jpeg):
        rows += measure(photos, chosen.rounds)
    print_rows(rows)
    save_rows(rows, chosen.json, images=what, rounds=chosen.rounds, round_s=ROUND_S)


if __name__ == "__main__":
    main()
