"""A vLLM server of ours: started, watched until ready, asked for its facts, stopped without a rest.

Also `ExternalServer`, the same surface for a server that somebody else runs.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import httpx
import psutil

from harness.arms import SERVED_MODEL_NAME, LaunchSpec
from harness.errors import ServerError, ServerExited, StartTimeout
from harness.records import ProcessFacts, ServerFacts
from harness.server.facts import effective_configuration, error_lines

logger = logging.getLogger(__name__)

STOP_GRACE_S = 20.0
Progress = Callable[[str], None]


class Server(Protocol):
    """What a trial needs of a server."""

    base_url: str
    model: str
    owned: bool

    def facts(self) -> ServerFacts: ...

    def pids(self) -> list[int]: ...

    def log_text(self, start: int = 0) -> str: ...

    def log_size(self) -> int: ...

    def check_alive(self) -> None: ...


@dataclass(frozen=True)
class Leftovers:
    """What was still there after a stop, and was removed where it was ours for certain."""

    processes: tuple[int, ...] = ()
    shared_memory: tuple[str, ...] = ()
    port_open: bool = False

    def __bool__(self) -> bool:
        return bool(self.processes or self.shared_memory or self.port_open)


class ManagedServer:
    """One server process tree. Use as a context manager; leaving it stops the tree."""

    owned = True
    model = SERVED_MODEL_NAME

    def __init__(
        self, spec: LaunchSpec, *, log_path: Path, progress: Progress | None = None
    ) -> None:
        self.spec = spec
        self.log_path = log_path
        self.leftovers = Leftovers()
        self._progress = progress or (lambda _text: None)
        self._supervisor: subprocess.Popen[str] | None = None
        self._events: queue.Queue[dict[str, Any]] = queue.Queue()
        self._exit_code: int | None = None
        self._pid: int | None = None
        self._seen_shared_memory: set[str] = set()
        self.port = 0
        self.base_url = ""

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Starts the tree and waits until it answers. Raises StartTimeout or ServerExited."""
        if not Path(self.spec.argv[0]).is_file():
            raise ServerError(
                f"arm {self.spec.arm}: no interpreter at {self.spec.argv[0]}; run `kvgate setup`, or "
                "set server.python in the campaign"
            )
        self.port = self._choose_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self._supervisor = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "harness.server.supervisor",
                str(self.log_path),
                str(STOP_GRACE_S),
                *self.spec.argv,
                "--port",
                str(self.port),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self.spec.environment,
            start_new_session=True,  # Ctrl-C reaches the harness alone, which then stops in order
        )
        threading.Thread(target=self._listen, args=(self._supervisor,), daemon=True).start()
        self._wait_until_ready()

    def _choose_port(self) -> int:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", self.spec.port or 0))
            except OSError as error:
                raise ServerError(
                    f"arm {self.spec.arm}: port {self.spec.port} is taken ({error.strerror}); stop what "
                    "uses it, or leave server.port out to get a free one"
                ) from error
            return int(probe.getsockname()[1])

    def _listen(self, supervisor: subprocess.Popen[str]) -> None:
        assert supervisor.stdout is not None
        for line in supervisor.stdout:
            event = json.loads(line)
            if event["event"] == "started":
                self._pid = event["pid"]
            elif event["event"] == "exited":
                self._exit_code = event["code"]
            self._events.put(event)

    def _wait_until_ready(self) -> None:
        started = time.monotonic()
        deadline = started + self.spec.ready_deadline_s
        with httpx.Client(base_url=self.base_url, timeout=5.0, trust_env=False) as client:
            while True:
                self.check_alive()
                elapsed = time.monotonic() - started
                self._progress(f"starting, {elapsed:.0f} s")
                try:
                    if client.get("/health").status_code == 200:
                        self._pids_and_shared_memory()
                        return
                except httpx.TransportError:
                    pass  # not listening yet
                if time.monotonic() > deadline:
                    raise StartTimeout(
                        f"arm {self.spec.arm}: not ready after {self.spec.ready_deadline_s:.0f} s "
                        f"(allowed: server.ready_deadline_s); last lines of {self.log_path.name}:\n"
                        + error_lines(self.log_text())
                    )
                time.sleep(0.25)  # polling an external process, bounded by the deadline

    def check_alive(self) -> None:
        """Raises ServerExited, with the last error lines of the log, when the server has ended."""
        supervisor = self._supervisor
        ended = supervisor is not None and supervisor.poll() is not None
        if self._exit_code is not None or ended:
            raise ServerExited(
                f"arm {self.spec.arm}: the server ended by itself with code {self._exit_code}; last "
                f"lines of {self.log_path.name}:\n" + error_lines(self.log_text())
            )

    def facts(self) -> ServerFacts:
        """What was asked for and what the server itself says, read back now."""
        processes = []
        for pid in self.pids():
            try:
                with open(f"/proc/{pid}/stat") as file:
                    stat = file.read()
            except OSError:
                continue  # a short-lived child ended in between
            name = stat[stat.index("(") + 1 : stat.rindex(")")]
            processes.append(ProcessFacts(pid, int(stat.rpartition(")")[2].split()[19]), name))
        effective, versions = effective_configuration(self.base_url, self.log_text())
        return ServerFacts(
            arm=self.spec.arm,
            kind="vllm",
            argv=(*self.spec.argv, "--port", str(self.port)),
            environment=self.spec.recorded_environment(),
            effective=effective,
            processes=tuple(processes),
            versions=versions,
        )

    def pids(self) -> list[int]:
        """The server's process and all its descendants, without the supervisor."""
        if self._supervisor is None:
            return []
        try:
            tree = psutil.Process(self._supervisor.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        return sorted(process.pid for process in tree)

    def log_text(self, start: int = 0) -> str:
        """The captured log from a byte offset on."""
        if not self.log_path.is_file():
            return ""
        with self.log_path.open("rb") as file:
            file.seek(start)
            return file.read().decode("utf-8", errors="replace")

    def log_size(self) -> int:
        """Bytes logged so far."""
        return self.log_path.stat().st_size if self.log_path.is_file() else 0

    def stop(self) -> Leftovers:
        """Stops the whole tree and looks for what is left. Idempotent; raises nothing."""
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is None:
            return self.leftovers
        self._supervisor = supervisor
        pids = self._pids_and_shared_memory()
        self._supervisor = None
        try:
            assert supervisor.stdin is not None
            supervisor.stdin.close()
            supervisor.wait(STOP_GRACE_S + 15.0)
        except (OSError, subprocess.TimeoutExpired):
            logger.warning("supervisor of arm=%s did not end; killing its tree", self.spec.arm)
            for pid in (*pids, supervisor.pid):
                try:
                    os.kill(pid, 9)
                except ProcessLookupError:
                    continue
            supervisor.wait(10.0)
        shared = sorted(path for path in self._seen_shared_memory if os.path.exists(path))
        for path in shared:
            os.unlink(path)
        self.leftovers = Leftovers(
            processes=tuple(pid for pid in pids if _alive(pid)),
            shared_memory=tuple(shared),
            port_open=_port_open(self.port),
        )
        if self.leftovers:
            logger.warning("arm=%s left behind: %s", self.spec.arm, self.leftovers)
        return self.leftovers

    def _pids_and_shared_memory(self) -> list[int]:
        """The tree's pids; also notes the /dev/shm files it has open or mapped, which are ours."""
        pids = self.pids()
        for pid in pids:
            try:
                with open(f"/proc/{pid}/maps") as file:
                    for line in file:
                        _, found, path = line.rstrip("\n").partition("/dev/shm/")
                        if found and not path.endswith("(deleted)"):
                            self._seen_shared_memory.add("/dev/shm/" + path)
            except OSError:
                continue  # ended in between
        return pids


class ExternalServer:
    """A server somebody else runs: it is never started, stopped, reset or looked into by us."""

    owned = False

    def __init__(self, arm: str, base_url: str, model: str) -> None:
        self.arm, self.base_url, self.model = arm, base_url.rstrip("/"), model

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def facts(self) -> ServerFacts:
        """What the server says of itself over HTTP."""
        effective, versions = effective_configuration(self.base_url, "")
        return ServerFacts(
            arm=self.arm,
            kind="url",
            argv=(),
            environment={},
            effective=effective,
            versions=versions,
        )

    def pids(self) -> list[int]:
        """Unknown: the processes are not ours."""
        return []

    def log_text(self, start: int = 0) -> str:
        """Unknown."""
        return ""

    def log_size(self) -> int:
        """Unknown."""
        return 0

    def check_alive(self) -> None:
        """Raises ServerError when the server does not answer."""
        try:
            httpx.get(f"{self.base_url}/v1/models", timeout=10.0, trust_env=False)
        except httpx.TransportError as error:
            raise ServerError(f"arm {self.arm}: {self.base_url} does not answer: {error}") from error


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _port_open(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0
