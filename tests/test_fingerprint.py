"""Fingerprints distinguish caches: transforms, datasets and labels that differ in any effect have different ones."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import re
import socket
import subprocess
import sys
import textwrap
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import Subset, default_collate
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder as TorchvisionFolder
from torchvision.transforms import v2

from data import save_image
from fastdata import CachedDataset, ImageFolder, collate
from fastdata.machine.tables import SampleTable
from fastdata.pixels.draws import may_draw
from fastdata.pixels.fingerprint import fingerprint
from fastdata.tools.inspect import inspect_caches

Folder = Callable[..., Path]


def module(text: str) -> Any:
    """A user's own module, such as a script."""
    made = types.ModuleType("mine")
    exec(textwrap.dedent(text), vars(made))
    return made


class Brighter(nn.Module):
    """A step whose repr hides its value."""

    def __init__(self, by: int) -> None:
        super().__init__()
        self.by = by

    def forward(self, image: Image.Image) -> Image.Image:
        return image.point(lambda level: level + self.by)


class Slotted:
    __slots__ = ("by",)

    def __init__(self, by: int) -> None:
        self.by = by

    def __call__(self, image: Image.Image) -> Image.Image:
        return image.point(lambda level: level + self.by)


class Forgetful(Slotted):
    """A step whose pickle leaves out its effect."""

    def __init__(self, by: int) -> None:
        super().__init__(0)
        self.more = by

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __call__(self, image: Image.Image) -> Image.Image:
        return image.point(lambda level: level + self.more)


def hooked(by: int) -> nn.Module:
    step = nn.Sequential(Brighter(1))
    step.register_forward_hook(lambda *given: given[-1].point(lambda level: level + by))
    return step


def with_buffer(by: int) -> nn.Module:
    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("by", torch.full((1,), by, dtype=torch.bfloat16))

        def forward(self, image: Image.Image) -> Image.Image:
            return image.point(lambda level: level + int(self.by))  # type: ignore[operator]

    return Step()


def add_table(image: Image.Image, table: np.ndarray) -> Image.Image:
    return image.point([min(level + int(table[2500]), 255) for level in range(256)] * 3)


def table(by: int) -> np.ndarray:
    return np.array([0] * 2500 + [by] + [0] * 2500)


def with_global(by: int) -> Any:
    return module(f"BY = {by}\ndef step(image): return image.point(lambda level: level + BY)").step


def with_helper(by: int) -> Any:
    text = f"""
        def helper(level): return level + {by}
        class Holder:
            @staticmethod
            def method(level): return helper(level)
        def step(image): return image.point(Holder().method)
    """
    return module(text).step


def with_default(by: int) -> Any:
    return lambda image, by=by: image.point(lambda level: level + by)


def with_module(by: int) -> Any:
    inner, outer = (
        module(f"BY = {by}"),
        module("def step(image): return image.point(lambda level: level + inner.BY)"),
    )
    outer.inner = inner
    return outer.step


def cached_function(by: int) -> Any:
    @lru_cache
    def add(level: int) -> int:
        return level + by

    return lambda image: image.point(add)


MAKERS: dict[str, Callable[[int], Any]] = {
    "a module": Brighter,
    "a sequence of modules": lambda by: nn.Sequential(nn.Identity(), Brighter(by)),
    "slots": Slotted,
    "what a pickle leaves out": Forgetful,
    "a hook": hooked,
    "a buffer": with_buffer,
    "a partial of a large array": lambda by: partial(add_table, table=table(by)),
    "v1's Lambda": lambda by: v1.Lambda(Slotted(by)),
    "v2's Lambda": lambda by: v2.Lambda(lambda image: Slotted(by)(image)),
    "a dict as fill": lambda by: v2.Pad(1, fill={Image.Image: by, "others": 0}),
    "a closure": lambda by: lambda image: image.point(lambda level: level + by),
    "a default": with_default,
    "a global": with_global,
    "a helper": with_helper,
    "a module that is imported": with_module,
    "a cached function": cached_function,
    "a method": lambda by: Slotted(by).__call__,
}


def first_pixels(dataset: Any) -> np.ndarray:
    with dataset:
        return np.asarray(dataset[0][0]).copy()


@pytest.mark.parametrize("name", MAKERS)
def test_steps_that_differ_in_one_value_share_no_cache(image_folder: Folder, name: str) -> None:
    """Each cache has its own pixels, and an equal new step finds its cache again."""
    root = image_folder(classes=("a",), size=(8, 6))
    save_image(root / "a" / "000.jpg", 3, (8, 6))
    options: dict[str, Any] = {
        "cache_dir": root.parent / "cache",
        "prepare_workers": 1,
    }
    source = TorchvisionFolder(str(root))
    steps = [MAKERS[name](by) for by in (1, 60, 1)]
    one, other, again = (
        first_pixels(CachedDataset(source, prepare=step, **options)) for step in steps
    )
    assert np.array_equal(one, np.asarray(steps[0](source[0][0])))
    assert np.array_equal(other, np.asarray(steps[1](source[0][0])))
    assert not np.array_equal(one, other)
    assert np.array_equal(one, again)
    # Which torch numbers anew.
    assert len(inspect_caches(root.parent / "cache")) == 2 + (name == "a hook")


def test_resized_tensors_differ_by_who_resizes_and_how(tmp_path: Path) -> None:
    """v1, v2 and each ``antialias=`` have separate caches for tensors, because their pixels differ."""
    image = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, 24, 20), np.uint8))
    options: dict[str, Any] = {
        "cache_dir": tmp_path,
        "cache_key": "image",
        "prepare_workers": 1,
    }
    for kind, antialias in ((v1, True), (v2, True), (v1, False), (v2, False)):
        step = kind.Resize((6, 5), antialias=antialias)
        with CachedDataset([(image, 0)], transform=step, **options) as dataset:
            assert torch.equal(dataset[0][0], step(image))
    assert len(inspect_caches(tmp_path)) == 4


def test_a_step_assigned_later_is_told_by_all_its_values(image_folder: Folder) -> None:
    """Samples are prepared again for a step that differs in a value which its repr does not show."""
    source = TorchvisionFolder(str(image_folder(classes=("a",))))
    steps = [v2.Pad(1, fill={Image.Image: level, "others": 0}) for level in (1, 60)]
    with CachedDataset(source, transform=steps[0], prepare_workers=1) as dataset:
        dataset.transform = steps[1]
        assert np.array_equal(np.asarray(dataset[0][0]), np.asarray(steps[1](source[0][0])))


def test_equal_values_have_one_description_and_others_another() -> None:
    """Over all pairs of values, also of two types such as 1 and True, 1.0 or "1"."""

    def values() -> Iterator[Any]:
        for atom in (0, 1, True, 1.0, -0.0, 0.0, "1", b"1", None, ...):
            yield from (
                atom,
                [atom],
                (atom,),
                {"a": atom},
                {atom},
                frozenset({atom}),
                [[atom]],
                [atom, [atom]],
            )
            yield from (partial(print, atom), partial(print, key=atom), lambda atom=atom: atom)
            yield types.SimpleNamespace(a=atom)
        for dtype in ("int8", "uint8", "float32", "int64"):
            yield from (
                np.zeros(4, dtype),
                np.zeros((2, 2), dtype),
                torch.zeros(4, dtype=getattr(torch, dtype)),
            )
            yield from (np.dtype(dtype), getattr(torch, dtype), np.array([1, dtype], object))
        for kind in (v1, v2):
            yield from (
                kind.Resize(8),
                kind.Resize(8, antialias=False),
                kind.Resize([8, 9]),
                kind.Pad(1),
                kind.Pad(2),
            )
        yield from (
            Slotted(1),
            Slotted(1).__call__,
            Slotted,
            Forgetful,
            os.path.join,
            np.sin,
            np.cos,
            torch.relu,
        )

    makers = list(zip(values(), values(), strict=True))
    texts = [(fingerprint(one), fingerprint(again)) for one, again in makers]
    assert all(one == again for one, again in texts)
    assert len({text for text, _ in texts}) == len(texts)


def test_methods_of_one_name_have_different_descriptions() -> None:
    """Methods made by a decorator, and a method of a single object, have their own descriptions."""

    def decorated(by: int) -> Any:
        def inner(self: Any, value: int) -> int:
            return value + by

        return inner

    class Steps:
        train = decorated(1)
        evaluate = decorated(2)

    texts = {fingerprint(Steps().train), fingerprint(Steps().evaluate)}
    for by in (1, 2):
        steps: Any = Steps()
        steps.own = types.MethodType(decorated(by), steps)
        texts.add(fingerprint(steps))
    assert len(texts) == 4


def test_a_wrapper_that_forwards_attributes_has_its_own_description(image_folder: Folder) -> None:
    """A wrapper with __getattr__ is described by its own attributes too."""

    class Around:
        def __init__(self, inner: Any, by: int) -> None:
            self.inner = inner
            self.by = by

        def __getattr__(self, name: str) -> Any:
            return getattr(self.__dict__["inner"], name)

    with ImageFolder(image_folder(), storage="none") as inner:
        texts = [fingerprint(Around(inner, by)) for by in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_an_import_inside_a_function_is_refused() -> None:
    """A function may import only from Python's library and known packages when it is called."""
    made = module("""
        def known(): import os.path, numpy; return numpy
        def own(): import mine.helpers as helpers; return helpers.by
        def near(): from .helpers import by; return by
    """)
    assert fingerprint(made.known) == fingerprint(made.known)
    for step in (made.own, made.near):
        with pytest.raises(ValueError, match=r"it imports .*helpers when it is called.*cache_key="):
            fingerprint(step)


def test_a_script_from_standard_input_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its module names the file <stdin>, which does not exist; its code is described by its contents."""
    piped: Any = types.ModuleType("piped")
    piped.__file__ = "<stdin>"
    monkeypatch.setitem(sys.modules, "piped", piped)
    exec("def keep(image): return image\ndef invert(image): return -image", vars(piped))
    assert fingerprint(piped.keep) != fingerprint(piped.invert)


def test_a_description_outlives_its_process(tmp_path: Path) -> None:
    """It is equal under another hash seed, as a script or as a module, and for code that names itself."""
    (tmp_path / "mine.py").write_text(
        textwrap.dedent("""
            import re, functools, enum, dataclasses, logging, sys
            import torch
            from fastdata.pixels.fingerprint import fingerprint
            class Kind(enum.Enum): A, B = 1, 2
            @dataclasses.dataclass(frozen=True)
            class Settings:
                names: frozenset = frozenset({"a", "b", "c", "d"})
                kinds: dict = dataclasses.field(default_factory=lambda: {Kind.A: torch.ones(2)})
            SETTINGS, NAMES, log = Settings(), {"x", "y", "z"}, logging.getLogger("mine")
            class Step(torch.nn.Module):
                def __init__(self):
                    super().__init__()
                    self.itself, self.pattern = [self], re.compile("a")
                def forward(self, x):
                    log.info(x)
                    return step(x) if x in {"p", "q", "r"} else SETTINGS
            def step(x): return Step()(x), step, NAMES
            TEXT = fingerprint([step, Step(), functools.partial(step, 1), lambda x: step(x)])
            print(TEXT)
        """)
    )
    spec = importlib.util.spec_from_file_location("mine", tmp_path / "mine.py")
    assert spec is not None
    assert spec.loader is not None
    mine = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mine)
    environ = {**os.environ, "PYTHONHASHSEED": "1"}
    words = [sys.executable, str(tmp_path / "mine.py")]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=True)
    assert done.stdout == f"{mine.TEXT}\n"
    assert re.fullmatch("[0-9a-f]{24}", mine.TEXT)


def test_values_that_cannot_be_described_are_refused_by_name(image_folder: Folder) -> None:
    """Values inside of C code need a ``cache_key``; everything else still counts."""
    root = image_folder(size=(8, 6))
    options: dict[str, Any] = {
        "cache_dir": root.parent / "cache",
        "prepare_workers": 1,
    }
    mine = module("""
        from PIL import Image
        def load(path): return Image.open(path).point(lambda level: level + BY) if server else None
    """)
    with socket.socket() as mine.server:
        for mine.BY in (1, 60):
            with pytest.raises(
                ValueError,
                match=r"load contains a socket.socket that cannot be described.*cache_key=",
            ):
                ImageFolder(root, loader=mine.load, **options)
            with ImageFolder(root, loader=mine.load, cache_key="a", **options) as dataset:
                assert np.array_equal(
                    np.asarray(dataset[0][0]), np.asarray(mine.load(dataset.samples[0][0]))
                )
    assert len(inspect_caches(root.parent / "cache")) == 2


# Labels


class Files:
    """Lists its files in ``samples``, and its labels elsewhere."""

    def __init__(self, root: Path, labels: Any) -> None:
        self.samples, self.labels = sorted(map(str, root.glob("*/*"))), labels

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        path = self.samples[index]
        found = self.labels(path) if callable(self.labels) else self.labels[os.path.basename(path)]
        return Image.open(path), found


@pytest.mark.parametrize("kind", ["mapping", "closure", "method", "global"])
def test_labels_in_other_attributes_count(image_folder: Folder, kind: str) -> None:
    """A cache is not used for other labels of the same files, wherever the dataset has them."""
    root = image_folder(classes=("a",), per_class=2)
    options: dict[str, Any] = {
        "cache_dir": root.parent / "cache",
        "prepare_workers": 1,
    }
    for labels in (
        {"000.jpg": 1, "001.jpg": 2},
        {"000.jpg": 1, "001.jpg": 3},
        {"000.jpg": 1, "001.jpg": 2},
    ):
        found = {
            "mapping": labels,
            "closure": lambda path, labels=dict(labels): labels[os.path.basename(path)],
            "method": labels.__getitem__,
            "global": module(f"L = {labels}\ndef find(path): return L[path[-7:]]").find,
        }[kind]
        if kind == "method":
            found = partial(lambda get, path: get(os.path.basename(path)), found)
        with CachedDataset(Subset(Files(root, found), [1, 0]), **options) as dataset:
            assert list(dataset.targets) == [labels["001.jpg"], labels["000.jpg"]]
    assert len(inspect_caches(root.parent / "cache")) == 2


def test_names_that_are_no_files_may_be_cached(image_folder: Folder) -> None:
    """A dataset whose ``samples`` are keys, as of an LMDB, needs a ``cache_key``; other labels have another cache."""

    class Keys(Files):
        def __init__(self, root: Path, labels: Any) -> None:
            super().__init__(root, labels)
            self.folder, self.samples = root, [os.path.relpath(path, root) for path in self.samples]

        def __getitem__(self, index: int) -> tuple[Image.Image, int]:
            return Image.open(self.folder / self.samples[index]), self.labels[index]

    root = image_folder(classes=("a",), per_class=2)
    options: dict[str, Any] = {
        "cache_dir": root.parent / "cache",
        "prepare_workers": 1,
    }
    with pytest.raises(
        ValueError, match=r"its files are not listed in an attribute samples\. Give cache_key="
    ):
        CachedDataset(Keys(root, [3, 4]), **options)
    for _ in range(2):
        with CachedDataset(Keys(root, [3, 4]), cache_key="keys", **options) as dataset:
            assert list(dataset.targets) == [3, 4]
    assert len(inspect_caches(root.parent / "cache")) == 1


def test_which_columns_are_chosen_counts(tmp_path: Path) -> None:
    """Two columns of one dataset of dicts have separate caches."""
    rows = [{"a": np.full((2, 3), 1, np.uint8), "b": np.full((2, 3), 2, np.uint8), "label": 0}] * 2
    for name, level in (("a", 1), ("b", 2)):
        columns, options = (
            {"sample": name, "target": "label"},
            {"cache_key": "rows"},
        )
        with CachedDataset(
            rows, columns=columns, cache_dir=tmp_path, prepare_workers=1, **options
        ) as dataset:
            assert int(dataset[0][0].max()) == level


def test_a_draw_from_any_generator_is_told_from_none() -> None:
    """Tables, builtins and functions of these do not draw; code that reaches a generator may, also torch's."""
    table, row = {0: 1, 1: 0}, np.arange(3)

    def by_default(label: int, source: Any = random) -> float:
        return float(label + source.random())

    def by_name(label: int, *, draw: Any = random.random) -> float:
        return float(label + draw())

    drawing: Any = defaultdict(random.random)
    for calm in (
        None,
        int,
        abs,
        table.get,
        row.__getitem__,
        lambda label: table[label] + int(row[0]),
        lambda label: -label,
        lambda label: label in {1, 2},
    ):
        assert not may_draw(calm)
    for unknown in (
        random.random,
        np.random.rand,
        torch.rand,
        by_default,
        by_name,
        lambda label: drawing[label],
        lambda label: label + random.random(),
        lambda label: label + torch.rand(()),
        lambda label: [random.random() for _ in range(label)],
        _by_import,
        torch.nn.Dropout(),
        partial(np.random.normal, 0),
    ):
        assert may_draw(unknown)


class Mixing:
    """A ``collate_fn`` object with a generator in an attribute."""

    def __init__(self, own: Any) -> None:
        self.own = own
        self.seed = random.random()

    def __call__(self, samples: Any) -> Any:
        return self.mix(samples)

    def mix(self, samples: Any) -> Any:
        return samples[: int(self.share)]

    @property
    def share(self) -> float:
        return float(self.own.random())


class MixingBySlot:
    __slots__ = ("own",)

    def __init__(self, own: Any) -> None:
        self.own = own

    def __call__(self, samples: Any) -> Any:
        return self.own(samples)


class Drawing(nn.Module):
    def forward(self, samples: Any) -> Any:
        return samples + np.random.rand()


class MixingModule(nn.Module):
    def __init__(self, step: Any) -> None:
        super().__init__()
        self.step = nn.Sequential(step)

    def forward(self, samples: Any) -> Any:
        return self.step(samples)


def _by_import(samples: Any) -> Any:
    from random import shuffle as mix

    return mix(samples)


def _calls(call: Any) -> Callable[[Any], Any]:
    return lambda samples: default_collate(call(samples))


def _in_many(samples: Any) -> Any:
    return _DEEP[0](samples)


_DEEP = [_calls(_by_import)]
_OWN = module(
    """
    from numpy import random

    def draw(samples):
        return inner(samples)

    def inner(samples):
        return random.permutation(samples)
    """
)


@pytest.mark.parametrize(
    "call",
    [
        random.shuffle,
        np.random.permutation,
        _by_import,
        _in_many,
        _calls(_calls(np.random.rand)),
        partial(_calls(len), key=random.random),
        Mixing(np.random.default_rng(0)),
        Mixing(random.Random(0)).mix,
        MixingBySlot(np.random.RandomState(0).rand),
        MixingModule(Drawing()),
        v1.RandomOrder([v1.ToTensor()]),
        v1.RandomChoice([v1.ToTensor()]),
        lambda samples: _OWN.draw(samples),
        lambda samples, source=random: source.choice(samples),
    ],
)
def test_a_draw_from_other_generators_is_found(call: Any) -> None:
    """It is found in a closure, an attribute, a slot, a default, an import or a package."""
    assert may_draw(call, from_torch=False)


@pytest.mark.parametrize(
    "call",
    [
        default_collate,
        collate,
        _calls(torch.rand),
        _calls(v2.RandomChoice([v2.MixUp(num_classes=2), v2.CutMix(num_classes=2)])),
        MixingBySlot(len),
        MixingModule(v2.CutMix(num_classes=2)),
        lambda samples: np.stack(samples),
    ],
)
def test_torchs_draws_and_none_are_told_apart(call: Any) -> None:
    """MixUp and CutMix, and functions that only stack samples, draw from no generator but torch's."""
    assert not may_draw(call, from_torch=False)


def test_a_dataset_that_holds_anothers_targets_is_known_by_them() -> None:
    """The view of targets is described by its values, not by the memory that holds them."""
    texts = []
    for targets in ([3, 4], [3, 4], [3, 5]):
        with contextlib.closing(SampleTable(targets)) as table:
            texts.append(fingerprint([table.targets], None))
    assert texts[0] == texts[1] != texts[2]
