"""Several worker processes as one load client: shares, release, records, witness, ends."""

from __future__ import annotations

import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from harness.errors import LoadError
from harness.load.driver import MAX_WORKERS, LoadClient, shares, worker_count
from harness.load.recorder import RecordWriter, read_records
from harness.load.witness import ClientWitness, in_flight_max, merged
from harness.records import (
    ErrorKind,
    Outcome,
    PlannedRequest,
    PromptRecipe,
    RequestRecord,
    Schedule,
)

END_S = 20.0


class Server:
    """Handle of the odd server's process."""

    def __init__(self, port: int) -> None:
        self.root = f"http://127.0.0.1:{port}"

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.root}/{path}", timeout=END_S) as response:
            return json.load(response)


@pytest.fixture
def server() -> Iterator[Server]:
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("odd_server.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        yield Server(int(process.stdout.readline()))
    finally:
        process.kill()
        process.communicate()


def plan(users: int, turns: int = 1, **fields: Any) -> Schedule:
    return Schedule(
        "test",
        "wave",
        tuple(
            PlannedRequest(
                seq=seq,
                user=10 * (seq % users),
                session=seq,
                turn=seq // users,
                prompt=PromptRecipe(7, seq, 16, 512),
                output_tokens=4,
            )
            for seq in range(users * turns)
        ),
        **fields,
    )


@contextmanager
def client(
    server: Server, behaviour: str, tmp_path: Path, workers: int | None
) -> Iterator[LoadClient]:
    with LoadClient(
        base_url=f"{server.root}/{behaviour}",
        model="m",
        log_path=tmp_path / "load.log",
        workers=workers,
    ) as load:
        yield load


@contextmanager
def all_watched(pids: list[int]) -> Iterator[list[int]]:
    with ExitStack() as stack:
        fds = [os.pidfd_open(pid) for pid in pids]
        for fd in fds:
            stack.callback(os.close, fd)
        yield fds


def all_ended(fds: list[int]) -> bool:
    """Waits for the end of every process."""
    for fd in fds:
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        if not poller.poll(END_S * 1000):
            return False
    return True


def kinds(records: tuple[RequestRecord, ...]) -> list[tuple[Outcome, ErrorKind | None]]:
    return [(record.outcome, record.error_kind) for record in records]


# --- pure ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("users", "expected"),
    [(0, 1), (1, 1), (128, 1), (129, 2), (256, 2), (257, 3), (512, 4), (100_000, MAX_WORKERS)],
)
def test_a_worker_per_128_users_up_to_a_bound(users: int, expected: int) -> None:
    assert worker_count(users) == expected


def test_every_user_stays_whole_and_every_request_has_one_worker() -> None:
    schedule = plan(5, 3, logprobs=False, request_timeout_s=7.0)
    parts = shares(schedule, 2)
    assert [sorted({r.user for r in part.requests}) for part in parts] == [[0, 20, 40], [10, 30]]
    found = sorted((r for part in parts for r in part.requests), key=lambda r: r.seq)
    assert found == list(schedule.requests)
    for part in parts:
        assert dataclasses.replace(part, requests=()) == dataclasses.replace(schedule, requests=())


def test_no_worker_is_left_without_a_user() -> None:
    assert [part.users for part in shares(plan(2), 8)] == [1, 1]
    assert shares(plan(3), 1) == [plan(3)]


def record(seq: int, sent_ns: int | None, done_ns: int | None) -> RequestRecord:
    return RequestRecord(
        seq=seq,
        user=seq,
        session=seq,
        phase="wave",
        prompt_tokens_planned=16,
        output_tokens_planned=4,
        planned_ns=0,
        outcome=Outcome.OK,
        sent_ns=sent_ns,
        done_ns=done_ns,
    )


@pytest.mark.parametrize(
    ("intervals", "expected"),
    [
        ([], 0),
        ([(None, None)], 0),  # never sent
        ([(0, 10), (5, 15), (9, 20)], 3),
        ([(0, 10), (10, 20)], 1),  # a user's next request
        ([(0, 10), (20, 30), (25, 40)], 2),
    ],
)
def test_most_in_flight(intervals: list[tuple[int | None, int | None]], expected: int) -> None:
    records = [record(seq, sent, done) for seq, (sent, done) in enumerate(intervals)]
    assert in_flight_max(records) == expected


QUIET = ClientWitness(
    loop_lag_s_max=0.002,
    loop_lag_s_p99=0.001,
    cpu_share=0.1,
    in_flight_max=1,
    send_lag_s_max=0.5,
    send_spread_s=0.0,
    duration_s=1.0,
    heartbeat_count=100,
)
BUSY = dataclasses.replace(
    QUIET,
    loop_lag_s_max=0.9,
    loop_lag_s_p99=0.8,
    cpu_share=0.95,
    duration_s=2.0,
    heartbeat_count=3,
)


@pytest.mark.parametrize("parts", [[QUIET, BUSY], [BUSY, QUIET]])
def test_the_worst_worker_is_the_witness(parts: list[ClientWitness]) -> None:
    # Each worker sent at one moment; together they spread over two seconds and never overlapped.
    records = [record(0, 10**9, 2 * 10**9), record(1, 3 * 10**9, 4 * 10**9)]
    assert merged(parts, plan(2), records) == ClientWitness(
        loop_lag_s_max=0.9,
        loop_lag_s_p99=0.8,
        cpu_share=0.95,
        in_flight_max=1,
        send_lag_s_max=3.0,
        send_spread_s=2.0,
        duration_s=2.0,
        heartbeat_count=3,
    )


def test_what_one_worker_did_not_measure_is_absent() -> None:
    blind = dataclasses.replace(QUIET, loop_lag_s_max=None, loop_lag_s_p99=None)
    found = merged([QUIET, blind], plan(2), [])
    assert (found.loop_lag_s_max, found.loop_lag_s_p99) == (None, None)


def test_a_single_workers_witness_is_its_own() -> None:
    assert merged([BUSY], plan(1), []) is BUSY


def test_two_writers_never_tear_each_others_lines(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    # Far above any buffer.
    long = dataclasses.replace(record(0, 1, 2), token_ns=tuple(range(20_000)))
    with RecordWriter(path) as one, RecordWriter(path) as other:
        for seq in range(20):
            (one, other)[seq % 2].write(dataclasses.replace(long, seq=seq))
    assert [r.seq for r in read_records(path)] == list(range(20))


@pytest.mark.parametrize("workers", [0, MAX_WORKERS + 1])
def test_a_number_of_workers_that_cannot_be_is_refused(tmp_path: Path, workers: int) -> None:
    with pytest.raises(LoadError, match=f"found {workers}; allowed: 1 to {MAX_WORKERS}"):
        LoadClient(
            base_url="http://127.0.0.1:1", model="m", log_path=tmp_path / "log", workers=workers
        )


# --- with processes -----------------------------------------------------------


def test_two_workers_give_one_record_per_request_in_one_file(
    server: Server, tmp_path: Path
) -> None:
    told: list[tuple[int, int]] = []
    path = tmp_path / "r.jsonl"
    schedule = plan(5, 4)
    with client(server, "good-5", tmp_path, 2) as load:
        assert len(load.worker_pids) == 2
        result = load.run(
            schedule,
            records_path=path,
            deadline_s=END_S,
            on_progress=lambda done, total: told.append((done, total)),
        )
        again = load.run(plan(1), records_path=path, deadline_s=END_S)
    assert kinds(result.records) == [(Outcome.OK, None)] * 20
    assert [r.seq for r in result.records] == list(range(20))
    assert [r.user for r in result.records] == [r.user for r in schedule.requests]
    assert len(again.records) == 1
    assert len(read_records(path)) == 21
    assert told == sorted(told)
    assert told[-1] == (20, 20)
    assert all(total == 20 for _, total in told)
    # A user never left its connection, so never its worker.
    entries = server.get("log")["entries"][:20]
    assert len({entry["peer"] for entry in entries}) == 5
    assert result.witness.in_flight_max <= 5


def test_both_workers_release_their_users_at_the_same_moment(
    server: Server, tmp_path: Path
) -> None:
    # Nobody is answered before all are there: one worker after the other would never end.
    with client(server, "gate-24", tmp_path, 2) as load:
        result = load.run(plan(24), records_path=tmp_path / "r.jsonl", deadline_s=END_S)
    log = server.get("log")
    assert kinds(result.records) == [(Outcome.OK, None)] * 24
    assert log["in_flight_max"] == result.witness.in_flight_max == 24
    # Connected before.
    assert log["probes"] == 24
    # One moment was agreed on and nobody left earlier.
    assert len({r.planned_ns for r in result.records}) == 1
    assert all((r.sent_ns or 0) >= r.planned_ns for r in result.records)
    sent = [r.sent_ns or 0 for r in result.records]
    assert result.witness.send_spread_s == (max(sent) - min(sent)) / 1e9


def test_workers_are_added_when_a_schedule_needs_them(server: Server, tmp_path: Path) -> None:
    with client(server, "good", tmp_path, None) as load:
        load.run(plan(3), records_path=tmp_path / "r.jsonl", deadline_s=END_S)
        (first,) = load.worker_pids
        result = load.run(plan(129), records_path=tmp_path / "r.jsonl", deadline_s=END_S)
        assert len(load.worker_pids) == 2
        assert load.worker_pids[0] == first
    assert kinds(result.records) == [(Outcome.OK, None)] * 129


def test_a_dead_worker_fails_the_run_and_leaves_none(server: Server, tmp_path: Path) -> None:
    with client(server, "hang", tmp_path, 2) as load, all_watched(load.worker_pids) as fds:
        pid = load.worker_pids[1]

        def kill_when_busy() -> None:
            server.get("arrival")
            os.kill(pid, signal.SIGKILL)

        killer = threading.Thread(target=kill_when_busy)
        killer.start()
        with pytest.raises(LoadError, match="load worker ended with status -9"):
            load.run(plan(4), records_path=tmp_path / "r.jsonl", deadline_s=END_S)
        killer.join()
        assert load.worker_pids == []
        assert all_ended(fds)


def test_past_the_deadline_the_requests_of_both_have_records(
    server: Server, tmp_path: Path
) -> None:
    with client(server, "hang", tmp_path, 2) as load:
        result = load.run(plan(4, 2), records_path=tmp_path / "r.jsonl", deadline_s=0.3)
    assert kinds(result.records) == [
        *[(Outcome.UNKNOWN, ErrorKind.TIMEOUT)] * 4,
        *[(Outcome.FAILED, ErrorKind.CANCELLED)] * 4,
    ]


def test_an_interrupted_caller_gets_the_records_of_both(server: Server, tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "r.jsonl"
    with client(server, "hang", tmp_path, 2) as load:
        with pytest.raises(KeyboardInterrupt):
            load.run(
                plan(4, 3, request_timeout_s=1.0),
                records_path=path,
                deadline_s=END_S,
                on_progress=interrupt,
            )
        assert sorted(r.seq for r in read_records(path)) == list(range(12))
        # Both are as good as before.
        assert len(load.worker_pids) == 2
        result = load.run(plan(4, request_timeout_s=0.1), records_path=path, deadline_s=END_S)
        assert kinds(result.records) == [(Outcome.UNKNOWN, ErrorKind.TIMEOUT)] * 4


def test_a_watch_that_gives_up_ends_both(server: Server, tmp_path: Path) -> None:
    class Gone(Exception):
        pass

    def watch() -> None:
        raise Gone("no sign of life")

    path = tmp_path / "r.jsonl"
    with client(server, "mute", tmp_path, 2) as load:
        with pytest.raises(Gone):
            load.run(plan(4), records_path=path, deadline_s=END_S, watch=watch)
        found = sorted(read_records(path), key=lambda r: r.seq)
    assert kinds(tuple(found)) == [(Outcome.UNKNOWN, ErrorKind.CANCELLED)] * 4
    assert {r.error_detail for r in found} == {"the server was given up: no sign of life"}
