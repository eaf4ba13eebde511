"""Ties a process to the one that started it. Imports nothing that Locust would replace."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with(parent_pid: int) -> None:
    """Has the kernel kill this process when its parent is gone, even while Python is stuck."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        # It died before the line above.
        os._exit(0)
