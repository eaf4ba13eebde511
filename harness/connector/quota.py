"""How many bytes a directory's block files may take, counted by all its users together.

The count lies in ``<directory>/.usage`` (two times 8 bytes, little endian: bytes in use, and all
bytes ever taken) and is changed under ``flock``, so that several servers and ranks keep one bound.
A file is paid for before it is written. A crash can leave the count wrong by the file it was about;
``recount`` puts it right. Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import threading
from collections.abc import Callable, Iterator
from enum import Enum, auto
from pathlib import Path
from typing import NamedTuple

USAGE_NAME = ".usage"
_RECOUNT_NAME = ".recount"
_OPEN = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_COUNT = struct.Struct("<QQ")
_DEFAULT_RESERVE_BYTES = 2**30
_DEFAULT_RESERVE_SHARE = 0.05


class Room(Enum):
    """Whether a file may be written."""

    GRANTED = auto()
    OVER_CAPACITY = auto()  # the byte bound is reached
    NO_FREE_SPACE = auto()  # the file system is too full


class _Count(NamedTuple):
    used: int
    taken: int  # only ever grows: what was given back must not hide what came during a recount


class DirectoryQuota:
    """Bytes in use under ``directory`` against a bound and against the file system's free space."""

    def __init__(
        self, directory: Path, *, capacity_bytes: int | None, reserve_bytes: int | None
    ) -> None:
        """
        Args:
            capacity_bytes: bound on all block files; None: free space alone bounds them.
            reserve_bytes: free space to leave alone; None: the smaller of 1 GiB and 5 % of the
                file system.
        """
        self.directory = directory
        self.capacity_bytes = capacity_bytes
        self._reserve_bytes = reserve_bytes
        self.used_bytes = 0  # as of the last operation of this process
        self.is_count_lost = False  # it was unreadable, and nobody has counted since
        self._pending_bytes = 0  # taken by this process, not yet in a file that a recount would see
        self._lock = threading.Lock()

    def take(self, count_bytes: int) -> Room:
        """Counts a file of ``count_bytes`` in, if there is room, before it is written.

        Must be followed by ``keep`` or ``cancel``. Raises OSError.
        """
        status = os.statvfs(self.directory)
        reserve = self._reserve_bytes
        if reserve is None:
            whole = status.f_blocks * status.f_frsize
            reserve = min(_DEFAULT_RESERVE_BYTES, int(whole * _DEFAULT_RESERVE_SHARE))
        if status.f_bavail * status.f_frsize < reserve + count_bytes:
            return Room.NO_FREE_SPACE
        with self._count() as (count, put):
            if self.capacity_bytes is not None and count.used + count_bytes > self.capacity_bytes:
                return Room.OVER_CAPACITY
            put(_Count(count.used + count_bytes, count.taken + count_bytes))
            # Before the count is unlocked: a recount must find both or neither.
            with self._lock:
                self._pending_bytes += count_bytes
        return Room.GRANTED

    def keep(self, count_bytes: int) -> None:
        """The file taken for is written."""
        with self._lock:
            self._pending_bytes -= count_bytes

    def cancel(self, count_bytes: int) -> None:
        """The file taken for was not written."""
        self.keep(count_bytes)
        self.give_back(count_bytes)

    def give_back(self, count_bytes: int) -> None:
        """Counts a removed file out; errors and a lost count are left for the next recount."""
        with contextlib.suppress(OSError), self._count() as (count, put):
            if count.used:  # writing a 0 over a lost count would hide the loss from other servers
                put(_Count(max(0, count.used - count_bytes), count.taken))

    @contextlib.contextmanager
    def recount(self) -> Iterator[Callable[[int], None] | None]:
        """Lets the caller add up what is there and correct the count.

        Yields a function that takes the sum found, or None while another process counts. All that
        is taken meanwhile is added, found or not, and nothing that is given back is subtracted. So
        the result errs on the high side, but for files that another thread is about right then:
        paid for by another process and not yet there, or removed and not yet given back. It can
        thus be too low by one block per such thread. Raises OSError.
        """
        descriptor = os.open(self.directory / _RECOUNT_NAME, _OPEN, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield None
                return
            with self._count() as (before, _), self._lock:
                pending = self._pending_bytes

            def correct(found_bytes: int) -> None:
                with self._count() as (now, put):
                    # Less than before: the count was lost meanwhile, and began again at 0.
                    is_lost = now.taken < before.taken
                    come = now.taken - (0 if is_lost else before.taken)
                    put(_Count(found_bytes + pending + come, now.taken))
                    self.is_count_lost = is_lost

            yield correct
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def _count(self) -> Iterator[tuple[_Count, Callable[[_Count], None]]]:
        """The shared count, locked, and a function that replaces it."""
        descriptor = os.open(self.directory / USAGE_NAME, _OPEN, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            content = os.pread(descriptor, _COUNT.size, 0)
            if len(content) == _COUNT.size:
                count = _Count(*_COUNT.unpack(content))
            else:  # new, damaged, or of a version that kept one number
                count, self.is_count_lost = _Count(0, 0), True
            self.used_bytes = count.used

            def put(changed: _Count) -> None:
                os.pwrite(descriptor, _COUNT.pack(*changed), 0)
                self.used_bytes = changed.used

            yield count, put
        finally:
            os.close(descriptor)  # unlocks
