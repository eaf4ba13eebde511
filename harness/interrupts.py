"""Ctrl-C, SIGTERM and a closed terminal (SIGHUP) end a run in order, once.

The first signal raises `Interrupted` where the main thread happens to be; later ones change
nothing, so that an impatient second Ctrl-C cannot break the stop it is waiting for. Steps that must
not be left half done (spawning, stopping, sealing) run under `shield`, which lets a first signal
wait until they are done. Knows nothing of runs and servers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """The operator, or the system in their name, asked the run to end."""

    def __init__(self, number: int) -> None:
        self.name = signal.Signals(number).name
        super().__init__(self.name)


@dataclass
class _State:
    is_installed: bool = False
    is_stopping: bool = False
    shields: int = 0
    waiting: int | None = None


_state = _State()


@contextlib.contextmanager
def handled(*, to_the_end: bool = False) -> Iterator[None]:
    """Installs the handlers for a while. Nested, or outside the main thread, it does nothing.

    A signal that is ignored already stays ignored: that is what ``nohup`` asks for. ``to_the_end``:
    the process ends after this, so once it is stopping no signal may change its exit code any more.
    """
    if _state.is_installed or threading.current_thread() is not threading.main_thread():
        yield
        return
    mine = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, _note) for number in mine}
    _state.is_installed, _state.is_stopping, _state.waiting = True, False, None
    try:
        yield
    finally:
        if to_the_end and _state.is_stopping:
            # Python would put the default back in place of a handler of ours as it ends.
            before = dict.fromkeys(before, signal.SIG_IGN)
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        _state.is_installed = False


@contextlib.contextmanager
def shield() -> Iterator[None]:
    """Inside, a first signal waits; it is raised as `Interrupted` when the outermost ends."""
    _state.shields += 1
    try:
        yield
    finally:
        _state.shields -= 1
        number = _state.waiting
        if number is not None and _state.shields == 0:
            _state.waiting = None
            raise Interrupted(number)


def _note(number: int, _frame: FrameType | None) -> None:
    if _state.is_stopping:
        with contextlib.suppress(OSError):  # the terminal may be what went away
            os.write(2, b"kvgate: stopping already; a server has 20 s to end by itself\n")
        return
    _state.is_stopping = True
    if _state.shields:
        _state.waiting = number
        return
    raise Interrupted(number)
