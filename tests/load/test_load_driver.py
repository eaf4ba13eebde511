"""The load client as a whole, against a real server process that misbehaves as asked."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.errors import LoadError
from harness.load import worker as worker_module
from harness.load.driver import LoadClient
from harness.load.recorder import read_records
from harness.records import (
    ErrorKind,
    Outcome,
    PlannedRequest,
    PromptRecipe,
    RequestRecord,
    Schedule,
)

END_S = 20.0
MS = 1_000_000


class Server:
    """Handle of the odd server's process."""

    def __init__(self, port: int) -> None:
        self.port = port

    def url(self, behaviour: str) -> str:
        return f"http://127.0.0.1:{self.port}/{behaviour}"

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url(path), timeout=20) as response:
            return json.load(response)

    def entries(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get("log")["entries"]
        return found


@pytest.fixture
def server() -> Iterator[Server]:
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("odd_server.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield Server(int(process.stdout.readline()))
    finally:
        process.kill()
        process.communicate()


Planner = Callable[..., Schedule]


@pytest.fixture
def plan() -> Planner:
    def make(
        users: int = 1,
        turns: int = 1,
        *,
        output_tokens: int = 4,
        prompt_tokens: int = 16,
        offsets_ns: tuple[int | None, ...] = (None,),
        **fields: Any,
    ) -> Schedule:
        requests: list[PlannedRequest] = []
        for turn in range(turns):
            for user in range(users):
                seq = len(requests)
                requests.append(
                    PlannedRequest(
                        seq=seq,
                        user=user,
                        session=seq,
                        turn=turn,
                        prompt=PromptRecipe(7, seq, prompt_tokens, 512),
                        output_tokens=output_tokens,
                        planned_offset_ns=offsets_ns[turn % len(offsets_ns)],
                    )
                )
        return Schedule("test", "wave", tuple(requests), **fields)

    return make


@contextlib.contextmanager
def client(server: Server, behaviour: str, tmp_path: Path, **fields: Any) -> Iterator[LoadClient]:
    with LoadClient(
        base_url=server.url(behaviour), model="m", log_path=tmp_path / "load.log", **fields
    ) as load:
        yield load


def ended(pidfd: int) -> bool:
    """Waits for the end of a process."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(END_S * 1000))


@contextlib.contextmanager
def watched(pid: int) -> Iterator[int]:
    fd = os.pidfd_open(pid)
    try:
        yield fd
    finally:
        os.close(fd)


def kinds(records: tuple[RequestRecord, ...]) -> list[tuple[Outcome, ErrorKind | None]]:
    return [(record.outcome, record.error_kind) for record in records]


def test_good_streams_are_recorded_in_full(server: Server, plan: Planner, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    with client(server, "good-5/v1", tmp_path) as load:
        result = load.run(
            plan(users=2, turns=2),
            records_path=tmp_path / "r.jsonl",
            deadline_s=END_S,
            on_progress=lambda done, total: told.append((done, total)),
        )
    assert [record.seq for record in result.records] == [0, 1, 2, 3]
    for record in result.records:
        assert record.outcome is Outcome.OK, record
        assert record.token_ids == (0, 1, 2, 3)
        assert record.logprobs == (0.0, -0.5, -1.0, -1.5)
        assert record.token_counts == (1, 1, 1, 1)
        assert (record.prompt_tokens, record.completion_tokens) == (16, 4)
        assert record.cached_tokens is None
        stamps = [record.planned_ns, record.sent_ns, record.headers_ns, *record.token_ns]
        assert stamps == sorted(stamps, key=lambda stamp: stamp or 0)
    assert told[-1] == (4, 4)
    assert sorted(read_records(tmp_path / "r.jsonl"), key=lambda r: r.seq) == list(result.records)
    assert {entry["path"] for entry in server.entries()} == {"/good-5/v1/completions"}
    assert result.witness.in_flight_max == 2
    assert result.witness.heartbeat_count > 0


def test_a_first_token_is_stamped_when_it_comes_though_the_next_takes_500_ms(
    server: Server, plan: Planner, tmp_path: Path
) -> None:
    with client(server, "pause-500", tmp_path) as load:
        result = load.run(plan(), records_path=tmp_path / "r.jsonl", deadline_s=END_S)
    (record,) = result.records
    (entry,) = server.entries()
    assert record.first_token_ns is not None
    assert 0 <= record.first_token_ns - entry["token_ns"][0] < 250 * MS
    assert record.token_ns[1] - record.token_ns[0] > 400 * MS


@pytest.mark.parametrize(
    ("behaviour", "kind", "status"),
    [
        ("status-500", ErrorKind.HTTP_STATUS, 500),
        ("status-429", ErrorKind.HTTP_STATUS, 429),
        ("status-302", ErrorKind.HTTP_STATUS, 302),
        ("reset", ErrorKind.RESET, None),
        ("close", ErrorKind.RESET, None),
        ("cut", ErrorKind.TRUNCATED, 200),
        ("error", ErrorKind.SERVER_ERROR, 200),
        ("raw", ErrorKind.SHORT, 200),
    ],
)
def test_each_fault_is_a_failed_record_and_nothing_is_sent_twice(
    server: Server,
    plan: Planner,
    tmp_path: Path,
    behaviour: str,
    kind: ErrorKind,
    status: int | None,
) -> None:
    with client(server, behaviour, tmp_path) as load:
        result = load.run(plan(2, 2), records_path=tmp_path / "r.jsonl", deadline_s=END_S)
    assert kinds(result.records) == [(Outcome.FAILED, kind)] * 4
    assert [record.http_status for record in result.records] == [status] * 4
    assert len(server.entries()) == 4


def test_a_body_ended_by_the_close_of_the_connection_is_whole(
    server: Server, plan: Planner, tmp_path: Path
) -> None:
    with client(server, "raw", tmp_path) as load:
        result = load.run(
            plan(turns=2, output_tokens=1), records_path=tmp_path / "r.jsonl", deadline_s=END_S
        )
    assert kinds(result.records) == [(Outcome.OK, None)] * 2


def test_no_server_is_a_failure_to_connect(plan: Planner, tmp_path: Path) -> None:
    with LoadClient(
        base_url="http://127.0.0.1:1", model="m", log_path=tmp_path / "load.log"
    ) as load:
        result = load.run(plan(), records_path=tmp_path / "r.jsonl", deadline_s=END_S)
    assert kinds(result.records) == [(Outcome.FAILED, ErrorKind.CONNECT)]
    assert result.records[0].sent_ns is None


def test_a_request_without_an_end_is_unknown_and_the_user_goes_on(
    server: Server, plan: Planner, tmp_path: Path
) -> None:
    with client(server, "hang", tmp_path) as load:
        result = load.run(
            plan(turns=2, request_timeout_s=0.3),
            records_path=tmp_path / "r.jsonl",
            deadline_s=END_S,
        )
    assert kinds(result.records) == [(Outcome.UNKNOWN, ErrorKind.TIMEOUT)] * 2
    assert [record.token_ids for record in result.records] == [(0,), (0,)]


@pytest.mark.parametrize("behaviour", ["hang", "mute"])
def test_past_the_deadline_every_planned_request_has_one_record(
    server: Server, plan: Planner, tmp_path: Path, behaviour: str
) -> None:
    with client(server, behaviour, tmp_path) as load:
        result = load.run(plan(2, 2), records_path=tmp_path / "r.jsonl", deadline_s=0.3)
        again = load.run(plan(), records_path=tmp_path / "r.jsonl", deadline_s=0.3)
    assert kinds(result.records) == [
        (Outcome.UNKNOWN, ErrorKind.TIMEOUT),
        (Outcome.UNKNOWN, ErrorKind.TIMEOUT),
        (Outcome.FAILED, ErrorKind.CANCELLED),
        (Outcome.FAILED, ErrorKind.CANCELLED),
    ]
    assert result.records[3].sent_ns is None
    assert kinds(again.records) == [(Outcome.UNKNOWN, ErrorKind.TIMEOUT)]
    assert len(read_records(tmp_path / "r.jsonl")) == 5


def test_all_users_are_in_flight_together_on_connections_opened_before(
    server: Server, plan: Planner, tmp_path: Path
) -> None:
    with client(server, "gate-24", tmp_path) as load:
        result = load.run(plan(24), records_path=tmp_path / "r.jsonl", deadline_s=END_S)
    log = server.get("log")
    assert kinds(result.records) == [(Outcome.OK, None)] * 24
    assert log["in_flight_max"] == result.witness.in_flight_max == 24
    assert log["probes"] == 24
    assert len({entry["peer"] for entry in log["entries"]}) == 24
    assert result.witness.send_spread_s is not None
    assert result.witness.send_spread_s < 1.0


def test_a_user_issues_its_requests_in_order_on_one_connection(
    server: Server, plan: Planner, tmp_path: Path
) -> None:
    schedule = plan(users=3, turns=4)
    with client(server, "good-1", tmp_path) as load:
        result = load.run(schedule, records_path=tmp_path / "r.jsonl", deadline_s=END_S)
    for user in range(3):
        own = [record for record in result.records if record.user == user]
        assert [record.planned_ns for record in own[1:]] == [r.done_ns for r in own[:-1]]
        for before, after in itertools.pairwise(own):
            assert before.done_ns is not None
            assert after.sent_ns is not None
            assert before.done_ns <= after.sent_ns
    assert len({entry["peer"] for entry in server.entries()}) == 3


def test_a_planned_offset_is_kept_and_a_late_start_is_seen(
    server: Server, plan: Planner, tmp_path: Path
) -> None:
    # The second request is due 10 ms after the release but its user is busy for about 80 ms.
    schedule = plan(turns=3, offsets_ns=(50 * MS, 60 * MS, 1050 * MS))
    with client(server, "good-20", tmp_path) as load:
        result = load.run(schedule, records_path=tmp_path / "r.jsonl", deadline_s=END_S)
    first, second, third = result.records
    assert second.planned_ns - first.planned_ns == 10 * MS
    assert third.planned_ns - first.planned_ns == 1000 * MS
    lags = [(r.sent_ns or 0) - r.planned_ns for r in result.records]
    assert lags[0] >= 0
    assert lags[1] > 50 * MS
    assert 0 <= lags[2] < 500 * MS


def test_a_connection_the_server_closed_meanwhile_is_replaced(
    server: Server, plan: Planner, tmp_path: Path
) -> None:
    schedule = plan(turns=2, offsets_ns=(0, 200 * MS))
    with client(server, "kept", tmp_path) as load:
        result = load.run(schedule, records_path=tmp_path / "r.jsonl", deadline_s=END_S)
    assert kinds(result.records) == [(Outcome.OK, None)] * 2
    assert len({entry["peer"] for entry in server.entries()}) == 2


def test_the_key_is_sent_and_shows_up_nowhere(
    server: Server, plan: Planner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVGATE_TEST_KEY", "sk-verysecret")
    with client(server, "status-401", tmp_path, api_key_env="KVGATE_TEST_KEY") as load:
        argv = Path(f"/proc/{load.worker_pids[0]}/cmdline").read_bytes()
        load.run(plan(), records_path=tmp_path / "r.jsonl", deadline_s=END_S)
    assert "bearer sk-verysecret" in server.get("log")["authorizations"]
    assert b"verysecret" not in argv
    for path in tmp_path.iterdir():
        assert b"verysecret" not in path.read_bytes(), path


def test_a_key_that_is_not_set_is_refused(plan: Planner, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="KVGATE_NO_SUCH_KEY"):
        LoadClient(
            base_url="http://127.0.0.1:1",
            model="m",
            log_path=tmp_path / "load.log",
            api_key_env="KVGATE_NO_SUCH_KEY",
        ).start()


def test_the_worker_is_gone_after_stop_and_starts_again_by_itself(
    server: Server, plan: Planner, tmp_path: Path
) -> None:
    load = LoadClient(base_url=server.url("good"), model="m", log_path=tmp_path / "load.log")
    load.stop()
    load.start()
    with watched(load.worker_pids[0]) as fd:
        load.stop()
        assert ended(fd)
    try:
        result = load.run(plan(), records_path=tmp_path / "r.jsonl", deadline_s=END_S)
        assert kinds(result.records) == [(Outcome.OK, None)]
    finally:
        load.stop()
    assert load.worker_pids == []


def test_a_worker_that_ignores_everything_is_killed(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "STOP_S", 0.2)
    with client(server, "good", tmp_path) as load, watched(load.worker_pids[0]) as fd:
        os.kill(load.worker_pids[0], signal.SIGSTOP)
        load.stop()
        assert ended(fd)


def test_a_worker_that_dies_is_a_load_error_with_the_end_of_its_log(
    server: Server, plan: Planner, tmp_path: Path
) -> None:
    with client(server, "hang", tmp_path) as load:
        (tmp_path / "load.log").write_text("last words\n")
        (pid,) = load.worker_pids

        def kill_when_busy() -> None:
            server.get("arrival")
            os.kill(pid, signal.SIGKILL)

        killer = threading.Thread(target=kill_when_busy)
        killer.start()
        with pytest.raises(LoadError, match=r"status -9.*\nlast words"):
            load.run(plan(), records_path=tmp_path / "r.jsonl", deadline_s=END_S)
        killer.join()
        assert load.worker_pids == []


def test_a_worker_that_cannot_start_is_a_load_error(tmp_path: Path) -> None:
    load = LoadClient(
        base_url="http://127.0.0.1:1",
        model="m",
        log_path=tmp_path / "load.log",
        python="/bin/false",
    )
    with pytest.raises(LoadError, match="load worker ended with status 1"):
        load.start()


def test_an_interrupted_caller_still_gets_every_record(
    server: Server, plan: Planner, tmp_path: Path
) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "r.jsonl"
    with client(server, "hang", tmp_path) as load:
        with pytest.raises(KeyboardInterrupt):
            # The end of the first request is reported while the second is in flight.
            load.run(
                plan(turns=3, request_timeout_s=1.0),
                records_path=path,
                deadline_s=END_S,
                on_progress=interrupt,
            )
        by_seq = sorted(read_records(path), key=lambda record: record.seq)
        assert kinds(tuple(by_seq)) == [
            (Outcome.UNKNOWN, ErrorKind.TIMEOUT),
            (Outcome.UNKNOWN, ErrorKind.CANCELLED),
            (Outcome.FAILED, ErrorKind.CANCELLED),
        ]
        assert load.run(plan(request_timeout_s=0.1), records_path=path, deadline_s=END_S).records


PARENT = """
import sys
from pathlib import Path
from harness.load.driver import LoadClient
from harness.records import PlannedRequest, PromptRecipe, Schedule
request = PlannedRequest(0, 0, 0, 0, PromptRecipe(1, 0, 16, 512), 4)
with LoadClient(base_url=sys.argv[1], model="m", log_path=Path(sys.argv[2], "load.log")) as load:
    print(load.worker_pids[0], flush=True)
    load.run(Schedule("w", "wave", (request,)), records_path=Path(sys.argv[2], "r"), deadline_s=60)
"""


def test_killing_the_harness_leaves_no_worker(server: Server, tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, server.url("hang"), str(tmp_path)],
        stdout=subprocess.PIPE,
        cwd=root,
    )
    assert parent.stdout is not None
    with parent, watched(int(parent.stdout.readline())) as fd:
        server.get("arrival")
        parent.kill()
        assert ended(fd)


def test_a_schedule_that_cannot_be_run_is_refused(plan: Planner, tmp_path: Path) -> None:
    load = LoadClient(base_url="http://127.0.0.1:1", model="m", log_path=tmp_path / "load.log")
    with pytest.raises(LoadError, match="no request"):
        load.run(plan(users=0), records_path=tmp_path / "r.jsonl", deadline_s=1)
    assert load.worker_pids == []


def test_importing_the_driver_loads_neither_locust_nor_gevent() -> None:
    code = (
        "import json, sys, harness.load.driver;"
        "print(json.dumps([m for m in sys.modules if m.split('.')[0] in ('locust', 'gevent')]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        check=True,
        cwd=Path(__file__).resolve().parents[2],
    )
    assert json.loads(done.stdout) == []
