"""Datasets: torch map-style datasets over a store, read one sample or a whole batch at a time."""

from __future__ import annotations

import logging
import pickle
import time
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import numpy as np

from fastdata import core
from fastdata.cache import CacheOrigin, Listing, describe_steps, prepare_on_disk
from fastdata.contents import Contents, Table
from fastdata.decode import Resize
from fastdata.errors import StoreGoneError
from fastdata.memory import format_bytes
from fastdata.options import Options
from fastdata.preparation import Prepared, Road, Steps, prepare_storage, report_storage
from fastdata.serving import ServingDataset
from fastdata.sources import Source
from fastdata.spec import SampleSpec
from fastdata.storage import StorageReport
from fastdata.table import ListView, SampleTable
from fastdata.transforms import TransformPlan, fingerprint, is_same, plan_transform
from fastdata.transforms.cpu import Program, compile_ops
from fastdata.transforms.steps import known_name
from fastdata.visits import SharedVisits

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["PreparedDataset"]

log = logging.getLogger(__name__)

_ADVISED_PX = 256
"""Shorter side of images that are prepared for crops of 224 px."""
_LOOKED_AT = 8
_WORTH_SHARE = 0.8
"""Of the memory: what is saved beyond it is not worth a word."""


class PreparedDataset(ServingDataset):
    """What all datasets have in common once their source is known; made by its subclasses only."""

    _table: SampleTable | None
    _first_steps: tuple[Callable[[Any], Any], ...] = ()
    _prepared: tuple[int, str] | None = None
    """How many leading steps of the transform samples are stored after, and their text; None where none are stored."""

    # Building

    def _build(
        self,
        source: Source,
        options: Options,
        transform: Callable[[Any], Any] | None,
        target_transform: Callable[[Any], Any] | None,
        *,
        prepare: Callable[[Any], Any] | None = None,
        table: SampleTable | None = None,
        listing: Listing | None = None,
        root: str = "",
    ) -> None:
        """Choose the storage and fill it.

        Args:
            source: the samples.
            options: as given by the user.
            transform: the user's.
            target_transform: the user's.
            prepare: runs first, before ``resize`` and the leading part of the transform.
            table: paths and targets where they are known beforehand; else they come from the source.
            listing: the files, for a cache; None where samples are no files.
            root: their folder.
        """
        resize = None if options.resize is None else Resize(options.resize)
        self._first_steps = tuple(step for step in (prepare, resize) if step is not None)
        self._begin(options, transform, target_transform)
        steps = (*self._first_steps, *self._plan.prepare)
        self._is_upright = "exif_transpose" in map(known_name, steps)
        road = self._road(source, steps)
        if options.cache_dir is None or len(source) == 0:
            prepared = prepare_storage(road, options, table)
        else:
            text = describe_steps(steps, options.cache_key)
            origin = CacheOrigin(root=root, source=self._source_text(source), steps=text, listing=listing)
            prepared = prepare_on_disk(road, options, table, origin)
        self._serve(prepared, source)

    def _begin(
        self,
        options: Options,
        transform: Callable[[Any], Any] | None,
        target_transform: Callable[[Any], Any] | None,
    ) -> None:
        """Take what the user gave."""
        self._options, self.target_transform, self._transform = options, target_transform, transform
        self._plan = self._plan_of(transform, batch_ops=options.batch_ops)
        self._epoch: int | None = None

    def _serve(self, prepared: Prepared, source: Source | None) -> None:
        """Serve what was prepared, or where nothing is kept the source."""
        self.storage_plan, self.skipped = prepared.storage_plan, prepared.skipped
        self._contents, self._table = prepared.contents, prepared.table
        if prepared.contents is not None and self._prepared is None:
            self._prepared = len(self._plan.prepare), self._plan.prepare_key()
        self._source = source if prepared.contents is None else None
        self._visits = SharedVisits(self.sample_count)
        self._compile()
        advice = self._resize_advice()
        if advice:
            log.info("%s", advice)
            self.storage_plan = replace(self.storage_plan, reason=f"{self.storage_plan.reason}; {advice}")

    def _resize_advice(self) -> str:
        """What ``resize=`` would gain where whole images are kept for a random crop of them; empty elsewhere.

        Measured on a few samples: 10 ms.
        """
        contents = self._contents
        if not self._decodes_itself or contents is None or contents.images.spec.is_dense or self._program is None:
            return ""
        store, step = contents.images, max(1, len(contents.images) // _LOOKED_AT)
        planes = [store.read(index) for index in range(0, len(store), step)][:_LOOKED_AT]
        whole = [np.ascontiguousarray(image.transpose(1, 2, 0)) for image in planes]
        small = plan_transform(Resize(f"short:{_ADVISED_PX}"), channels=planes[0].shape[0], prepared=0)
        shrink = Program(small.batch_ops, store.spec).prepare
        less = [np.ascontiguousarray(shrink(image).transpose(1, 2, 0)) for image in whole]
        share = sum(image.size for image in less) / sum(image.size for image in whole)
        if share > _WORTH_SHARE or self._served is None:
            return ""
        out, index_B = np.empty((len(whole), *self._served[0]), self._served[1]), np.arange(len(whole))
        seconds = []
        for images in (whole, less, whole, less):
            start = time.perf_counter()
            self._program.run_decoded(images, index_B, 0, 0, out)
            seconds.append(time.perf_counter() - start)
        kept, times = format_bytes(int(share * store.size_bytes)), min(seconds[::2]) / min(seconds[1::2])
        bound = f"resize='short:{_ADVISED_PX}'"
        return f"images are kept as decoded; {bound} would keep {kept}, served {times:.1f} times as fast"

    def _plan_of(self, transform: Callable[[Any], Any] | None, **facts: Any) -> TransformPlan:
        """Split a transform.

        Raises:
            ValueError: it does not begin with the steps that samples are stored after.
        """
        plan = plan_transform(transform, prepared=self._prepared and self._prepared[0], **facts)
        if self._prepared is not None and plan.prepare_key() != self._prepared[1]:
            raise ValueError(
                f"samples are stored after {self._prepared[1] or 'no step'}, but the transform now begins with "
                f"{plan.prepare_key() or 'none'}. Give it the same first steps, or make a new dataset."
            )
        return plan

    def _road(self, source: Source, steps: tuple[Callable[[Any], Any], ...], *, stores: bool = True) -> Road:
        """Where samples are read from and what prepares them; ``stores``: only for their pixels, which are kept."""
        return Road(source=source, prepare=Steps(steps))

    @property
    def _decodes_itself(self) -> bool:
        """Whether samples are files that fastdata opens itself."""
        return False

    @abstractmethod
    def _source_text(self, source: Source) -> str:
        """What opens the samples, as text that tells a cache from others."""

    def _compile(self) -> None:
        """Derive what serving needs from the transform and the store; what fails changes nothing."""
        seen = fingerprint(self._transform)
        program: Program | None = None
        served: tuple[tuple[int, ...], np.dtype[Any]] | None = None  # shape and dtype of every sample served
        if self._contents is None:
            assert self._source is not None
            plan = self._plan_of(self._transform, batch_ops="off")
            steps = (*self._first_steps, *plan.prepare)
            self._is_upright = "exif_transpose" in map(known_name, steps)
            self._reader = self._road(self._source, steps, stores=False)
            if self._decodes_itself and self.transforms is None and core.obstacle() is None:
                every = (*self._first_steps, self._transform)
                asked, before = self._options.batch_ops, -len(self._first_steps)
                whole = plan_transform(every, channels=3, batch_ops=asked, prepared=0, first=before)
                spec = SampleSpec(shape=None, dtype="uint8", form="pil")
                if whole.is_batched and (served := Program(whole.batch_ops, spec).output((3, 1, 1))) is not None:
                    plan, program = whole, compile_ops(whole, spec)
        else:
            spec, shape = self._contents.images.spec, self._contents.images.shape(0)
            batch_ops = self._options.batch_ops if len(shape) == 3 and not self._contents.is_tuple else "off"
            channels = shape[0] if len(shape) == 3 else None
            facts: dict[str, Any] = {"dtype": spec.dtype, "channels": channels, "obstacle": core.obstacle()}
            plan = self._plan_of(self._transform, form=spec.form, batch_ops=batch_ops, **facts)
            if plan.batch_texts:
                program = compile_ops(plan, spec)
                served = program.output(shape)
            elif spec.is_dense:
                served = shape, np.dtype(spec.dtype)
        self._plan, self._program, self._served, self._seen = plan, program, served, seen

    def refresh(self) -> None:
        """Serve what the transform says now, whose steps may have been changed in place; cheap where none were.

        Raises:
            ValueError: it no longer begins with the steps that samples are stored after.
        """
        if not is_same(fingerprint(self._transform), self._seen):
            self._compile()

    # What torchvision's datasets show

    @property
    def transform(self) -> Callable[[Any], Any] | None:
        """The user's transform. It may be replaced by one that begins with the same deterministic steps."""
        return self._transform

    @transform.setter
    def transform(self, transform: Callable[[Any], Any] | None) -> None:
        self._plan_of(transform)
        self._transform = transform
        self._compile()

    @property
    def targets(self) -> ListView[Any]:
        """Target of every sample, before ``target_transform``."""
        return ListView(self.sample_count, self._stored_target)

    @property
    def samples(self) -> ListView[tuple[str, Any]]:
        """(path, target) of every sample, in torchvision's order; only where samples are files."""
        return self._files("samples").pairs

    imgs = samples

    @property
    def classes(self) -> list[str]:
        """Class names, sorted; empty where labels are plain numbers. Only where samples are files."""
        return list(self._files("classes").class_to_idx or ())

    @property
    def class_to_idx(self) -> dict[str, int]:
        """Number of each class; only where samples are files."""
        return self._files("class_to_idx").class_to_idx or {}

    def _files(self, asked_for: str) -> SampleTable:
        """The table, if it is one of files.

        Raises:
            StoreGoneError: the dataset was closed.
            AttributeError: it is none, so that ``hasattr`` says what torchvision's own datasets would.
        """
        self._check_open()
        if self._table is None or not self._table.has_paths:
            raise AttributeError(f"{type(self).__name__} has no {asked_for}: it does not list files")
        return self._table

    @property
    def plan(self) -> TransformPlan:
        """How the transform is split; ``print(dataset.plan)`` shows it."""
        return self._plan

    @property
    def storage(self) -> str:
        """Where samples are kept: ``"device"``, ``"shared"``, ``"compressed"``, ``"disk"`` or ``"none"``."""
        return self.storage_plan.storage

    def _trial_road(self) -> Road:
        """Where samples to try codecs on come from."""
        return self._reader if self._contents is None else Road(source=self._contents, prepare=Steps(()))

    def unkept_road(self) -> Road | None:
        """How samples that are kept nowhere would be read to be kept, for a time; None where they are kept."""
        if self._contents is not None or self._source is None:
            return None
        plan = self._plan_of(self._transform, batch_ops=self._options.batch_ops)
        return self._road(self._source, (*self._first_steps, *plan.prepare))

    def read_after(self) -> tuple[Source | None, str]:
        """What ``unkept_road`` follows from: the source, and the text of the steps that samples are read after."""
        return self._source, self._plan.prepare_key()

    def served_from(self, contents: Contents) -> Self:
        """This dataset over other contents of the same samples, such as some of them in memory; never closed itself."""
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._contents = contents
        other._compile()
        return other

    @property
    def kept(self) -> Contents | None:
        """What the dataset serves from; None where it keeps nothing."""
        return self._contents

    @property
    def options(self) -> Options:
        """How the dataset is prepared, as given by the user."""
        return self._options

    @property
    def table(self) -> Table | None:
        """Paths and targets; None where only reading the samples tells them."""
        return self._table if self._contents is None else self._contents.table

    def filled_share(self, index: np.ndarray | None = None) -> float:
        """How many of the samples, or of those of ``index``, are kept already, from 0 to 1.

        Less than 1 only where ``fill`` is lazy; 0 where nothing is kept.
        """
        return 0.0 if self._contents is None else self._contents.filled_share(index)

    def storage_report(self) -> StorageReport:
        """Try every codec on samples spread over the dataset; ``print(dataset.storage_report())`` shows the outcome.

        Takes about a second: up to 25 samples are read, encoded and decoded.
        """
        return report_storage(self._trial_road(), self._options)

    def __repr__(self) -> str:
        lines = [
            f"Dataset {type(self).__name__}",
            f"    Number of datapoints: {len(self)}",
            *(f"    {line}" for line in self._extra_repr()),
            f"    Storage: {self.storage_plan.reason}{self._fill_text()}",
        ]
        if self._transform is not None:
            lines.append("    Transform: " + repr(self._transform).replace("\n", "\n               "))
        return "\n".join(lines)

    def _fill_text(self) -> str:
        share = self.filled_share()
        return f"; {share:.0%} prepared so far, the rest on first read" if self._contents and share < 1 else ""

    def _extra_repr(self) -> list[str]:
        return []

    # Epochs

    @property
    def epoch(self) -> int | None:
        """The epoch that was set; None where loaders count theirs."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Make random draws those of ``epoch``, until it is set again."""
        self._epoch = epoch
        self._visits.restart(epoch)

    def close(self) -> None:
        """Give the memory back; batches already served stay valid. Idempotent."""
        if self._contents:
            self._contents.close()
        if self._table:
            self._table.close()
        self._visits.close()
        self._gone = "the dataset was closed; create it again to read from it"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        self.refresh()  # what a copy cannot serve is said here, not where it is opened
        derived = ("_plan", "_program", "_served", "_seen", "_reader", "skipped", "batch_ring")
        state = {name: value for name, value in self.__dict__.items() if name not in derived}
        state["_imported"] = self._contents.tensor_classes() if self._contents else ()
        if get_spawning_popen() is not None:
            # An error while a process starts would end it, and nobody would be told why: it is raised when it reads.
            opened = {name: state.pop(name) for name in ("_contents", "_table", "_visits")}
            state["_sent"] = bytes(ForkingPickler.dumps(opened))
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        del state["_imported"]  # unpickling it has imported what samples are
        sent = state.pop("_sent", None)
        self.__dict__.update(state)
        self.skipped = []
        try:
            self.__dict__.update({} if sent is None else pickle.loads(sent))
            self._compile()
        except StoreGoneError as gone:
            if sent is None:
                raise
            self._gone = str(gone)
