"""Owns the process of a load worker: starts it, talks to it in JSON lines, makes sure it ends.

Knows neither schedules nor records. Used by one thread at a time, and started from a thread that
outlives it: the kernel kills the worker when the thread that started it ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from harness.errors import LoadError

STOP_S = 2.0

_MODULE = "harness.load.locustfile"
_ROOT = Path(__file__).resolve().parents[2]
_LOG_TAIL_BYTES = 4096
_LOG_TAIL_LINES = 20


class WorkerProcess:
    """A running worker, in a session of its own so that a Ctrl-C reaches the harness alone."""

    def __init__(self, *, python: str, log_path: Path) -> None:
        self._log_path = log_path
        self._buffer = b""
        self._lines: list[bytes] = []
        path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [python, "-m", _MODULE, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Also the id of its process group."""
        return self._process.pid

    def send(self, message: dict[str, Any]) -> None:
        """One JSON line. Raises LoadError when the worker is gone."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode("ascii") + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._ended() from error

    def fileno(self) -> int:
        """Readable when `read` will not wait."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def read(self) -> None:
        """Takes in what the worker wrote; waits for it. Raises LoadError when the worker ended."""
        piece = os.read(self.fileno(), 65536)
        if not piece:
            raise self._ended()
        *whole, self._buffer = (self._buffer + piece).split(b"\n")
        self._lines.extend(whole)

    def take(self) -> dict[str, Any] | None:
        """The next message that was read whole."""
        if not self._lines:
            return None
        message: dict[str, Any] = json.loads(self._lines.pop(0))
        return message

    def receive(self, timeout_s: float) -> dict[str, Any] | None:
        """The next message, None when none came in time. Raises LoadError when the worker ended."""
        poller = select.poll()
        poller.register(self.fileno(), select.POLLIN)
        deadline = time.monotonic() + timeout_s
        while (message := self.take()) is None:
            left_s = deadline - time.monotonic()
            if not poller.poll(max(0.0, left_s) * 1000):
                return None
            self.read()
        return message

    def close_commands(self) -> None:
        """Tells the worker to leave, and does not wait. Never raises."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def stop(self) -> None:
        """Closes the command pipe, then SIGTERM, then SIGKILL to the whole group. Never raises."""
        process = self._process
        assert process.stdout is not None
        self.close_commands()
        for number in (None, signal.SIGTERM, signal.SIGKILL):
            if number is not None:
                self._signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
                break
        # Whatever the worker may have started goes with it.
        self._signal(signal.SIGKILL)
        process.stdout.close()

    def log_tail(self) -> str:
        """The last lines the worker printed."""
        with self._log_path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
            lines = log.read().decode("utf-8", "replace").splitlines()
        return "\n".join(lines[-_LOG_TAIL_LINES:])

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def _ended(self) -> LoadError:
        try:
            status = self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            return LoadError(f"the load worker closed its pipe; see {self._log_path}")
        return LoadError(
            f"the load worker ended with status {status}; see {self._log_path}. Its last lines:\n"
            f"{self.log_tail()}"
        )
