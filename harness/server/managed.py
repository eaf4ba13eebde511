"""A vLLM server of ours: started, watched until ready, asked for its facts, stopped without a rest.

`external.ExternalServer` has the same surface for a server that somebody else runs.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import httpx

from harness import interrupts
from harness.campaign.arms import SERVED_MODEL_NAME, LaunchSpec
from harness.errors import (
    PortTaken,
    ServerError,
    ServerExited,
    ServerSilent,
    StartTimeout,
)
from harness.records import ProcessFacts, ServerFacts
from harness.server import processes
from harness.server.access import Access
from harness.server.facts import effective_configuration, error_lines
from harness.server.listeners import holder_of, listeners_of
from harness.server.processes import OwnedProcess, OwnedServer, start_ticks

logger = logging.getLogger(__name__)

STOP_GRACE_S = 20.0
ANSWER_DEADLINE_S = 60.0
# A refused connection is told before the end of the process behind it.
EXIT_TOLD_S = 3.0
# /health and /v1/models of a server that starts; asked again until its deadline.
READY_ANSWER_S = 5.0
SHARED_MEMORY = "/dev/shm"
Progress = Callable[[str], None]


class Server(Protocol):
    """What a trial needs of a server."""

    base_url: str
    model: str
    owned: bool

    @property
    def access(self) -> Access: ...

    def facts(self) -> ServerFacts: ...

    def pids(self) -> list[int]: ...

    def log_text(self, start: int = 0) -> str: ...

    def log_size(self) -> int: ...

    def check_alive(self) -> None: ...

    def check_answers(self) -> None: ...


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
        self,
        spec: LaunchSpec,
        *,
        log_path: Path,
        progress: Progress | None = None,
        stop_grace_s: float = STOP_GRACE_S,
        answer_deadline_s: float = ANSWER_DEADLINE_S,
        on_tree: Callable[[OwnedServer], None] | None = None,
    ) -> None:
        """``on_tree`` hears of the tree whenever it grew, so that others may end it."""
        self.spec = spec
        self.log_path = log_path
        self.leftovers = Leftovers()
        self._progress = progress or (lambda _text: None)
        self._supervisor: subprocess.Popen[str] | None = None
        self._exit_code: int | None = None
        self._stop_grace_s = stop_grace_s
        self._answer_deadline_s = answer_deadline_s
        self._on_tree = on_tree or (lambda _tree: None)
        self._listener: threading.Thread | None = None
        self._ended = threading.Event()
        self._seen_supervisor: OwnedProcess | None = None
        self._seen_processes: dict[int, int] = {}
        self._seen_shared_memory: set[str] = set()
        self._foreign: frozenset[str] = frozenset()
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

    @property
    def access(self) -> Access:
        """How to ask the server."""
        return Access(self.base_url)

    def start(self) -> None:
        """Starts the tree and waits until it is ready.

        Raises StartTimeout, ServerExited, PortTaken.
        """
        if not Path(self.spec.argv[0]).is_file():
            raise ServerError(
                f"arm {self.spec.arm}: no interpreter at {self.spec.argv[0]}; run `kvgate setup`, "
                "or set server.python in the campaign"
            )
        self.port = self._choose_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self._foreign = _shared_memory_names()
        with interrupts.shield():  # a tree that nobody holds would have to be found again
            self._supervisor = self._spawn()
            self._listener = threading.Thread(
                target=self._listen, args=(self._supervisor,), daemon=True
            )
            self._listener.start()
        self._wait_until_ready()

    def _spawn(self) -> subprocess.Popen[str]:
        supervisor = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "harness.server.supervisor",
                str(self.log_path),
                str(self._stop_grace_s),
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
        ticks = start_ticks(supervisor.pid)
        self._seen_supervisor = None if ticks is None else OwnedProcess(supervisor.pid, ticks)
        self._tell_tree()
        return supervisor

    def _choose_port(self) -> int:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", self.spec.port or 0))
            except OSError as error:
                raise ServerError(
                    f"arm {self.spec.arm}: port {self.spec.port} is taken ({error.strerror}); stop "
                    "what uses it, or leave server.port out to get a free one"
                ) from error
            return int(probe.getsockname()[1])

    def _listen(self, supervisor: subprocess.Popen[str]) -> None:
        assert supervisor.stdout is not None
        for line in supervisor.stdout:
            event = json.loads(line)
            if event["event"] == "exited":
                self._exit_code = event["code"]
                self._ended.set()
        self._ended.set()  # the supervisor itself is gone

    def _wait_until_ready(self) -> None:
        """Ready: /health answers, from a socket of our own tree, and our model is served."""
        started = time.monotonic()
        deadline = started + self.spec.ready_deadline_s
        while True:
            self.check_alive()
            self._note_tree()
            elapsed = time.monotonic() - started
            self._progress(f"starting, {elapsed:.0f} s")
            missing = self._missing_to_be_ready()
            if missing is None:
                self._note_tree()
                return
            if time.monotonic() > deadline:
                raise StartTimeout(
                    f"arm {self.spec.arm}: not ready after {self.spec.ready_deadline_s:.0f} s "
                    f"(allowed: server.ready_deadline_s): {missing}; last lines of "
                    f"{self.log_path.name}:\n" + error_lines(self.log_text())
                )
            time.sleep(0.25)  # polling an external process, bounded by the deadline

    def _missing_to_be_ready(self) -> str | None:
        """What is missing, None when nothing is. Raises PortTaken, ServerError."""
        self._check_port()
        try:
            status = self.access.get("/health", timeout_s=READY_ANSWER_S).status_code
            if status != 200:
                return f"/health answered {status}"
            self._check_port(answered=True)
            served = self.access.served_models(timeout_s=READY_ANSWER_S)
        except httpx.HTTPError as error:  # not listening yet, or busy with its start
            return f"{type(error).__name__}: {error}"
        if self.model not in served:
            raise ServerError(
                f"arm {self.spec.arm}: /v1/models lists {', '.join(served) or 'no model'}; needed: "
                f"{self.model}; take --served-model-name out of the arm's args"
            )
        return None

    def _check_port(self, *, answered: bool = False) -> None:
        """Raises PortTaken when a socket of somebody else's can answer on the port.

        ``answered``: something did, so that a socket of our own tree must be found as well.
        """
        if self._supervisor is None:
            return
        root = self._supervisor.pid
        found = listeners_of(self.port, [root, *processes.descendants(root)])
        if found.foreign:
            whose = ", ".join(sorted(holder_of(inode) for inode in found.foreign))
            raise PortTaken(
                f"arm {self.spec.arm}: port {self.port} is answered by {whose}; allowed: the "
                "server that this run started, alone; stop the other, or leave server.port out to "
                "get a free one"
            )
        # A server that ended right after its answer has no socket, and nobody answers any more.
        if answered and not found.ours and (found.unreadable or _port_open(self.port)):
            raise PortTaken(
                f"arm {self.spec.arm}: cannot tell whose server answers on port {self.port}: "
                f"{found.unreadable or 'no listening socket is shown in /proc/self/net'}; needed: "
                "a /proc that shows the sockets of the processes this run started; run as the user "
                "of the server, without hidepid"
            )

    def check_alive(self) -> None:
        """Raises ServerExited, with the last error lines of the log, when the server has ended."""
        supervisor = self._supervisor
        if self._exit_code is not None:
            how = f"the server ended by itself with code {self._exit_code}"
        elif supervisor is not None and supervisor.poll() is not None:
            how = (
                f"the supervisor of the server ended with code {supervisor.returncode}, and the "
                "server with it"
            )
        else:
            return
        raise ServerExited(
            f"arm {self.spec.arm}: {how}; last lines of {self.log_path.name}:\n"
            + error_lines(self.log_text())
        )

    def check_answers(self) -> None:
        """Raises ServerExited or ServerSilent when there is no answer within the deadline.

        Raises PortTaken when another process may have given it.
        """
        self.check_alive()
        try:
            status = self.access.get("/health", timeout_s=self._answer_deadline_s).status_code
        except httpx.TimeoutException:
            how = f"no answer from /health in {self._answer_deadline_s:g} s"
        except httpx.HTTPError as error:
            how = f"/health: {type(error).__name__}: {error}"
        else:
            if status < 500:
                self._check_port(answered=True)
                return
            how = f"/health answered {status}"
        if not how.startswith("no answer"):
            self._ended.wait(EXIT_TOLD_S)
        self.check_alive()
        raise ServerSilent(
            f"arm {self.spec.arm}: the server stopped answering: {how} (allowed: "
            f"server.answer_deadline_s); last lines of {self.log_path.name}:\n"
            + error_lines(self.log_text())
        )

    def facts(self) -> ServerFacts:
        """What was asked for and what the server itself says, read back now."""
        self._check_port()
        found = []
        for pid in self.pids():
            stat = processes.stat_fields(pid)
            if stat is not None:  # a short-lived child may have ended in between
                found.append(ProcessFacts(pid, int(stat[1][19]), stat[0]))
        try:
            effective, versions = effective_configuration(
                self.access, self.log_text(), timeout_s=self._answer_deadline_s
            )
        except ServerError:
            self.check_answers()  # a server that died or hangs is the better reason
            raise
        return ServerFacts(
            arm=self.spec.arm,
            kind=self.spec.kind,
            argv=(*self.spec.argv, "--port", str(self.port)),
            environment=self.spec.recorded_environment(),
            effective=effective,
            processes=tuple(found),
            versions=versions,
        )

    def pids(self) -> list[int]:
        """The server's process and all its descendants, without the supervisor."""
        self._note_tree()
        return [] if self._supervisor is None else processes.descendants(self._supervisor.pid)

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
        """Stops the whole tree and looks for what is left. Idempotent; raises nothing.

        A Ctrl-C meanwhile waits until it is done.
        """
        with interrupts.shield():
            return self._stop()

    def _stop(self) -> Leftovers:
        supervisor = self._supervisor
        if supervisor is None:
            return self.leftovers
        self._note_tree()
        self._supervisor = None
        self._end(supervisor)
        # Only with the supervisor gone before its time is anything left. A pid alone may be reused
        # by now; together with its start time it is the process we saw.
        seen = [OwnedProcess(pid, ticks) for pid, ticks in self._seen_processes.items()]
        left = tuple(process.pid for process in processes.kill(seen))
        shared = sorted(path for path in self._seen_shared_memory if os.path.exists(path))
        for path in shared:
            with contextlib.suppress(OSError):
                os.unlink(path)
        self.leftovers = Leftovers(left, tuple(shared), _port_open(self.port))
        if self.leftovers:
            logger.warning("arm=%s left behind: %s", self.spec.arm, self.leftovers)
        return self.leftovers

    def _end(self, supervisor: subprocess.Popen[str]) -> None:
        """Closes the supervisor's input, which makes it stop the tree, and waits for it."""
        assert supervisor.stdin is not None
        assert supervisor.stdout is not None
        with contextlib.suppress(OSError):
            supervisor.stdin.close()
        try:
            supervisor.wait(self._stop_grace_s + 15.0)
        except subprocess.TimeoutExpired:
            logger.warning("supervisor of arm=%s did not end; killing its tree", self.spec.arm)
            self._note_tree(supervisor)
            supervisor.kill()
            supervisor.wait()
        if self._listener is not None:
            self._listener.join(5.0)
        supervisor.stdout.close()

    def _note_tree(self, supervisor: subprocess.Popen[str] | None = None) -> None:
        """Notes the tree's processes with their start times, and the /dev/shm files they map.

        Files that lay there before the start are somebody else's.
        """
        supervisor = supervisor or self._supervisor
        before = len(self._seen_processes), len(self._seen_shared_memory)
        for pid in [] if supervisor is None else processes.descendants(supervisor.pid):
            ticks = start_ticks(pid)
            if ticks is not None:
                self._seen_processes[pid] = ticks
            try:
                with open(f"/proc/{pid}/maps") as file:
                    mapped = file.read().splitlines()
            except OSError:
                continue  # ended in between
            for line in mapped:
                _, found, name = line.partition(f"{SHARED_MEMORY}/")
                if found and not name.endswith(" (deleted)") and name not in self._foreign:
                    self._seen_shared_memory.add(f"{SHARED_MEMORY}/{name}")
        if (len(self._seen_processes), len(self._seen_shared_memory)) != before:
            self._tell_tree()

    def _tell_tree(self) -> None:
        shared = (processes.owned_path(path) for path in sorted(self._seen_shared_memory))
        self._on_tree(
            OwnedServer(
                arm=self.spec.arm,
                port=self.port,
                supervisor=self._seen_supervisor,
                processes=tuple(
                    OwnedProcess(pid, ticks) for pid, ticks in self._seen_processes.items()
                ),
                shared_memory=tuple(path for path in shared if path is not None),
            )
        )


def _shared_memory_names() -> frozenset[str]:
    try:
        return frozenset(os.listdir(SHARED_MEMORY))
    except OSError:
        return frozenset()


def _port_open(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0
