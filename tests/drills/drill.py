"""Breaks a run on purpose and looks at what is left. Used with the fake server and with real vLLM.

Everything a run starts inherits ``KVGATE_DRILL`` with a value of its own, so that a process of the
run is found wherever it moved, and nobody else's is ever touched.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import termios
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from harness.run.ownership import is_live, read_owner

REPOSITORY = Path(__file__).resolve().parents[2]
LEFT_WITHIN_S = 30.0

SIGNALS = {"SIGINT": signal.SIGINT, "SIGTERM": signal.SIGTERM, "SIGHUP": signal.SIGHUP}
FAULTS = (
    *SIGNALS,
    "kill -9 harness",
    "kill -9 supervisor",
    "kill -9 API server",
    "kill -9 EngineCore",
    "SIGSTOP API server",
)


def wait_until(condition: Callable[[], bool], limit_s: float, what: str) -> None:
    """Asks again and again, for what another process does and no handle tells."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {limit_s:.0f} s"
        select.select([], [], [], 0.02)


@dataclass(frozen=True)
class Outcome:
    """What came of a drill. ``left``: what was still there 30 s later, in words."""

    exit_code: int
    reason: str
    left: tuple[str, ...]


@dataclass
class Drill:
    """One harness process with everything it starts, under a directory of the test."""

    root: Path
    campaign: Path
    environment: dict[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    terminal: int | None = None  # the harness's end of a pseudo-terminal, as its controlling one
    token: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        self.runs = self.root / "runs"
        self.before = set(self.run_paths())
        self.shared_memory = set(os.listdir("/dev/shm"))
        self.output = self.root / f"output-{self.token}.txt"
        self.process: subprocess.Popen[bytes] | None = None
        self._path: Path | None = None
        self.ports: set[int] = set()

    def __enter__(self) -> Drill:
        with self.output.open("wb") as output:
            shown = output.fileno() if self.terminal is None else self.terminal
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "harness", "run", str(self.campaign)),
                    *("--runs", str(self.runs), *self.arguments),
                ],
                cwd=self.root,
                stdin=subprocess.DEVNULL if self.terminal is None else self.terminal,
                stdout=shown,
                stderr=subprocess.STDOUT,
                start_new_session=self.terminal is not None,
                preexec_fn=None if self.terminal is None else _take_terminal,
                env={
                    **os.environ,
                    "KVGATE_DRILL": self.token,
                    "PYTHONPATH": str(REPOSITORY),
                    **self.environment,
                },
            )
        return self

    def __exit__(self, *_: object) -> None:
        """Whatever a failed test left of its own run is ended."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    # -- looking --------------------------------------------------------------

    def run_paths(self) -> list[Path]:
        """All run directories there are."""
        return sorted(self.runs.glob("*/*")) if self.runs.is_dir() else []

    @property
    def path(self) -> Path:
        """The run directory of this drill; remembered, for others may follow."""
        if self._path is None:
            (self._path,) = set(self.run_paths()) - self.before
        return self._path

    def has_run(self) -> bool:
        """True once the run directory is there."""
        return self._path is not None or len(set(self.run_paths()) - self.before) == 1

    def text(self) -> str:
        """What the harness printed."""
        return self.output.read_text(errors="replace")

    def processes(self) -> list[psutil.Process]:
        """All living processes of the run, the harness itself included."""
        found = []
        for process in psutil.process_iter():
            try:
                is_ours = process.environ().get("KVGATE_DRILL") == self.token
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def server_pid(self) -> int:
        """The API server: the only child of the supervisor that the run recorded."""
        supervisor = self._supervisor()
        return min(child.pid for child in psutil.Process(supervisor).children())

    def engine_pid(self) -> int:
        """vLLM's EngineCore below the API server."""
        for child in psutil.Process(self.server_pid()).children(recursive=True):
            if "EngineCor" in child.name() or "--engine" in " ".join(child.cmdline()):
                return child.pid
        raise LookupError("no engine yet")

    def noted_memory(self) -> str:
        """The first file of /dev/shm that the run recorded as its own."""
        owner = read_owner(self.path)
        assert owner is not None
        return owner.servers[-1].shared_memory[0].path

    def _supervisor(self) -> int:
        owner = read_owner(self.path)
        assert owner is not None
        supervisor = owner.servers[-1].supervisor
        assert supervisor is not None
        return supervisor.pid

    def is_there(self, find: Callable[[], Any]) -> bool:
        """Whether something can be found already."""
        try:
            find()
        except (LookupError, ValueError, AssertionError, psutil.Error):
            return False
        return True

    # -- breaking -------------------------------------------------------------

    def inject(self, fault: str) -> None:
        """Does it."""
        assert self.process is not None
        if self.has_run() and (owner := read_owner(self.path)) is not None:
            self.ports |= {server.port for server in owner.servers}
        match fault:
            case "kill -9 harness":
                self.process.kill()
            case "kill -9 supervisor":
                os.kill(self._supervisor(), signal.SIGKILL)
            case "kill -9 API server":
                os.kill(self.server_pid(), signal.SIGKILL)
            case "kill -9 EngineCore":
                os.kill(self.engine_pid(), signal.SIGKILL)
            case "SIGSTOP API server":
                os.kill(self.server_pid(), signal.SIGSTOP)
            case _:
                self.process.send_signal(SIGNALS[fault])

    def outcome(self, limit_s: float) -> Outcome:
        """Waits for the end of the harness, then for the end of everything else."""
        assert self.process is not None
        exit_code = self.process.wait(limit_s)
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not self.left(), LEFT_WITHIN_S, "nothing is left")
        return Outcome(exit_code, self.reason(), tuple(self.left()))

    def reason(self) -> str:
        """Why the run ended, as its seal says; what is there instead when nothing was sealed."""
        if not self.has_run():
            return "nothing was started"
        if not (self.path / "seal.json").is_file():
            return "not sealed"
        return str(json.loads((self.path / "seal.json").read_text())["stopped"])

    def left(self) -> list[str]:
        """Processes, open ports, files of /dev/shm and a held lock, in words."""
        found = [f"process {p.pid}" for p in self.processes()]
        for port in sorted(self.ports):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    found.append(f"port {port}")
        for name in sorted(set(os.listdir("/dev/shm")) - self.shared_memory):
            if self.token in name or self._is_mapped_by_us(name):
                found.append(f"/dev/shm/{name}")
        if self.has_run() and is_live(self.path):
            found.append("the lock")
        return found

    def _is_mapped_by_us(self, name: str) -> bool:
        owner = read_owner(self.path) if self.has_run() else None
        return owner is not None and any(
            memory.path == f"/dev/shm/{name}"
            for server in owner.servers
            for memory in server.shared_memory
        )


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def last_trial(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(requests, events) of the last trial of a sealed run."""
    trial = max((path / "trials").iterdir())
    return _lines(trial / "requests.jsonl"), _lines(trial / "events.jsonl")


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
