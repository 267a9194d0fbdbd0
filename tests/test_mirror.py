"""Caches behind URLs: fetched in segments into a local folder that is shared and limited."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import re
import threading
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from PIL import Image

from fastdata import CachedDataset, ChunkedLoader, DataLoader, ImageFolder
from fastdata.errors import CacheError, RemoteError, SampleError
from fastdata.sources.remote import Place
from fastdata.stores import mirror as mirror_module
from fastdata.stores import segments as segments_module
from fastdata.stores.cache import Cache
from fastdata.stores.find import find_cache
from fastdata.tools.inspect import inspect_caches

URL = "memory://bucket/caches"
SHAPE = 3, 40, 60
SAMPLES = 96
SAMPLE_BYTES = 3 * 40 * 60
BLOCK_BYTES = 4096  # small ones, so that small caches have many
BLOCKS = -(-SAMPLES * SAMPLE_BYTES // BLOCK_BYTES)


def value(index: int) -> torch.Tensor:
    return torch.full(SHAPE, index, dtype=torch.uint8) + torch.arange(60, dtype=torch.uint8)


@pytest.fixture(autouse=True)
def quick_tries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("fastdata.sources.remote._PAUSE_S", 0.001)
    monkeypatch.setattr(mirror_module, "_SEGMENT_BYTES", BLOCK_BYTES)
    yield
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture(params=["raw", "lz4"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URL of a cache of ``SAMPLES`` different samples."""
    return upload(tmp_path, "auto" if request.param == "raw" else request.param)


def upload(tmp_path: Path, codec: str = "auto", url: str = URL) -> str:
    samples = [(value(index), index) for index in range(SAMPLES)]
    CachedDataset(samples, cache_dir=tmp_path / "built", cache_key="x", codec=codec).close()
    for path in (tmp_path / "built").rglob("*"):
        if path.is_file() and not path.name.startswith("."):
            Place(url).upload(str(path.relative_to(tmp_path / "built")), path)
    return url


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], int]:
    """Return the bytes of samples that this process and its children fetched since the last call."""
    plain, log = MemoryFileSystem.cat_file, tmp_path / "log"

    def cat_file(self: Any, path: str, **span: Any) -> bytes:
        data = plain(self, path, **span)
        if "part0" in path:
            with log.open("ab") as file:
                file.write(b"%d\n" % len(data))
        return data

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)

    def since() -> int:
        sizes = log.read_text().split() if log.exists() else []
        log.unlink(missing_ok=True)
        return sum(map(int, sizes))

    return since


def disk_bytes(folder: Path) -> int:
    found = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # one that is let go of meanwhile
            found += path.stat().st_size if path.is_file() else 0
    return found


def part_bytes() -> int:
    """Return the bytes of the samples, without the header of an .npy file."""
    found = 0
    for name, (size_bytes, _) in Place(URL).find().result().items():
        if "part0" in name:
            found += size_bytes - 128 * name.endswith(".npy")
    return found


def check(dataset: Any, indices: Any = range(SAMPLES)) -> None:
    for index in indices:
        sample, target = dataset[index]
        assert target == index
        assert torch.equal(sample, value(index)), index


def test_a_remote_cache_is_a_cache(url: str, tmp_path: Path, fetched: Callable[[], int]) -> None:
    """Its samples are those of the cache; each byte is fetched once, and never by a later run."""
    for needed in (part_bytes(), 0):
        with CachedDataset.from_cache(url, local_cache=tmp_path / "local") as dataset:
            check(dataset)
            loader = DataLoader(dataset, 32, shuffle=True, num_workers=2)
            assert sorted(torch.cat([targets for _, targets in loader]).tolist()) == list(
                range(SAMPLES)
            )
            assert "memory://bucket/caches" in dataset.storage_plan.reason
        assert fetched() == needed


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no list of mappings")
def test_dropping_a_dataset_unmaps_its_segments(tmp_path: Path) -> None:
    """It unmaps them at once, and not when Python collects garbage."""

    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count(str(tmp_path / "local"))

    gc.disable()
    try:
        dataset = CachedDataset.from_cache(upload(tmp_path), local_cache=tmp_path / "local")
        check(dataset, [3])
        assert mapped() > 0
        del dataset
        assert mapped() == 0
    finally:
        gc.enable()


def test_only_what_is_read_is_fetched(tmp_path: Path, fetched: Callable[[], int]) -> None:
    """One sample fetches only its segment; a segment as large as the cache takes no more space than that."""
    with CachedDataset.from_cache(upload(tmp_path), local_cache=tmp_path / "local") as dataset:
        assert fetched() == 0
        check(dataset, [50, 51])
        assert 0 < fetched() <= 2 * SAMPLE_BYTES + 2 * BLOCK_BYTES
        dataset.__getitems__([50, 51, 50])
        assert fetched() == 0


def test_worker_processes_fetch_for_all(
    url: str, tmp_path: Path, fetched: Callable[[], int]
) -> None:
    """Two worker processes and their parent fetch every byte once together."""
    with CachedDataset.from_cache(url, local_cache=tmp_path / "local") as dataset:
        loader = DataLoader(dataset, 4, shuffle=True, num_workers=2, workers="process")
        assert sorted(torch.cat([targets for _, targets in loader]).tolist()) == list(
            range(SAMPLES)
        )
        check(dataset)
    assert fetched() == part_bytes()


def test_the_local_folder_keeps_its_limit(
    url: str, tmp_path: Path, fetched: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """ChunkedLoader reads a cache that is larger than the folder, and fetches each sample at most twice per epoch."""
    limit_bytes, folder = part_bytes() // 2 + 16 * BLOCK_BYTES, tmp_path / "local"
    monkeypatch.setattr(segments_module, "_SHARE", limit_bytes)
    with (
        CachedDataset.from_cache(url, as_tensors=True, local_cache=folder) as cached,
        ChunkedLoader(cached, 4, memory_limit="3GiB", chunk_samples=16, mix_chunks=2) as loader,
    ):
        for _ in range(4):
            seen = []
            for samples, targets in loader:
                for sample, target in zip(samples, targets.tolist(), strict=True):
                    assert torch.equal(sample, value(target))
                    seen.append(target)
                assert disk_bytes(folder) <= limit_bytes
            assert sorted(seen) == list(range(SAMPLES))
            # The edges of pieces of 8 samples.
            assert fetched() <= part_bytes() + 2 * BLOCK_BYTES * SAMPLES // 8


def test_what_fits_is_fetched_once(url: str, tmp_path: Path, fetched: Callable[[], int]) -> None:
    """If the folder has room for the cache, later epochs and runs fetch nothing, with any loader."""
    folder = tmp_path / "local"
    for needed in (part_bytes(), 0):
        with (
            CachedDataset.from_cache(url, as_tensors=True, local_cache=folder) as cached,
            ChunkedLoader(cached, 4, memory_limit="3GiB", chunk_samples=32) as loader,
        ):
            for _ in range(2):
                assert sum(len(targets) for _, targets in loader) == SAMPLES
        assert fetched() == needed
    with CachedDataset.from_cache(url, local_cache=folder) as dataset:
        check(dataset)
    assert fetched() == 0


def test_too_small_a_folder_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a batch needs more than the limit, the error has the limit and the cure; smaller batches can be read."""
    monkeypatch.setattr(segments_module, "_SHARE", 30 * BLOCK_BYTES)
    folder = tmp_path / "local"
    with CachedDataset.from_cache(upload(tmp_path), local_cache=folder) as dataset:
        check(dataset, range(3))
        problem = r"segments at once, but half of the free space in .*local is 120\.0 KiB\. .* or use ChunkedLoader"
        with pytest.raises(CacheError, match=problem):
            check(dataset)
        check(dataset, range(3))


def test_a_cache_larger_than_the_folder_is_inspected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All samples of an intact cache are verified, although its segments do not fit at once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(segments_module, "_SHARE", 30 * BLOCK_BYTES)
    [inspected] = inspect_caches(upload(tmp_path), verify=True)
    assert "verified" in inspected.facts


@pytest.mark.parametrize("is_mapped", [False, True])
def test_a_segment_deleted_while_it_is_written_is_read_from_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_mapped: bool
) -> None:
    """Another process that makes room may delete a segment before or after it is mapped."""
    map_file = segments_module._map_file

    def map_deleted(path: Path, size_bytes: int) -> Any:
        if is_mapped:
            mapped = map_file(path, size_bytes)
        path.unlink()
        return mapped if is_mapped else map_file(path, size_bytes)

    monkeypatch.setattr(segments_module, "_map_file", map_deleted)
    with CachedDataset.from_cache(upload(tmp_path), local_cache=tmp_path / "local") as dataset:
        check(dataset)


def test_segments_unused_for_longest_are_deleted_first(
    tmp_path: Path, fetched: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Segments of any cache are deleted in the order of their last use."""
    monkeypatch.setattr(segments_module, "_SHARE", SAMPLES * SAMPLE_BYTES * 3 // 2)
    options: dict[str, Any] = {"local_cache": tmp_path / "local"}
    one, two = (upload(tmp_path, url=f"{URL}/{name}") for name in ("one", "two"))
    with CachedDataset.from_cache(one, **options) as dataset:
        check(dataset)
    for path in (tmp_path / "local").glob("mirror-*/*"):
        number = int(path.suffix[1:].partition("-")[0])
        os.utime(path, (number, number))
    with CachedDataset.from_cache(one, **options) as dataset:
        check(dataset, [0])  # needed again
    with CachedDataset.from_cache(two, **options) as dataset:
        check(dataset)
    fetched()
    with CachedDataset.from_cache(two, **options) as dataset:
        check(dataset)
    with CachedDataset.from_cache(one, **options) as dataset:
        check(dataset, [0, SAMPLES - 1])
        assert fetched() == 0
        check(dataset, [1])
        assert fetched() == SAMPLE_BYTES


def test_a_deleted_segment_is_readable_where_it_is_mapped(
    tmp_path: Path, fetched: Callable[[], int]
) -> None:
    """A segment that another process deletes stays readable here; if it is needed again, it is fetched."""
    with CachedDataset.from_cache(upload(tmp_path), local_cache=tmp_path / "local") as dataset:
        check(dataset)
        for path in (tmp_path / "local").glob("mirror-*/*"):
            path.unlink()
        fetched()
        check(dataset)
        assert fetched() == 0
    with CachedDataset.from_cache(URL, local_cache=tmp_path / "local") as dataset:
        check(dataset)
    assert fetched() == part_bytes()


def damage(url: str, number: int = 0) -> None:
    """Change a byte of the samples' file behind the URL."""
    (path,) = [name for name in Place(url).find().result() if "part0" in name]
    data = bytearray(Place(url).read(path))
    data[-1 - number] ^= 1
    Place(url).write(path, bytes(data))


def test_damage_on_the_way_is_mended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments with a wrong bit from the network or the local disk are fetched again."""
    url, plain, is_bad = upload(tmp_path), MemoryFileSystem.cat_file, [True]

    def cat_file(self: Any, path: str, **span: Any) -> bytes:
        data = bytearray(plain(self, path, **span))
        if "part0" in path and is_bad:
            is_bad.pop()
            data[-1] ^= 4
        return bytes(data)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    for _ in range(2):
        with CachedDataset.from_cache(url, local_cache=tmp_path / "local") as dataset:
            check(dataset)
        file = min((tmp_path / "local").glob("*/part0*"))
        file.write_bytes(bytes(file.stat().st_size))


def test_what_comes_again_is_checked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a segment is fetched again, samples in it that were right before are checked again."""
    monkeypatch.setattr(mirror_module, "_SEGMENT_BYTES", 1 << 20)  # of all samples
    url, plain, spoiled = upload(tmp_path), MemoryFileSystem.cat_file, [-1, -1 - SAMPLE_BYTES]

    def cat_file(self: Any, path: str, **span: Any) -> bytes:
        data = bytearray(plain(self, path, **span))
        if "part0" in path and spoiled:
            data[spoiled.pop(0)] ^= 4
        return bytes(data)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    with CachedDataset.from_cache(url, local_cache=tmp_path / "local") as dataset:
        check(dataset, range(SAMPLES - 1))
        check(dataset)
        check(dataset)
    assert not spoiled


def test_a_segment_that_is_evicted_during_a_check_is_checked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check of bytes that another thread has evicted since is no check of the bytes that come next."""
    cache = Cache.read(find_cache(upload(tmp_path)))
    with contextlib.closing(cache.open_part(0, None, tmp_path / "local")) as store:
        check_sample = store._check
        checked = []

        def check_and_evict(index: int) -> None:
            check_sample(index)
            checked.append(index)
            store.evict(np.array([index]))

        monkeypatch.setattr(store, "_check", check_and_evict)
        store.ensure(np.array([3]))
        store.ensure(np.array([3]))
    assert checked == [3, 3]


def test_damage_behind_the_url_is_an_error(tmp_path: Path) -> None:
    """A sample that stays damaged when it is fetched again is named; the others can be read."""
    url = upload(tmp_path)
    damage(url)
    with CachedDataset.from_cache(url, local_cache=tmp_path / "local") as dataset:
        check(dataset, range(SAMPLES - 1))
        for _ in range(2):
            with pytest.raises(
                SampleError,
                match=rf"^sample {SAMPLES - 1} .* also when fetched again; the file was changed or is dama",
            ):
                dataset[SAMPLES - 1]
    with (
        CachedDataset.from_cache(url, as_tensors=True, local_cache=tmp_path / "local") as cached,
        ChunkedLoader(cached, 4, memory_limit="3GiB", shuffle=False) as loader,
    ):
        batches = iter(loader)
        for _ in range(SAMPLES // 4 - 1):
            next(batches)
        with pytest.raises(SampleError, match="also when fetched again"):
            next(batches)


def test_a_file_that_is_replaced_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache that changes under its readers gives the right samples or an error, never others."""
    url = upload(tmp_path)
    options: dict[str, Any] = {
        "chunk_samples": 16,
        "mix_chunks": 2,
    }
    monkeypatch.setattr(segments_module, "_SHARE", part_bytes() // 2)
    with (
        CachedDataset.from_cache(url, as_tensors=True, local_cache=tmp_path / "local") as cached,
        ChunkedLoader(cached, 4, memory_limit="3GiB", **options) as loader,
    ):
        for _ in loader:
            pass
        for number in range(0, SAMPLES * SAMPLE_BYTES, SAMPLE_BYTES):
            damage(url, number)
        with pytest.raises(SampleError, match="also when fetched again"):
            check_all(loader)


def check_all(loader: Any) -> None:
    for samples, targets in loader:
        for sample, target in zip(samples, targets.tolist(), strict=True):
            assert torch.equal(sample, value(target))


@pytest.mark.parametrize("pattern", ["part0-*.npy", "fastdata.npz"])
def test_a_missing_file_is_an_error(tmp_path: Path, pattern: str) -> None:
    """A cache with a missing file, or one of another size, is refused with the name of the file."""
    place = Place(upload(tmp_path)).below(str(find_cache(URL)).rpartition("/")[2])
    (name,) = (name for name in place.find().result() if Path(name).match(pattern))
    place.write(name, place.read(name)[:-1])
    with pytest.raises(CacheError, match=re.escape(name)):
        CachedDataset.from_cache(URL, local_cache=tmp_path / "local")
    place.remove(name)
    with pytest.raises((CacheError, FileNotFoundError), match=re.escape(name)):
        CachedDataset.from_cache(place.url, local_cache=tmp_path / "local")


def test_a_lost_connection_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the server stops to answer, the epoch ends with an error that names the file; the next one has all samples."""
    url, plain, is_down = upload(tmp_path), MemoryFileSystem.cat_file, threading.Event()

    def cat_file(self: Any, path: str, **span: Any) -> bytes:
        if "part0" in path and is_down.is_set():
            raise ConnectionResetError("no route")
        return plain(self, path, **span)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    with (
        CachedDataset.from_cache(url, as_tensors=True, local_cache=tmp_path / "local") as cached,
        ChunkedLoader(cached, 4, memory_limit="3GiB", chunk_samples=16) as loader,
    ):
        is_down.set()
        with pytest.raises(
            RemoteError, match=r"part0-\w+\.npy: ConnectionResetError: no route \(tried twice\)"
        ):
            for _ in loader:
                pass
        is_down.clear()
        assert sum(len(targets) for _, targets in loader) == SAMPLES


def test_a_break_ends_fetching(url: str, tmp_path: Path) -> None:
    """An epoch that is left early leaves no thread, and the next one is complete."""
    with (
        CachedDataset.from_cache(url, as_tensors=True, local_cache=tmp_path / "local") as cached,
        ChunkedLoader(cached, 4, memory_limit="3GiB", chunk_samples=16) as loader,
    ):
        for _ in loader:
            break
        assert sum(len(targets) for _, targets in loader) == SAMPLES


def fetch_and_die(dataset: Any) -> None:
    def die(path: Path, size_bytes: int) -> None:
        path.write_bytes(path.read_bytes()[:4])
        os.kill(os.getpid(), 9)

    segments_module._map_file = die  # type: ignore[assignment]
    check(dataset)


def test_a_killed_reader_leaves_no_lock(tmp_path: Path) -> None:
    """If a process is killed while it fetches, the next one fetches that segment, and no other file is left."""
    with CachedDataset.from_cache(upload(tmp_path), local_cache=tmp_path / "local") as dataset:
        child = get_context("fork").Process(target=fetch_and_die, args=(dataset,))
        child.start()
        child.join()
        assert child.exitcode == -9
        child.close()
        check(dataset)
    assert not list((tmp_path / "local").glob("mirror-*/*.part"))
    assert len(list((tmp_path / "local").glob("mirror-*/*"))) == SAMPLES


def test_a_pickled_cache_is_opened_again(tmp_path: Path) -> None:
    """A pickled dataset holds the names of its remote files, but no credentials."""
    options: dict[str, Any] = {
        "local_cache": tmp_path / "local",
        "storage_options": {"token": "very secret"},
    }
    with CachedDataset.from_cache(upload(tmp_path), **options) as dataset:
        sent = pickle.dumps(dataset)
        assert b"very secret" not in sent
        with pickle.loads(sent) as copy:
            check(copy)


def test_ranks_read_what_is_theirs(tmp_path: Path, fetched: Callable[[], int]) -> None:
    """Two ranks with their own folders, as on two machines, fetch each byte once together, except at the edges."""
    url, seen = upload(tmp_path), []
    for rank in range(2):
        options: dict[str, Any] = {"rank": rank, "world_size": 2}
        local = tmp_path / f"machine{rank}"
        with (
            CachedDataset.from_cache(url, as_tensors=True, local_cache=local) as cached,
            ChunkedLoader(
                cached, 4, memory_limit="3GiB", chunk_samples=24, mix_chunks=1, **options
            ) as loader,
        ):
            seen += [target for _, targets in loader for target in targets.tolist()]
    assert sorted(seen) == list(range(SAMPLES))
    # By both, before they know which are theirs.
    looked_at = 2 * 9 * (SAMPLE_BYTES + 2 * BLOCK_BYTES)
    assert fetched() <= part_bytes() + looked_at


def test_an_epoch_is_resumed_on_another_machine(tmp_path: Path) -> None:
    """A state from inside an epoch continues with the same batches from an empty folder."""
    url = upload(tmp_path)
    options: dict[str, Any] = {"memory_limit": "3GiB", "chunk_samples": 16}
    with (
        CachedDataset.from_cache(url, as_tensors=True, local_cache=tmp_path / "one") as one,
        CachedDataset.from_cache(url, as_tensors=True, local_cache=tmp_path / "two") as two,
        ChunkedLoader(one, 4, **options) as first,
        ChunkedLoader(two, 4, **options) as second,
    ):
        batches = iter(first)
        for _ in range(7):
            next(batches)
        state = first.state_dict()
        rest = [targets.tolist() for _, targets in batches]
        second.load_state_dict(state)
        assert [targets.tolist() for _, targets in second] == rest
        assert np.concatenate(rest).size == SAMPLES - 28


@pytest.mark.parametrize("last", [0, 2])
def test_parts_without_elements_are_kept(tmp_path: Path, last: int) -> None:
    """Boxes come back although most images, or all, have none."""
    samples = [((value(k), np.ones((last if k == 3 else 0, 4), np.float32)), k) for k in range(4)]
    options: dict[str, Any] = {"cache_dir": URL, "cache_key": "x", "local_cache": tmp_path}
    with CachedDataset(samples, **options) as dataset:
        assert [boxes.shape for (_, boxes), _ in dataset] == [(0, 4)] * 3 + [(last, 4)]
        assert torch.equal(dataset[2][0][0], value(2))


@pytest.mark.parametrize("ending", ["", ".part"])
def test_a_link_in_the_place_of_a_segment_leads_nowhere(tmp_path: Path, ending: str) -> None:
    """The link's target is neither written nor read; the fetched segment replaces the link."""
    url = upload(tmp_path)
    target = tmp_path / "thesis"
    target.write_bytes(b"words" * SAMPLE_BYTES)  # as long as a segment, so that it could be mapped
    os.utime(target, (1, 1))
    with CachedDataset.from_cache(url, local_cache=tmp_path / "local") as dataset:
        check(dataset)
    for path in list((tmp_path / "local").glob("mirror-*/*")):
        path.unlink()
        path.with_name(path.name + ending).symlink_to(target)
    with CachedDataset.from_cache(url, local_cache=tmp_path / "local") as dataset:
        check(dataset)
    assert target.read_bytes() == b"words" * SAMPLE_BYTES
    assert target.stat().st_mtime == 1
    assert not any(path.is_symlink() for path in (tmp_path / "local").glob("mirror-*/*"))


def test_room_is_made_behind_no_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files behind a link in the folder of segments are neither deleted nor counted."""
    home, local = tmp_path / "home", tmp_path / "local"
    home.mkdir()
    local.mkdir()
    for name in ("thesis", "photo"):
        (home / name).write_bytes(bytes(part_bytes() + 10 * SAMPLES * SAMPLE_BYTES))
        os.utime(home / name, (1, 1))
    (local / "mirror-0123456789abcdef").symlink_to(home)
    monkeypatch.setattr(segments_module, "_SHARE", SAMPLES * SAMPLE_BYTES * 3 // 2)
    for name in ("one", "two"):  # which have room for one
        with CachedDataset.from_cache(
            upload(tmp_path, url=f"{URL}/{name}"), local_cache=local
        ) as it:
            check(it)
    assert sorted(os.listdir(home)) == ["photo", "thesis"]
    assert disk_bytes(local) > SAMPLES * SAMPLE_BYTES // 2


@pytest.mark.skipif(os.name == "nt", reason="no modes")
@pytest.mark.parametrize("place", ["link", "open"])
def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path, place: str) -> None:
    """Segments are in a folder that only this user can write to; otherwise it is an error."""
    url = upload(tmp_path)
    CachedDataset.from_cache(url, local_cache=tmp_path / "local").close()
    (folder,) = (tmp_path / "local").glob("mirror-*")
    assert folder.stat().st_mode & 0o777 == 0o700
    if place == "open":
        folder.chmod(0o777)
    else:
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match=r"remove it, or give another local_cache=.*mirror-"):
        CachedDataset.from_cache(url, local_cache=tmp_path / "local")


@pytest.fixture
def plain_server(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Yield files behind an HTTP server of fsspec; ``lacking`` names the features that it does not have."""
    lacks = {"sizes in listings"}
    find, info = MemoryFileSystem.find, MemoryFileSystem.info
    cat_file, ls = MemoryFileSystem.cat_file, MemoryFileSystem.ls

    def sizeless(facts: dict[str, Any]) -> dict[str, Any]:
        return {**facts, "size": None, "created": None}

    def find_plainly(self: Any, path: str, **options: Any) -> Any:
        if "listings" in lacks:
            raise PermissionError("403")
        return {name: sizeless(each) for name, each in find(self, path, **options).items()}

    def list_plainly(self: Any, path: str, **options: Any) -> Any:
        if "listings" in lacks:
            raise PermissionError("403")
        return ls(self, path, **options)

    def ask_plainly(self: Any, path: str, **options: Any) -> Any:
        found = info(self, path, **options)
        return sizeless(found) if "sizes" in lacks else found

    def read_plainly(self: Any, path: str, start: Any = None, end: Any = None, **_: Any) -> bytes:
        if "ranges" in lacks:
            start = end = None
        return cat_file(self, path, start=start, end=end)

    monkeypatch.setattr(MemoryFileSystem, "find", find_plainly)
    monkeypatch.setattr(MemoryFileSystem, "ls", list_plainly)
    monkeypatch.setattr(MemoryFileSystem, "info", ask_plainly)
    monkeypatch.setattr(MemoryFileSystem, "cat_file", read_plainly)
    return lacks


@pytest.mark.parametrize("lacking", [{""}, {"listings"}, {"sizes"}, {"listings", "sizes"}])
def test_a_cache_needs_neither_listings_nor_sizes(
    plain_server: set[str], tmp_path: Path, lacking: set[str]
) -> None:
    """A cache can be read from a server without listings or sizes."""
    url = str(find_cache(upload(tmp_path)))
    plain_server |= lacking
    with CachedDataset.from_cache(url, local_cache=tmp_path / "local") as dataset:
        check(dataset)
    (name,) = [each for each in MemoryFileSystem.store if "part0" in each]
    short = MemoryFileSystem.store.pop(name)
    with pytest.raises(CacheError, match=r"part0-\w+\.npy is missing: build the cache again"):
        CachedDataset.from_cache(url, local_cache=tmp_path / "local")
    Place(f"memory://{name}").write("", short.getvalue()[:-1])
    if "sizes" not in lacking:
        with pytest.raises(CacheError, match=r"part0-\w+\.npy has [\d,]+ bytes, but [\d,]+ were"):
            CachedDataset.from_cache(url, local_cache=tmp_path / "local")


def test_a_server_that_gives_no_parts_of_files_is_named(
    plain_server: set[str], tmp_path: Path
) -> None:
    """If a server ignores Range, the error says so, and the cache is not called damaged."""
    url = str(find_cache(upload(tmp_path)))
    plain_server |= {"ranges"}
    with (
        CachedDataset.from_cache(url, local_cache=tmp_path / "local") as dataset,
        pytest.raises(
            RemoteError, match=r"bytes were requested, but [\d,]+ came: its server cannot send p"
        ),
    ):
        dataset[0]


def test_an_update_behind_a_url_keeps_files_of_readers(
    image_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """A reader keeps its samples during an update; the update after the next removes them."""
    root = image_folder()
    options: dict[str, Any] = {"cache_dir": URL, "resize": (4, 4), "local_cache": tmp_path}

    def shards() -> int:
        return sum("part0" in name for name in Place(URL).find().result())

    with ImageFolder(root, **options) as dataset:
        wanted = [np.asarray(image) for image, _ in ImageFolder(root, resize=(4, 4))]
        for level in (10, 20, 30):
            Image.new("RGB", (12, 10), (level,) * 3).save(root / "cat" / "000.jpg")
            with ImageFolder(root, **options) as updated:
                assert np.asarray(updated[0][0]).max() == level
            assert shards() == 2
            if level == 10:
                for index, pixels in enumerate(wanted):
                    assert np.array_equal(np.asarray(dataset[index][0]), pixels)
