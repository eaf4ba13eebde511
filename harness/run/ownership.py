"""What belongs to a run outside its evidence: processes, shared memory, tier directories, a lock.

While a run lasts, ``<run>/scratch/lock`` is locked (flock: the kernel lets go of it however the
harness ends) and ``<run>/scratch/owner.json`` says what is its own. A run whose lock nobody holds
is dead, and the next run ends what is left of it: processes only by pid *and* start time on the
same boot, directories and shared memory only by path *and* inode. Nothing is ever found by name.

Knows no evidence.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from harness.records import Record, RecordError, canonical_json
from harness.server.processes import (
    SUPERVISOR_PATIENCE_S,
    OwnedPath,
    OwnedProcess,
    OwnedServer,
    boot_id,
    end_server,
    is_same,
    lives,
    pid_namespace,
    start_ticks,
)

logger = logging.getLogger(__name__)

SCRATCH = "scratch"
_FORMAT = 1


@dataclass(frozen=True)
class Owner(Record):
    """Content of ``owner.json``; never evidence, so it may name the machine."""

    host: str
    boot_id: str
    pid_namespace: str
    harness: OwnedProcess
    servers: tuple[OwnedServer, ...] = ()
    directories: tuple[OwnedPath, ...] = ()
    format: int = _FORMAT


class RunOwner:
    """Ownership of a live run. Use as a context manager; leaving it lets go of the lock."""

    def __init__(self, run_path: Path) -> None:
        self._scratch = run_path / SCRATCH
        self._scratch.mkdir()
        self._lock = _locked_file(self._scratch / "lock")
        pid = os.getpid()
        self._owner = Owner(
            host=socket.gethostname(),
            boot_id=boot_id(),
            pid_namespace=pid_namespace(),
            harness=OwnedProcess(pid, start_ticks(pid) or 0),
        )
        self._save()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of the lock. What is left in scratch makes the run a dead one."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def note_server(self, server: OwnedServer) -> None:
        """Remembers a server tree in its present extent."""
        others = tuple(s for s in self._owner.servers if s.arm != server.arm)
        self._owner = replace(self._owner, servers=(*others, server))
        self._save()

    def make_directory(self, path: Path) -> None:
        """Makes a directory of the run outside scratch. Raises OSError, also when it is there."""
        path.mkdir(mode=0o700)
        status = path.stat()
        mine = OwnedPath(str(path), status.st_dev, status.st_ino)
        self._owner = replace(self._owner, directories=(*self._owner.directories, mine))
        self._save()

    def remove_directories(self) -> list[str]:
        """Removes the directories that this run made; returns what could not be removed."""
        left = [p for p in self._owner.directories if not _remove_directory(p)]
        self._owner = replace(self._owner, directories=tuple(left))
        self._save()
        return [p.path for p in left]

    def clear_scratch(self) -> None:
        """Empties scratch but for the lock and the record of what is owned."""
        _clear(self._scratch)

    def finish(self) -> None:
        """Removes scratch, the lock last: nothing of the run is left outside its evidence."""
        shutil.rmtree(self._scratch, ignore_errors=True)
        self.close()

    def _save(self) -> None:
        try:
            _write(self._scratch / "owner.json", canonical_json(self._owner))
        except OSError as error:  # a full disk: the lock alone still tells a dead run
            logger.warning("event=owner_not_saved error=%s", error)


class DeadRun:
    """A run whose harness is gone, held by its lock so that nobody else cleans it up."""

    def __init__(self, path: Path, lock: int, owner: Owner | None) -> None:
        self.path = path
        self._lock = lock
        self.owner = owner

    def end(self, *, patience_s: float = SUPERVISOR_PATIENCE_S) -> list[str]:
        """Ends the processes that still live, removes memory and directories; says what it did."""
        owner = self.owner
        if owner is None:
            return []
        done = []
        if owner.boot_id == boot_id() and owner.pid_namespace == pid_namespace():
            for server in owner.servers:
                ended = end_server(server, patience_s)
                if ended:
                    pids = ", ".join(str(process.pid) for process in ended)
                    done.append(f"{server.arm}: ended its processes {pids}")
                for memory in server.shared_memory:
                    if is_same(memory):
                        with contextlib.suppress(OSError):
                            os.unlink(memory.path)
                            done.append(f"{server.arm}: removed {memory.path}")
        for directory in owner.directories:
            if is_same(directory):
                gone = _remove_directory(directory)
                done.append(f"{'removed' if gone else 'could not remove'} {directory.path}")
        return done

    def clear_scratch(self) -> None:
        """Empties scratch but for the lock and the record of what is owned."""
        _clear(self.path / SCRATCH)

    def finish(self) -> None:
        """Removes scratch: the run is not dead any more, but stopped."""
        shutil.rmtree(self.path / SCRATCH, ignore_errors=True)

    def close(self) -> None:
        """Lets go of the lock."""
        os.close(self._lock)


def dead_runs(root: Path) -> Iterator[DeadRun]:
    """Each dead run below a runs root, locked while the caller works on it.

    Runs of another machine are left alone: over a shared file system its lock may not show here.
    """
    for lock_path in sorted(root.glob(f"*/*/{SCRATCH}/lock")):
        path = lock_path.parent.parent
        if path.is_symlink() or path.parent.is_symlink():
            continue
        lock = _take(lock_path)
        if lock is None:
            continue
        dead = DeadRun(path, lock, read_owner(path))
        try:
            if not _is_elsewhere(dead.owner) and not _harness_lives(dead.owner):
                yield dead
        finally:
            dead.close()


def is_live(path: Path) -> bool:
    """True while a harness, of this machine or another, holds the run's lock."""
    try:
        lock = os.open(path / SCRATCH / "lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not _lock(lock, fcntl.LOCK_SH) or _harness_lives(read_owner(path))
    finally:
        os.close(lock)


def read_owner(path: Path) -> Owner | None:
    """What a run says is its own; None when it says nothing that can be read."""
    try:
        text = (path / SCRATCH / "owner.json").read_text(encoding="ascii")
        return Owner.from_json(json.loads(text))
    except (OSError, ValueError, RecordError):
        return None


def _harness_lives(owner: Owner | None) -> bool:
    return (
        owner is not None
        and owner.boot_id == boot_id()
        and owner.pid_namespace == pid_namespace()
        and lives(owner.harness)
        and owner.harness.pid != os.getpid()
    )


def _is_elsewhere(owner: Owner | None) -> bool:
    return owner is not None and owner.boot_id != boot_id() and owner.host != socket.gethostname()


# --- files ------------------------------------------------------------------


def _locked_file(path: Path) -> int:
    """Makes the lock file. It appears under its name only once it is locked."""
    partial = path.with_name(f".lock.{os.getpid()}")
    lock = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    _lock(lock, fcntl.LOCK_EX)
    os.rename(partial, path)
    return lock


def _take(path: Path) -> int | None:
    """The lock of a dead run; None when somebody holds it or it was removed in between."""
    try:
        lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if _lock(lock, fcntl.LOCK_EX) and os.path.samestat(os.fstat(lock), os.stat(path)):
            return lock
    except OSError:
        pass  # whoever held it before finished the run and removed it
    os.close(lock)
    return None


def _lock(lock: int, how: int) -> bool:
    """False when somebody else holds it. Where there is no flock the recorded process decides."""
    try:
        fcntl.flock(lock, how | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True


def _remove_directory(owned: OwnedPath) -> bool:
    if is_same(owned):
        shutil.rmtree(owned.path, ignore_errors=True)
    return not os.path.lexists(owned.path)


def _clear(scratch: Path) -> None:
    for entry in sorted(scratch.iterdir()) if scratch.is_dir() else []:
        if entry.name in ("lock", "owner.json"):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="ascii")
        partial.rename(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
