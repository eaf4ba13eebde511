"""The I/O threads: read block files into host slots, write slots to files, make room, renew ages.

Reads are served in the order of submission and before writes; writes wait for pauses. Threads see
host memory and files only, never device memory. What they did is handed over as values; one other
thread takes them in. Standard library only; knows nothing of vLLM.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from harness.connector.blockfile import BlockFileError
from harness.connector.breaker import BreakerState, CircuitBreaker
from harness.connector.config import TierConfig
from harness.connector.eviction import Evictor
from harness.connector.file_store import FileStore
from harness.connector.meta import NO_SLOT
from harness.connector.quota import Room

logger = logging.getLogger("vllm.kvgate.file_io")

# A write waits this long at most for reads and computation to end, unless the backlog presses.
_YIELD_S = 0.5
_FULL = (errno.ENOSPC, errno.EDQUOT)


class JobState(Enum):
    """Where a read is."""

    QUEUED = auto()
    RUNNING = auto()
    DONE = auto()


@dataclass(slots=True, eq=False)
class ReadJob:
    """One file read. ``buffer``: the slot it goes to, or NO_SLOT until a staging buffer is free."""

    key: bytes
    buffer: int
    state: JobState = JobState.QUEUED
    failure: str = ""  # one of metrics.LOAD_FAILURES; empty when the block is in the buffer
    is_file_dropped: bool = False  # the file is no longer there
    has_io_error: bool = False
    file_bytes: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class WriteResult:
    """One write that ended. ``evicted``: keys whose files went to make room."""

    key: bytes
    failure: str = ""  # one of metrics.DROP_REASONS; empty when the file is there
    has_io_error: bool = False
    file_bytes: int = 0  # 0: another server had written the file
    seconds: float = 0.0
    evicted_count: int = 0
    evicted: list[bytes] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Write:
    key: bytes
    slot: int


@dataclass(frozen=True, slots=True)
class _Touch:
    keys: tuple[bytes, ...]


class FileIo:
    """Owns the threads and both queues. All methods are for one thread, the worker's own."""

    def __init__(
        self,
        config: TierConfig,
        store: FileStore,
        *,
        buffer_of: Callable[[int], memoryview],
        staging: Sequence[int],
        is_read: Callable[[bytes], bool],
        write_pressure: int,
        cpus: frozenset[int] = frozenset(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            buffer_of: the memory of a slot.
            staging: slots for reads that have none of their own.
            is_read: whether a key's file is wanted right now, so that eviction spares it.
            write_pressure: writes queued from which on they no longer wait for anything.
        """
        self._store = store
        self._buffer_of = buffer_of
        self._is_read = is_read
        self._write_pressure = write_pressure
        self._cpus = cpus
        self._clock = clock
        self._deadline_s = config.load_deadline_s
        self.read_breaker = CircuitBreaker(config.probe_interval_s, clock=clock)
        self.write_breaker = CircuitBreaker(config.probe_interval_s, clock=clock)
        self._rank_path = str(store.path_of(b"\0" * 16).parent.parent) + os.sep
        self._room_lock = threading.Lock()
        self._evictor = Evictor(
            store.quota,
            high_watermark=config.disk_high_watermark,
            low_watermark=config.disk_low_watermark,
            is_in_use=self._is_in_use,
        )

        self._lock = threading.Lock()  # guards all below and every ReadJob.state and .buffer
        # One condition per kind of waiter: waking a thread for nothing costs as much as a small
        # read.
        self._may_read = threading.Condition(self._lock)
        self._may_write = threading.Condition(self._lock)
        self._read_ended = threading.Condition(self._lock)
        self._reads: deque[ReadJob] = deque()
        self._running_reads = 0
        self._done: deque[ReadJob] = deque()
        self._staging = list(staging)
        self._writes: deque[_Write | _Touch] = deque()
        self._write_started: dict[int, float] = {}  # by thread
        self._results: deque[WriteResult] = deque()
        self._is_computing = False
        self._is_stopping = False

        for index in range(config.reader_threads):
            self._start_thread(f"kvgate-read-{index}", self._read_loop)
        for index in range(config.writer_threads):
            self._start_thread(f"kvgate-write-{index}", self._write_loop, index == 0)

    @property
    def breaker_state(self) -> BreakerState:
        """The worse of the two breakers' states."""
        states = (self.read_breaker.state, self.write_breaker.state)
        return BreakerState.OPEN if BreakerState.OPEN in states else max(states)

    def set_computing(self, *, is_computing: bool) -> None:
        """Says whether the engine computes, so that writes leave it the processors meanwhile."""
        if is_computing is not self._is_computing:
            with self._lock:
                self._is_computing = is_computing
                self._may_write.notify_all()

    def submit_read(self, job: ReadJob) -> None:
        """Queues a read."""
        with self._lock:
            self._reads.append(job)
            self._may_read.notify()

    def cancel_read(self, job: ReadJob) -> bool:
        """Takes a read back; False when it has begun, and will be handed over."""
        with self._lock:
            if job.state is not JobState.QUEUED:
                return False
            self._reads.remove(job)
            return True

    def wait_done(self, timeout_s: float) -> bool:
        """Waits for a finished read; whether there is one."""
        with self._lock:
            return self._read_ended.wait_for(lambda: bool(self._done), timeout=timeout_s)

    def take_done(self) -> ReadJob | None:
        """The next finished read, if any."""
        with contextlib.suppress(IndexError):
            return self._done.popleft()
        return None

    def release_staging(self, buffer: int) -> None:
        """Gives a staging buffer back."""
        with self._lock:
            self._staging.append(buffer)
            self._may_read.notify()

    def submit_write(self, key: bytes, slot: int) -> None:
        """Queues the write of a slot."""
        with self._lock:
            self._writes.append(_Write(key, slot))
            self._may_write.notify_all()  # one may be waiting for quiet

    def submit_touch(self, keys: tuple[bytes, ...]) -> None:
        """Queues the renewal of a prompt's files, behind the writes queued so far."""
        with self._lock:
            self._writes.append(_Touch(keys))
            self._may_write.notify_all()  # one may be waiting for quiet

    def take_results(self) -> list[WriteResult]:
        """Writes that ended since the last call."""
        results: list[WriteResult] = []
        with contextlib.suppress(IndexError):
            while True:
                results.append(self._results.popleft())
        return results

    @property
    def breakers_opened(self) -> int:
        """Times that either breaker opened since the start."""
        return self.read_breaker.opened_count + self.write_breaker.opened_count

    def watch(self) -> None:
        """Opens the write breaker when a write hangs, and starts due probes."""
        now = self._clock()
        hung = [
            start for start in list(self._write_started.values()) if now - start > self._deadline_s
        ]
        if hung and self.write_breaker.trip():
            logger.error('event=breaker_open op=write reason="a write hangs"')
        for name, breaker in (("read", self.read_breaker), ("write", self.write_breaker)):
            if breaker.wants_probe():
                self._start_thread(f"kvgate-probe-{name}", self._probe, name, breaker)

    def stop(self) -> None:
        """Asks the threads to end; does not wait for a hung one."""
        with self._lock:
            self._is_stopping = True
            self._may_read.notify_all()
            self._may_write.notify_all()

    def _start_thread(
        self, name: str, target: Callable[..., None], *args: object, **options: object
    ) -> None:
        def run() -> None:
            if self._cpus:
                # Threads inherit the OpenMP pin of the worker's main thread, one core of the
                # machine.
                with contextlib.suppress(OSError):
                    os.sched_setaffinity(0, self._cpus)
            target(*args)

        threading.Thread(target=run, name=name, daemon=True).start()

    # Reader threads.

    def _read_loop(self) -> None:
        while (job := self._next_read()) is not None:
            started = time.perf_counter()
            try:
                self._read(job)
            except Exception:
                logger.exception("event=block_unreadable key=%s", job.key.hex())
                job.failure = "unreadable"
            job.seconds = time.perf_counter() - started
            with self._lock:
                job.state = JobState.DONE
                self._running_reads -= 1
                self._done.append(job)
                self._read_ended.notify()
                if not (self._reads or self._running_reads):
                    self._may_write.notify_all()

    def _next_read(self) -> ReadJob | None:
        """The first queued read that has a buffer; waits for one. None: stop."""
        with self._lock:
            while not self._is_stopping:
                for job in self._reads:
                    if job.buffer == NO_SLOT and self._staging:
                        job.buffer = self._staging.pop()
                    if job.buffer != NO_SLOT:
                        self._reads.remove(job)
                        job.state = JobState.RUNNING
                        self._running_reads += 1
                        return job
                self._may_read.wait()
        return None

    def _read(self, job: ReadJob) -> None:
        if not self.read_breaker.is_closed:
            job.failure = "sick"
            return
        try:
            job.file_bytes = self._store.read_into(job.key, self._buffer_of(job.buffer))
        except BlockFileError as error:
            job.failure, job.is_file_dropped = "damaged", True
            logger.error("event=block_damaged key=%s reason=%s", job.key.hex(), error)
            self._store.drop(job.key)
        except OSError as error:
            self._explain_read_error(job, error)
            return
        self.read_breaker.succeeded()

    def _explain_read_error(self, job: ReadJob, error: OSError) -> None:
        is_root_gone = False
        if isinstance(error, FileNotFoundError):
            try:
                self._store.check_present()
            except OSError as absent:
                error, is_root_gone = absent, True
            else:
                # Evicted by another server, or deleted by hand: an everyday miss.
                job.failure, job.is_file_dropped = "gone", True
                return
        job.failure, job.has_io_error = "unreadable", True
        logger.error("event=block_unreadable key=%s reason=%s", job.key.hex(), error)
        if self.read_breaker.failed():
            logger.error('event=breaker_open op=read reason="%s"', error)
        elif self.read_breaker.is_closed and not is_root_gone:
            # Not to be met again and again; the block is stored anew when it is recomputed.
            job.is_file_dropped = True
            self._store.drop(job.key)

    # Writer threads.

    def _write_loop(self, is_first: bool) -> None:
        if is_first:
            # Correct the count and clear away what crashed writers left, before anything is
            # written.
            try:
                with self._room_lock:
                    self._evictor.refresh()
            except Exception as error:
                logger.error("event=listing_failed reason=%s", error)
        while (job := self._next_write()) is not None:
            if isinstance(job, _Write):
                self._write_counted(job)
            elif self.write_breaker.is_closed:
                with contextlib.suppress(OSError):
                    self._store.touch(job.keys)

    def _next_write(self) -> _Write | _Touch | None:
        """The next write or touch; waits for one, and a little for quiet. None: stop."""
        with self._lock:
            self._may_write.wait_for(lambda: bool(self._writes) or self._is_stopping)
            self._may_write.wait_for(
                lambda: (
                    not (self._reads or self._running_reads or self._is_computing)
                    or len(self._writes) > self._write_pressure
                    or self._is_stopping
                ),
                timeout=_YIELD_S,
            )
            if self._is_stopping:
                return None
            # Another writer may have taken the last one meanwhile.
            return self._writes.popleft() if self._writes else _Touch(())

    def _write_counted(self, job: _Write) -> None:
        result = WriteResult(job.key)
        thread = threading.get_ident()
        started = time.perf_counter()
        self._write_started[thread] = self._clock()
        try:
            self._write(result, job.slot)
        except OSError as error:
            result.failure, result.has_io_error = "io_error", True
            logger.error("event=block_not_written key=%s reason=%s", job.key.hex(), error)
            if self.write_breaker.failed():
                logger.error('event=breaker_open op=write reason="%s"', error)
        except Exception:
            result.failure = "error"
            logger.exception("event=block_not_written key=%s", job.key.hex())
        else:
            if not result.failure:
                self.write_breaker.succeeded()
        finally:
            del self._write_started[thread]
        result.seconds = time.perf_counter() - started
        self._results.append(result)

    def _write(self, result: WriteResult, slot: int) -> None:
        if not self.write_breaker.is_closed:
            result.failure = "sick"
            return
        if self._store.has(result.key):
            return
        for is_last_try in (False, True):
            if not self._take_room(result):
                result.failure = "no_space"
                return
            is_written = False
            try:
                is_written = self._store.write_from(result.key, self._buffer_of(slot))
            except OSError as error:
                # Another server's reset moves the rank's directory away for a moment.
                is_missing = isinstance(error, FileNotFoundError) and not is_last_try
                if error.errno not in _FULL and not is_missing:
                    raise
                if is_last_try:
                    result.failure = "no_space"
            else:
                result.file_bytes = self._store.file_bytes if is_written else 0
                return
            finally:
                settle = self._store.quota.keep if is_written else self._store.quota.cancel
                settle(self._store.file_bytes)

    def _take_room(self, result: WriteResult) -> bool:
        with self._room_lock:
            room, removed = self._evictor.make_room(self._store.file_bytes)
        result.evicted_count += len(removed)
        result.evicted += [key for path in removed if (key := self._own_key(path)) is not None]
        return room is Room.GRANTED

    def _own_key(self, path: str) -> bytes | None:
        """The key of a file of this store's namespace and rank; None for other files."""
        if not path.startswith(self._rank_path):
            return None
        with contextlib.suppress(ValueError):
            return bytes.fromhex(os.path.splitext(os.path.basename(path))[0])
        return None

    def _is_in_use(self, path: str) -> bool:
        key = self._own_key(path)
        return key is not None and self._is_read(key)

    def _probe(self, name: str, breaker: CircuitBreaker) -> None:
        is_well = False
        try:
            self._store.probe()
            is_well = True
        except OSError as error:
            # What forbids writing does not forbid reading.
            is_well = name == "read" and error.errno in (*_FULL, errno.EROFS)
            logger.info("event=probe_failed op=%s reason=%s", name, error)
        finally:
            breaker.probe_ended(is_well=is_well)
        if is_well:
            logger.info("event=breaker_closed op=%s", name)
