"""What the scheduler side believes to be on disk, and the thread that keeps the belief fresh.

The index is a hint: a key whose file is gone costs a recomputation. It learns of this server's
files at once and of other servers' by listing the directory again and again. Standard library only.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from harness.connector.file_store import FileStore

logger = logging.getLogger("vllm.kvgate.disk_index")

BUCKETS = 256
# The watcher lists for at most this share of the time: it runs beside the engine's own loop.
_DUTY = 0.05
# How long own writes and drops are remembered: longer than the slowest listing takes.
_RECENT_S = 120.0


@dataclass(frozen=True, slots=True)
class Listing:
    """The keys found in one bucket by a listing that began at ``started_s`` (monotonic)."""

    rank: int
    bucket: int
    started_s: float
    keys: frozenset[bytes]


class DiskIndex:
    """A set of keys, one part per rank and bucket directory (the key's first byte).

    A key is in it when every rank's file is there.
    """

    def __init__(self, rank_count: int = 1) -> None:
        self._ranks: list[list[set[bytes]]] = [
            [set() for _ in range(BUCKETS)] for _ in range(rank_count)
        ]
        # When this server last wrote or dropped a key, oldest first.
        self._recent: list[dict[bytes, float]] = [{} for _ in range(rank_count)]
        self._cleared_s = float("-inf")

    def __contains__(self, key: bytes) -> bool:
        bucket = key[0]
        return all(key in parts[bucket] for parts in self._ranks)

    def __len__(self) -> int:
        if len(self._ranks) == 1:
            return sum(map(len, self._ranks[0]))
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[bytes]:
        return (key for key in chain.from_iterable(self._ranks[0]) if key in self)

    def add(self, key: bytes, now_s: float, rank: int = 0) -> None:
        """Takes in a key that this server's worker ``rank`` has just written."""
        self._ranks[rank][key[0]].add(key)
        self._remember(key, now_s, rank)

    def discard(self, key: bytes, now_s: float, rank: int = 0) -> None:
        """Forgets a key whose file this server's worker ``rank`` has dropped or not found."""
        self._ranks[rank][key[0]].discard(key)
        self._remember(key, now_s, rank)

    def _remember(self, key: bytes, now_s: float, rank: int) -> None:
        recent = self._recent[rank]
        recent.pop(key, None)
        recent[key] = now_s
        while recent:
            oldest = next(iter(recent))
            if recent[oldest] > now_s - _RECENT_S:
                break
            del recent[oldest]

    def clear(self, now_s: float) -> None:
        """Forgets every key, and whatever a listing that began before ``now_s`` found."""
        for parts, recent in zip(self._ranks, self._recent, strict=True):
            for part in parts:
                part.clear()
            recent.clear()
        self._cleared_s = now_s

    def apply(self, listing: Listing) -> None:
        """Takes in a listing, but for own writes and drops that it may have been too early for."""
        if listing.started_s <= self._cleared_s:
            return
        part = self._ranks[listing.rank][listing.bucket]
        recent = self._recent[listing.rank]
        # Keys known already keep their object: a listing must not double the index's memory.
        for key in part ^ listing.keys:
            if recent.get(key, float("-inf")) >= listing.started_s:
                continue
            if key in part:
                part.remove(key)
            else:
                part.add(key)


class DirectoryWatcher:
    """Lists changed buckets in a thread of its own; ``take`` hands over what it found."""

    def __init__(self, store: FileStore, interval_s: float) -> None:
        self._store = store
        self._interval_s = interval_s
        self._found: deque[Listing] = deque()
        self._changes: dict[int, int] = {}  # bucket -> change time of its directory when listed
        self._stop = threading.Event()
        self._first_pass = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvgate-watch", daemon=True)

    def start(self, first_pass_timeout_s: float) -> None:
        """Starts the thread and waits until it has been through once, or for the timeout."""
        self._thread.start()
        if not self._first_pass.wait(first_pass_timeout_s):
            logger.warning(
                "event=first_listing_slow waited_s=%g effect=found_blocks_come_later",
                first_pass_timeout_s,
            )

    def take(self) -> Iterable[Listing]:
        """Listings since the last call."""
        while self._found:
            yield self._found.popleft()

    def stop(self) -> None:
        """Asks the thread to end; does not wait for a hung one."""
        self._stop.set()

    def _run(self) -> None:
        is_first = True
        while not self._stop.is_set():
            try:
                self._pass(is_first)
            except OSError as error:
                logger.info("event=listing_failed reason=%s", error)
            except Exception:
                logger.exception("event=listing_failed")
            is_first = False
            self._first_pass.set()
            self._stop.wait(self._interval_s)

    def _pass(self, is_first: bool) -> None:
        for bucket, changed_ns in enumerate(self._store.bucket_changes()):
            started = time.monotonic()
            # A directory that changed within the clock's resolution of the listing is read again.
            if changed_ns == self._changes.get(bucket, 0):
                continue
            listed = time.time_ns()
            keys = self._store.list_bucket(bucket)
            self._found.append(Listing(self._store.rank, bucket, started, keys))
            self._changes[bucket] = changed_ns if listed - changed_ns > 50_000_000 else -1
            spent = time.monotonic() - started
            if not is_first and self._stop.wait(spent / _DUTY):
                return
