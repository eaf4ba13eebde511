"""The load client as the rest of the harness sees it: give a schedule, get one record per request.

Imports neither locust nor gevent; they live in the worker process. Knows nothing of arms or servers
beyond an address.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from harness.errors import LoadError
from harness.load.outcome import End
from harness.load.recorder import read_records
from harness.load.target import Target, check_size
from harness.load.witness import ClientWitness
from harness.load.worker import WorkerProcess
from harness.records import Record, RequestRecord, Schedule

READY_S = 30.0
CANCEL_S = 10.0

_PREPARE_S = 60.0
_PREPARE_TOKENS_PER_S = 200_000
_WATCH_S = 1.0

Progress = Callable[[int, int], None]
# Called about once a second while nothing is heard of a run; raises to end it.
Watch = Callable[[], None]


@dataclass(frozen=True)
class LoadResult(Record):
    """``records``: exactly one per planned request, in ``seq`` order."""

    records: tuple[RequestRecord, ...]
    witness: ClientWitness


class LoadClient:
    """A context manager around one worker process, started by the first run or on entering.

    The worker has its own session: a Ctrl-C reaches the caller, which then tells the worker. Create
    and use it in a thread that outlives it.
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
        python: str = sys.executable,
    ) -> None:
        self._target = Target(base_url, model, endpoint, api_key_env, verify_tls, api_key_file)
        self._target.check()
        self._log_path = log_path
        self._python = python
        self._worker: WorkerProcess | None = None

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
    def worker_pid(self) -> int | None:
        """None when no worker runs."""
        return self._worker.pid if self._worker else None

    def start(self) -> None:
        """Starts the worker unless it runs. Raises LoadError when it is not ready in 30 s."""
        if self._worker is not None:
            return
        key_name = self._target.api_key_env
        if key_name is not None and not _is_key(os.environ.get(key_name, "")):
            raise LoadError(
                f"the environment variable {key_name} must hold the API key in printable ASCII"
            )
        worker = self._worker = WorkerProcess(python=self._python, log_path=self._log_path)
        try:
            worker.send(self._target.to_json())
            if worker.receive(READY_S) is None:
                raise LoadError(
                    f"the load worker was not ready in {READY_S} s; see {self._log_path}"
                )
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Ends the worker and waits for its end. Harmless when none runs."""
        if self._worker is not None:
            self._worker.stop()
            self._worker = None

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
            LoadError: the schedule cannot be run, or the worker failed.
        """
        _check(schedule)
        self.start()
        offset_bytes = records_path.stat().st_size if records_path.exists() else 0
        try:
            witness = self._follow(schedule, records_path, deadline_s, on_progress, watch)
        except LoadError:
            self.stop()
            raise
        except BaseException as error:
            self._abandon(error)
            raise
        records = read_records(records_path, offset_bytes=offset_bytes)
        return LoadResult(_one_each(schedule, records), witness)

    def _follow(
        self,
        schedule: Schedule,
        records_path: Path,
        deadline_s: float,
        on_progress: Progress | None,
        watch: Watch | None,
    ) -> ClientWitness:
        worker = self._worker
        assert worker is not None
        worker.send(
            {
                "op": "run",
                "schedule": schedule.to_json(),
                "records_path": str(records_path.resolve()),
            }
        )
        tokens = sum(request.prompt.tokens for request in schedule.requests)
        prepare_s = _PREPARE_S + tokens / _PREPARE_TOKENS_PER_S
        if self._await("released", prepare_s, on_progress, watch) is None:
            raise LoadError(f"the load worker did not release its users in {prepare_s:.0f} s")
        finished = self._await("finished", deadline_s, on_progress, watch)
        if finished is None:
            worker.send(_cancel(End.TIMEOUT, f"the run's deadline of {deadline_s} s passed"))
            finished = self._await("finished", CANCEL_S, on_progress)
        if finished is None:
            raise LoadError(f"the load worker did not obey a cancel in {CANCEL_S} s")
        if on_progress is not None:
            on_progress(len(schedule.requests), len(schedule.requests))
        return ClientWitness.from_json(finished["witness"])

    def _await(
        self,
        event: str,
        timeout_s: float,
        on_progress: Progress | None,
        watch: Watch | None = None,
    ) -> dict[str, Any] | None:
        """The next message of that name; reports progress meanwhile. None when it did not come."""
        assert self._worker is not None
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            message = self._worker.receive(left_s if watch is None else min(left_s, _WATCH_S))
            if message is None and watch is not None and left_s > _WATCH_S:
                watch()
                continue
            if message is None or message["event"] == event:
                return message
            if message["event"] == "failed":
                raise LoadError(f"the load worker failed:\n{message['detail']}")
            if message["event"] == "progress" and on_progress is not None:
                on_progress(message["done"], message["total"])

    def _abandon(self, error: BaseException) -> None:
        """Has the worker record what is in flight, for a caller that goes no further."""
        assert self._worker is not None
        why = f"the server was given up: {error}".splitlines()[0][:300]
        if not isinstance(error, Exception):
            why = "the harness was interrupted"
        with contextlib.suppress(LoadError):
            self._worker.send(_cancel(End.CANCELLED, why))
            if self._await("finished", CANCEL_S, None) is not None:
                return
        self.stop()


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
