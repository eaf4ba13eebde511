"""Temporary files: their names, and how to know that nobody will finish them.

A block is written under a temporary name and published by a rename; a crash leaves the temporary
file behind. Its name says which process made it. Standard library only.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import secrets
import time
from pathlib import Path

TMP_SUFFIX = ".tmp"
_MAX_AGE_S = 3600.0
_NAME = re.compile(r"\..+\.(?P<place>[0-9a-f]{8})\.(?P<pid>\d{1,9})\.[0-9a-f]+\.tmp")


def partial_name(stem: str) -> str:
    """A fresh temporary name in this process's name."""
    return f".{stem}.{_place()}.{os.getpid()}.{secrets.token_hex(4)}{TMP_SUFFIX}"


def is_abandoned(name: str, mtime_ns: int) -> bool:
    """Whether nobody will finish this file: its process is dead, or it is an hour old.

    Processes of other machines and containers cannot be looked at: their files wait for the hour.
    """
    if mtime_ns < time.time_ns() - int(_MAX_AGE_S * 1e9):
        return True
    found = _NAME.fullmatch(name)
    if found is None or found["place"] != _place():
        return False
    try:
        os.kill(int(found["pid"]), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


@functools.cache
def _place() -> str:
    """Names the processes among which a process id is unique: one boot, one pid namespace."""
    text = ""
    with contextlib.suppress(OSError):
        text += Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    with contextlib.suppress(OSError):
        text += os.readlink("/proc/self/ns/pid")
    return hashlib.sha256(text.encode()).hexdigest()[:8]
