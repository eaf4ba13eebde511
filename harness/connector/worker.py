"""The worker side: executes plans. Owns the host memory and the I/O threads; decides nothing.

One thread, the worker's own, touches device blocks. Reader and writer threads see host memory and
files only, so a read that comes back late, after its blocks went to another request, cannot do
harm. Needs numpy; knows nothing of vLLM or torch.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np

from harness.connector.blockfile import PAGE_BYTES, BlockFileError
from harness.connector.config import TierConfig
from harness.connector.file_store import FileStore
from harness.connector.layout import BlockLayout, ByteArray
from harness.connector.meta import (
    NO_SLOT,
    LoadBlock,
    LoadRequest,
    LoadSource,
    StepPlan,
    StoreBlock,
    WorkerReport,
)
from harness.connector.metrics import TierCounters

logger = logging.getLogger("vllm.kvgate.worker")

_MADV_POPULATE_WRITE = 23
_IDLE_WAIT_S = 0.002


class HostMemory:
    """Page-aligned anonymous memory cut into slots, ``(slot_count, slot_bytes) uint8``."""

    def __init__(self, slot_count: int, slot_bytes: int) -> None:
        self._mapping = mmap.mmap(-1, slot_count * slot_bytes)
        try:
            # Page faults are paid at start, and a pool larger than the memory fails here.
            self._mapping.madvise(_MADV_POPULATE_WRITE)
        except (OSError, ValueError) as error:
            logger.info("event=pool_not_prefaulted reason=%s", error)
        flat = np.frombuffer(self._mapping, dtype=np.uint8)
        self.slots: ByteArray = flat.reshape(slot_count, slot_bytes)
        self._view = memoryview(self._mapping)
        self._slot_bytes = slot_bytes

    def buffer(self, slot: int) -> memoryview:
        """The slot's bytes for I/O."""
        return self._view[slot * self._slot_bytes : (slot + 1) * self._slot_bytes]


class _JobState(Enum):
    QUEUED = auto()
    RUNNING = auto()
    DONE = auto()


class _Failure(Enum):
    NONE = auto()
    DAMAGED = auto()  # the file is not this block
    UNREADABLE = auto()  # missing, or an I/O error


@dataclass(slots=True)
class _Load:
    """One request's load. ``pending`` counts blocks neither restored nor given up."""

    request_id: str
    started_s: float
    deadline_s: float
    pending: int
    keys: frozenset[bytes]
    failed_blocks: list[int] = field(default_factory=list)
    is_cancelled: bool = False


@dataclass(slots=True, eq=False)
class _ReadJob:
    """One file read, for one or more waiting blocks. ``buffer``: where to, or none yet."""

    key: bytes
    slot: int  # the pool slot to fill, or NO_SLOT
    buffer: int
    waiters: list[tuple[_Load, LoadBlock]] = field(default_factory=list)
    state: _JobState = _JobState.QUEUED
    failure: _Failure = _Failure.NONE
    file_bytes: int = 0


class TierWorker:
    """Moves blocks between device, host memory and files as planned.

    Call order per step, all on one thread: ``begin_step`` before the forward pass (starts reads),
    then ``copy_ready`` and ``save`` after it, then ``poll``, then the ``take_*`` methods.
    """

    def __init__(
        self,
        config: TierConfig,
        layout: BlockLayout,
        memory: HostMemory,
        *,
        pool_slots: int,
        store: FileStore | None,
        cpus: frozenset[int] = frozenset(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """The first ``pool_slots`` slots of ``memory`` are the pool, the rest staging buffers."""
        self._deadline_s = config.load_deadline_s
        self._layout = layout
        self._memory = memory
        self._store = store
        self._cpus = cpus
        self._clock = clock
        self._payload_end = PAGE_BYTES + layout.payload_bytes
        self._slot_key: dict[
            int, bytes
        ] = {}  # what a pool slot really holds; the check before each use
        self._loads: dict[str, _Load] = {}
        self._reads: dict[bytes, _ReadJob] = {}
        self._ready: list[tuple[_Load, LoadBlock]] = []
        self._failed_blocks: set[int] = set()
        self._report = WorkerReport()
        self.counters = TierCounters()

        self._lock = (
            threading.Condition()
        )  # guards the four below and every _ReadJob.state and .buffer
        self._queue: deque[_ReadJob] = deque()
        self._staging = list(range(pool_slots, len(memory.slots)))
        self._done: deque[_ReadJob] = deque()
        self._is_stopping = False

        self._write_lock = threading.Condition()  # guards the two below
        self._write_queue: deque[StoreBlock] = deque()
        self._write_results: deque[tuple[bytes, bool, int]] = deque()

        if store is not None:
            for index in range(config.reader_threads):
                self._start_thread(f"kvgate-read-{index}", self._read_loop)
            for index in range(config.writer_threads):
                self._start_thread(f"kvgate-write-{index}", self._write_loop)

    def begin_step(self, plan: StepPlan) -> None:
        """Takes in a step's loads and cancellations, and starts file reads at once."""
        for request_id in plan.cancelled:
            if (load := self._loads.get(request_id)) is not None:
                self._give_up(load, is_overdue=False)
        for request in plan.loads:
            try:
                self._accept(request)
            except Exception:
                logger.exception("event=load_not_started request=%s", request.request_id)
                self._fail(request)

    def copy_ready(self) -> None:
        """Copies every block that has arrived in host memory into its device block."""
        ready, self._ready = self._ready, []
        for load, block in ready:
            # The slot is pinned, but the key is checked again here: a wrong index must cost a
            # recomputation, never a wrong answer.
            if load.is_cancelled:
                self._settle(load, block, is_restored=False)
            elif self._slot_key.get(block.slot) == block.key:
                self._restore(load, block, block.slot, "host")
            else:
                self._report.bad.append(block.key)
                self._settle(load, block, is_restored=False)
            self._release(block.slot)
        while True:
            with self._lock:
                if not self._done:
                    return
                job = self._done.popleft()
            self._retire(job)

    def save(self, plan: StepPlan) -> None:
        """Copies the step's completed device blocks to host slots and queues their writes."""
        for store in plan.stores:
            self._slot_key.pop(store.slot, None)
            try:
                self._gather(store)
            except Exception:
                # The slot keeps no key, so a load of it fails its check and the block is
                # recomputed.
                logger.exception("event=store_failed block=%d", store.block_id)
                self.counters.add("dropped_store_blocks")
                if store.to_disk:
                    self._report.unwritten.append(store.key)
                continue
            self._slot_key[store.slot] = store.key
            self.counters.add("write_bytes.host", self._layout.payload_bytes)
            if store.to_disk:
                with self._write_lock:
                    self._write_queue.append(store)
                    self._write_lock.notify()

    def poll(self, *, is_idle: bool) -> set[str]:
        """Ends loads that are complete or overdue; returns their request ids, each exactly once.

        In a step without computation it waits up to 2 ms for a read: the engine would otherwise
        spin.
        """
        if is_idle and self._reads and not self._done:
            with self._lock:
                self._lock.wait_for(lambda: bool(self._done), timeout=_IDLE_WAIT_S)
        self.copy_ready()
        self._collect_writes()
        now = self._clock()
        for load in [load for load in self._loads.values() if load.deadline_s <= now]:
            self._give_up(load, is_overdue=True)
        finished: set[str] = set()
        for load in [load for load in self._loads.values() if load.pending == 0]:
            del self._loads[load.request_id]
            finished.add(load.request_id)
            self._report.finished.append(load.request_id)
            if load.is_cancelled:
                continue
            if load.failed_blocks:
                self._report.failed.append(load.request_id)
                self._failed_blocks.update(load.failed_blocks)
                self.counters.add("load_failed_blocks", len(load.failed_blocks))
            self.counters.load_seconds.append(now - load.started_s)
        return finished

    def take_failed_blocks(self) -> set[int]:
        """Device blocks whose load failed, of the requests that ``poll`` just returned."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_report(self) -> WorkerReport:
        """What finished since the last call, for the scheduler side."""
        report, self._report = self._report, WorkerReport()
        return report

    def stop(self) -> None:
        """Asks the threads to end; does not wait for a hung one."""
        with self._lock:
            self._is_stopping = True
            self._lock.notify_all()
        with self._write_lock:
            self._write_lock.notify_all()

    def _payload(self, slot: int) -> ByteArray:
        return self._memory.slots[slot, PAGE_BYTES : self._payload_end]

    def _gather(self, store: StoreBlock) -> None:
        self._layout.gather(store.block_id, self._payload(store.slot))

    def _scatter(self, load: _Load, block: LoadBlock, buffer: int) -> None:
        self._layout.scatter(self._payload(buffer), block.block_id)

    def _accept(self, request: LoadRequest) -> None:
        now = self._clock()
        load = _Load(
            request_id=request.request_id,
            started_s=now,
            deadline_s=now + self._deadline_s,
            pending=len(request.blocks),
            keys=frozenset(block.key for block in request.blocks),
        )
        self._loads[request.request_id] = load
        for block in request.blocks:
            job = self._reads.get(block.key)
            if block.source is LoadSource.HOST and (job is None or job.slot != block.slot):
                self._ready.append((load, block))
            elif block.source is LoadSource.MISSING or self._store is None:
                self._settle(load, block, is_restored=False)
                self._release(block.slot)
            elif job is not None:
                job.waiters.append((load, block))
                if block.slot not in (NO_SLOT, job.slot):
                    # Planned to be filled, but the bytes go elsewhere: the slot stays empty.
                    self._report.unfilled.append(block.slot)
            else:
                self._start_read(load, block)

    def _fail(self, request: LoadRequest) -> None:
        """Ends a load that could not be started, so that its request is not stuck."""
        load = self._loads[request.request_id]
        self._ready = [entry for entry in self._ready if entry[0] is not load]
        for job in self._reads.values():
            job.waiters = [entry for entry in job.waiters if entry[0] is not load]
        load.pending = 0
        load.failed_blocks = [block.block_id for block in request.blocks]

    def _start_read(self, load: _Load, block: LoadBlock) -> None:
        self._slot_key.pop(block.slot, None)
        job = _ReadJob(block.key, block.slot, block.slot, [(load, block)])
        self._reads[block.key] = job
        with self._lock:
            self._queue.append(job)
            self._lock.notify()

    def _retire(self, job: _ReadJob) -> None:
        """Hands a finished read to its waiters; runs on the worker's thread."""
        del self._reads[job.key]
        is_valid = job.failure is _Failure.NONE and job.file_bytes > 0
        self.counters.add("file_read_bytes", job.file_bytes)
        if job.failure is not _Failure.NONE:
            self._report.bad.append(job.key)
            if job.failure is _Failure.DAMAGED:
                self.counters.add("verify_failed_blocks")
        for load, block in job.waiters:
            if is_valid and not load.is_cancelled:
                self._restore(load, block, job.buffer, "disk")
            else:
                self._settle(load, block, is_restored=False)
            # The pin of the block that started the read ends with the read, below.
            if block.slot != job.slot or block.source is LoadSource.HOST:
                self._release(block.slot)
        if job.slot != NO_SLOT:
            if is_valid:
                self._slot_key[job.slot] = job.key
                self._report.filled.append(job.slot)
            else:
                self._report.unfilled.append(job.slot)
            self._release(job.slot)
        elif job.buffer != NO_SLOT:
            with self._lock:
                self._staging.append(job.buffer)
                self._lock.notify_all()

    def _restore(self, load: _Load, block: LoadBlock, buffer: int, tier: str) -> None:
        try:
            self._scatter(load, block, buffer)
        except Exception:
            logger.exception("event=restore_failed request=%s", load.request_id)
            self._settle(load, block, is_restored=False)
            return
        self.counters.add(f"hit_blocks.{tier}")
        self.counters.add(f"read_bytes.{tier}", self._layout.payload_bytes)
        self._settle(load, block, is_restored=True)

    def _settle(self, load: _Load, block: LoadBlock, *, is_restored: bool) -> None:
        load.pending -= 1
        if not is_restored and not load.is_cancelled:
            load.failed_blocks.append(block.block_id)

    def _release(self, slot: int) -> None:
        if slot != NO_SLOT:
            self._report.released.append(slot)

    def _give_up(self, load: _Load, *, is_overdue: bool) -> None:
        """Ends a load early: queued reads are skipped, running ones keep their slots."""
        for waiting, block in self._ready:
            if waiting is load:
                if is_overdue:
                    load.failed_blocks.append(block.block_id)
                load.pending -= 1
                self._release(block.slot)
        self._ready = [entry for entry in self._ready if entry[0] is not load]
        for job in list(self._reads.values()):
            mine = [entry for entry in job.waiters if entry[0] is load]
            if not mine:
                continue
            job.waiters = [entry for entry in job.waiters if entry[0] is not load]
            for _, block in mine:
                load.pending -= 1
                if is_overdue:
                    load.failed_blocks.append(block.block_id)
                    self._report.overdue += 1
                if block.slot != job.slot or block.source is LoadSource.HOST:
                    self._release(block.slot)
            if not job.waiters and self._unqueue(job):
                self._retire(job)
        if not is_overdue:
            load.is_cancelled = True

    def _unqueue(self, job: _ReadJob) -> bool:
        with self._lock:
            if job.state is not _JobState.QUEUED:
                return False
            self._queue.remove(job)
            return True

    def _collect_writes(self) -> None:
        while self._write_results:
            key, is_durable, written_bytes = self._write_results.popleft()
            (self._report.written if is_durable else self._report.unwritten).append(key)
            if written_bytes:
                self.counters.add("write_bytes.disk", written_bytes)

    def _start_thread(self, name: str, target: Callable[[], None]) -> None:
        def run() -> None:
            if self._cpus:
                # Threads inherit the OpenMP pin of the worker's main thread, one core of the
                # machine.
                with contextlib.suppress(OSError):
                    os.sched_setaffinity(0, self._cpus)
            target()

        threading.Thread(target=run, name=name, daemon=True).start()

    def _read_loop(self) -> None:
        assert self._store is not None
        while (job := self._next_read()) is not None:
            failure, count = _Failure.NONE, 0
            try:
                count = self._store.read_into(job.key, self._memory.buffer(job.buffer))
            except BlockFileError as error:
                failure = _Failure.DAMAGED
                logger.error("event=block_damaged key=%s reason=%s", job.key.hex(), error)
                self._store.drop(job.key)
            except Exception as error:
                failure = _Failure.UNREADABLE
                logger.error("event=block_unreadable key=%s reason=%s", job.key.hex(), error)
            with self._lock:
                job.failure, job.file_bytes, job.state = failure, count, _JobState.DONE
                self._done.append(job)
                self._lock.notify_all()

    def _next_read(self) -> _ReadJob | None:
        """The first queued read that has a buffer; waits for one. None: stop."""
        with self._lock:
            while not self._is_stopping:
                for job in self._queue:
                    if job.buffer == NO_SLOT and self._staging:
                        job.buffer = self._staging.pop()
                    if job.buffer != NO_SLOT:
                        self._queue.remove(job)
                        job.state = _JobState.RUNNING
                        return job
                self._lock.wait()
        return None

    def _write_loop(self) -> None:
        assert self._store is not None
        while True:
            with self._write_lock:
                while not self._write_queue:
                    if self._is_stopping:
                        return
                    self._write_lock.wait()
                store = self._write_queue.popleft()
            is_durable, count = False, 0
            try:
                if self._store.write_from(store.key, self._memory.buffer(store.slot)):
                    count = self._layout.payload_bytes
                is_durable = True
            except Exception as error:
                logger.error("event=block_not_written key=%s reason=%s", store.key.hex(), error)
            self._write_results.append((store.key, is_durable, count))
