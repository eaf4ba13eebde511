"""Whose listening socket answers on a port: read from /proc, because HTTP answers from anybody.

A process that takes the port between its choice and the server's bind answers /health as well as
ours would, and with SO_REUSEPORT both listen at once and the kernel deals requests out among them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
_LISTEN = "0A"
# Which socket takes a connection to 127.0.0.1: the kernel prefers the exact address, then IPv4's
# "any", then IPv6's (inet_hashtables.c, compute_score). As /proc writes them on little-endian.
_LOOPBACK = {
    "0100007F": 0,
    "0000000000000000FFFF00000100007F": 0,  # ::ffff:127.0.0.1
    "00000000": 1,
    "0000000000000000FFFF000000000000": 1,  # ::ffff:0.0.0.0
    "00000000000000000000000000000000": 2,
}


@dataclass(frozen=True)
class Listeners:
    """The sockets that take connections to 127.0.0.1 at one port, by whose they are.

    ``foreign``: inodes of sockets that no process of the tree holds. ``unreadable``: why that
    cannot be told; None when it can.
    """

    ours: frozenset[str] = frozenset()
    foreign: frozenset[str] = frozenset()
    unreadable: str | None = None


def listeners_of(port: int, tree: Iterable[int], *, proc: Path = PROC) -> Listeners:
    """The listening sockets at a port and whether the processes of ``tree`` hold them.

    Only sockets that were there before and after the processes were looked at count: one that was
    closed meanwhile is nobody's. Raises nothing: what cannot be read is told in ``unreadable``.
    """
    try:
        before = _listening(port, proc)
        held, refused = _held_sockets(tree, proc)
        there = before & _listening(port, proc)
    except OSError as error:
        return Listeners(unreadable=f"{error.filename or proc}: {error.strerror}")
    foreign = there - held
    if foreign and refused:
        # The tree itself may hold what we were not allowed to see.
        return Listeners(there & held, unreadable=refused)
    return Listeners(there & held, foreign)


def holder_of(inode: str, *, proc: Path = PROC) -> str:
    """Names the process that holds a socket, for a person; "unknown" where it cannot be read."""
    for path in proc.iterdir():
        if path.name.isdigit() and inode in _held_sockets([int(path.name)], proc)[0]:
            try:
                return f"process {path.name} ({(path / 'comm').read_text().strip()})"
            except OSError:
                return f"process {path.name}"
    return "a process that cannot be read"


def _listening(port: int, proc: Path) -> frozenset[str]:
    """Inodes of the listening sockets that a connection to 127.0.0.1 at ``port`` may reach."""
    ranked = [
        (_LOOPBACK[address], inode)
        for name in ("tcp", "tcp6")
        for address, inode in _rows(proc / "self" / "net" / name, port)
        if address in _LOOPBACK
    ]
    best = min((rank for rank, _inode in ranked), default=0)
    return frozenset(inode for rank, inode in ranked if rank == best)


def _rows(path: Path, port: int) -> Iterator[tuple[str, str]]:
    """(address, inode) of listening sockets. Raises OSError; a kernel without IPv6 has no tcp6."""
    try:
        lines = path.read_text().splitlines()[1:]
    except FileNotFoundError:
        if path.name == "tcp6":
            return
        raise
    for line in lines:
        fields = line.split()
        address, _, number = fields[1].partition(":")
        if fields[3] == _LISTEN and int(number, 16) == port:
            yield address, fields[9]


def _held_sockets(tree: Iterable[int], proc: Path) -> tuple[frozenset[str], str | None]:
    """Inodes of the sockets that processes hold, and why some process could not be looked into."""
    held, refused = set(), None
    for pid in tree:
        directory = proc / str(pid) / "fd"
        try:
            names = os.listdir(directory)
        except PermissionError:
            refused = f"{directory}: not permitted"
            continue
        except OSError:
            continue  # ended meanwhile
        for name in names:
            try:
                target = os.readlink(directory / name)
            except OSError:
                continue  # closed meanwhile
            if target.startswith("socket:["):
                held.add(target[len("socket:[") : -1])
    return frozenset(held), refused
