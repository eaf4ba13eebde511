"""The worker side: executes plans. Owns the host memory; decides nothing.

One thread, the worker's own, touches device blocks. The I/O threads (file_io.py) see host memory
and files only, so a read that comes back late, after its blocks went to another request, cannot do
harm. Needs numpy; knows nothing of vLLM or torch.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from harness.connector.blockfile import PAGE_BYTES
from harness.connector.breaker import BreakerState
from harness.connector.config import TierConfig
from harness.connector.file_io import FileIo, ReadJob
from harness.connector.file_store import FileStore
from harness.connector.layout import BlockLayout, ByteArray
from harness.connector.meta import (
    NO_SLOT,
    LoadBlock,
    LoadRequest,
    LoadSource,
    StepPlan,
    WorkerReport,
)
from harness.connector.metrics import TIERS, TierCounters

logger = logging.getLogger("vllm.kvgate.worker")

_MADV_POPULATE_WRITE = 23
# How long a step without computation waits for reads; a new request waits as long at most.
_IDLE_WAIT_S = 0.005


class HostMemory:
    """Page-aligned anonymous memory cut into slots, ``(slot_count, slot_bytes) uint8``."""

    def __init__(self, slot_count: int, slot_bytes: int) -> None:
        size_bytes = slot_count * slot_bytes
        self._mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # O_DIRECT gives the disk the pages themselves. Many small ones cost some disks most of
        # their speed (docs/adr/0016-restore-speed.md). And a child must not make pages under a read
        # copy-on-write.
        for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
            with contextlib.suppress(OSError):  # a kernel without it
                self._mapping.madvise(advice)
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


@dataclass(slots=True)
class _Load:
    """One request's load. ``pending`` counts blocks neither restored nor given up."""

    request_id: str
    started_s: float
    deadline_s: float
    pending: int
    failed_blocks: list[int] = field(default_factory=list)
    is_cancelled: bool = False
    in_step: bool = False


@dataclass(slots=True, eq=False)
class _Read(ReadJob):
    """A file read and the blocks that wait for it. ``slot``: the pool slot to fill, or NO_SLOT."""

    slot: int = NO_SLOT
    waiters: list[tuple[_Load, LoadBlock]] = field(default_factory=list)
    is_prefetch: bool = False


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
        rank: int = 0,
        cpus: frozenset[int] = frozenset(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """The first ``pool_slots`` slots of ``memory`` are the pool, the rest staging buffers."""
        self._deadline_s = config.load_deadline_s
        self._layout = layout
        self._memory = memory
        self._clock = clock
        self._payload_end = PAGE_BYTES + layout.payload_bytes
        # What a pool slot really holds; the check before each use.
        self._slot_key: dict[int, bytes] = {}
        self._loads: dict[str, _Load] = {}
        self._reads: dict[bytes, _Read] = {}
        self._ready: list[tuple[_Load, LoadBlock]] = []
        self._failed_blocks: set[int] = set()
        self._restored_in_step: set[int] = set()
        self._rank = rank
        self._report = WorkerReport(rank)
        self._reported_breaker = BreakerState.CLOSED
        self._reported_gauges: dict[str, float] = {}
        self._counted_openings = 0
        self.counters = TierCounters()
        self._io: FileIo | None = None
        if store is not None:
            self._quota = store.quota
            self._io = FileIo(
                config,
                store,
                buffer_of=memory.buffer,
                staging=range(pool_slots, len(memory.slots)),
                is_read=self._reads.__contains__,
                write_pressure=pool_slots // 2,
                cpus=cpus,
                clock=clock,
            )

    def begin_step(self, plan: StepPlan) -> None:
        """Takes in a step's loads and cancellations, and starts file reads at once."""
        for request_id in plan.cancelled:
            if (load := self._loads.get(request_id)) is not None:
                self._give_up(load, is_overdue=False)
        for block in plan.prefetches:
            self._prefetch(block)
        for request in plan.loads:
            try:
                self._accept(request)
            except Exception:
                logger.exception("event=load_not_started request=%s", request.request_id)
                self._fail(request)
        if self._io is not None:
            self._io.set_computing(is_computing=not plan.is_idle)
            for keys in plan.touched:
                self._io.submit_touch(keys)

    def copy_ready(self) -> None:
        """Copies every block that has arrived in host memory into its device block."""
        ready, self._ready = self._ready, []
        for load, block in ready:
            # The slot is pinned, but the key is checked again here: a wrong index must cost a
            # recomputation, never a wrong answer.
            if load.is_cancelled:
                self._settle(load, block)
            elif self._slot_key.get(block.slot) == block.key:
                tier = "disk" if block.source is LoadSource.FILLING else "host"
                self._restore(load, block, block.slot, tier)
            else:
                self._report.bad.append(block.key)
                self._settle(load, block, "lost")
            self._release(block.slot)
        while self._io is not None and (job := self._io.take_done()) is not None:
            assert isinstance(job, _Read)
            self._retire(job)

    def save(self, plan: StepPlan) -> None:
        """Copies the step's completed device blocks to host slots and queues their writes."""
        for store in plan.stores:
            self._slot_key.pop(store.slot, None)
            started = time.perf_counter()
            try:
                self._layout.gather(store.block_id, self._payload(store.slot))
            except Exception:
                # The slot keeps no key, so a load of it fails its check and the block is
                # recomputed.
                logger.exception("event=store_failed block=%d", store.block_id)
                self.counters.add("dropped_store_blocks.error")
                if store.to_disk:
                    self._report.unwritten.append(store.key)
                continue
            self._slot_key[store.slot] = store.key
            self.counters.add("stored_blocks.host")
            self.counters.add("write_bytes.host", self._layout.payload_bytes)
            self.counters.add("write_seconds.host", time.perf_counter() - started)
            if store.to_disk:
                if self._io is not None:
                    self._io.submit_write(store.key, store.slot)
                else:
                    self._report.unwritten.append(store.key)

    def poll(self, *, is_idle: bool) -> set[str]:
        """Ends loads that are complete or overdue; returns the ids of requests that waited for one.

        Each is returned exactly once; a request whose load was in its step waited for nothing.

        In a step without computation it waits up to 5 ms for a load to end: the engine would
        otherwise spin.
        """
        self.copy_ready()
        if is_idle and self._io is not None:
            limit = time.monotonic() + _IDLE_WAIT_S
            while (
                self._reads
                and all(load.pending for load in self._loads.values())
                and (left_s := limit - time.monotonic()) > 0
            ):
                if self._io.wait_done(left_s):
                    self.copy_ready()
        now = self._clock()
        for load in [load for load in self._loads.values() if load.deadline_s <= now]:
            self._give_up(load, is_overdue=True)
        for load in [load for load in self._loads.values() if load.in_step and load.pending]:
            self._give_up(load, is_overdue=True)  # its step is over
        if self._io is not None:
            self._collect_writes(self._io)
            self._io.set_computing(is_computing=False)
            self._io.watch()
            opened = self._io.breakers_opened
            self.counters.add("breaker_opened", opened - self._counted_openings)
            self._counted_openings = opened
            state = self._io.read_breaker.state
            if state is not self._reported_breaker:
                self._reported_breaker = self._report.read_breaker = state
        finished: set[str] = set()
        for load in [load for load in self._loads.values() if load.pending == 0]:
            del self._loads[load.request_id]
            if not load.in_step:
                finished.add(load.request_id)
            self._report.finished.append(load.request_id)
            if load.is_cancelled:
                continue
            if load.failed_blocks:
                self._report.failed.append(load.request_id)
                self._failed_blocks.update(load.failed_blocks)
            self.counters.load_seconds.append(now - load.started_s)
        return finished

    def take_failed_blocks(self) -> set[int]:
        """Device blocks whose load failed, of the requests that ``poll`` just returned."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_restored_in_step(self) -> set[int]:
        """Device blocks that this step's own loads filled."""
        restored, self._restored_in_step = self._restored_in_step, set()
        return restored

    def take_report(self) -> WorkerReport:
        """What finished since the last call, for the scheduler side."""
        report, self._report = self._report, WorkerReport(self._rank)
        return report

    def take_statistics(self, block_tokens: int) -> dict[str, Any]:
        """Counters since the last call, and the gauges that changed."""
        statistics = self.counters.take(block_tokens)
        if self._rank:  # tokens and loads are the same for every rank; bytes and files are not
            statistics["load_seconds"] = []
            for tier in TIERS:
                statistics["counters"].pop(f"hit_tokens.{tier}", None)
        if self._io is not None:
            gauges: dict[str, float] = {
                "read_queue_blocks": len(self._reads),
                "disk_used_bytes": self._quota.used_bytes,
                "disk_capacity_bytes": self._quota.capacity_bytes or 0,
                "breaker_state": int(self._io.breaker_state),
            }
            changed = {
                name: value
                for name, value in gauges.items()
                if self._reported_gauges.get(name) != value
            }
            self._reported_gauges.update(changed)
            statistics["gauges"] = changed
        return statistics

    def stop(self) -> None:
        """Asks the threads to end; does not wait for a hung one."""
        if self._io is not None:
            self._io.stop()

    def _payload(self, slot: int) -> ByteArray:
        return self._memory.slots[slot, PAGE_BYTES : self._payload_end]

    def _accept(self, request: LoadRequest) -> None:
        now = self._clock()
        load = _Load(request.request_id, now, now + self._deadline_s, len(request.blocks))
        load.in_step = request.in_step
        self._loads[request.request_id] = load
        for block in request.blocks:
            read = self._reads.get(block.key)
            is_in_slot = block.source in (LoadSource.HOST, LoadSource.FILLING)
            if is_in_slot and (read is None or read.slot != block.slot):
                self._ready.append((load, block))
            elif block.source is LoadSource.MISSING or self._io is None:
                self._settle(load, block, "lost")
                self._release(block.slot)
            elif read is not None:
                read.waiters.append((load, block))
                if block.slot not in (NO_SLOT, read.slot):
                    # Planned to be filled, but the bytes go elsewhere: the slot stays empty.
                    self._report.unfilled.append(block.slot)
            else:
                self._start_read(_Read(block.key, block.slot, slot=block.slot), (load, block))

    def _prefetch(self, block: LoadBlock) -> None:
        if self._io is None or block.key in self._reads:
            self._report.unfilled.append(block.slot)
            self._release(block.slot)
            return
        self._start_read(_Read(block.key, block.slot, slot=block.slot, is_prefetch=True))

    def _fail(self, request: LoadRequest) -> None:
        """Ends a load that could not be started, so that its request is not stuck."""
        load = self._loads[request.request_id]
        self._ready = [entry for entry in self._ready if entry[0] is not load]
        for read in self._reads.values():
            read.waiters = [entry for entry in read.waiters if entry[0] is not load]
        load.pending = 0
        load.failed_blocks = [block.block_id for block in request.blocks]
        self.counters.add("load_failed_blocks.lost", len(request.blocks))

    def _start_read(self, read: _Read, *waiters: tuple[_Load, LoadBlock]) -> None:
        assert self._io is not None
        read.waiters += waiters
        self._slot_key.pop(read.slot, None)
        self._reads[read.key] = read
        self._io.submit_read(read)

    def _retire(self, read: _Read) -> None:
        """Hands an ended read to its waiters; runs on the worker's thread."""
        del self._reads[read.key]
        is_valid = not read.failure and read.file_bytes > 0
        self.counters.add("file_read_bytes", read.file_bytes)
        self.counters.add("read_seconds.disk", read.seconds)
        if read.has_io_error:
            self.counters.add("io_errors.read")
        if read.failure == "gone":
            self.counters.add("missing_files")
        if read.failure == "damaged":
            self.counters.add("verify_failed_blocks")
            self._report.bad.append(read.key)
        elif read.is_file_dropped:
            self._report.gone.append(read.key)
        if is_valid and read.is_prefetch:
            self.counters.add("prefetched_blocks")
        for load, block in read.waiters:
            if is_valid and not load.is_cancelled:
                self._restore(load, block, read.buffer, "disk")
            else:
                self._settle(load, block, read.failure or "lost")
            # The pin of the block that started the read ends with the read, below.
            if block.slot != read.slot or block.source is not LoadSource.DISK:
                self._release(block.slot)
        if read.slot != NO_SLOT:
            if is_valid:
                self._slot_key[read.slot] = read.key
                self._report.filled.append(read.slot)
            else:
                self._report.unfilled.append(read.slot)
            self._release(read.slot)
        elif read.buffer != NO_SLOT and self._io is not None:
            self._io.release_staging(read.buffer)

    def _restore(self, load: _Load, block: LoadBlock, buffer: int, tier: str) -> None:
        started = time.perf_counter()
        try:
            self._scatter(buffer, block)
        except Exception:
            logger.exception("event=restore_failed request=%s", load.request_id)
            self._settle(load, block, "lost")
            return
        # Copies out of a slot are the host tier's time, whoever filled the slot.
        self.counters.add("read_seconds.host", time.perf_counter() - started)
        self.counters.add(f"hit_blocks.{tier}")
        self.counters.add(f"read_bytes.{tier}", self._layout.payload_bytes)
        if load.in_step:
            self._restored_in_step.add(block.block_id)
        self._settle(load, block)

    def _scatter(self, buffer: int, block: LoadBlock) -> None:
        self._layout.scatter(self._payload(buffer), block.block_id)

    def _settle(self, load: _Load, block: LoadBlock, failure: str = "") -> None:
        """Counts a block of a load as done; ``failure`` is one of metrics.LOAD_FAILURES."""
        load.pending -= 1
        if failure and not load.is_cancelled:
            load.failed_blocks.append(block.block_id)
            self.counters.add(f"load_failed_blocks.{failure}")

    def _release(self, slot: int) -> None:
        if slot != NO_SLOT:
            self._report.released.append(slot)

    def _give_up(self, load: _Load, *, is_overdue: bool) -> None:
        """Ends a load early: queued reads are skipped, running ones keep their slots."""
        failure = "overdue" if is_overdue else ""
        for waiting, block in self._ready:
            if waiting is load:
                self._settle(load, block, failure)
                self._release(block.slot)
        self._ready = [entry for entry in self._ready if entry[0] is not load]
        is_disk_late = False
        for read in list(self._reads.values()):
            mine = [entry for entry in read.waiters if entry[0] is load]
            if not mine:
                continue
            is_disk_late = True
            read.waiters = [entry for entry in read.waiters if entry[0] is not load]
            for _, block in mine:
                self._settle(load, block, failure)
                if block.slot != read.slot or block.source is not LoadSource.DISK:
                    self._release(block.slot)
            assert self._io is not None
            if not read.waiters and self._io.cancel_read(read):
                self._retire(read)
        if is_overdue and is_disk_late and self._io is not None and self._io.read_breaker.trip():
            # The disk hangs or cannot keep up: requests recompute until a probe comes back.
            logger.error('event=breaker_open op=read reason="a load missed its deadline"')
        if not is_overdue:
            load.is_cancelled = True

    def _collect_writes(self, io: FileIo) -> None:
        for result in io.take_results():
            if result.failure:
                self._report.unwritten.append(result.key)
                self.counters.add(f"dropped_store_blocks.{result.failure}")
            else:
                self._report.written.append(result.key)
            if result.has_io_error:
                self.counters.add("io_errors.write")
            if result.file_bytes:
                self.counters.add("stored_blocks.disk")
                self.counters.add("write_bytes.disk", self._layout.payload_bytes)
            self.counters.add("write_seconds.disk", result.seconds)
            self.counters.add("evicted_blocks.disk", result.evicted_count)
            self._report.gone += result.evicted
