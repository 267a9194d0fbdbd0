"""Caches written as class folders and tars, read back with the very pixels."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import ImageFolder as Vanilla

from conftest import test_image
from fastdata import CachedDataset, ImageFolder
from fastdata.tools.__main__ import main
from fastdata.tools.caches import export_cache

Folder = Callable[..., Path]


@pytest.fixture
def cache(image_folder: Folder, tmp_path: Path) -> Path:
    """Of three images in each of two classes, whole."""
    ImageFolder(image_folder(), cache_dir=tmp_path / "cache", prepare_workers=1).prepare().close()
    return tmp_path / "cache"


def cache_of(folder: Path, items: list[Any]) -> Path:
    CachedDataset(items, cache_dir=folder, cache_key="items", prepare_workers=1).close()
    return folder


def images(count: int) -> list[Image.Image]:
    return [Image.fromarray(test_image(i, (6, 5))) for i in range(count)]


@pytest.mark.parametrize("image_format", ["png"])
def test_class_folders_have_the_pixels_of_the_cache(
    cache: Path, tmp_path: Path, image_format: Any
) -> None:
    """Classes and pixels that torchvision reads are those that the cache serves."""
    count = export_cache(cache, tmp_path / "out", to="folder", image_format=image_format)
    assert count == 6
    theirs = Vanilla(str(tmp_path / "out"))
    with CachedDataset.from_cache(cache) as ours:
        assert theirs.classes == ours.classes == ["cat", "dog"]
        assert theirs.targets == list(ours.targets)
        assert all(theirs[i][0].tobytes() == ours[i][0].tobytes() for i in range(6))


def test_tars_have_the_pixels_of_the_cache(cache: Path, tmp_path: Path) -> None:
    """What fastdata reads from the tars is what the cache serves; class names lie beside."""
    export_cache(cache, tmp_path / "out", to="webdataset")
    with (
        CachedDataset(tmp_path / "out") as theirs,
        CachedDataset.from_cache(cache) as ours,
    ):
        assert list(theirs.targets) == list(ours.targets)
        assert all(theirs[i][0].tobytes() == ours[i][0].tobytes() for i in range(6))
    assert json.loads((tmp_path / "out" / "classes.json").read_text()) == ["cat", "dog"]


def test_tars_are_the_same_each_time(cache: Path, tmp_path: Path) -> None:
    """Two exports are equal byte for byte, and no shard has more bytes of images than were asked for."""
    for name in ("a", "b"):
        export_cache(cache, tmp_path / name, to="webdataset", shard_size=700)
    shards = sorted((tmp_path / "a").glob("*.tar"))
    assert len(shards) > 1
    count = 0
    for shard in shards:
        assert shard.read_bytes() == (tmp_path / "b" / shard.name).read_bytes()
        with tarfile.open(shard) as tar:
            members = tar.getmembers()
            assert {member.mtime for member in members} == {0}
            assert sum(member.size for member in members if member.name.endswith("png")) <= 700
            count += len(members)
    assert count == 12


def test_lossy_images_are_said_to_be(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command says whether pixels are those of the cache; a lower quality takes fewer bytes."""
    sizes = []
    for quality in ("95", "10"):
        out = tmp_path / quality
        words = ["--to", "folder", "--image-format", "jpeg", "--quality", quality]
        assert main(["export", str(cache), str(out), *words]) == 0
        assert f"{out}: 6 samples as jpeg files, pixels changed by lossy" in capsys.readouterr().out
        sizes.append(sum(path.stat().st_size for path in out.rglob("*.jpg")))
    assert sizes[0] > sizes[1]
    assert main(["export", str(cache), str(tmp_path / "png"), "--to", "webdataset"]) == 0
    assert "6 samples as png files, the pixels of the cache" in capsys.readouterr().out


def test_targets_of_other_kinds_are_json(tmp_path: Path) -> None:
    """Vectors, texts and dicts of dict items are written; class folders refuse them."""
    items = [{"image": image, "box": [i, 2.5], "name": f"{i}"} for i, image in enumerate(images(2))]
    cache = cache_of(tmp_path / "cache", items)
    export_cache(cache, tmp_path / "out", to="webdataset")
    with CachedDataset(tmp_path / "out") as dataset:
        assert dataset[1][1] == {"box": [1, 2.5], "name": "1"}
        assert np.array_equal(dataset[1][0], images(2)[1])
    with pytest.raises(
        ValueError, match="class folders keep class names, or whole numbers from 0 on, and some"
    ):
        export_cache(cache, tmp_path / "folder", to="folder")
    tensors = cache_of(
        tmp_path / "tensors", [(image, torch.tensor([i, 1])) for i, image in enumerate(images(2))]
    )
    export_cache(tensors, tmp_path / "vectors", to="webdataset")
    with CachedDataset(tmp_path / "vectors") as dataset:
        assert dataset[1][1] == [1, 1]


def test_numbers_name_folders_that_sort_as_they_do(tmp_path: Path) -> None:
    """Where classes have no names, torchvision finds the numbers in their order."""
    cache = cache_of(
        tmp_path / "cache",
        [(image, target) for image, target in zip(images(3), (10, 2, 2), strict=True)],
    )
    export_cache(cache, tmp_path / "out", to="folder")
    assert Vanilla(str(tmp_path / "out")).classes == ["02", "10"]


@pytest.mark.parametrize("kind", ["tensor", "planes", "array", "grey", "ragged"])
def test_tensors_and_arrays_are_images(tmp_path: Path, kind: str) -> None:
    """uint8 of 1, 3 or 4 channels is an image, first in tensors and last in arrays, of any sizes."""
    pixels = [test_image(i, (6, 5 + i * (kind == "ragged"))) for i in range(3)]
    made = {
        "tensor": lambda it: torch.from_numpy(it.transpose(2, 0, 1).copy()),
        "planes": lambda it: np.ascontiguousarray(it.transpose(2, 0, 1)),
        "grey": lambda it: it[:, :, 2].copy(),
    }.get(kind, lambda it: it)
    cache = cache_of(tmp_path / "cache", [(made(each), i) for i, each in enumerate(pixels)])
    export_cache(cache, tmp_path / "out", to="webdataset")
    with CachedDataset(tmp_path / "out", prepare_workers=1) as dataset:
        for i, wanted in enumerate(pixels):
            wanted = np.repeat(wanted[:, :, 2:], 3, 2) if kind == "grey" else wanted
            assert np.array_equal(dataset[i][0], wanted)


@pytest.mark.parametrize(
    ("items", "options", "message"),
    [
        (
            [(torch.zeros(5, 4, 4, dtype=torch.uint8), 0)],
            {},
            r"sample 0, uint8 of shape \(5, 4, 4\), is no image that",
        ),
        (
            [(torch.zeros(3, 4, 4), 0)],
            {},
            r"sample 0, float32 of shape \(3, 4, 4\), is no image that PNG keeps",
        ),
        (
            [((images(1)[0], images(1)[0]), 0)],
            {},
            "sample 0 has 2 images, and one can be exported",
        ),
        (
            [(images(1)[0], images(1)[0])],
            {},
            "sample 0 has 2 images, and one can be exported",
        ),
        (
            [(images(1)[0].convert("RGBA"), 0)],
            {"image_format": "jpeg"},
            r"is no image that JPEG keeps: cannot write",
        ),
        (
            [(images(1)[0], -1)],
            {"to": "folder"},
            "class folders keep class names, or whole numbers from 0 on",
        ),
        ([(images(1)[0], 0)], {"shard_size": "many"}, "memory of 'many' is not understood"),
    ],
    ids=["channels", "float", "parts", "mask", "mode", "negative", "size"],
)
def test_what_cannot_be_exported_leaves_nothing(
    tmp_path: Path, items: list[Any], options: dict[str, Any], message: str
) -> None:
    """The error says why, and neither the folder nor a part of it is left behind."""
    cache = cache_of(tmp_path / "cache", items)
    with pytest.raises(ValueError, match=message):
        export_cache(cache, tmp_path / "out", **{"to": "webdataset", **options})
    assert os.listdir(tmp_path) == ["cache"]


def test_ctrl_c_leaves_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An export that is stopped leaves no folder, and the command ends with 130."""
    before = set(os.listdir(tmp_path))
    monkeypatch.setattr(
        "fastdata.tools.caches.encode_image",
        lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt),
    )
    for to in ("folder", "webdataset"):
        assert main(["export", str(cache), str(tmp_path / "out"), "--to", to]) == 130
        assert set(os.listdir(tmp_path)) == before


def test_a_folder_with_files_is_refused(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is overwritten; an empty folder is taken."""
    out = tmp_path / "out"
    out.mkdir()
    assert main(["export", str(cache), str(out), "--to", "folder"]) == 0
    capsys.readouterr()
    assert main(["export", str(cache), str(out), "--to", "folder"]) == 2
    assert "is there and not empty; give a folder that is to be made" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "nowhere"), str(tmp_path / "new"), "--to", "folder"]) == 2
    assert main(["export", str(cache), "s3://bucket/out", "--to", "folder"]) == 2
    assert "is a URL, and this needs a folder of this machine" in capsys.readouterr().err


def test_class_names_that_name_no_folder_are_refused(tmp_path: Path) -> None:
    """A name with a slash, or one that leads out of the folder, is never joined to a path."""
    from fastdata import ImageManifest

    images(1)[0].save(tmp_path / "0.png")
    rows = [(str(tmp_path / "0.png"), "../evil"), (str(tmp_path / "0.png"), "good")]
    ImageManifest(
        rows,
        cache_dir=tmp_path / "cache",
    ).prepare().close()
    with pytest.raises(
        ValueError, match=r"the class '../evil' cannot name a folder; use to='webdataset'"
    ):
        export_cache(tmp_path / "cache", tmp_path / "out", to="folder")
    export_cache(tmp_path / "cache", tmp_path / "out", to="webdataset")
    with tarfile.open(tmp_path / "out" / "shard-000000.tar") as tar:
        assert io.BytesIO(tar.extractfile("00000001.cls").read()).read() == b"1"  # type: ignore[union-attr]
