"""A server tree of ours, as real processes: ready in time or told why, and gone without a rest."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from harness.campaign.arms import LaunchSpec
from harness.errors import PortTaken, ServerError, ServerExited, StartTimeout
from harness.server.external import ExternalServer
from harness.server.listeners import Listeners
from harness.server.managed import Leftovers, ManagedServer
from tests.server.fake_server import Web
from tests.server.managed_script import spec_of

GRACE_S = 0.3
LIMIT_S = 60.0


def managed(directory: Path, mode: str, *more: str, deadline_s: float = 30.0) -> ManagedServer:
    return ManagedServer(
        spec_of(mode, directory, *more, deadline_s=deadline_s),
        log_path=directory / "server.log",
        stop_grace_s=GRACE_S,
    )


def pids_in(directory: Path) -> list[int]:
    return [int(line) for line in (directory / "pids").read_text().split()]


def ended(pid: int) -> bool:
    """Waits until a process has ended; no matter whose child it is."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], LIMIT_S)[0])
    finally:
        os.close(descriptor)


def wait_until(condition: Callable[[], bool]) -> None:
    """Asks again and again, for what another process does and no handle tells."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        select.select([], [], [], 0.01)


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(autouse=True)
def nothing_survives_a_failed_test(tmp_path: Path) -> Iterator[None]:
    yield
    if (tmp_path / "pids").is_file():
        for pid in pids_in(tmp_path):
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if any("fake_server" in part or "SIG_IGN" in part for part in process.cmdline()):
                    process.kill()


@pytest.fixture
def shared_name() -> Iterator[str]:
    name = f"kvgate-test-{uuid.uuid4().hex}"
    yield name
    Path("/dev/shm", name).unlink(missing_ok=True)


# --- start ------------------------------------------------------------------


def test_a_server_is_ready_when_it_says_so_and_gone_afterwards(tmp_path: Path) -> None:
    with managed(tmp_path, "good") as server:
        server.check_alive()
        (pid,) = server.pids()
        assert pids_in(tmp_path) == [pid]
        assert is_open(server.port)
        assert "INFO starting, mode good" in server.log_text()
        port = server.port
    assert server.leftovers == Leftovers()
    assert ended(pid)
    assert not is_open(port)
    assert server.pids() == []


def test_facts_are_what_was_asked_and_what_was_read_back(tmp_path: Path) -> None:
    with managed(tmp_path, "good") as server:
        facts = server.facts()
        (pid,) = server.pids()
    assert facts.argv == (*server.spec.argv, "--port", str(server.port))
    assert facts.versions == {"vllm": "0.32.0"}
    assert facts.effective == {
        "engines": 1,
        "block_tokens": 16,
        "device_blocks": 10,
        "kv_capacity_tokens": 160,
        "prefix_caching": True,
        "max_model_len": 64,
        "served_models": ["kvgate-model"],
    }
    assert [process.pid for process in facts.processes] == [pid]
    assert facts.processes[0].start_ticks > 0
    assert set(facts.environment) <= {"OMP_NUM_THREADS", "LD_PRELOAD", "PYTHONHASHSEED"}


def test_a_server_that_is_never_ready_is_a_timeout_with_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "server.log"

    def until_it_logged(_text: str) -> None:
        wait_until(lambda: log.is_file() and "still loading" in log.read_text())

    server = ManagedServer(
        spec_of("never_ready", tmp_path, deadline_s=1.0),
        log_path=log,
        progress=until_it_logged,
        stop_grace_s=GRACE_S,
    )
    with pytest.raises(StartTimeout) as error, server:
        pytest.fail("it said that it was ready")
    assert str(error.value).splitlines() == [
        "arm fake: not ready after 1 s (allowed: server.ready_deadline_s): /health answered 503; "
        "last lines of server.log:",
        "ERROR still loading weights",
    ]
    assert server.leftovers == Leftovers()
    assert all(ended(pid) for pid in pids_in(tmp_path))


def test_a_server_that_ends_at_once_is_told_with_its_code_and_error(tmp_path: Path) -> None:
    server = managed(tmp_path, "exits")
    with pytest.raises(ServerExited) as error, server:
        pytest.fail("it said that it was ready")
    assert str(error.value).splitlines() == [
        "arm fake: the server ended by itself with code 3; last lines of server.log:",
        "ERROR no memory for the KV cache",
    ]
    assert server.leftovers == Leftovers()


@contextlib.contextmanager
def foreign_server(port: int, *, shares: bool = False) -> Iterator[None]:
    """A whole server of somebody else's on a port: it answers as ours would, model name and all."""
    web = Web(("127.0.0.1", port), shares=shares)
    thread = threading.Thread(target=web.serve_forever, daemon=True)
    thread.start()
    try:
        yield
    finally:
        web.shutdown()
        web.server_close()
        thread.join()


def test_a_foreign_server_that_takes_the_port_does_not_make_ours_ready(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:

        def take_the_port(_text: str) -> None:
            stack.enter_context(foreign_server(server.port))

        server = ManagedServer(
            spec_of("never_listens", tmp_path),
            log_path=tmp_path / "server.log",
            progress=take_the_port,
            stop_grace_s=GRACE_S,
        )
        with pytest.raises(PortTaken) as error, server:
            pytest.fail("somebody else's server made ours ready")
    assert f"port {server.port} is answered by process {os.getpid()} (" in str(error.value)


def test_a_foreign_server_that_shares_the_port_later_is_noticed(tmp_path: Path) -> None:
    with managed(tmp_path, "shares_its_port") as server:
        server.check_answers()
        with foreign_server(server.port, shares=True):
            with pytest.raises(PortTaken, match=f"answered by process {os.getpid()}"):
                server.check_answers()
            with pytest.raises(PortTaken):
                server.facts()
        server.check_answers()


def test_a_server_may_listen_on_ipv6_for_both(tmp_path: Path) -> None:
    with managed(tmp_path, "ipv6") as server:
        server.check_answers()


def test_a_server_of_another_model_is_told_at_once(tmp_path: Path) -> None:
    with (
        pytest.raises(ServerError, match="lists another; needed: kvgate-model; take --served-"),
        managed(tmp_path, "other_model"),
    ):
        pytest.fail("it serves another model")


def test_sockets_that_cannot_be_read_are_no_proof(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blind = Listeners(unreadable="/proc/7/fd: not permitted")
    monkeypatch.setattr("harness.server.managed.listeners_of", lambda *_: blind)
    with (
        pytest.raises(PortTaken, match=r"cannot tell whose server .* /proc/7/fd: not permitted"),
        managed(tmp_path, "good"),
    ):
        pytest.fail("nobody saw whose server it is")


def test_a_missing_interpreter_says_what_to_do(tmp_path: Path) -> None:
    spec = LaunchSpec("fake", (str(tmp_path / "python"),), {}, 1.0)
    with (
        pytest.raises(ServerError, match=r"no interpreter at .*run `kvgate setup`"),
        ManagedServer(spec, log_path=tmp_path / "server.log"),
    ):
        pytest.fail("there is no such program")


def test_a_port_that_is_taken_says_so(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        spec = spec_of("good", tmp_path)
        taken = LaunchSpec(spec.arm, spec.argv, spec.environment, 1.0, port=port)
        with (
            pytest.raises(ServerError, match=f"port {port} is taken"),
            ManagedServer(taken, log_path=tmp_path / "server.log"),
        ):
            pytest.fail("the port is somebody else's")
    assert not (tmp_path / "pids").exists()


def test_a_server_that_dies_later_is_noticed(tmp_path: Path) -> None:
    with managed(tmp_path, "good") as server:
        (pid,) = server.pids()
        with pytest.raises((urllib.error.URLError, ConnectionError)):
            urllib.request.urlopen(f"{server.base_url}/die", timeout=LIMIT_S)
        assert ended(pid)
        with pytest.raises(ServerExited, match="ended by itself with code 7"):
            # The supervisor's report comes a moment after the end.
            wait_until(lambda: server.check_alive() is not None)
    assert server.leftovers == Leftovers()


# --- stop -------------------------------------------------------------------


def test_stop_ends_a_grandchild_that_ignores_it(tmp_path: Path) -> None:
    with managed(tmp_path, "grandchild") as server:
        assert len(server.pids()) == 2
        assert server.pids() == sorted(pids_in(tmp_path))
    assert server.leftovers == Leftovers()
    assert all(ended(pid) for pid in pids_in(tmp_path))


def test_stop_ends_a_server_that_ignores_it(tmp_path: Path) -> None:
    with managed(tmp_path, "ignores_sigterm") as server:
        assert is_open(server.port)
    assert server.leftovers == Leftovers()
    assert all(ended(pid) for pid in pids_in(tmp_path))


def test_stop_ends_the_grandchild_of_a_server_that_died(tmp_path: Path) -> None:
    with managed(tmp_path, "grandchild") as server:
        os.kill(pids_in(tmp_path)[0], signal.SIGKILL)
    assert server.leftovers == Leftovers()
    assert all(ended(pid) for pid in pids_in(tmp_path))


def test_a_shared_memory_file_left_behind_is_removed_and_told(
    tmp_path: Path, shared_name: str
) -> None:
    with managed(tmp_path, "shared_memory", shared_name) as server:
        assert Path("/dev/shm", shared_name).exists()
    assert server.leftovers == Leftovers(shared_memory=(f"/dev/shm/{shared_name}",))
    assert not Path("/dev/shm", shared_name).exists()


def test_a_shared_memory_file_that_was_there_before_is_kept(
    tmp_path: Path, shared_name: str
) -> None:
    Path("/dev/shm", shared_name).write_bytes(b"somebody else's")
    with managed(tmp_path, "shared_memory", shared_name) as server:
        pass
    assert server.leftovers == Leftovers()
    assert Path("/dev/shm", shared_name).exists()


def test_stop_twice_is_stop_once(tmp_path: Path) -> None:
    with managed(tmp_path, "good") as server:
        first = server.stop()
    assert server.stop() == first == Leftovers()


def test_stop_without_start_does_nothing(tmp_path: Path) -> None:
    assert managed(tmp_path, "good").stop() == Leftovers()


def test_an_error_inside_still_stops_the_server(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mine"), managed(tmp_path, "grandchild"):
        raise ValueError("mine")
    assert all(ended(pid) for pid in pids_in(tmp_path))


# --- killed from outside ----------------------------------------------------


def test_a_killed_supervisor_leaves_nothing_after_stop(tmp_path: Path, shared_name: str) -> None:
    with managed(tmp_path, "all", shared_name) as server:
        tree = pids_in(tmp_path)
        assert server.pids() == sorted(tree)
        supervisor = psutil.Process(tree[0]).ppid()
        os.kill(supervisor, signal.SIGKILL)
        assert ended(tree[0])  # the server dies with its parent; the grandchild does not
    assert server.leftovers.processes == (tree[1],)
    assert server.leftovers.shared_memory == (f"/dev/shm/{shared_name}",)
    assert not server.leftovers.port_open
    assert ended(tree[1])
    assert not Path("/dev/shm", shared_name).exists()


@pytest.fixture
def harness_process(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A whole harness with a server and a stubborn grandchild."""
    script = Path(__file__).with_name("managed_script.py")
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path), "grandchild"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(script.parents[2])},
    )
    yield process
    if process.poll() is None:
        process.kill()
    process.communicate()


def test_kill_9_of_the_harness_leaves_nothing(
    harness_process: subprocess.Popen[str], tmp_path: Path
) -> None:
    assert harness_process.stdout is not None
    port = int(harness_process.stdout.readline())
    tree = pids_in(tmp_path)
    supervisor = psutil.Process(tree[0]).ppid()
    assert len(tree) == 2
    harness_process.kill()
    assert all(ended(pid) for pid in (*tree, supervisor))
    assert not is_open(port)


def test_ctrl_c_stops_the_server(harness_process: subprocess.Popen[str], tmp_path: Path) -> None:
    assert harness_process.stdout is not None
    port = int(harness_process.stdout.readline())
    tree = pids_in(tmp_path)
    harness_process.send_signal(signal.SIGINT)
    assert harness_process.communicate(timeout=LIMIT_S)[0] == "interrupted False\n"
    assert all(ended(pid) for pid in tree)
    assert not is_open(port)


def test_ctrl_c_while_starting_stops_the_server(tmp_path: Path) -> None:
    def interrupt(_text: str) -> None:
        if (tmp_path / "pids").exists():
            raise KeyboardInterrupt

    server = ManagedServer(
        spec_of("never_ready", tmp_path),
        log_path=tmp_path / "server.log",
        progress=interrupt,
        stop_grace_s=GRACE_S,
    )
    with pytest.raises(KeyboardInterrupt), server:
        pytest.fail("it said that it was ready")
    assert all(ended(pid) for pid in pids_in(tmp_path))


# --- a server of somebody else ----------------------------------------------


def test_an_external_server_is_asked_and_never_stopped(tmp_path: Path) -> None:
    with managed(tmp_path, "good") as own:
        with ExternalServer("theirs", own.base_url + "/", "kvgate-model") as server:
            server.check_alive()
            facts = server.facts()
        assert (server.pids(), server.log_text(), server.log_size()) == ([], "", 0)
        assert is_open(own.port)
    assert (facts.kind, facts.argv, facts.environment) == ("url", (), {})
    assert facts.effective["kv_capacity_tokens"] == 160
    assert "connector" not in facts.effective
    with pytest.raises(ServerError, match="does not answer"):
        server.check_alive()
    with pytest.raises(ServerError, match="cannot read the configuration back"):
        server.facts()
