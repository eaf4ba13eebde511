"""Opens directories below a root without following symbolic links. Standard library only.

Whoever can write to the directory may put a link in the place of any part of it, at any time. Names
are therefore resolved one by one, each in the directory opened before it, never as a whole path.
The root itself is the operator's word and may be a link.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@contextlib.contextmanager
def open_below(root: Path | str, *names: str) -> Iterator[int]:
    """A descriptor of ``root/names[0]/names[1]/...``, for the ``dir_fd`` of other calls.

    Raises:
        FileNotFoundError: a part is missing.
        OSError: a part is a symbolic link (ENOTDIR or ELOOP), no directory, or unreadable.
    """
    descriptor = _descend(root, names)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_file_below(root: Path | str, *names: str, flags: int) -> int:
    """A descriptor of the file ``root/names...``, the caller's to close. Raises OSError as above.

    ``flags`` must hold O_NOFOLLOW.
    """
    directory = _descend(root, names[:-1])
    try:
        return os.open(names[-1], flags, dir_fd=directory)
    finally:
        os.close(directory)


def _descend(root: Path | str, names: Sequence[str]) -> int:
    descriptor = os.open(root, _FLAGS)
    for name in names:
        try:
            inner = os.open(name, _FLAGS | os.O_NOFOLLOW, dir_fd=descriptor)
        finally:
            os.close(descriptor)
        descriptor = inner
    return descriptor


def make_private(path: Path) -> None:
    """Creates a directory and its missing parents, each with mode 0700. Raises OSError."""
    if not path.parent.exists():
        make_private(path.parent)
    path.mkdir(mode=0o700, exist_ok=True)


def unlink_below(root: Path | str, *names: str) -> int:
    """Removes the file ``root/names...``; returns its size in bytes. Raises OSError."""
    with open_below(root, *names[:-1]) as directory:
        size = os.stat(names[-1], dir_fd=directory, follow_symlinks=False).st_size
        os.unlink(names[-1], dir_fd=directory)
    return size
