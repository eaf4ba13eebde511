"""A worker without memory, files or threads, for tests of the scheduler side.

It takes plans as `TierWorker` does and answers them when told to, in any order and with any
outcome. It checks what no worker may be asked: to use a slot that holds another key, to fill or
free a slot twice, to load for one request twice at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from harness.connector.breaker import BreakerState
from harness.connector.meta import (
    NO_BLOCK,
    NO_SLOT,
    LoadBlock,
    LoadSource,
    StepPlan,
    StoreBlock,
    WorkerReport,
)


@dataclass
class Load:
    """A request's load; ``pending`` blocks are neither restored nor given up."""

    pending: int
    failed_blocks: list[int] = field(default_factory=list)
    is_cancelled: bool = False


@dataclass
class Read:
    """A file on its way to ``slot`` (or a staging buffer), and who waits for it."""

    slot: int
    waiters: list[tuple[str, LoadBlock]] = field(default_factory=list)


class AnsweringWorker:
    """Executes plans piecemeal; ``report`` is what the scheduler side has not been told yet."""

    def __init__(self, rank: int, *, has_disk: bool) -> None:
        self.rank = rank
        self.has_disk = has_disk
        self.files: set[bytes] = set()
        self.slots: dict[int, bytes | None] = {}  # what each slot really holds
        self.loads: dict[str, Load] = {}
        self.reads: dict[bytes, Read] = {}
        self.copies: list[tuple[str, LoadBlock]] = []
        self.writes: list[StoreBlock] = []
        self.ended: dict[str, list[int]] = {}  # told with the report: failed device blocks
        self.breaker = BreakerState.CLOSED
        self.report = WorkerReport(rank)

    def take(self, plan: StepPlan) -> None:
        """Takes a plan in; only what cannot fail or wait is done at once."""
        for request_id in plan.cancelled:
            if request_id in self.loads:
                self._give_up(request_id, is_cancelled=True)
        for block in plan.prefetches:
            assert self.has_disk
            assert (block.source, block.block_id) == (LoadSource.DISK, NO_BLOCK)
            if block.key in self.reads:
                self.report.unfilled.append(block.slot)
                self.report.released.append(block.slot)
            else:
                self._start_read(block.key, block.slot)
        for load in plan.loads:
            assert load.request_id not in self.loads, "two loads of one request at a time"
            self.loads[load.request_id] = Load(len(load.blocks))
            for block in load.blocks:
                self._accept(load.request_id, block)
        for store in plan.stores:
            self._assert_unread(store.slot)
            self.slots[store.slot] = store.key
            if store.to_disk:
                self.writes.append(store)
        self._end_complete()

    def copy(self, index: int) -> None:
        """Copies a block from its slot to the device."""
        request_id, block = self.copies.pop(index)
        found = self.slots.get(block.slot)
        # An empty slot is a store or a read that failed and was not reported yet.
        assert found in (block.key, None), "a pinned slot holds another key"
        if found is None:
            self.report.bad.append(block.key)
        self._settle(request_id, block, is_fine=found is not None)
        self._release(block.slot)
        self._end_complete()

    def fail_store(self, store: StoreBlock) -> None:
        """The copy to the slot failed: nothing is in it, and nothing will be written."""
        self.slots[store.slot] = None
        if store.to_disk:
            self.writes.remove(store)
            self.report.unwritten.append(store.key)

    def write(self, index: int, *, is_fine: bool) -> None:
        """A write ends."""
        store = self.writes.pop(index)
        assert self.slots[store.slot] == store.key, "a slot was reused before it was written"
        if is_fine:
            self.files.add(store.key)
            self.report.written.append(store.key)
        else:
            self.report.unwritten.append(store.key)

    def read(self, key: bytes, outcome: str) -> None:
        """A read ends: "ok", "damaged", "unreadable", or "kept" (unreadable, and left there)."""
        read = self.reads.pop(key)
        if outcome == "ok" and key not in self.files:
            self.report.gone.append(key)
        elif outcome == "damaged":
            self.files.discard(key)
            self.report.bad.append(key)
        elif outcome == "unreadable":
            self.files.discard(key)
            self.report.gone.append(key)
        is_fine = outcome == "ok" and key in self.files
        for request_id, block in read.waiters:
            self._settle(request_id, block, is_fine=is_fine)
            if block.slot != read.slot or block.source is not LoadSource.DISK:
                self._release(block.slot)
        if read.slot != NO_SLOT:
            self.slots[read.slot] = key if is_fine else None
            (self.report.filled if is_fine else self.report.unfilled).append(read.slot)
            self._release(read.slot)
        self._end_complete()

    def give_up(self, request_id: str) -> None:
        """A load misses its deadline."""
        self._give_up(request_id, is_cancelled=False)
        self._end_complete()

    def lose_file(self, key: bytes, *, is_noticed: bool) -> None:
        """A file is evicted: by this server, which says so, or by another one."""
        self.files.discard(key)
        if is_noticed:
            self.report.gone.append(key)

    def set_breaker(self, state: BreakerState) -> None:
        """The directory falls sick, or is well again."""
        if state is not self.breaker:
            self.breaker = self.report.read_breaker = state

    def take_report(self) -> tuple[WorkerReport, dict[str, list[int]]]:
        """The report, and the failed device blocks of each request in ``finished``."""
        report, self.report = self.report, WorkerReport(self.rank)
        ended, self.ended = self.ended, {}
        return report, ended

    def _accept(self, request_id: str, block: LoadBlock) -> None:
        read = self.reads.get(block.key)
        is_in_slot = block.source in (LoadSource.HOST, LoadSource.FILLING)
        if is_in_slot and (read is None or read.slot != block.slot):
            self.copies.append((request_id, block))
        elif block.source is LoadSource.MISSING:
            assert block.slot == NO_SLOT
            self._settle(request_id, block, is_fine=False)
        elif read is not None:
            read.waiters.append((request_id, block))
            if block.slot not in (NO_SLOT, read.slot):
                self.report.unfilled.append(block.slot)
        else:
            assert self.has_disk
            self._start_read(block.key, block.slot).waiters.append((request_id, block))

    def _start_read(self, key: bytes, slot: int) -> Read:
        if slot != NO_SLOT:
            self._assert_unread(slot)
            self.slots[slot] = None
        self.reads[key] = Read(slot)
        return self.reads[key]

    def _assert_unread(self, slot: int) -> None:
        """Nobody reads into, copies from or writes out a slot that is about to be overwritten."""
        assert slot not in [read.slot for read in self.reads.values()]
        assert slot not in [block.slot for _, block in self.copies]
        assert slot not in [store.slot for store in self.writes]

    def _give_up(self, request_id: str, *, is_cancelled: bool) -> None:
        load = self.loads[request_id]
        load.is_cancelled = is_cancelled
        for waiting, block in [copy for copy in self.copies if copy[0] == request_id]:
            self.copies.remove((waiting, block))
            self._settle(request_id, block, is_fine=False)
            self._release(block.slot)
        for read in self.reads.values():
            for entry in [entry for entry in read.waiters if entry[0] == request_id]:
                read.waiters.remove(entry)
                self._settle(request_id, entry[1], is_fine=False)
                if entry[1].slot != read.slot or entry[1].source is not LoadSource.DISK:
                    self._release(entry[1].slot)

    def _settle(self, request_id: str, block: LoadBlock, *, is_fine: bool) -> None:
        load = self.loads[request_id]
        load.pending -= 1
        if not is_fine:
            load.failed_blocks.append(block.block_id)

    def _release(self, slot: int) -> None:
        if slot != NO_SLOT:
            self.report.released.append(slot)

    def _end_complete(self) -> None:
        for request_id in [r for r, load in self.loads.items() if load.pending == 0]:
            load = self.loads.pop(request_id)
            self.report.finished.append(request_id)
            self.ended[request_id] = load.failed_blocks
            if load.failed_blocks and not load.is_cancelled:
                self.report.failed.append(request_id)
