"""The lines that keep the prefetcher right, deleted one at a time: some scenario must fail for each.

    python tests/mutants.py [NAME ...]

If no scenario finds a mutant, its line is not needed or not tested.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MUTANTS", "Mutant", "is_caught", "mutated"]

HELD, BUFFERS = "datasets/held_tensors.py", "datasets/buffers.py"
PINNED, RESIDENT, DEVICE = "loaders/pinned.py", "loaders/resident.py", "loaders/device.py"
FLOATS = "loaders/floats.py"
TRANSFER, PREFETCH = "loaders/transfer.py", "loaders/prefetch.py"
THREAD, LOOP = "loaders/copy_thread.py", "loaders/loop_copies.py"
_MODULES = {
    HELD: "fastdata.datasets.held_tensors",
    BUFFERS: "fastdata.datasets.buffers",
    PINNED: "fastdata.loaders.pinned",
    FLOATS: "fastdata.loaders.floats",
    RESIDENT: "fastdata.loaders.resident",
    DEVICE: "fastdata.loaders.device",
    TRANSFER: "fastdata.loaders.transfer",
    THREAD: "fastdata.loaders.copy_thread",
    LOOP: "fastdata.loaders.loop_copies",
    PREFETCH: "fastdata.loaders.prefetch",
}
SCHEDULES = 200


@dataclass(frozen=True)
class Mutant:
    """A change of one file: ``old``, which is in it once, becomes ``new``; ``scenarios`` are tried first."""

    name: str
    file: str
    old: str
    new: str
    scenarios: str = "staged"


MUTANTS = [
    # The loop's stream
    Mutant(
        "the loop's stream does not wait for the batch",
        TRANSFER,
        "user_stream.wait_event(place.ready)",
        "pass",
    ),
    Mutant("no record_stream", TRANSFER, "owner.record_stream(user_stream)", "pass"),
    Mutant(
        "record_stream for another stream than the loop's",
        THREAD,
        "user_stream = torch.cuda.current_stream(self.device)",
        "user_stream = torch.cuda.default_stream(self.device)",
        "own_stream",
    ),
    Mutant(
        "the side stream does not begin behind the loop's work",
        THREAD,
        "self.stream.wait_stream(user_stream)",
        "pass",
        "transform",
    ),
    Mutant(
        "the side stream does not wait for what the loader made on the device",
        TRANSFER,
        "self.stream.wait_stream(torch.cuda.default_stream(self.device))",
        "pass",
        "made_on_the_device",
    ),
    Mutant(
        "memory that the loader made on the device is not kept for the side stream",
        TRANSFER,
        "tensor.record_stream(self.stream)",
        "pass",
        "made_on_the_device",
    ),
    Mutant(
        "no event behind copies",
        TRANSFER,
        "            place.ready.record(self.stream)",
        "            pass",
    ),
    Mutant(
        "what follows copies runs on another stream",
        TRANSFER,
        "            batch = self.finish(batch)\n",
        "            with torch.cuda.stream(torch.cuda.default_stream(self.device)):\n"
        "                batch = self.finish(batch)\n",
        "transform",
    ),
    Mutant(
        "record_stream for what was copied, not for what a transform made",
        TRANSFER,
        "            memory = self._device_memory(batch)",
        "            memory = []",
        "transform",
    ),
    Mutant(
        "attributes and slots of the user's objects are not searched",
        HELD,
        "        parts = gc.get_referents(value)\n",
        "        parts = list(value) if isinstance(value, (list, tuple)) else []\n",
        "objects",
    ),
    Mutant(
        "an object's own record_stream is not called",
        HELD,
        "_memory_of(parts, seen) or [value]",
        "_memory_of(parts, seen)",
        "objects",
    ),
    Mutant(
        "the thread works on its default stream",
        THREAD,
        "with torch.cuda.stream(self.stream):",
        "if True:",
        "gathered",
    ),
    # Host memory
    Mutant(
        "sources are let go without waiting",
        TRANSFER,
        "        ready.synchronize()\n",
        "",
        "gathered",
    ),
    Mutant(
        "sources are not held",
        TRANSFER,
        "((place.ready, sources))",
        "((place.ready, []))",
        "gathered",
    ),
    Mutant(
        "sources in objects that move in place are not held",
        PINNED,
        "                sources.extend(host_memory(staged))",
        "                pass",
        "moving_objects",
    ),
    Mutant(
        "objects are not pinned",
        PINNED,
        "return self.pinned.pin_object(value)",
        "return None",
        "moving_objects",
    ),
    Mutant(
        "objects are not moved",
        PINNED,
        "return _move_object(value, self._device)",
        "return value",
        "moving_objects",
    ),
    Mutant(
        "the thread ends with copies in flight",
        THREAD,
        "                while self._in_flight:\n",
        "                while False:\n",
        "gathered_anew",
    ),
    Mutant(
        "an epoch's end does not wait for its thread",
        THREAD,
        "            thread.join(_PATIENCE_S)",
        "            pass",
        "lost_device",
    ),
    Mutant(
        "the loop waits for a thread that close() has given up",
        THREAD,
        "        elif not self._is_stopped:  # an exception",
        "        else:  # an exception",
        "closed_while_the_loop_waits",
    ),
    Mutant(
        "an epoch's end waits for a batch that the loop may take",
        THREAD,
        "                self._arrivals.get_nowait()  #",
        "                assert not self._arrivals.empty() or self._arrivals.get_nowait()\n"
        "                self._arrivals.get()  #",
        "closed_while_the_loop_waits",
    ),
    Mutant(
        "slots are given back while they are lent",
        BUFFERS,
        "        lease.buffer = buffer\n",
        "        lease.buffer = buffer\n        self._free.append(lease)\n",
        "gathered",
    ),
    Mutant(
        "tensors with gaps are read in place",
        PINNED,
        "part.is_pinned() and _is_dense(part)",
        "part.is_pinned()",
        "pinned_by_the_loader",
    ),
    Mutant(
        "what is pinned is copied once more",
        PINNED,
        "if all(part.is_pinned()",
        "if all(False and part.is_pinned()",
        "pinned_by_the_loader",
    ),
    Mutant(
        "pinned copies block the thread",
        PINNED,
        "non_blocking=value.is_pinned()",
        "non_blocking=False",
    ),
    # Bounds
    Mutant(
        "a copy does not wait until the device has left an older batch",
        THREAD,
        "            place.left.synchronize()",
        "            pass",
        "bounds",
    ),
    Mutant(
        "the loop does not say what it has left",
        TRANSFER,
        "place.left.record(user_stream)",
        "pass",
        "bounds",
    ),
    Mutant(
        "a place for one batch more",
        THREAD,
        "for _ in range(self.depth):",
        "for _ in range(self.depth + 1):",
        "bounds",
    ),
    Mutant(
        "a failed batch keeps its place",
        THREAD,
        "            self._places.put(place)\n            raise",
        "            raise",
        "transform",
    ),
    Mutant(
        "places are not given back",
        THREAD,
        "            self._places.put(self._hand_over(outcome, user_stream))",
        "            self._hand_over(outcome, user_stream)",
    ),
    # Threads, devices, captures
    Mutant(
        "the thread minds captures of others",
        THREAD,
        "            begin_thread(self.device)\n",
        "            torch.cuda.set_device(self.device)\n",
        "capture",
    ),
    Mutant(
        "pinning minds captures of others",
        PINNED,
        "        begin_thread(self._device)\n",
        "",
        "capture_beside_loader_threads",
    ),
    Mutant(
        "the thread stays on device 0",
        PINNED,
        "    torch.cuda.set_device(device)\n",
        "",
        "second_device",
    ),
    Mutant(
        "waiting threads spin",
        TRANSFER,
        "self.left = torch.cuda.Event(blocking=True)",
        "self.left = torch.cuda.Event()",
    ),
    Mutant(
        "a driver that refuses ends the epoch",
        PINNED,
        "except RuntimeError as error:\n            reason",
        "except KeyError as error:\n            reason",
        "pageable",
    ),
    # Copies that the loop queues
    Mutant(
        "the loop's copies run on its own stream",
        LOOP,
        "torch.cuda.stream(self.stream)",
        "torch.cuda.stream(torch.cuda.current_stream())",
        "gathered_by_threads streams_and_threads",
    ),
    Mutant(
        "the loop's copies do not wait until the device has left an older batch",
        LOOP,
        "            place.left.synchronize()",
        "            pass",
        "bounds_without_a_thread",
    ),
    Mutant(
        "the loop copies ahead without asking whether the device has left an older batch",
        LOOP,
        " or not self._empty[0].left.query():",
        ":",
        "bounds_without_a_thread",
    ),
    Mutant(
        "the loop waits for the latest batch that the device leaves, not for the oldest",
        LOOP,
        "            place = self._empty[0]\n",
        "            place = self._empty[0]\n            self._empty[-1].left.synchronize()\n",
        "bounds_without_a_thread",
    ),
    Mutant(
        "the loop waits for the oldest copy where it need not copy",
        LOOP,
        "len(self._in_flight) < self.depth or self._in_flight[0][0].query()",
        "True",
        "bounds_without_a_thread gathered_by_threads",
    ),
    Mutant(
        "sources are held longer than their copies run",
        LOOP,
        "            if len(self._in_flight) == self.depth:\n                self._release_oldest()\n",
        "",
        "bounds_without_a_thread",
    ),
    Mutant(
        "an epoch of the loop's ends with copies in flight",
        LOOP,
        "                # Wait for the copies: the next epoch's readers write to the memory that they read.\n"
        "                self._release_all()\n",
        "                pass\n",
        "left_while_threads_gather",
    ),
    Mutant(
        "the loop ends an epoch with copies in flight",
        LOOP,
        "            if batch is END:\n                self._release_all()\n",
        "            if batch is END:\n                self._in_flight.clear()\n",
        "gathered_by_threads",
    ),
    Mutant(
        "the loop reads behind an exception",
        LOOP,
        "        if self._queue and not isinstance(self._queue[-1], Arrival):\n"
        "            return False\n",
        "",
        "failing_threads",
    ),
    Mutant(
        "the loop's copies are made in its inference mode",
        LOOP,
        "torch.inference_mode(mode=False), ",
        "_without_autocast(), ",
        "ops_behind_threads",
    ),
    Mutant(
        "closing does not wait for the loop that is queueing copies",
        LOOP,
        "self._lock = threading.Lock()",
        "self._lock = nullcontext()",
        "closed_while_threads_read",
    ),
    Mutant(
        "a batch is copied after its epoch was closed",
        LOOP,
        "                self._is_begun = True\n                if self._is_stopped:\n"
        "                    return StopIteration()\n",
        "                self._is_begun = True\n",
        "closed_while_threads_read",
    ),
    # The store on the device, and epochs
    Mutant(
        "the store is copied for every epoch",
        DEVICE,
        "        if store not in self._copies:\n",
        "        if True:\n",
        "store_on_the_device",
    ),
    Mutant(
        "a chunk of a store is filled again while the device reads it",
        RESIDENT,
        "            chunk.is_read.synchronize()\n            filled",
        "            filled",
        "store_on_the_device",
    ),
    Mutant(
        "an epoch on another stream does not wait for the copy of the store",
        RESIDENT,
        "    for chunk in chunks:\n        chunk.is_read.synchronize()\n",
        "",
        "store_on_another_stream",
    ),
    Mutant(
        "a loop that changes its stream does not wait for what is cut",
        RESIDENT,
        "            now.wait_stream(self._stream)\n",
        "",
        "store_and_streams",
    ),
    Mutant(
        "what is cut on another stream does not wait for the constants",
        RESIDENT,
        "            stream.wait_stream(self._stream)",
        "            pass",
        "store_and_streams",
    ),
    Mutant(
        "memory of constants is free for others while another stream reads it",
        FLOATS,
        "            self._both_2C11.record_stream(torch.cuda.current_stream(device))",
        "            pass",
        "store_and_streams",
    ),
    Mutant(
        "memory of what is cut is free for others while another stream reads it",
        RESIDENT,
        "                owner.record_stream(now)\n",
        "                pass\n",
        "store_and_streams",
    ),
    Mutant(
        "memory of the copy is free for others while another stream reads it",
        RESIDENT,
        "            tensor.record_stream(stream)\n",
        "            pass\n",
        "store_and_streams",
    ),
    Mutant(
        "what is cut in inference mode cannot be trained on",
        RESIDENT,
        "    @torch.inference_mode(False)",
        "    #",
        "store_and_inference",
    ),
    Mutant(
        "a state before the first batch counts what was read ahead",
        PREFETCH,
        "        progress.mark_delivered(progress.mark())\n",
        "",
        "state_before_the_first_batch",
    ),
    Mutant(
        "a state before the first batch counts what was cut ahead",
        PREFETCH,
        "        progress.mark_delivered(marks[0])\n",
        "",
        "state_before_the_first_batch",
    ),
    Mutant(
        "every epoch has a new stream",
        PREFETCH,
        "self._stream = self._stream or torch",
        "self._stream = torch",
    ),
    Mutant(
        "close() does not end epochs",
        PREFETCH,
        "        for iterator in list(self._live):\n            iterator.close()\n        self._ring",
        "        self._ring",
        "broken_off",
    ),
]


def mutated(mutant: Mutant) -> str:
    """Return the changed source of a mutant's file."""
    import fastdata

    source = (Path(fastdata.__file__).parent / mutant.file).read_text("utf-8")
    assert source.count(mutant.old) == 1, (
        f"{mutant.name}: stands {source.count(mutant.old)} times in {mutant.file}"
    )
    return source.replace(mutant.old, mutant.new)


def is_caught(mutant: Mutant) -> str:
    """Return the error that finds a mutant, in a separate process; empty if none does."""
    source = mutated(mutant)  # an error of its own is nothing that the scenarios see
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.write(writer, _hunt(mutant, source).encode()[:4000])
        except BaseException:  # noqa: BLE001
            os.write(writer, traceback.format_exc().encode()[-4000:])
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as words:
        said = words.read().decode()
    os.waitpid(pid, 0)
    return said


def _hunt(mutant: Mutant, source: str) -> str:
    import scenarios

    files = list(_MODULES)
    # Each module after the changed one imports its names again.
    for file in files[files.index(mutant.file) :]:
        name = _MODULES[file]
        module = sys.modules[name]
        text = source if file == mutant.file else Path(module.__file__ or "").read_text("utf-8")
        exec(compile(text, file, "exec"), module.__dict__)
    scenarios.CudaPrefetcher = sys.modules["fastdata.loaders.prefetch"].CudaPrefetcher  # type: ignore[misc]
    likely = mutant.scenarios.split()
    for name in (*likely, *(other for other in scenarios.SCENARIOS if other not in likely)):
        seen = scenarios.run(name, 5, ordered=True)
        if seen:
            return f"{name}, ordered: {seen[0]}"
        for seed in range(SCHEDULES if name in likely else SCHEDULES // 20):
            seen = scenarios.run(name, seed)
            if seen:
                return f"{name}, seed {seed}: {seen[0]}"
    return ""


def main() -> None:
    import torch

    from torchvision_ops import import_torchvision

    import_torchvision()  # beside a CPU build of torch
    import scenarios

    torch.set_num_threads(1)
    scenarios.prepare()
    missed = 0
    for mutant in MUTANTS:
        if len(sys.argv) > 1 and not any(word in mutant.name for word in sys.argv[1:]):
            continue
        began = time.perf_counter()
        said = is_caught(mutant)
        missed += not said
        took = f"{time.perf_counter() - began:5.1f} s"
        print(f"{took}  {mutant.name}: {said or 'MISSED'}"[:230], flush=True)  # noqa: T201
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
