"""Requests as vLLM keeps them, and what a scheduler side must believe: for its property tests."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from harness.connector.breaker import BreakerState
from harness.connector.disk_index import Listing
from harness.connector.keys import chain_keys
from harness.connector.meta import NO_SLOT, LoadRequest, LoadSource, WorkerReport

from .answering_worker import AnsweringWorker

NAMESPACE = "cd" * 16
BLOCK_TOKENS = 4


@functools.cache
def chain(tokens: tuple[int, ...]) -> list[bytes]:
    """The keys of a prompt's full blocks."""
    return chain_keys(NAMESPACE, tokens, BLOCK_TOKENS)


@dataclass
class Request:
    """A request as vLLM keeps it. ``phase``: waiting, loading, or running."""

    request_id: str
    all_token_ids: list[int]
    phase: str = "waiting"
    block_ids: list[int] = field(default_factory=list)
    told_blocks: int = 0  # of block_ids, known to the scheduler side; 0: all are new to it
    computed_tokens: int = 0
    local_tokens: int = 0
    has_failed: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def keys(self) -> list[bytes]:
        return chain(tuple(self.all_token_ids))


class Oracle:
    """What a scheduler side that knows plans and reports must believe. Plain dictionaries."""

    def __init__(self, rank_count: int, *, has_disk: bool) -> None:
        self.rank_count = rank_count
        self.has_disk = has_disk
        self.slot_of: dict[bytes, int] = {}
        self.key_of: dict[int, bytes] = {}
        self.filling: dict[int, int] = {}  # slot -> ranks still to fill it
        self.pins: Counter[int] = Counter()
        self.writing: dict[bytes, int] = {}  # key -> pinned slot
        self.writes_left: Counter[bytes] = Counter()
        # By rank: key -> when this server wrote it.
        self.on_disk: list[dict[bytes, float]] = [{} for _ in range(rank_count)]
        # By rank: key -> when this server dropped it or found it gone.
        self.dropped: list[dict[bytes, float]] = [{} for _ in range(rank_count)]
        self.streaming: Counter[bytes] = Counter()  # loads without a slot, by key
        self.cleared_s = float("-inf")
        self.sick_ranks: set[int] = set()

    def has_files(self, key: bytes) -> bool:
        """Whether every rank's part is on disk."""
        return all(key in files for files in self.on_disk)

    def can_load(self, key: bytes) -> bool:
        """Whether a lookup finds the key."""
        slot = self.slot_of.get(key)
        if slot is not None and slot not in self.filling:
            return True
        is_there = slot is not None or self.has_files(key)
        return is_there and self.has_disk and not self.sick_ranks

    def is_known(self, key: bytes) -> bool:
        """Whether a completed block of this key need not be stored."""
        return key in self.slot_of or key in self.writing or self.has_files(key)

    def assign(self, key: bytes, slot: int, *, is_filling: bool) -> None:
        """A plan gives a slot to a key; whatever it held is evicted."""
        assert not self.pins[slot], "a pinned slot was given away"
        assert key not in self.slot_of, "a key was given two slots"
        if slot in self.key_of:
            self.forget(self.key_of[slot])
        self.slot_of[key], self.key_of[slot] = slot, key
        if is_filling:
            assert not self.streaming[key], "a file is read twice instead of being waited for"
            self.filling[slot] = self.rank_count
        self.pins[slot] += self.rank_count

    def unpin(self, slot: int) -> None:
        """A rank's pin comes back."""
        self.pins[slot] -= 1
        assert self.pins[slot] >= 0, "a pin was given back twice"

    def forget(self, key: bytes) -> None:
        """Nobody may find the key in host memory any more."""
        if (slot := self.slot_of.pop(key, None)) is not None:
            del self.key_of[slot]
            self.filling.pop(slot, None)

    def plan_load(self, load: LoadRequest) -> None:
        """A planned load: every block from where it is, and from nowhere else."""
        for block in load.blocks:
            if block.source in (LoadSource.HOST, LoadSource.FILLING):
                assert self.slot_of[block.key] == block.slot
                assert block.source is LoadSource.FILLING or block.slot not in self.filling
                self.pins[block.slot] += self.rank_count
        for block in load.blocks:
            if block.source is LoadSource.DISK:
                assert self.has_files(block.key)
                if block.slot == NO_SLOT:
                    self.streaming[block.key] += 1
                else:
                    self.assign(block.key, block.slot, is_filling=True)

    def end_load(self, load: LoadRequest) -> None:
        """Every rank has told its end."""
        for block in load.blocks:
            if block.source is LoadSource.DISK and block.slot == NO_SLOT:
                self.streaming[block.key] -= 1

    def apply(self, report: WorkerReport, now_s: float) -> None:
        """A rank's report."""
        files = self.on_disk[report.rank]
        for key in report.bad:
            self.forget(key)
        for key in (*report.bad, *report.gone):
            files.pop(key, None)
            self.dropped[report.rank][key] = now_s
        for slot in report.unfilled:
            if slot in self.key_of:
                self.forget(self.key_of[slot])
        for slot in report.filled:
            if slot in self.filling:
                self.filling[slot] -= 1
                if not self.filling[slot]:
                    del self.filling[slot]
        for key in report.written:
            files[key] = now_s
        for key in (*report.written, *report.unwritten):
            self.unpin(self.writing[key])
            self.writes_left[key] -= 1
            if not self.writes_left[key]:
                del self.writing[key]
        for slot in report.released:
            self.unpin(slot)
        if report.read_breaker is BreakerState.CLOSED:
            self.sick_ranks.discard(report.rank)
        elif report.read_breaker is not None:
            self.sick_ranks.add(report.rank)

    def list_bucket(self, listing: Listing) -> None:
        """A listing of a bucket, which may be older than this server's last writes and drops."""
        if listing.started_s <= self.cleared_s:
            return
        files = self.on_disk[listing.rank]
        for key in [key for key in files if key[0] == listing.bucket]:
            if key not in listing.keys and files[key] < listing.started_s:
                del files[key]
        for key in listing.keys:
            if self.dropped[listing.rank].get(key, float("-inf")) < listing.started_s:
                files.setdefault(key, float("-inf"))


class Watcher:
    """Stands for the thread that lists a directory: hands over what the test puts in."""

    def __init__(self) -> None:
        self.found: list[Listing] = []

    def start(self, _timeout_s: float) -> None:
        pass

    def take(self) -> Iterable[Listing]:
        found, self.found = self.found, []
        return found


class Store:
    """The scheduler side only resets it."""

    def __init__(self, workers: list[AnsweringWorker], rank: int = 0) -> None:
        self._workers = workers
        self.rank = rank

    def of_rank(self, rank: int) -> Store:
        return Store(self._workers, rank)

    def clear(self) -> None:
        self._workers[self.rank].files.clear()
