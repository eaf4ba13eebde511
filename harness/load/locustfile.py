"""The load worker: a long-lived process in which Locust drives the users of one run after another.

The only importer of locust, which replaces the sockets of the whole process. Started by `worker` as
``python -m harness.load.locustfile <pid of the harness>``; commands come as JSON lines on standard
input, replies leave as JSON lines on what was standard output, everything else that prints goes to
standard error. Dies with the harness.

Locust spawns the users, holds their connections and stops them; none of its statistics is used,
because with ``stream=True`` they time the headers (docs/adr/0005).
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any, ClassVar

from harness.load.parent import die_with

if __name__ == "__main__":
    die_with(int(sys.argv[1]))

# Locust goes first: it patches sockets and ssl, which must not be in use yet.
from locust import FastHttpUser  # noqa: I001
from locust.env import Environment
from locust.exception import StopUser

import gevent
from gevent.event import Event
from gevent.fileobject import FileObjectPosix
from geventhttpclient.response import HTTPConnectionClosed, HTTPParseError

from harness.load.completion import CompletionStream
from harness.load.outcome import End, Exchange, record_of, redacted
from harness.load.reading import Backlog, Reading
from harness.load.recorder import RecordWriter
from harness.load.target import Target, build_bodies
from harness.load.witness import (
    ClientWitness,
    nearest_rank,
    send_lag_s_max,
    send_spread_s,
)
from harness.records import PlannedRequest, RequestRecord, Schedule

CONNECT_TIMEOUT_S = 10.0
HEARTBEAT_S = 0.010
PROGRESS_S = 0.1
BACKLOG_S = 0.005

# Streams read at a time when the loop is idle: the most that a chunk may wait for its stamp.
_BACKLOG_STREAMS = 4

_RECEIVE_BYTES = 65536
_ERROR_BODY_BYTES = 4096

logger = logging.getLogger(__name__)


class Wave:
    """One run: its plan, its barrier and what came of it. Used by greenlets of one thread only."""

    def __init__(
        self, schedule: Schedule, target: Target, secret: str | None, writer: RecordWriter
    ) -> None:
        self.schedule = schedule
        self.target = target
        self.secret = secret
        self.bodies = build_bodies(schedule, target.model)
        self.plans = _plans(schedule)
        self.headers = {
            "Accept": "text/event-stream",
            "Accept-Encoding": "identity",
            "Content-Type": "application/json",
        }
        if secret:
            self.headers["Authorization"] = f"Bearer {secret}"
        self.records: list[RequestRecord] = []
        self.backlog = Backlog()
        self.connected = Event()
        self.go = Event()
        self.barrier = Event()
        self.over = Event()
        self.release_ns = 0
        self.cancel_end: End | None = None
        self.cancel_detail = ""
        self.failure: str | None = None
        self.in_flight = 0
        self.in_flight_max = 0
        self._writer = writer
        self._unconnected = self._unfinished = schedule.users
        self._unassigned = list(self.plans.values())

    def take_plan(self) -> list[PlannedRequest]:
        """The requests of the next user to be spawned."""
        return self._unassigned.pop(0)

    def note_connected(self) -> None:
        """A user stands at the barrier."""
        self._unconnected -= 1
        if self._unconnected == 0:
            self.connected.set()

    def note_finished(self) -> None:
        """A user has no request left."""
        self._unfinished -= 1
        if self._unfinished == 0:
            self.over.set()

    def fail(self, report: str) -> None:
        """A fault of this program; ends the run."""
        self.failure = self.failure or redacted(report, self.secret)
        self._let_end()

    def cancel(self, end: End, detail: str) -> None:
        """Ends the run; what is in flight is recorded with this end."""
        self.cancel_end, self.cancel_detail = end, detail
        self._let_end()

    def release(self, release_ns: int) -> None:
        """Says when the users leave; the same moment is told to every worker."""
        self.release_ns = release_ns
        self.go.set()

    def _let_end(self) -> None:
        for event in (self.connected, self.go, self.over):
            event.set()

    def record(self, planned: PlannedRequest, exchange: Exchange, stream: CompletionStream) -> None:
        """Writes the one record of a request."""
        record = record_of(
            planned,
            self.schedule.phase,
            exchange,
            stream,
            logprobs=self.schedule.logprobs,
            secret=self.secret,
        )
        self._writer.write(record)
        self.records.append(record)

    def record_unsent(self) -> None:
        """Records every planned request that has no record yet."""
        recorded = {record.seq for record in self.records}
        for planned in self.schedule.requests:
            if planned.seq not in recorded:
                planned_ns = self.planned_ns(planned, time.monotonic_ns())
                exchange = Exchange(planned_ns, end_detail=f"never sent: {self.cancel_detail}")
                self.record(planned, exchange, CompletionStream())

    def planned_ns(self, planned: PlannedRequest, previous_done_ns: int) -> int:
        """When a request should leave."""
        if planned.planned_offset_ns is None or not self.release_ns:
            return previous_done_ns
        return self.release_ns + planned.planned_offset_ns


def _plans(schedule: Schedule) -> dict[int, list[PlannedRequest]]:
    plans: dict[int, list[PlannedRequest]] = {}
    for request in sorted(schedule.requests, key=lambda item: item.seq):
        plans.setdefault(request.user, []).append(request)
    return plans


class CompletionUser(FastHttpUser):  # type: ignore[misc]
    """One user: one connection, its requests in order, each after the one before."""

    abstract = True
    connection_timeout = CONNECT_TIMEOUT_S
    concurrency = 1
    max_retries = 0
    max_redirects = 0
    wave: Wave

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self._plan = self.wave.take_plan()
        # Every status is an answer to be recorded; the default closes the connection on 4xx and 5xx
        # before the body with the reason has come.
        self.client.client.valid_response_codes = frozenset(range(100, 600))

    def on_start(self) -> None:
        """Opens the connection, on a page that costs the server nothing."""
        try:
            with gevent.Timeout(CONNECT_TIMEOUT_S, False):
                self.client.get(self.wave.target.probe_url, headers=self.wave.headers, name="probe")
        except Exception as error:
            # The user's first request will meet the same fault, and have a record.
            logger.warning("event=probe_failed error=%s", type(error).__name__)
        finally:
            self.wave.note_connected()

    def issue(self) -> None:
        """Locust's task: the whole plan of this user, once."""
        try:
            self.wave.barrier.wait()
            previous_done_ns = self.wave.release_ns
            for planned in self._plan:
                planned_ns = self.wave.planned_ns(planned, previous_done_ns)
                _sleep_until(planned_ns)
                previous_done_ns = self._issue(planned, planned_ns)
        except (Exception, gevent.Timeout):
            self.wave.fail(traceback.format_exc())
        self.wave.note_finished()
        raise StopUser

    tasks: ClassVar = [issue]

    def _issue(self, planned: PlannedRequest, planned_ns: int) -> int:
        """Sends one request, records it, and returns when it was done."""
        exchange = Exchange(planned_ns)
        reading = Reading(self.wave.backlog)
        limit_s = self.wave.schedule.request_timeout_s
        timer = gevent.Timeout.start_new(limit_s)
        try:
            exchange.end, exchange.end_detail = self._exchange(planned, exchange, reading)
        except gevent.Timeout as expired:
            if expired is not timer:
                raise
            exchange.end, exchange.end_detail = End.TIMEOUT, f"not done after {limit_s} s"
        except gevent.GreenletExit:
            exchange.end = self.wave.cancel_end or End.CANCELLED
            exchange.end_detail = self.wave.cancel_detail
            raise
        finally:
            timer.close()
            if exchange.sent_ns is not None:
                self.wave.in_flight -= 1
            exchange.done_ns = time.monotonic_ns()
            reading.end(is_whole=exchange.end is End.COMPLETE)
            self.wave.record(planned, exchange, reading.stream)
        return exchange.done_ns

    def _exchange(
        self, planned: PlannedRequest, exchange: Exchange, reading: Reading
    ) -> tuple[End, str]:
        url = self.wave.target.completion_url
        try:
            self._connect(url)
        except (OSError, RuntimeError) as error:
            return End.NO_CONNECTION, _describe(error)
        body = self.wave.bodies[planned.seq]
        self.wave.in_flight += 1
        self.wave.in_flight_max = max(self.wave.in_flight_max, self.wave.in_flight)
        exchange.sent_ns = time.monotonic_ns()
        response = self.client.post(
            url, data=body, headers=self.wave.headers, stream=True, name="completion"
        )
        fault = getattr(response, "error", None)
        if fault is not None:
            return _end_without_headers(fault)
        exchange.headers_ns = time.monotonic_ns()
        exchange.http_status = response.status_code
        wire = response.stream
        try:
            if 200 <= response.status_code < 300:
                while not reading.is_broken and (chunk := _receive(wire)):
                    reading.take(time.monotonic_ns(), chunk)
            else:
                exchange.error_body = _read_error_body(wire)
        except (OSError, HTTPParseError) as lost:
            return End.CUT, _describe(lost)
        finally:
            wire.release()
        return End.COMPLETE, ""

    def _connect(self, url: str) -> None:
        """Leaves an open connection in this user's pool; replaces a dead one before the request.

        A server may drop an idle connection between this check and the request: that is a RESET
        with a record of its own and never repeated (geventhttpclient repeats no POST).
        """
        pool = self.client.client.clientpool.get_client(url)._connection_pool
        pool.return_socket(pool.get_socket())


def _read_when_idle(backlog: Backlog) -> None:
    """Reads what the users received, whenever nothing else waits for this loop."""
    while True:
        gevent.sleep(BACKLOG_S)
        while backlog:
            gevent.idle()
            backlog.work_off(_BACKLOG_STREAMS)


def _read_error_body(wire: Any) -> str:
    body = b""
    while len(body) < _ERROR_BODY_BYTES and (chunk := _receive(wire)):
        body += chunk
    return body[:_ERROR_BODY_BYTES].decode("utf-8", "replace")


def _receive(wire: Any) -> bytes:
    """What has arrived of a body, at once; empty at its end.

    geventhttpclient's own ``read(n)`` waits until n bytes have come, which adds several inter-token
    times to a TTFT, and ``readline`` knows one line end; hence its buffer is read directly (2.6.1,
    response.py).

    Raises:
        OSError, HTTPParseError: the connection was lost or the framing broke before the end.
    """
    while not wire._body_buffer and not wire.message_complete:
        piece = wire._sock.recv(_RECEIVE_BYTES)
        wire.feed(piece)
        if not piece and not wire.message_complete:
            raise HTTPConnectionClosed("connection closed before the end of the body")
    chunk = bytes(wire._body_buffer)
    del wire._body_buffer[:]
    return chunk


def _end_without_headers(error: BaseException) -> tuple[End, str]:
    """How a request ended that got no response headers."""
    while getattr(error, "original", None) is not None:
        error = error.original  # type: ignore[attr-defined]
    if isinstance(error, gevent.Timeout):
        raise error
    if isinstance(error, TimeoutError):
        return End.TIMEOUT, _describe(error)
    is_reset = isinstance(error, (HTTPConnectionClosed, ConnectionError))
    return (End.RESET if is_reset else End.CUT), _describe(error)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _sleep_until(t_ns: int) -> None:
    while (wait_ns := t_ns - time.monotonic_ns()) > 0:
        gevent.sleep(wait_ns / 1e9)


class Heartbeat:
    """Measures how late the event loop serves a 10 ms timer, and the process's CPU time."""

    def __init__(self) -> None:
        self.lags_s: list[float] = []
        self._start_ns = time.monotonic_ns()
        self._start_cpu_s = time.process_time()
        self._duration_s = self._cpu_s = 0.0
        self._greenlet = gevent.spawn(self._beat)

    def _beat(self) -> None:
        while True:
            start = time.monotonic()
            gevent.sleep(HEARTBEAT_S)
            self.lags_s.append(max(0.0, time.monotonic() - start - HEARTBEAT_S))

    def stop(self) -> None:
        """Ends the measurement."""
        self._duration_s = (time.monotonic_ns() - self._start_ns) / 1e9
        self._cpu_s = time.process_time() - self._start_cpu_s
        self._greenlet.kill(block=False)

    def witness(self, wave: Wave) -> ClientWitness:
        """What was measured, once stopped and once every record is there."""
        return ClientWitness(
            loop_lag_s_max=max(self.lags_s, default=None),
            loop_lag_s_p99=nearest_rank(self.lags_s, 0.99),
            cpu_share=self._cpu_s / self._duration_s,
            in_flight_max=wave.in_flight_max,
            send_lag_s_max=send_lag_s_max(wave.records),
            send_spread_s=send_spread_s(wave.schedule, wave.records),
            duration_s=self._duration_s,
            heartbeat_count=len(self.lags_s),
        )


class Worker:
    """Obeys the commands run, release and cancel; one run at a time."""

    def __init__(self, target: Target, secret: str | None, replies: int) -> None:
        self._target = target
        self._secret = secret
        self._replies = replies
        self._wave: Wave | None = None

    def reply(self, event: str, **fields: Any) -> None:
        """One JSON line to the harness."""
        os.write(self._replies, json.dumps({"event": event, **fields}).encode("ascii") + b"\n")

    def obey(self, command: dict[str, Any]) -> None:
        """Returns at once; a run goes on in its own greenlet."""
        match command["op"]:
            case "run":
                gevent.spawn(self._run, command)
                # It begins before the next command is read, which is about this run.
                gevent.sleep(0)
            case "release" if self._wave is not None:
                self._wave.release(command["release_ns"])
            case "cancel" if self._wave is not None:
                self._wave.cancel(End(command["end"]), command["detail"])

    def _run(self, command: dict[str, Any]) -> None:
        try:
            schedule = Schedule.from_json(command["schedule"])
            with RecordWriter(Path(command["records_path"])) as writer:
                wave = self._wave = Wave(schedule, self._target, self._secret, writer)
                witness = self._drive(wave)
            if wave.failure is not None:
                self.reply("failed", detail=wave.failure)
            else:
                self.reply("finished", witness=witness.to_json())
        except Exception:
            self.reply("failed", detail=redacted(traceback.format_exc(), self._secret))
        finally:
            self._wave = None

    def _drive(self, wave: Wave) -> ClientWitness:
        """Spawns the users, releases them together, stops them when all is done or cancelled."""
        environment = Environment(user_classes=[_user_class(wave)])
        runner = environment.create_local_runner()
        reader = gevent.spawn(_read_when_idle, wave.backlog)
        try:
            runner.start(wave.schedule.users, spawn_rate=wave.schedule.users)
            wave.connected.wait()
            self.reply("connected")
            wave.go.wait()
            _sleep_until(wave.release_ns)
            heartbeat = Heartbeat()
            if wave.cancel_end is None and wave.failure is None:
                wave.barrier.set()
            self._watch(wave)
            heartbeat.stop()
        finally:
            runner.quit()
            reader.kill()
        wave.record_unsent()
        return heartbeat.witness(wave)

    def _watch(self, wave: Wave) -> None:
        total = len(wave.schedule.requests)
        told = 0
        while not wave.over.wait(PROGRESS_S):
            if len(wave.records) != told:
                told = len(wave.records)
                self.reply("progress", done=told, total=total)


def _user_class(wave: Wave) -> type[CompletionUser]:
    class LoadUser(CompletionUser):
        host = wave.target.host_url
        insecure = not wave.target.verify_tls
        # The timer of each request decides; the socket's only stops what slips through.
        network_timeout = wave.schedule.request_timeout_s + CONNECT_TIMEOUT_S

    LoadUser.wave = wave
    return LoadUser


def _serve(commands: Any, replies: int) -> None:
    target = Target.from_json(json.loads(commands.readline()))
    secret = _secret(target)
    worker = Worker(target, secret, replies)
    # What was imported lives as long as the process: no collection needs to look at it again.
    gc.collect()
    gc.freeze()
    worker.reply("ready", pid=os.getpid())
    while line := commands.readline():
        worker.obey(json.loads(line))


def _secret(target: Target) -> str | None:
    """The API key, read here so that it is in no argument and no message."""
    if target.api_key_env is not None:
        return os.environ[target.api_key_env].strip()
    if target.api_key_file is not None:
        path = Path(os.path.expandvars(target.api_key_file)).expanduser()
        return path.read_text(encoding="utf-8").strip()
    return None


def main() -> None:
    """Serves until standard input closes."""
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(name)s %(levelname)s %(message)s"
    )
    # It warns at every wave that spawning over 100 users a second is fast.
    logging.getLogger("locust.runners").setLevel(logging.ERROR)
    replies = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    _serve(FileObjectPosix(os.dup(sys.stdin.fileno()), "rb"), replies)
    # Users may still be running; nobody waits for them any more.
    os._exit(0)


if __name__ == "__main__":
    main()
