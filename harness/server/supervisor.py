"""Runs one server as its child and guarantees that nothing of it outlives the harness.

    harness --pipe--> supervisor (own session, child subreaper) --> server --> engine, workers

vLLM's engine and workers survive a killed API server and are re-parented. As subreaper this
process becomes their parent, so it finds every descendant whatever session or group it moved to.
It stops the tree when told to ("stop" on standard input), when the harness dies (end of standard
input, also after kill -9) and when it is itself asked to end. Standard library only; run as a
script:

    python -m harness.server.supervisor LOG_PATH GRACE_S ARGV...
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from typing import Any

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main(arguments: list[str]) -> int:
    """Reports JSON lines on standard output: started {pid}, exited {code}, stopped {left}."""
    log_path, grace_s, argv = arguments[0], float(arguments[1]), arguments[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    asked = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda n, _frame: asked.append(n))
    signal.signal(signal.SIGCHLD, lambda _n, _frame: None)

    with open(log_path, "ab") as log:
        server = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),
        )
    _say(event="started", pid=server.pid)
    exit_code: int | None = None
    while not asked:
        readable, _, _ = select.select([0, wake_read], [], [], 1.0)
        if wake_read in readable:
            os.read(wake_read, 4096)
        if 0 in readable:
            break  # "stop" or end of file: both mean the same
        if exit_code is None and server.poll() is not None:
            exit_code = server.returncode
            _say(event="exited", code=exit_code)
    left = _stop_tree(server, grace_s)
    _say(event="stopped", code=server.returncode, left=left)
    return 0


def _stop_tree(server: subprocess.Popen[bytes], grace_s: float) -> list[int]:
    """SIGTERM to the server, SIGKILL to what is left after the grace; returns surviving pids."""
    if server.poll() is None:
        server.terminate()
    else:
        for pid in _descendants():
            _send(pid, signal.SIGTERM)
    for pid in _descendants():
        _send(pid, signal.SIGCONT)  # a stopped process would hear the signal after its grace only
    if not _gone_within(server, grace_s):
        for pid in _descendants():
            _send(pid, signal.SIGKILL)
        _gone_within(server, 10.0)
    return _descendants()


def _gone_within(server: subprocess.Popen[bytes], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        server.poll()
        _reap(server.pid)
        if server.returncode is not None and not _descendants():
            return True
        time.sleep(0.05)  # polling for processes to end, bounded by the deadline
    return False


def _reap(keep: int) -> None:
    """Collects re-parented children that ended; the server itself belongs to Popen."""
    for pid in _children(os.getpid()):
        if pid != keep:
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                continue


def _descendants() -> list[int]:
    found: list[int] = []
    waiting = [os.getpid()]
    while waiting:
        children = _children(waiting.pop())
        found += children
        waiting += children
    return [pid for pid in found if not _is_zombie(pid)]


def _children(pid: int) -> list[int]:
    found = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as file:
                found += [int(child) for child in file.read().split()]
    except OSError:
        pass  # the process ended while we looked
    return found


def _is_zombie(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _say(**fields: Any) -> None:
    # With the harness gone nobody listens, but the tree must still be stopped.
    with contextlib.suppress(OSError):
        print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
