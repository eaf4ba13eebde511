"""Makes room in a directory: removes the block files that were used longest ago.

Age is the file's modification time, which users of a block renew (``FileStore.touch``), so the
order outlives restarts and is the same for all servers on the directory. All namespaces and ranks
count: files of a model that nobody serves any more go first. Standard library only.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import os
import stat
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.connector.directories import unlink_below
from harness.connector.keys import is_block_name
from harness.connector.partial_files import TMP_SUFFIX, is_abandoned
from harness.connector.quota import DirectoryQuota, Room

logger = logging.getLogger("vllm.kvgate.eviction")

# Files removed beyond need per written file, so that no single write pays for a whole watermark.
_AHEAD = 16
_CANDIDATES_MIN = 1024
_CANDIDATES_SHARE = 16


@dataclass(frozen=True, slots=True)
class BlockFileStat:
    """One block file, or with ``is_partial`` one that was being written."""

    path: str
    size_bytes: int
    mtime_ns: int
    is_partial: bool


def iter_block_files(directory: Path) -> Iterator[BlockFileStat]:
    """All block files of all namespaces and ranks; symbolic links are not followed.

    Files and directories that vanish meanwhile are left out. Raises OSError when ``directory``
    itself cannot be listed.
    """
    for namespace in _directories(str(directory)):
        for rank in _directories(namespace.path, is_lenient=True):
            for bucket in _directories(rank.path, is_lenient=True):
                yield from _bucket_files(bucket.path)


def _bucket_files(bucket: str) -> Iterator[BlockFileStat]:
    with contextlib.suppress(OSError), os.scandir(bucket) as entries:
        for entry in entries:
            is_partial = entry.name.endswith(TMP_SUFFIX)
            if not is_partial and not is_block_name(entry.name):
                continue
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    yield BlockFileStat(entry.path, status.st_size, status.st_mtime_ns, is_partial)


def _directories(path: str, *, is_lenient: bool = False) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            found = [entry for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        if is_lenient:
            return
        raise
    yield from found


class Evictor:
    """Grants room for new files. Used by one thread at a time; each server has its own."""

    def __init__(
        self,
        quota: DirectoryQuota,
        *,
        high_watermark: float,
        low_watermark: float,
        is_in_use: Callable[[str], bool],
    ) -> None:
        """
        Args:
            high_watermark, low_watermark: shares of the quota's capacity at which removal starts
                and ends.
            is_in_use: files that must stay, because this server reads them right now.
        """
        self._quota = quota
        self._high, self._low = high_watermark, low_watermark
        self._is_in_use = is_in_use
        self._candidates: deque[BlockFileStat] = deque()
        self._is_lowering = False

    def refresh(self) -> None:
        """Lists the directory, corrects the count, and remembers the oldest files.

        Removes what crashed writers left. Raises OSError when the directory cannot be listed.
        """
        with self._quota.recount() as correct:
            found = [
                file
                for file in iter_block_files(self._quota.directory)
                if not (file.is_partial and self._remove_abandoned(file))
            ]
            if correct is not None:
                correct(sum(file.size_bytes for file in found))
        whole = [file for file in found if not file.is_partial]
        count = max(_CANDIDATES_MIN, len(whole) // _CANDIDATES_SHARE)
        self._candidates = deque(heapq.nsmallest(count, whole, key=lambda file: file.mtime_ns))

    def make_room(self, count_bytes: int) -> tuple[Room, list[str]]:
        """Counts a file of ``count_bytes`` in, after removing what must go for it.

        Returns:
            Whether there is room now, and the files removed.

        Raises:
            OSError: the directory cannot be used.
        """
        removed: list[str] = []
        room = self._quota.take(count_bytes)
        if self._quota.is_count_lost:
            self.refresh()
        while room is not Room.GRANTED:
            path = self._remove_oldest()
            if path is not None:
                removed.append(path)
            # Also when nothing went: the listing has corrected the count.
            room = self._quota.take(count_bytes)
            if path is None:
                return room, removed
        for _ in range(_AHEAD):
            if not self._wants_less() or (path := self._remove_oldest()) is None:
                break
            removed.append(path)
        return room, removed

    def _wants_less(self) -> bool:
        capacity = self._quota.capacity_bytes
        if capacity is None:
            return False
        share = self._quota.used_bytes / capacity
        self._is_lowering = share > (self._low if self._is_lowering else self._high)
        return self._is_lowering

    def _remove_oldest(self) -> str | None:
        """Removes one file; None when there is none that may go."""
        for has_fresh_list in (False, True):
            if has_fresh_list:
                self.refresh()
            while self._candidates:
                file = self._candidates.popleft()
                try:
                    # Used again since it was listed: it has a new place in the order.
                    is_newer = os.lstat(file.path).st_mtime_ns != file.mtime_ns
                    if is_newer or self._is_in_use(file.path):
                        continue
                    self._unlink(file)
                except (FileNotFoundError, NotADirectoryError):
                    continue  # another server was faster, and counted it out; or a link by now
                self._quota.give_back(file.size_bytes)
                return file.path
        return None

    def _remove_abandoned(self, file: BlockFileStat) -> bool:
        if not is_abandoned(os.path.basename(file.path), file.mtime_ns):
            return False
        with contextlib.suppress(OSError):
            self._unlink(file)
        return True

    def _unlink(self, file: BlockFileStat) -> None:
        root = self._quota.directory
        unlink_below(root, *Path(file.path).relative_to(root).parts)
