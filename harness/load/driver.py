"""The load client as the rest of the harness sees it: give a schedule, get one record per request.

Imports neither locust nor gevent; they live in the worker processes. Knows nothing of arms or
servers beyond an address.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from harness.errors import LoadError
from harness.load.outcome import End
from harness.load.pool import WorkerPool
from harness.load.recorder import read_records
from harness.load.target import Target, check_size
from harness.load.witness import ClientWitness, merged
from harness.records import PlannedRequest, Record, RequestRecord, Schedule

READY_S = 30.0
CANCEL_S = 10.0
# Measured (docs/client_truth.md): half a core at 16,000 tokens a second from 512 streams.
USERS_PER_WORKER = 128
MAX_WORKERS = 8

_PREPARE_S = 60.0
_PREPARE_TOKENS_PER_S = 200_000
_WATCH_S = 1.0
# From the order to the release, when several workers must have read it by then.
_LEAD_NS = 50_000_000

Progress = Callable[[int, int], None]
# Called about once a second while nothing is heard of a run; raises to end it.
Watch = Callable[[], None]


@dataclass(frozen=True)
class LoadResult(Record):
    """``records``: exactly one per planned request, in ``seq`` order."""

    records: tuple[RequestRecord, ...]
    witness: ClientWitness


def worker_count(users: int) -> int:
    """How many processes drive so many users, unless it is said."""
    return max(1, min(MAX_WORKERS, -(-users // USERS_PER_WORKER)))


def shares(schedule: Schedule, workers: int) -> list[Schedule]:
    """The schedule of each worker: users stay whole and are dealt out in turn; none is empty."""
    users = sorted({request.user for request in schedule.requests})
    count = min(workers, len(users))
    if count == 1:
        return [schedule]
    worker_of = {user: position % count for position, user in enumerate(users)}
    parts: list[list[PlannedRequest]] = [[] for _ in range(count)]
    for request in schedule.requests:
        parts[worker_of[request.user]].append(request)
    return [replace(schedule, requests=tuple(part)) for part in parts]


class LoadClient:
    """A context manager around worker processes, started by the first run or on entering.

    ``workers`` None: as many as `worker_count` says of each schedule. Each worker has its own
    session: a Ctrl-C reaches the caller, which then tells the workers. Create and use it in a
    thread that outlives it.
    """

    def __init__(
        self,
        *,
        base_url: str,
        model: str,
        log_path: Path,
        endpoint: str = "completions",
        api_key_env: str | None = None,
        api_key_file: str | None = None,
        verify_tls: bool = True,
        workers: int | None = None,
        python: str = sys.executable,
    ) -> None:
        self._target = Target(base_url, model, endpoint, api_key_env, verify_tls, api_key_file)
        self._target.check()
        if workers is not None and not 1 <= workers <= MAX_WORKERS:
            raise LoadError(f"workers: found {workers}; allowed: 1 to {MAX_WORKERS}")
        self._workers = workers
        self._pool = WorkerPool(python=python, log_path=log_path)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def worker_pids(self) -> list[int]:
        """Empty when no worker runs."""
        return self._pool.pids

    def start(self) -> None:
        """Starts the workers unless they run. Raises LoadError when one is not ready in 30 s."""
        self._grow(self._workers or 1)

    def stop(self) -> None:
        """Ends the workers and waits for their end. Harmless when none runs."""
        self._pool.stop()

    def run(
        self,
        schedule: Schedule,
        *,
        records_path: Path,
        deadline_s: float,
        on_progress: Progress | None = None,
        watch: Watch | None = None,
    ) -> LoadResult:
        """Issues every request of the schedule and waits for the last.

        ``records_path`` is appended to as each request ends. ``deadline_s`` counts from the release
        of the barrier; past it the run is cancelled: what is in flight ends unknown (timeout), what
        was never sent ends failed (cancelled). ``on_progress`` gets (ended, planned) a few times a
        second. When the caller is interrupted, or ``watch`` raises, the records are still
        completed: what is in flight ends unknown (cancelled).

        Raises:
            LoadError: the schedule cannot be run, or a worker failed; then all are ended.
        """
        _check(schedule)
        parts = shares(schedule, self._workers or worker_count(schedule.users))
        self._grow(len(parts))
        offset_bytes = records_path.stat().st_size if records_path.exists() else 0
        dialogue = _Dialogue(self._pool, [len(part.requests) for part in parts], on_progress, watch)
        try:
            witnesses = self._follow(dialogue, parts, records_path, deadline_s)
        except LoadError:
            self.stop()
            raise
        except BaseException as error:
            self._abandon(dialogue, error)
            raise
        records = _one_each(schedule, read_records(records_path, offset_bytes=offset_bytes))
        return LoadResult(records, merged(witnesses, schedule, records))

    def _grow(self, count: int) -> None:
        key_name = self._target.api_key_env
        if key_name is not None and not _is_key(os.environ.get(key_name, "")):
            raise LoadError(
                f"the environment variable {key_name} must hold the API key in printable ASCII"
            )
        try:
            self._pool.grow(count, self._target.to_json(), ready_s=READY_S)
        except BaseException:
            self.stop()
            raise

    def _follow(
        self, dialogue: _Dialogue, parts: list[Schedule], records_path: Path, deadline_s: float
    ) -> list[ClientWitness]:
        for index, part in enumerate(parts):
            self._pool.send(
                index,
                {
                    "op": "run",
                    "schedule": part.to_json(),
                    "records_path": str(records_path.resolve()),
                },
            )
        tokens = sum(request.prompt.tokens for part in parts for request in part.requests)
        prepare_s = _PREPARE_S + tokens / _PREPARE_TOKENS_PER_S
        if dialogue.wait("connected", prepare_s) is None:
            raise LoadError(f"the load worker did not connect its users in {prepare_s:.0f} s")
        lead_ns = _LEAD_NS if len(parts) > 1 else 0
        dialogue.tell({"op": "release", "release_ns": time.monotonic_ns() + lead_ns})
        finished = dialogue.wait("finished", lead_ns / 1e9 + deadline_s)
        if finished is None:
            dialogue.tell(_cancel(End.TIMEOUT, f"the run's deadline of {deadline_s} s passed"))
            dialogue.watch = None
            finished = dialogue.wait("finished", CANCEL_S)
        if finished is None:
            raise LoadError(f"the load worker did not obey a cancel in {CANCEL_S} s")
        dialogue.report_end()
        return [ClientWitness.from_json(message["witness"]) for message in finished]

    def _abandon(self, dialogue: _Dialogue, error: BaseException) -> None:
        """Has the workers record what is in flight, for a caller that goes no further."""
        why = f"the server was given up: {error}".splitlines()[0][:300]
        if not isinstance(error, Exception):
            why = "the harness was interrupted"
        dialogue.on_progress = dialogue.watch = None
        with contextlib.suppress(LoadError):
            dialogue.tell(_cancel(End.CANCELLED, why))
            if dialogue.wait("finished", CANCEL_S) is not None:
                return
        self.stop()


class _Dialogue:
    """One run as it is told to and heard from the first workers of the pool."""

    def __init__(
        self,
        pool: WorkerPool,
        planned: list[int],
        on_progress: Progress | None,
        watch: Watch | None,
    ) -> None:
        self.on_progress, self.watch = on_progress, watch
        self._pool = pool
        self._planned = sum(planned)
        self._done = [0] * len(planned)
        self._heard: dict[str, dict[int, dict[str, Any]]] = {"connected": {}, "finished": {}}

    def tell(self, message: dict[str, Any]) -> None:
        """The same to every worker."""
        for index in range(len(self._done)):
            self._pool.send(index, message)

    def wait(self, event: str, timeout_s: float) -> list[dict[str, Any]] | None:
        """That message of every worker, in order; reports progress meanwhile. None: not in time.

        Raises LoadError when a worker failed or ended.
        """
        deadline = time.monotonic() + timeout_s
        heard = self._heard[event]
        while len(heard) < len(self._done):
            left_s = max(0.0, deadline - time.monotonic())
            wait_s = left_s if self.watch is None else min(left_s, _WATCH_S)
            received = self._pool.receive(len(self._done), wait_s)
            if received is not None:
                self._take(*received)
            elif self.watch is None or left_s <= _WATCH_S:
                return None
            else:
                self.watch()
        return [heard[index] for index in sorted(heard)]

    def report_end(self) -> None:
        """All requests have ended."""
        if self.on_progress is not None:
            self.on_progress(self._planned, self._planned)

    def _take(self, index: int, message: dict[str, Any]) -> None:
        event = message["event"]
        if event == "failed":
            raise LoadError(f"the load worker failed:\n{message['detail']}")
        if event == "progress":
            self._done[index] = message["done"]
            if self.on_progress is not None:
                self.on_progress(sum(self._done), self._planned)
        else:
            self._heard[event][index] = message


def _is_key(value: str) -> bool:
    value = value.strip()
    return bool(value) and value.isascii() and value.isprintable()


def _cancel(end: End, detail: str) -> dict[str, Any]:
    return {"op": "cancel", "end": end.value, "detail": detail}


def _check(schedule: Schedule) -> None:
    """Raises LoadError when a schedule cannot be run."""
    seqs = [request.seq for request in schedule.requests]
    if not seqs:
        raise LoadError(f"the schedule {schedule.workload}/{schedule.phase} has no request")
    if len(set(seqs)) != len(seqs):
        raise LoadError(f"the schedule {schedule.workload}/{schedule.phase} repeats a seq")
    check_size(schedule)


def _one_each(schedule: Schedule, records: tuple[RequestRecord, ...]) -> tuple[RequestRecord, ...]:
    planned = sorted(request.seq for request in schedule.requests)
    found = tuple(sorted(records, key=lambda record: record.seq))
    if [record.seq for record in found] != planned:
        raise LoadError(
            f"{len(planned)} requests were planned but {len(found)} records were written; "
            "the load client lost or repeated some"
        )
    return found
