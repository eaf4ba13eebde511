"""Checks the block files of a connector's directory, and removes what nobody needs.

Works beside running servers as `harness.tier.listing` does: a file is removed only while it is
still the one that was looked at. Knows nothing of screens.
"""

from __future__ import annotations

import enum
import os
import shutil
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from harness.connector.blockfile import (
    PAGE_BYTES,
    BlockFault,
    BlockFileError,
    file_bytes,
    parse_header,
    verify,
)
from harness.connector.directories import open_below
from harness.connector.partial_files import is_abandoned
from harness.connector.quota import USAGE_NAME, DirectoryQuota
from harness.tier.listing import (
    VANISHED,
    Amount,
    Description,
    Entry,
    Kind,
    age_s,
    describe,
    open_regular,
    walk,
)


class Outcome(enum.Enum):
    """What became of a file that was checked or to be removed."""

    FINE = "fine"
    DAMAGED = "damaged"
    GONE = "gone"  # vanished meanwhile: evicted or replaced by a server
    UNREADABLE = "unreadable"
    REMOVED = "removed"
    USED = "used"  # used by a server since it was listed, hence kept
    KEPT = "kept"  # could not be removed


@dataclass(frozen=True, slots=True)
class Checked:
    """One file's result. ``fault``: of a damaged one, as in `BlockFault`, or ``bad_config``."""

    entry: Entry
    outcome: Outcome
    fault: str = ""
    detail: str = ""
    is_removed: bool = False


@dataclass
class Verification:
    """The results of many files, by namespace. ``trouble``: all that are damaged or unreadable."""

    counts: dict[str, Counter[Outcome]] = field(default_factory=dict)
    fine_bytes: int = 0  # of block files
    trouble: list[Checked] = field(default_factory=list)

    def add(self, result: Checked) -> None:
        """Takes in one more."""
        self.counts.setdefault(result.entry.namespace, Counter())[result.outcome] += 1
        if result.outcome is Outcome.FINE and result.entry.kind is Kind.BLOCK:
            self.fine_bytes += result.entry.size_bytes
        elif result.outcome in (Outcome.DAMAGED, Outcome.UNREADABLE):
            self.trouble.append(result)

    @property
    def total(self) -> Counter[Outcome]:
        """Files by outcome, of all namespaces."""
        return sum(self.counts.values(), Counter())


@dataclass(frozen=True)
class PrunePlan:
    """What would go, in this order, and the selected blocks that stay."""

    doomed: tuple[Entry, ...]
    kept: Amount


def check_files(root: Path, namespaces: set[str] | None, *, delete: bool) -> Iterator[Checked]:
    """Reads every block file and config.json, and says whether it is what its name promises.

    A block file is held to the rules a server reads it by (`blockfile.verify`), and its size must
    be exactly right. With ``delete``, damaged files are removed.

    Args:
        namespaces: the ones to check; None: all.
    """
    descriptions: dict[str, Description] = {}
    for entry in walk(root):
        if namespaces is not None and entry.namespace not in namespaces:
            continue
        if entry.kind is Kind.UNREADABLE:
            yield Checked(entry, Outcome.UNREADABLE, detail=entry.note)
        if entry.kind not in (Kind.BLOCK, Kind.CONFIG):
            continue
        if entry.namespace not in descriptions:
            descriptions[entry.namespace] = describe(root, entry.namespace)
        description = descriptions[entry.namespace]
        if entry.kind is Kind.BLOCK:
            yield _check_block(root, entry, description, delete=delete)
        else:
            yield _check_config(root, entry, description, delete=delete)


def plan_prune(
    root: Path,
    *,
    now_ns: int,
    namespaces: set[str] | None = None,
    older_than_s: float | None = None,
    max_bytes: int | None = None,
    with_temporary: bool = False,
) -> PrunePlan:
    """Chooses what to remove: blocks unused for long, then the least recently used ones.

    Args:
        namespaces: the ones to look at; None: all. Given alone, all their blocks go.
        older_than_s: blocks unused for longer than this go, seconds.
        max_bytes: then blocks go until those looked at take no more than this.
        with_temporary: leftovers of crashes and of resets go too.
    """
    blocks: list[Entry] = []
    leftovers: list[Entry] = []
    for entry in walk(root):
        if namespaces is not None and entry.namespace not in namespaces:
            continue
        if entry.kind is Kind.BLOCK:
            blocks.append(entry)
        elif (
            with_temporary
            and entry.kind in (Kind.TEMPORARY, Kind.RETIRED)
            and is_abandoned(entry.parts[-1], entry.mtime_ns)
        ):
            # A retired directory that is younger is being deleted, and counted out, by its server.
            leftovers.append(entry)
    blocks.sort(key=lambda entry: (entry.mtime_ns, entry.parts))
    has_bound = older_than_s is not None or max_bytes is not None
    is_everything = namespaces is not None and not has_bound and not with_temporary
    doomed: list[Entry] = []
    kept = Amount()
    left_bytes = sum(entry.size_bytes for entry in blocks)
    for entry in blocks:
        if (
            is_everything
            or (older_than_s is not None and age_s(entry, now_ns) > older_than_s)
            or (max_bytes is not None and left_bytes > max_bytes)
        ):
            doomed.append(entry)
            left_bytes -= entry.size_bytes
        else:
            kept.add(entry)
    return PrunePlan((*leftovers, *doomed), kept)


def remove(root: Path, plan: PrunePlan) -> Iterator[Checked]:
    """Removes what a plan says, and tells the servers' shared count of bytes.

    A block that a server has used since the plan was made stays.
    """
    for entry in plan.doomed:
        result = _remove(root, entry)
        if result.is_removed:
            # One by one: a server that counts anew meanwhile would have the sum subtracted again.
            _give_back(root, entry.size_bytes)
        yield result


def _check_block(root: Path, entry: Entry, description: Description, *, delete: bool) -> Checked:
    if description.is_foreign_format:
        return Checked(entry, Outcome.UNREADABLE, detail=description.problem)
    try:
        descriptor, size, identity = open_regular(root, entry.parts)
        with open(descriptor, "rb", buffering=0) as file:
            try:
                _verify_block(file.fileno(), size, entry, description)
            except BlockFileError as error:
                if error.fault is BlockFault.BAD_VERSION and description.problem:
                    return Checked(entry, Outcome.UNREADABLE, detail=str(error))
                # The file is still open, so its identity cannot have passed to another one.
                is_removed = delete and _unlink_if_same(root, entry, identity)
                detail = str(error).partition(": ")[2]
                return Checked(entry, Outcome.DAMAGED, error.fault.value, detail, is_removed)
    except OSError as error:
        return _failed(entry, error)
    return Checked(entry, Outcome.FINE)


def _verify_block(descriptor: int, size: int, entry: Entry, description: Description) -> None:
    """Raises BlockFileError, OSError."""
    payload_bytes = None if description.problem else description.payload_bytes
    if payload_bytes is None:
        payload_bytes = parse_header(memoryview(_read(descriptor, PAGE_BYTES))).payload_bytes
    expected = file_bytes(payload_bytes)
    if size != expected:
        fault = BlockFault.TRUNCATED if size < expected else BlockFault.WRONG_LENGTH
        raise BlockFileError(fault, f"{size} bytes, a block has {expected}")
    content = _read(descriptor, size)
    # A large tier must not push everything else out of the page cache.
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    key = bytes.fromhex(entry.parts[-1].partition(".")[0])
    verify(memoryview(content), namespace=entry.namespace, key=key, payload_bytes=payload_bytes)


def _read(descriptor: int, count: int) -> bytearray:
    """The first ``count`` bytes, fewer at the end of the file."""
    content = bytearray(count)
    view, done = memoryview(content), 0
    while done < count:
        part = os.preadv(descriptor, [view[done:]], done)
        if part == 0:
            break
        done += part
    view.release()
    del content[done:]
    return content


def _check_config(root: Path, entry: Entry, description: Description, *, delete: bool) -> Checked:
    if not description.problem:
        return Checked(entry, Outcome.FINE)
    if description.problem == "missing":
        return Checked(entry, Outcome.GONE)
    if description.is_foreign_format:
        return Checked(entry, Outcome.UNREADABLE, detail=description.problem)
    try:
        descriptor, _, identity = open_regular(root, entry.parts)
        try:
            is_removed = delete and _unlink_if_same(root, entry, identity)
        finally:
            os.close(descriptor)
    except OSError as error:
        return _failed(entry, error)
    return Checked(entry, Outcome.DAMAGED, "bad_config", description.problem, is_removed)


def _unlink_if_same(root: Path, entry: Entry, identity: tuple[int, int]) -> bool:
    """Removes a file unless a server has put another in its place."""
    try:
        with open_below(root, *entry.parts[:-1]) as parent:
            status = os.stat(entry.parts[-1], dir_fd=parent, follow_symlinks=False)
            if (status.st_dev, status.st_ino) != identity:
                return False
            os.unlink(entry.parts[-1], dir_fd=parent)
    except OSError:
        return False
    _give_back(root, entry.size_bytes if entry.kind is Kind.BLOCK else 0)
    return True


def _remove(root: Path, entry: Entry) -> Checked:
    name = entry.parts[-1]
    try:
        with open_below(root, *entry.parts[:-1]) as parent:
            status = os.stat(name, dir_fd=parent, follow_symlinks=False)
            if entry.kind is Kind.RETIRED:
                # A server may be deleting it too: what matters is that it is gone in the end.
                shutil.rmtree(name, ignore_errors=True, dir_fd=parent)
                if name in os.listdir(parent):
                    return Checked(entry, Outcome.KEPT, detail="could not be emptied")
            elif not stat.S_ISREG(status.st_mode) or status.st_mtime_ns != entry.mtime_ns:
                return Checked(entry, Outcome.USED)
            else:
                os.unlink(name, dir_fd=parent)
    except OSError as error:
        if error.errno in VANISHED:
            return Checked(entry, Outcome.GONE)
        return Checked(entry, Outcome.KEPT, detail=error.strerror or str(error))
    return Checked(entry, Outcome.REMOVED, is_removed=True)


def _give_back(root: Path, freed_bytes: int) -> None:
    """Tells the servers' shared count. Without it they would evict for room that there is."""
    if freed_bytes and (root / USAGE_NAME).exists():
        DirectoryQuota(root, capacity_bytes=None, reserve_bytes=None).give_back(freed_bytes)


def _failed(entry: Entry, error: OSError) -> Checked:
    if error.errno in VANISHED:
        return Checked(entry, Outcome.GONE)
    return Checked(entry, Outcome.UNREADABLE, detail=error.strerror or str(error))
