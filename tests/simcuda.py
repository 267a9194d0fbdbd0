"""A CUDA made of CPU memory: it does everything as late, and in as odd an order, as CUDA permits.

It replaces ``torch.cuda``, so that every line of the prefetcher runs unchanged. A tensor on the device is a
``SimTensor``. Its bytes are in blocks of a small copy of torch's caching allocator. Each operation on it is queued on
the calling thread's current stream, and done later. The behaviour follows torch's sources, named in brackets:

    streams         queues without an order between them; events are places in them, ``wait_event`` captures one
    kernels         read and write when they run
    copies          from pinned memory the source's address is read when the copy runs, else at once; without
                    ``non_blocking`` the host waits for the stream (Copy.cu)
    device memory   when it is freed, its stream may use it again and overwrites it (POISON); after ``record_stream``
                    only when the events recorded at that time are done (CUDACachingAllocator)
    pinned memory   torch's blocks are overwritten when they are freed and the copies that torch knows of are done
                    (CachingHostAllocator); slots of a ``BatchRing`` as soon as they are free
    captures        in mode "global", querying events, waiting and allocating end the capture, unless the thread has
                    exchanged its mode

Without a seed, threads are real, and a stream runs when something waits for it. With a seed, a scheduler runs one host
thread or stream at a time, and may change to another at every call; the same seed repeats the schedule. Errors show in
the data, or in ``violations``. With ``ordered=True`` these include what ``Order`` finds, for all schedules at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import queue
import random
import threading
import types
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError
from typing import Any

import numpy as np
import torch
import torch.cuda
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["POISON", "CudaError", "Sim", "SimTensor"]

POISON = 0xA5
_ROUND = 512
_HOST_PAGE = 4096
_RELAXED = 2  # cudaStreamCaptureModeRelaxed
_MISSING = object()
aten: Any = torch.ops.aten
_current: list[Sim] = []


class CudaError(RuntimeError):
    """The error that torch raises if the runtime fails."""


class DeadlockError(RuntimeError):
    """No host thread and no stream can continue."""


def sim() -> Sim:
    return _current[-1]


# Memory


class Memory:
    """A piece of memory and its state. ``given_up`` counts on the host, ``overwritten`` where work is done."""

    def __init__(self, size: int) -> None:
        self.array = np.full(size, POISON, np.uint8)
        with torch._C._DisableTorchDispatch():
            self.octets = torch.from_numpy(self.array)
        self.address = self.array.ctypes.data
        self.given_up = self.overwritten = 0
        self.accesses: list[Access] = []

    def holds(self, address: int, size: int) -> bool:
        return self.address <= address and address + size <= self.address + len(self.array)


class Block:
    """An allocation. It is freed with its last tensor."""

    def __init__(self, owner: Sim, stream: Stream, memory: Memory, nbytes: int) -> None:
        self.owner, self.stream, self.memory, self.nbytes = owner, stream, memory, nbytes
        self.number = memory.given_up
        self.uses: set[Stream] = set()

    def __del__(self) -> None:
        self.owner.free(self)


class SimTensor(torch.Tensor):
    """A tensor on the device. ``cells`` are its bytes, which only work on a stream may touch."""

    # Behind a function, as a real tensor's memory is behind C++: who walks attributes does not see it.
    _inside: Callable[[], tuple[torch.Tensor, Block]]
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, cells: torch.Tensor, block: Block) -> Any:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            cells.shape,
            strides=cells.stride(),
            storage_offset=cells.storage_offset(),
            dtype=cells.dtype,
            device=block.stream.device,
        )
        made._inside = lambda: (cells, block)
        return made

    @property
    def cells(self) -> torch.Tensor:
        return self._inside()[0]

    @property
    def block(self) -> Block:
        return self._inside()[1]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"SimTensor({tuple(self.shape)}, {self.dtype}, {self.device})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return sim().dispatch(func, args, kwargs or {})

    def copy_(self, source: Any, non_blocking: bool = False) -> Any:
        if isinstance(source, SimTensor):
            into, cells = self.cells, source.cells
            sim().launch("copy", lambda: into.copy_(cells), reads=[source], writes=[self])
        else:
            sim().copy_from_host(self, source, non_blocking)
        return self

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, torch.Tensor):
            return aten.index.Tensor(self, [index])
        return SimTensor(self.cells[index], self.block)

    def contiguous(self, memory_format: Any = torch.contiguous_format) -> Any:
        if self.cells.is_contiguous(memory_format=memory_format):
            return self
        like = torch.empty_like(self.cells, device="meta", memory_format=memory_format)
        return sim().empty(self.device, like).copy_(self)

    def data_ptr(self) -> int:
        return self.cells.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def item(self) -> Any:
        return self.cpu().item()

    def record_stream(self, stream: Stream) -> None:  # type: ignore[override]
        if stream is not self.block.stream:
            self.block.uses.add(stream)

    def is_pinned(self, device: Any = None) -> bool:
        return False


# Streams and events


class Stream:
    """A queue of work that is done in order."""

    def __init__(self, device: Any = None, **_: Any) -> None:
        self._owner = sim()
        self.device = self._owner.index_of(device)
        self.work: deque[tuple[str, Any, list[tuple[Memory, int]]]] = deque()
        self.done = self.queued = 0
        self.waits: list[tuple[Event, int, int]] = []  # and how much was queued before
        self.cuda_stream = len(self._owner.streams)  # its handle; 0 is a default stream
        self._owner.streams.append(self)
        self.name = f"{self.device}/{len(self._owner.streams)}"
        self._owner.scheduler.add(self)

    def __repr__(self) -> str:
        return self.name

    def push(self, kind: str, work: Any, stamps: list[tuple[Memory, int]] | None = None) -> None:
        with self._owner.lock:
            self.work.append((kind, work, stamps or []))
            self.queued += 1

    def can_run(self) -> bool:
        return bool(self.work) and (
            self.work[0][0] != "wait" or self.work[0][1][0].done >= self.work[0][1][1]
        )

    def step(self) -> None:
        kind, work, stamps = self.work.popleft()
        for memory, number in stamps:
            if memory.overwritten != number:
                self._owner.violation(f"{kind} on {self} touches memory of another owner")
        if kind == "wait":
            work[0].run_to(work[1])
        else:
            with torch._C._DisableTorchDispatch():  # it has cells only, on which SimMode has no say
                work()
        self.done += 1

    def run_to(self, position: int) -> None:
        with self._owner.lock:
            while self.done < position:
                self.step()

    def wait_event(self, event: Event) -> None:
        self._owner.call("cudaStreamWaitEvent")
        self.waits.append((event, event.position, self.queued))
        if event.stream is not None:
            self.push("wait", (event.stream, event.position))
            self._owner.order.wait(self, event)
        self._owner.scheduler.point()

    def wait_stream(self, stream: Stream) -> None:
        event = Event()
        event.record(stream)
        self.wait_event(event)

    def synchronize(self) -> None:
        event = Event()
        event.record(self)
        event.synchronize()


class Event:
    """A place in a stream. An event that was never recorded counts as done."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, **_: Any) -> None:
        self.stream: Stream | None = None
        self.position, self.blocking = 0, blocking
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        owner = sim()
        owner.call("cudaEventRecord")
        self.stream = stream or owner.current_stream()
        self.position = self.stream.queued
        owner.order.record(self, self.stream)
        owner.scheduler.point()

    def is_done(self) -> bool:
        return self.stream is None or self.stream.done >= self.position

    def _has_work_behind(self, stream: Stream) -> bool:
        """Return True if the loop has queued work after this: the device then works while the host waits."""
        if stream is self.stream:
            return self.position < stream.queued
        behind = [
            queued
            for event, at, queued in stream.waits
            if event.stream is self.stream and at >= self.position
        ]
        return bool(behind) and min(behind) + 1 < stream.queued

    def query(self) -> bool:
        sim().call("cudaEventQuery", is_unsafe=True)
        return self.is_done()

    def synchronize(self) -> None:
        owner = sim()
        owner.call("cudaEventSynchronize", is_unsafe=True)
        if not self.is_done() and owner.is_loop_inside_next():
            owner.on_wait(self)
            if not self._has_work_behind(owner.current_stream()):
                owner.host_waits("event")
        if not self.blocking and owner.scheduler.is_thread():
            owner.violation("a thread that waits for an event spins")
        if self.stream is not None:
            owner.scheduler.wait_for(self.stream, self.position)
            owner.order.host_wait(self)


# Who runs next


class Freely:
    """Real host threads. A stream runs only as far as something waits for it."""

    def __init__(self, owner: Sim) -> None:
        self._owner = owner

    def add(self, who: Any) -> None: ...

    def point(self) -> None: ...

    def is_known(self) -> bool:
        return False

    def is_thread(self) -> bool:
        return threading.current_thread().name == "fastdata-prefetch"

    def wait_for(self, stream: Stream, position: int) -> None:
        stream.run_to(position)


class Task:
    """A host thread that runs when the scheduler chooses it."""

    def __init__(self) -> None:
        self.baton = threading.Semaphore(0)
        self.ready: Callable[[], bool] | None = None
        self.may_time_out = self.has_timed_out = self.is_done = False


class Schedule:
    """One of host threads and streams at a time, chosen by a seed.

    Seeds differ in kind: random walks with random weights, priorities with few changes (PCT), streams as late and as
    early as can be.
    """

    def __init__(self, owner: Sim, seed: int) -> None:
        self._owner, self.random = owner, random.Random(seed)
        self.kind = ("walk", "pct", "late", "walk", "pct", "early")[seed % 6]
        self._weights: dict[Any, float] = {}
        self._changes = {self.random.randrange(300) for _ in range(4)}
        self._steps = 0
        self._local = threading.local()
        self.tasks: list[Task] = []
        self.dead = ""
        self.joins_time_out = False
        self.adopt(Task())

    def adopt(self, task: Task) -> None:
        """Make the calling thread this task."""
        self._local.task = task
        if task not in self.tasks:
            self.enter(task)

    def enter(self, task: Task) -> None:
        self.tasks.append(task)
        self.add(task)

    def add(self, who: Any) -> None:
        is_early = isinstance(who, Stream) == (self.kind == "early")
        plain = self.random.random() + (2.0 if self.kind in ("late", "early") and is_early else 0.0)
        self._weights[who] = (
            self.random.choice((0.03, 0.2, 1.0, 4.0)) if self.kind == "walk" else plain
        )

    def task(self) -> Task | None:
        return getattr(self._local, "task", None)

    def is_known(self) -> bool:
        """Return True if the scheduler runs the calling thread."""
        return self.task() is not None

    def is_thread(self) -> bool:
        return self.task() not in (None, self.tasks[0])

    def point(self) -> None:
        """Let the scheduler change to another thread or stream."""
        task = self.task()
        if task is not None and not self.dead:
            self._switch(task, None, False)

    def wait_for(self, stream: Stream, position: int) -> None:
        self.block(lambda: stream.done >= position)

    def block(self, ready: Callable[[], bool], may_time_out: bool = False) -> bool:
        """Let others run until a condition is true; return False if the wait timed out."""
        task = self.task()
        assert task is not None, "a thread that the schedule does not know waits for the device"
        if self.dead:
            raise DeadlockError(self.dead)
        return self._switch(task, ready, may_time_out)

    def _switch(self, task: Task, ready: Callable[[], bool] | None, may_time_out: bool) -> bool:
        task.ready, task.may_time_out, task.has_timed_out = ready, may_time_out, False
        chosen = self._run_to_task()
        if chosen is not task:
            chosen.baton.release()
            task.baton.acquire()
            if self.dead and ready is not None and not ready():
                raise DeadlockError(self.dead)
        task.ready = None
        return not task.has_timed_out

    def _run_to_task(self) -> Task:
        while True:
            who = self._choose()
            if isinstance(who, Task):
                return who
            who.step()

    def pass_on(self, task: Task) -> None:
        task.is_done = True
        with contextlib.suppress(DeadlockError):
            if not self.dead:
                self._run_to_task().baton.release()

    def _choose(self) -> Any:
        self._steps += 1
        self._owner.take_back()
        waiting = [task for task in self.tasks if not task.is_done]
        enabled: list[Any] = [stream for stream in self._owner.streams if stream.can_run()]
        late = []
        for task in waiting:
            if task.ready is None or task.ready():
                enabled.append(task)
            elif task.may_time_out:
                late.append(task)
        if late and (not enabled or self.random.random() < 0.02):
            late[0].has_timed_out = True
            return late[0]
        if not enabled:
            self.die("deadlock")
            raise DeadlockError(self.dead)
        if self.kind == "walk":
            return self.random.choices(enabled, [self._weights[who] for who in enabled])[0]
        best = max(enabled, key=self._weights.__getitem__)
        if self._steps in self._changes:
            self._weights[best] = self.random.random() - 1
        return best

    def die(self, why: str) -> None:
        """End the schedule, and release the threads that wait."""
        if not self.dead:
            self._owner.violation(why)
            self.dead = why
            for task in self.tasks:
                if task is not self.task() and not task.is_done:
                    task.baton.release()


class SimThread(threading.Thread):
    """A thread of the prefetcher, run by the scheduler."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._sim, self._task = sim(), Task()

    def start(self) -> None:
        self._clock = self._sim.order.send()
        if isinstance(self._sim.scheduler, Schedule):
            self._sim.scheduler.enter(self._task)
        super().start()
        self._sim.scheduler.point()

    def run(self) -> None:
        scheduler = self._sim.scheduler
        if not isinstance(scheduler, Schedule):
            with SimMode():
                super().run()
            return
        scheduler.adopt(self._task)
        self._task.baton.acquire()
        self._sim.order.receive(self._clock)
        try:
            if not scheduler.dead:
                with SimMode():
                    super().run()
        except BaseException as error:  # noqa: BLE001
            self._sim.violation(f"an exception left the thread: {type(error).__name__}: {error}")
        finally:
            self._clock = self._sim.order.send()
            scheduler.pass_on(self._task)

    def join(self, timeout: float | None = None) -> None:
        scheduler = self._sim.scheduler
        if isinstance(scheduler, Schedule) and not scheduler.dead:
            scheduler.block(
                lambda: self._task.is_done, timeout is not None and scheduler.joins_time_out
            )
            if not self._task.is_done:
                return
            self._sim.order.receive(self._clock)
        super().join(timeout if isinstance(scheduler, Freely) else 5)


class SimQueue:
    """``queue.SimpleQueue``; each call lets the scheduler change to another thread or stream."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        self._items.append((item, sim().order.send()))
        sim().scheduler.point()

    def get(self) -> Any:
        scheduler = sim().scheduler
        assert isinstance(scheduler, Schedule)
        scheduler.block(lambda: bool(self._items))
        item, clock = self._items.popleft()
        sim().order.receive(clock)
        return item

    def get_nowait(self) -> Any:
        sim().scheduler.point()
        if not self._items:
            raise queue.Empty
        item, clock = self._items.popleft()
        sim().order.receive(clock)
        return item

    def empty(self) -> bool:
        is_empty = not self._items
        sim().scheduler.point()  # others may put or get before the caller acts on the answer
        return is_empty


class SimLock:
    """``threading.Lock``; each call lets the scheduler change to another thread or stream."""

    def __init__(self) -> None:
        self._is_held = False
        self._clock: Clock = {}

    def __enter__(self) -> None:
        scheduler = sim().scheduler
        assert isinstance(scheduler, Schedule)
        scheduler.block(lambda: not self._is_held)
        self._is_held = True
        sim().order.receive(self._clock)

    def __exit__(self, *_: object) -> None:
        self._is_held = False
        self._clock = sim().order.send()
        sim().scheduler.point()


class SimFuture:
    """``concurrent.futures.Future`` that waits by the scheduler."""

    def __init__(self) -> None:
        self._outcome: tuple[Any, Exception | None] | None = None
        self._clock: Clock = {}

    def done(self) -> bool:
        sim().scheduler.point()
        is_done = self._outcome is not None
        if is_done:
            sim().order.receive(self._clock)
        return is_done

    def exception(self, timeout: float | None = None) -> Exception | None:
        scheduler = sim().scheduler
        assert isinstance(scheduler, Schedule)
        scheduler.block(lambda: self._outcome is not None)
        sim().order.receive(self._clock)
        assert self._outcome is not None
        if isinstance(self._outcome[1], CancelledError):
            raise self._outcome[1]
        return self._outcome[1]

    def result(self) -> Any:
        error = self.exception()
        if error is not None:
            raise error
        assert self._outcome is not None
        return self._outcome[0]

    def settle(self, value: Any, error: Exception | None = None) -> None:
        if self._outcome is None:
            self._clock = sim().order.send()
            self._outcome = value, error


class SimExecutor:
    """``ThreadPoolExecutor`` whose threads are run by the scheduler."""

    def __init__(self, threads: int, **_: Any) -> None:
        self._work = SimQueue()
        self._waiting: list[SimFuture] = []
        self._most = threads
        self._threads: list[SimThread] = []
        self._is_shut = False

    def submit(self, function: Callable[..., Any], *arguments: Any) -> SimFuture:
        if self._is_shut:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future = SimFuture()
        self._waiting.append(future)
        if len(self._threads) < self._most:
            self._threads.append(SimThread(target=self._run))
            self._threads[-1].start()
        self._work.put((future, function, arguments))
        return future

    def _run(self) -> None:
        while (task := self._work.get()) is not None:
            future, function, arguments = task
            if future not in self._waiting:
                continue  # cancelled
            self._waiting.remove(future)
            try:
                future.settle(function(*arguments))
            except Exception as error:  # noqa: BLE001
                future.settle(None, error)
            del task, future, function, arguments

    def shutdown(self, *, wait: bool, cancel_futures: bool) -> None:
        self._is_shut = True
        assert cancel_futures
        while self._waiting:
            self._waiting.pop().settle(None, CancelledError())
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads if wait else ():
            thread.join()


# Order, whatever the schedule

Clock = dict[Any, int]
"""Of each actor, a host thread or a stream, up to where all that it did has happened."""


class Access:
    """A read or write of bytes [start, end) by an actor, with the actor's count of actions."""

    def __init__(
        self, actor: Any, time: int, start: int, end: int, is_write: bool, what: str
    ) -> None:
        self.actor, self.time, self.start, self.end, self.is_write, self.what = (
            actor,
            time,
            start,
            end,
            is_write,
            what,
        )


class Order:
    """Whether accesses of the same memory have an order in every schedule, judged in one of them.

    Host threads and streams are actors with vector clocks. Work happens after everything that its thread had done when
    it queued the work. An event passes the clock of its stream to each waiter, and a queue passes the clock from put to
    get. If one of two accesses is a write, one must happen before the other, as in torch.cuda._sanitizer. Freed memory
    counts as written by its next owner: its stream, and after ``record_stream`` the recorded streams.
    """

    def __init__(self, owner: Sim, *, is_on: bool) -> None:
        self._owner, self.is_on = owner, is_on
        self._clocks: dict[Any, Clock] = defaultdict(dict)

    def _host(self) -> Clock:
        return self._clocks[threading.get_ident()]

    def send(self) -> Clock:
        """Return the clock that is sent with a message of the calling thread."""
        return dict(self._host()) if self.is_on else {}

    def receive(self, clock: Clock) -> None:
        _join(self._host(), clock)

    def record(self, event: Event, stream: Stream) -> None:
        if self.is_on:
            event.clock = dict(self._clocks[stream])
            _join(event.clock, self._host())

    def wait(self, stream: Stream, event: Event) -> None:
        _join(self._clocks[stream], event.clock)
        _join(self._clocks[stream], self._host() if self.is_on else {})

    def host_wait(self, event: Event) -> None:
        _join(self._host(), event.clock)

    def work(
        self, stream: Stream, what: str, spans: Iterable[tuple[Memory, int, int, bool]]
    ) -> None:
        """Record that queued work reads or writes these ranges of memory."""
        if not self.is_on:
            return
        clock = self._clocks[stream]
        _join(clock, self._host())
        clock[stream] = clock.get(stream, 0) + 1
        for memory, start, end, is_write in spans:
            access = Access(stream, clock[stream], start, end, is_write, what)
            self._judge(memory, access, clock)
            memory.accesses.append(access)

    def free(self, memory: Memory, streams: Iterable[Stream], what: str) -> None:
        """Record freed memory as written by its next owner, after all work of these streams and the calling thread."""
        if self.is_on:
            clock = dict(self._host())
            for stream in streams:
                _join(clock, self._clocks[stream])
            self._judge(memory, Access(None, 0, 0, len(memory.array), True, what), clock)
            memory.accesses.clear()

    def _judge(self, memory: Memory, access: Access, clock: Clock) -> None:
        for other in memory.accesses:
            overlaps = other.start < access.end and access.start < other.end
            if (
                overlaps
                and (other.is_write or access.is_write)
                and clock.get(other.actor, 0) < other.time
            ):
                self._owner.violation(f"no order: {access.what}, and {other.what} on {other.actor}")


def _join(clock: Clock, other: Clock) -> None:
    for actor, time in other.items():
        if clock.get(actor, 0) < time:
            clock[actor] = time


# The device


class SimMode(TorchDispatchMode):
    """Sends all operations on the device to the simulation, also functions that make tensors."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled here, and torch's wrapper would take as long as the simulation."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return sim().dispatch(func, args, kwargs or {}) if _current else func(*args, **kwargs or {})


class Sim:
    """A machine with such a device, where ``installed``.

    Attributes:
        violations: actions that are, or may be, errors in CUDA.
        counts: calls and copies, by kind.
        sent: bytes of each copy from the host.
        made: device memory of tensors made by ``torch.empty``.
        lost: text of an error that every call raises from now on, as after an error of a kernel.
        refuses_to_pin: True to behave as a driver that has no more memory to lock.
        limit_bytes: most memory that tensors may take.
        driver: name of the driver's library; there is none by default.
        capture: thread, validity and device of the capture in progress.
    """

    def __init__(self, seed: int | None = None, *, devices: int = 1, ordered: bool = False) -> None:
        self.devices = [torch.device("cuda", index) for index in range(devices)]
        self.lock = threading.RLock()
        self.local = threading.local()
        self.violations: list[str] = []
        self.counts: Counter[str] = Counter()
        self.sent: list[int] = []
        self.made: list[weakref.ref[Any]] = []
        self.streams: list[Stream] = []
        self.lost = ""
        self.refuses_to_pin = False
        self.driver = "no driver of a simulated device"
        self.capture: list[Any] | None = None
        self.contexts: set[torch.device] = set()
        self.free_bytes = 1 << 30
        self.limit_bytes = self.free_bytes
        self.live_bytes = self.peak_bytes = 0
        self.is_inside_next = False
        self.loop_thread = threading.get_ident()
        self.on_copy: Callable[[], None] = lambda: None
        self.on_wait: Callable[[Event], None] = lambda event: None  # of the loop, inside next()
        self.order = Order(self, is_on=ordered)
        self.scheduler: Freely | Schedule = Freely(self) if seed is None else Schedule(self, seed)
        self._blocks: weakref.WeakSet[Block] = weakref.WeakSet()
        self._free: dict[Any, list[Memory]] = defaultdict(list)
        self._leaving: list[tuple[list[tuple[Stream, int]], Stream, Memory]] = []
        self._pinned: dict[
            int, tuple[Memory, set[Stream]]
        ] = {}  # by address, and which streams torch knows to read
        self._pinned_free: dict[int, list[Memory]] = defaultdict(list)
        self._pinned_leaving: list[tuple[list[tuple[Stream, int]], Memory]] = []
        _current.append(self)
        self._defaults = {device: Stream(device) for device in self.devices}
        _current.pop()

    def violation(self, words: str) -> None:
        if words not in self.violations and not getattr(self.scheduler, "dead", ""):
            self.violations.append(words)

    # Calls

    def call(self, name: str, *, is_unsafe: bool = False) -> None:
        """Count a call of the runtime. It fails if the device is lost, or if it is unsafe during a capture."""
        self.counts[name] += 1
        if self.lost:
            raise CudaError(self.lost)
        if is_unsafe and self.capture is not None:
            is_own = self.capture[0] == threading.get_ident()
            if is_own or getattr(self.local, "mode", 0) != _RELAXED:
                self.capture[1] = False
                raise CudaError(
                    f"CUDA error: operation not permitted when stream is capturing ({name})"
                )

    def is_loop_inside_next(self) -> bool:
        return self.is_inside_next and threading.get_ident() == self.loop_thread

    def host_waits(self, what: str) -> None:
        if self.is_loop_inside_next():
            self.violation(
                f"the training loop's thread waits for the device ({what}) inside next()"
            )

    def begin_capture(self) -> None:
        self.capture = [threading.get_ident(), True, self.current_device()]
        self.scheduler.point()

    def end_capture(self) -> bool:
        """End a capture; return True if it succeeded."""
        assert self.capture is not None
        self.scheduler.point()
        is_valid, self.capture = self.capture[1], None
        return bool(is_valid)

    def is_capturing(self) -> bool:
        here = threading.get_ident(), self.current_device()
        return self.capture is not None and (self.capture[0], self.capture[2]) == here

    # Devices and streams of a thread

    def index_of(self, device: Any) -> torch.device:
        device = (
            torch.device("cuda", device)
            if isinstance(device, int)
            else device and torch.device(device)
        )
        return device if device and device.index is not None else self.current_device()

    def current_device(self) -> torch.device:
        return getattr(self.local, "device", self.devices[0])

    def thread_streams(self) -> dict[torch.device, Stream]:
        if not hasattr(self.local, "streams"):
            self.local.streams = {}
        return self.local.streams  # type: ignore[no-any-return]

    def current_stream(self, device: Any = None) -> Stream:
        device = self.index_of(device)
        return self.thread_streams().get(device) or self._defaults[device]

    def default_stream(self, device: Any = None) -> Stream:
        return self._defaults[self.index_of(device)]

    def synchronize(self, device: Any = None) -> None:
        for stream in [stream for stream in self.streams if stream.device == self.index_of(device)]:
            stream.synchronize()

    @contextlib.contextmanager
    def on_device(self, device: Any) -> Iterator[None]:
        """Stand in for ``torch.cuda.device``."""
        before = self.current_device()
        self.local.device = self.index_of(device)
        yield
        self.local.device = before

    @contextlib.contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        """Stand in for ``torch.cuda.stream``."""
        before = dict(self.thread_streams())
        with self.on_device(stream.device):
            self.thread_streams()[stream.device] = stream
            yield
        self.local.streams = before

    # Memory of the device

    def allocate(self, device: torch.device, nbytes: int) -> Block:
        stream = self.current_stream(device)
        size = -(-max(nbytes, 1) // _ROUND) * _ROUND
        with self.lock:
            self.take_back()
            if self.live_bytes + nbytes > self.limit_bytes:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory")
            pool = self._free[stream, size]
            if not pool:
                self.call("cudaMalloc", is_unsafe=True)
                pool.append(Memory(size))
            self.live_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            block = Block(self, stream, pool.pop(), nbytes)
            self._blocks.add(block)
            return block

    def free(self, block: Block) -> None:
        if not _current or sim() is not self:
            return
        with self.lock:
            self.live_bytes -= block.nbytes
            block.memory.given_up += 1
            self.order.free(
                block.memory, [block.stream, *block.uses], "the next owner of freed memory"
            )
            self._leaving.append(
                ([(used, used.queued) for used in block.uses], block.stream, block.memory)
            )

    def take_back(self) -> None:
        """Make freed memory available again, if the events that were recorded then are done."""
        if not self._leaving and not self._pinned_leaving:
            return
        with self.lock:
            for entry in [each for each in self._leaving if _are_done(each[0])]:
                self._leaving.remove(entry)
                _, stream, memory = entry

                def overwrite(memory: Memory = memory) -> None:
                    memory.overwritten += 1
                    memory.array[:] = POISON

                stream.push("overwriting freed memory", overwrite)
                self._free[stream, len(memory.array)].append(memory)
            for uses, memory in [each for each in self._pinned_leaving if _are_done(each[0])]:
                self._pinned_leaving.remove((uses, memory))
                memory.array[:] = POISON
                self._pinned_free[len(memory.array)].append(memory)

    def empty(self, device: torch.device, like: torch.Tensor) -> SimTensor:
        """Return device memory for a tensor of this shape, dtype and strides."""
        shape, strides, dtype = like.shape, like.stride(), like.dtype
        has_elements = 0 not in shape
        extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        block = self.allocate(device, extent * like.itemsize if has_elements else 0)
        with torch._C._DisableTorchDispatch():
            if not has_elements:
                return SimTensor(torch.empty(shape, dtype=dtype), block)
            cells = block.memory.octets[: extent * like.itemsize].view(dtype)
            return SimTensor(cells.as_strided(shape, strides), block)

    def launch(
        self,
        kind: str,
        work: Callable[[], Any],
        *,
        reads: list[SimTensor],
        writes: list[SimTensor],
        device: Any = None,
    ) -> None:
        self.call("cudaLaunchKernel")
        stream = self.current_stream(device or (reads + writes)[0].device)
        with self.lock:
            self.order.work(
                stream,
                kind,
                [(*_span(t), False) for t in reads] + [(*_span(t), True) for t in writes],
            )
            stream.push(kind, work, [(t.block.memory, t.block.number) for t in (*reads, *writes)])
        self.scheduler.point()

    def launch_at(
        self, handle: int, work: Callable[[], Any], *, reads: list[int], writes: list[int]
    ) -> None:
        """Queue a kernel that was given addresses. It may touch the whole memory around each."""
        self.counts["cuLaunchKernel"] += 1
        stream = self.streams[handle]
        with self.lock:
            blocks = list(self._blocks)
            spans, stamps = [], []
            for address in (*reads, *writes):
                found = [block for block in blocks if block.memory.holds(address, 1)]
                if not found:
                    self.violation("a kernel gets the address of memory that is free")
                for block in found:
                    memory = block.memory
                    spans.append((memory, 0, len(memory.array), address in writes))
                    stamps.append((memory, block.number))
            self.order.work(stream, "cuLaunchKernel", spans)
            stream.push("cuLaunchKernel", work, stamps)
        self.scheduler.point()

    # Memory of the host

    def pinned_like(self, model: torch.Tensor) -> torch.Tensor:
        """Stand in for ``torch.empty_like(model, pin_memory=True)``."""
        with torch._C._DisableTorchDispatch():
            shape = torch.empty_like(_cells(model), device="meta")
        nbytes = shape.numel() * shape.itemsize
        if not nbytes:
            return torch.empty(shape.shape, dtype=shape.dtype)
        size = max(_HOST_PAGE, 1 << (nbytes - 1).bit_length())
        with self.lock:
            if self._pinned_leaving:
                self.call("cudaEventQuery", is_unsafe=True)
            self.take_back()
            if not self._pinned_free[size]:
                self.contexts.add(self.current_device())
                self.call("cudaHostAlloc", is_unsafe=True)
                if self.refuses_to_pin:
                    raise CudaError("CUDA error: out of memory (cudaHostAlloc)\nand so on")
                self._pinned_free[size].append(Memory(size))
            memory = self._pinned_free[size].pop()
            self._pinned[memory.address] = memory, set()
        leased = memory.array[:nbytes]
        weakref.finalize(leased, self._unpin, memory).atexit = False
        with torch._C._DisableTorchDispatch():
            whole = torch.frombuffer(leased.data, dtype=shape.dtype)
            return whole.as_strided(shape.shape, shape.stride())

    def _unpin(self, memory: Memory) -> None:
        if _current and sim() is self:
            with self.lock:
                _, known = self._pinned.pop(memory.address)
                self.order.free(memory, known, "the next owner of pinned memory")
                self._pinned_leaving.append(([(stream, stream.queued) for stream in known], memory))

    def pinned_of(self, tensor: torch.Tensor) -> tuple[Memory, set[Stream]] | None:
        with self.lock:
            every = list(self._pinned.values())
        address, size = tensor.data_ptr(), max(tensor.nbytes, 1)
        return next((each for each in every if each[0].holds(address, size)), None)

    def given_back(self, buffer: np.ndarray) -> None:
        """Mark a slot of a ring as free, and write the next batch to it at once."""
        if _current and sim() is self and buffer.nbytes:
            with self.lock:
                found = self.pinned_of(torch.from_numpy(buffer))
                if found is not None:
                    self.order.free(found[0], [], "the next batch in a slot")
                buffer[:] = POISON

    # Copies

    def copy_from_host(self, target: SimTensor, source: torch.Tensor, non_blocking: bool) -> None:
        if not source.numel():
            return
        source = source.expand(target.shape)
        is_one_transfer = source.dtype == target.dtype and source.stride() == target.stride()
        stream, cells = self.current_stream(target.device), target.cells
        pinned = self.pinned_of(source)
        self.on_copy()
        self.sent.append(source.nbytes)
        stamps = [(target.block.memory, target.block.number)]
        if non_blocking and pinned is not None:
            self.call("cudaMemcpyAsync")
            self.counts["asynchronous copies"] += 1
            if not is_one_transfer:
                self.violation("torch makes a host copy of a pinned source, which is pageable")
            memory, known = pinned
            start, size = source.data_ptr() - memory.address, source.nbytes
            read = (memory, start, start + size, False)
            self.order.work(stream, "a copy from the host", [(*_span(target), True), read])
            address = source.data_ptr()
            stream.push(
                "a copy from the host",
                lambda: ctypes.memmove(cells.data_ptr(), address, size),
                stamps,
            )
            if (
                source.untyped_storage().data_ptr() == memory.address
            ):  # which torch finds its block by
                known.add(stream)
            self.scheduler.point()
            return
        now = source.detach().clone()
        self.order.work(stream, "a copy from the host", [(*_span(target), True)])
        stream.push("a copy from the host", lambda: cells.copy_(now), stamps)
        if not non_blocking:
            self.counts["blocking copies"] += 1
            self._wait_here(stream, "copy")

    def _wait_here(self, stream: Stream, what: str) -> None:
        self.host_waits(what)
        self.call("cudaStreamSynchronize", is_unsafe=True)
        event = Event(blocking=True)
        event.stream, event.position = stream, stream.queued
        self.order.record(event, stream)
        self.scheduler.wait_for(stream, stream.queued)
        self.order.host_wait(event)

    # Operations

    def dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        flat = _flat((*args, *kwargs.values()))
        on_device = [value for value in flat if isinstance(value, SimTensor)]
        wanted = kwargs.get("device")
        wanted = None if wanted is None else torch.device(wanted)
        if not on_device and (wanted is None or wanted.type != "cuda"):
            return func(*args, **kwargs)
        if torch.is_inference_mode_enabled() and _is_composite(func):
            with SimMode():  # elsewhere autograd has taken it apart already
                return func.decompose(*args, **kwargs)
        real_args, real_kwargs = (
            _mapped(_cells, args),
            {key: _mapped(_cells, kwargs[key]) for key in kwargs},
        )
        if wanted is not None and wanted.type == "meta":
            return func(*real_args, **real_kwargs)
        if func is aten._to_copy.default:
            return self._to(args[0], **kwargs)
        if func is aten.copy_.default:  # to the host: SimTensor.copy_ is the other way
            self._wait_here(self.current_stream(args[1].device), "value")
            return args[0].copy_(args[1].cells)
        device = on_device[0].device if on_device else self.index_of(wanted)
        is_mixed = any(_is_cpu_operand(value) for value in flat) and wanted is None
        if is_mixed or any(value.device != device for value in on_device):
            raise RuntimeError(f"Expected all tensors to be on the same device ({func})")
        if "device" in real_kwargs:
            real_kwargs["device"] = torch.device("cpu")
        if func in (aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default):
            self._wait_here(self.current_stream(device), "value")
            return func(*real_args, **real_kwargs)
        schema = func._schema
        aliases = [each.alias_info for each in schema.returns if each.alias_info is not None]
        if aliases and not any(alias.is_write for alias in aliases):
            views = _quietly(func, real_args, real_kwargs)
            block = on_device[0].block
            return _mapped(
                lambda view: SimTensor(view, block) if isinstance(view, torch.Tensor) else view,
                views,
            )
        names = [argument.name for argument in schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        is_written = {
            each.name for each in schema.arguments if each.alias_info and each.alias_info.is_write
        }
        written = [given[name] for name in names if name in is_written and name in given]
        if written:
            reads = [value for value in on_device if not any(value is each for each in written)]
            work = lambda: _quietly(func, real_args, real_kwargs)  # noqa: E731
            self.launch(str(func), work, reads=reads, writes=written, device=device)
            return written[0] if len(schema.returns) == 1 else tuple(written) or None
        return self._functional(func, device, real_args, real_kwargs, on_device)

    def _functional(
        self, func: Any, device: torch.device, args: Any, kwargs: Any, reads: list[SimTensor]
    ) -> Any:
        try:
            shapes = _results(func, args, kwargs)
        except NotImplementedError:  # what is made depends on values, for which torch waits too
            self._wait_here(self.current_stream(device), "value")
            shapes = _quietly(func, args, kwargs)
        made = _mapped(
            lambda like: self.empty(device, like) if isinstance(like, torch.Tensor) else like,
            shapes,
        )
        outs = [value for value in _flat([made]) if isinstance(value, SimTensor)]
        if "empty" in func.overloadpacket.__name__:
            if func is aten.empty.memory_format:
                self.made.extend(weakref.ref(out) for out in outs)
            return made
        cells = [out.cells for out in outs]

        def work() -> None:
            results = [
                value for value in _flat([_quietly(func, args, kwargs)]) if torch.is_tensor(value)
            ]
            for cell, result in zip(cells, results, strict=True):
                cell.copy_(result)

        self.launch(str(func), work, reads=reads, writes=outs, device=device)
        return made

    def _to(
        self,
        source: Any,
        *,
        dtype: Any = None,
        device: Any = None,
        non_blocking: bool = False,
        **more: Any,
    ) -> Any:
        target = source.device if device is None else torch.device(device)
        dtype = dtype or source.dtype
        if isinstance(source, SimTensor) and target.type == "cpu":
            self._wait_here(self.current_stream(source.device), "value")
            with torch._C._DisableTorchDispatch():
                return source.cells.to(dtype=dtype, copy=True)
        memory_format = more.get("memory_format") or torch.preserve_format
        with torch._C._DisableTorchDispatch():
            like = torch.empty_like(
                _cells(source), dtype=dtype, device="meta", memory_format=memory_format
            )
        made = self.empty(self.index_of(target), like)
        if isinstance(source, SimTensor):
            into, origin = made.cells, source.cells
            self.launch("cast", lambda: into.copy_(origin), reads=[source], writes=[made])
        else:
            self.copy_from_host(
                made, source if source.dtype == dtype else source.to(dtype), non_blocking
            )
        return made

    # In place of torch.cuda

    @contextlib.contextmanager
    def installed(self) -> Iterator[Sim]:
        """Replace torch.cuda, and in a schedule the prefetcher's threads and queues, by the simulation."""
        from fastdata.datasets.buffers import BatchRing
        from fastdata.loaders import copy_thread, driver, iterators, loop_copies, pinned

        saved: list[tuple[Any, str, Any]] = []

        def put(owner: Any, **values: Any) -> None:
            for name, value in values.items():
                saved.append((owner, name, owner.__dict__.get(name, _MISSING)))
                setattr(owner, name, value)

        empty, empty_like, lease = torch.empty, torch.empty_like, BatchRing.lease

        def any_empty(*size: Any, pin_memory: bool = False, **options: Any) -> Any:
            return (
                self.pinned_like(empty(*size, **options)) if pin_memory else empty(*size, **options)
            )

        def any_like(model: Any, *, pin_memory: bool = False, **options: Any) -> Any:
            return self.pinned_like(model) if pin_memory else empty_like(model, **options)

        def overwriting(ring: Any, size_bytes: int) -> Any:
            memory = lease(ring, size_bytes)
            leased: Any = memory.obj
            if leased.base is not None:  # else nobody takes it back
                buffer = _whole(leased)[:size_bytes]
                weakref.finalize(leased, self.given_back, buffer).atexit = False
            return memory

        def exchange(reference: Any) -> int:
            self.contexts.add(self.current_device())  # which it opens (pytorch#148594)
            mode = reference._obj
            before = getattr(self.local, "mode", 0)
            self.local.mode, mode.value = mode.value, before
            return 0

        library = types.SimpleNamespace(cudaThreadExchangeStreamCaptureMode=exchange)
        loaded = types.SimpleNamespace(
            CDLL=lambda name: library, byref=ctypes.byref, c_int=ctypes.c_int
        )
        threads = types.SimpleNamespace(
            **{name: getattr(threading, name) for name in ("Event", "Lock", "active_count")}
        )

        def current_thread() -> threading.Thread:
            self.scheduler.point()
            return threading.current_thread()

        threads.Thread, threads.current_thread = SimThread, current_thread
        put(
            torch.cuda,
            _lazy_init=lambda: None,
            is_available=lambda: True,
            device_count=lambda: len(self.devices),
            current_device=lambda: self.current_device().index,
            set_device=lambda device: setattr(self.local, "device", self.index_of(device)),
            device=self.on_device,
            stream=self.on_stream,
            Stream=Stream,
            Event=Event,
            current_stream=self.current_stream,
            default_stream=self.default_stream,
            synchronize=self.synchronize,
            is_current_stream_capturing=self.is_capturing,
            mem_get_info=lambda device=None: (self.free_bytes, 1 << 40),
            memory_reserved=lambda device=None: 0,
            memory_allocated=lambda device=None: 0,
        )
        put(torch.backends.cuda, is_built=lambda: True)
        put(torch.Tensor, is_pinned=lambda tensor, device=None: self.pinned_of(tensor) is not None)
        put(
            torch.Tensor,
            pin_memory=lambda tensor, device=None: self.pinned_like(tensor).copy_(tensor),
        )
        put(torch, empty=any_empty, empty_like=any_like)
        put(BatchRing, lease=overwriting)
        put(pinned, ctypes=loaded)
        put(driver, LIBRARY=self.driver)
        driver.find_kernel.cache_clear()
        is_scheduled = isinstance(self.scheduler, Schedule)
        if is_scheduled:
            threads.Lock = SimLock
            put(copy_thread, SimpleQueue=SimQueue)
            put(iterators, ThreadPoolExecutor=SimExecutor)
        put(pinned, threading=threads)
        put(copy_thread, threading=threads)
        put(loop_copies, threading=threads)
        was_enabled = is_scheduled and gc.isenabled()
        if was_enabled:
            gc.disable()  # nobody is interrupted by finalisers but where the last reference dies
        _current.append(self)
        try:
            with SimMode():
                yield self
        finally:
            if isinstance(self.scheduler, Schedule) and any(
                not task.is_done for task in self.scheduler.tasks[1:]
            ):
                self.scheduler.die("a thread is still there at the end")
            for thread in threading.enumerate():
                if isinstance(thread, SimThread):
                    threading.Thread.join(thread, 5)
            _current.remove(self)
            driver.find_kernel.cache_clear()
            for owner, name, value in reversed(saved):
                delattr(owner, name) if value is _MISSING else setattr(owner, name, value)
            if was_enabled:
                gc.enable()


def _are_done(uses: list[tuple[Stream, int]]) -> bool:
    return all(stream.done >= position for stream, position in uses)


def _span(tensor: SimTensor) -> tuple[Memory, int, int]:
    """Return the memory of a tensor, and the range of the tensor's bytes in it."""
    cells, memory = tensor.cells, tensor.block.memory
    extent = (
        1 + sum((n - 1) * s for n, s in zip(cells.shape, cells.stride(), strict=True))
        if cells.numel()
        else 0
    )
    start = cells.data_ptr() - memory.address
    return memory, start, start + extent * cells.itemsize


def _whole(buffer: np.ndarray) -> np.ndarray:
    """Return the array that owns the memory of a leased array."""
    while isinstance(buffer.base, np.ndarray):
        buffer = buffer.base
    return buffer.reshape(-1).view(np.uint8)


def _flat(values: Iterable[Any]) -> list[Any]:
    flat: list[Any] = []
    for value in values:
        if isinstance(value, (list, tuple)):
            flat += _flat(value)
        else:
            flat.append(value)
    return flat


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_mapped(function, each) for each in value)
    return function(value)


def _is_composite(func: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _cells(value: Any) -> Any:
    return value.cells if isinstance(value, SimTensor) else value


def _is_cpu_operand(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, SimTensor) and value.ndim > 0


_RESULTS: dict[Any, Any] = {}


def _results(func: Any, args: Any, kwargs: Any) -> Any:
    """Return an operation's results as meta tensors, which are computed once for all schedules."""
    key = func, _kind(args), _kind(tuple(kwargs.items()))
    if key not in _RESULTS:
        with torch._C._DisableTorchDispatch():
            meta_kwargs = {name: _mapped(_to_meta, kwargs[name]) for name in kwargs}
            if "device" in kwargs:
                meta_kwargs["device"] = torch.device("meta")
            _RESULTS[key] = func(*_mapped(_to_meta, args), **meta_kwargs)
    return _RESULTS[key]


def _kind(value: Any) -> Any:
    """Return everything about an argument that may decide the shapes of results."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.stride()
    if isinstance(value, (list, tuple)):
        return tuple(map(_kind, value))
    return type(value), value


def _to_meta(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _quietly(func: Any, args: Any, kwargs: Any) -> Any:
    with torch.no_grad():
        return func(*args, **kwargs)
