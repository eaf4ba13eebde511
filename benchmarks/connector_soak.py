"""Mixed load on one live server with the bundled connector: does anything grow?

One CPU server with a small host pool and a bounded directory. A few clients mix hits from the
device, from host memory and from disk, sessions never seen before (many times what the directory
holds, so it wraps), and clients that leave while they are served; the device cache is emptied all
the time and host memory at fixed intervals. Every few seconds it samples, per process, resident
memory, open files and threads, and the connector's own gauges; what host memory holds is read right
before it is emptied, because between two emptyings it only fills.

After the warm-up it prints for each series the slope per hour with a 95 % interval, and one CHECK
line. The interval is that of a line through the means of ten equal spans: neighbouring samples are
not independent, means over minutes nearly are. Flat means that the upper end is at most the bound;
not flat, that the lower end is above it; undecided otherwise. The bounds (``BOUNDS``): memory 14
MiB per hour, 1 GiB over the 72 hours of gate 4; files and threads 5, so that 72 hours stay below
the usual limit of 1024; slots and blocks a quarter of the pool, the least that half an hour can
tell from the load's own ups and downs; the pool must not shrink by that much either, since a lost
slot cannot be filled. Smaller leaks of slots are found by what is left at the end:
when all load is over, no request, read or write may remain, and a reset must free every host slot
(a leaked pin would keep one).

Exits 1 when anything is not flat, left or wrong, 2 when undecided.

Run: KVGATE_VLLM_PYTHON=... python -m benchmarks.connector_soak [--minutes 30] [--without]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from harness.campaign.generated_model import ModelArchitecture, ensure_model
from harness.stats import t_quantile
from tests.live.vllm_server import (
    BLOCK_TOKENS,
    Answer,
    Metrics,
    Server,
    is_close,
    prompt,
    serve,
    transfer,
    value,
    wait_until,
)

BLOCKS = 8
FILE_BYTES = 4096 + ModelArchitecture(num_layers=2).kv_bytes_per_token * BLOCK_TOKENS
POOL_BLOCKS = 96
DISK_BLOCKS = 320
# Small, so that all of it has been touched when the warm-up ends; and few tokens at a time, so that
# the kernels have met every shape: each new one stays in memory, with or without a connector.
DEVICE_BLOCKS = 160
ARGUMENTS = ("--max-num-batched-tokens", str(BLOCK_TOKENS), "--max-num-seqs", "16")
HOT = range(8)
WARM = range(100, 124)
FIRST_NEW = 1000
CLIENTS = 3
THINK_S = 0.8
SAMPLE_S = 5.0
SPANS = 10
WARM_UP_SHARE = 0.2
NOISE = 0.5  # of first log-probabilities; the exact oracles are in tests/live
POOL_SERIES = "host pool when emptied, slots"
GAUGES = {
    "directory, blocks": ("disk_used_bytes", FILE_BYTES),
    "store backlog, blocks": ("store_backlog_blocks", 1),
    "reads queued, blocks": ("read_queue_blocks", 1),
}
MIB = float(2**20)
# Per hour, by the last word of a series' name.
BOUNDS = {
    "MiB": 14.0,
    "files": 5.0,
    "threads": 5.0,
    "slots": POOL_BLOCKS / 4,
    "blocks": POOL_BLOCKS / 4,
}


@dataclass
class Series:
    """Samples of one quantity: seconds since the start, and values."""

    seconds: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Slope:
    """Change per hour, with the ends of its 95 % interval."""

    per_hour: float
    low: float
    high: float


@dataclass
class Tally:
    """What the clients did, and what went wrong."""

    done: Counter[str] = field(default_factory=Counter)
    wrong: list[int] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, what: str) -> None:
        """Counts one."""
        with self.lock:
            self.done[what] += 1


def slope(series: Series) -> Slope:
    """The slope of a straight line through the means of equal spans of time. Pure."""
    points = [(_mean(x for x, _ in span), _mean(y for _, y in span)) for span in _spans(series)]
    count = len(points)
    if count < 3:
        return Slope(float("nan"), float("-inf"), float("inf"))
    mean_x, mean_y = _mean(x for x, _ in points), _mean(y for _, y in points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    per_hour = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    rest = sum((y - mean_y - per_hour * (x - mean_x)) ** 2 for x, y in points)
    half = t_quantile(0.975, count - 2) * (rest / (count - 2) / spread) ** 0.5
    return Slope(per_hour, per_hour - half, per_hour + half)


def span_means(series: Series) -> list[float]:
    """The means of those spans. Pure."""
    return [_mean(y for _, y in span) for span in _spans(series)]


def _spans(series: Series) -> list[list[tuple[float, float]]]:
    """Hours and values, in equal spans of time; empty spans are left out."""
    start, end = series.seconds[0], series.seconds[-1]
    width = (end - start) / SPANS or 1.0
    spans: list[list[tuple[float, float]]] = [[] for _ in range(SPANS)]
    for second, number in zip(series.seconds, series.values, strict=True):
        spans[min(SPANS - 1, int((second - start) / width))].append((second / 3600, number))
    return [span for span in spans if span]


def _mean(numbers: Iterable[float]) -> float:
    found = list(numbers)
    return sum(found) / len(found)


def verdict(found: Slope, bound: float, *, may_fall: bool = True) -> str:
    """Pure. ``may_fall``: only growth is bad."""
    if found.high <= bound and (may_fall or found.low >= -bound):
        return "flat"
    is_falling = not may_fall and found.high < -bound
    return "NOT FLAT" if found.low > bound or is_falling else "undecided"


class Soak:
    """The load and the samples of one server."""

    def __init__(self, server: Server, seed: int, *, has_tier: bool) -> None:
        self.server = server
        self._has_tier = has_tier
        self.tally = Tally()
        self.series: dict[str, Series] = {}
        self._first: dict[int, Answer] = {}
        self._draw = random.Random(seed)
        self._next_new = FIRST_NEW
        self._stop = threading.Event()
        self._gate = threading.Condition()  # guards the two below
        self._in_flight = 0
        self._is_closed = False
        self._started_s = time.monotonic()

    def run(self, seconds: float, warm_up_s: float) -> None:
        """Loads the server, and samples after the warm-up."""
        # Twice in each of the ten spans.
        emptying_s = (seconds - warm_up_s) / SPANS / 2
        threads = [
            threading.Thread(target=self._client, args=(self._draw.random(),))
            for _ in range(CLIENTS)
        ]
        threads.append(threading.Thread(target=self._emptier, args=(emptying_s, warm_up_s)))
        for thread in threads:
            thread.start()
        try:
            while (now_s := time.monotonic() - self._started_s) < seconds:
                if now_s >= warm_up_s:
                    self._sample(now_s)
                self._stop.wait(SAMPLE_S)
                assert self.server.is_alive(), "a process of the server is gone"
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()

    def _client(self, seed: float) -> None:
        draw = random.Random(seed)
        while not self._stop.wait(draw.expovariate(1 / THINK_S)):
            choice = draw.random()
            with self._gate:
                self._gate.wait_for(lambda: not self._is_closed)
                self._in_flight += 1
            try:
                if choice < 0.4:
                    self._ask("hot", draw.choice(HOT))
                elif choice < 0.7:
                    self._ask("warm", draw.choice(WARM))
                elif choice < 0.9:
                    self._ask("new", self._new_session())
                else:
                    session = self._new_session() if draw.random() < 0.5 else draw.choice(WARM)
                    self._leave(session, draw.uniform(0.0, 0.5))
            except httpx.HTTPError as error:
                self.tally.add(f"error {type(error).__name__}")
            finally:
                with self._gate:
                    self._in_flight -= 1
                    self._gate.notify_all()

    def _ask(self, kind: str, session: int) -> None:
        answer = self.server.ask(prompt(session, BLOCKS))
        first = self._first.setdefault(session, answer) if kind != "new" else answer
        if not is_close(answer, first, noise=NOISE):
            self.tally.wrong.append(session)
        self.tally.add(kind if not answer.cached_tokens else f"{kind}, cached")

    def _leave(self, session: int, after_s: float) -> None:
        leave_s = time.monotonic() + after_s
        self.server.ask_and_leave(
            prompt(session, BLOCKS), leave=lambda: time.monotonic() >= leave_s
        )
        self.tally.add("left")

    def _new_session(self) -> int:
        with self.tally.lock:
            self._next_new += 1
            return self._next_new

    def _emptier(self, interval_s: float, warm_up_s: float) -> None:
        """Empties the device cache often, so that hits come from the tier, and the host tier."""
        rounds = 0
        while not self._stop.wait(interval_s / 8):
            rounds += 1
            is_external = rounds % 8 == 0
            what = "host memory" if is_external else "the device"
            with self._gate:  # vLLM empties nothing that a request holds
                self._is_closed = True
                self._gate.wait_for(lambda: self._in_flight == 0)
            try:
                now_s = time.monotonic() - self._started_s
                if is_external and self._has_tier and now_s >= warm_up_s:
                    self._put(POOL_SERIES, now_s, self._host_slots())
                # Refused while blocks move; the next round tries again.
                is_done = self.server.try_reset(external=is_external)
                self.tally.add(f"reset of {what}" if is_done else f"reset of {what}, refused")
            except (httpx.HTTPError, KeyError) as error:
                self.tally.add(f"error {type(error).__name__}")
            finally:
                with self._gate:
                    self._is_closed = False
                    self._gate.notify_all()

    def _sample(self, now_s: float) -> None:
        for role, process in _roles(self.server).items():
            with contextlib.suppress(psutil.NoSuchProcess), process.oneshot():
                self._put(f"{role} resident MiB", now_s, process.memory_info().rss / MIB)
                self._put(f"{role} open files", now_s, process.num_fds())
                self._put(f"{role} threads", now_s, process.num_threads())
        if self._has_tier:
            metrics = self.server.metrics(step=False)  # the load makes steps enough
            for name, (gauge, unit) in GAUGES.items():
                self._put(name, now_s, value(metrics, f"kvgate:tier_{gauge}") / unit)

    def _host_slots(self) -> float:
        """Slots of host memory in use, once nobody asks. Raises KeyError, httpx.HTTPError."""
        return self.server.metric("kvgate:tier_host_used_bytes") / FILE_BYTES

    def _put(self, name: str, now_s: float, number: float) -> None:
        series = self.series.setdefault(name, Series())
        series.seconds.append(now_s)
        series.values.append(number)


def _roles(server: Server) -> Mapping[str, psutil.Process]:
    """The server's processes by what they are; helpers of Python itself are left out."""
    roles: dict[str, psutil.Process] = {}
    for process in server.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            name = process.name()
            if process.pid == server.pid:
                roles["API server"] = process
            elif name.startswith("VLLM::EngineCor"):
                roles["engine"] = process
            elif name.startswith("VLLM::Worker"):
                roles["worker"] = process
    return roles


def _report(soak: Soak) -> list[str]:
    """Prints slopes; returns the verdicts."""
    print(f"{'series':32} {'first':>9} {'last':>9} {'per hour':>9} {'95 % interval':>21} verdict")
    verdicts: list[str] = []
    for name, series in soak.series.items():
        found = slope(series)
        bound = BOUNDS[name.split()[-1]]
        verdicts.append(verdict(found, bound, may_fall=name != POOL_SERIES))
        interval = f"[{found.low:9.2f}, {found.high:9.2f}]"
        print(
            f"{name:32} {series.values[0]:9.1f} {series.values[-1]:9.1f} {found.per_hour:9.2f} "
            f"{interval:>21} {verdicts[-1]} (bound {bound:g})"
        )
        if verdicts[-1] != "flat":
            print("  means of the spans: " + " ".join(f"{mean:.1f}" for mean in span_means(series)))
    return verdicts


def _what_is_left(server: Server) -> list[str]:
    """What should be gone once nobody asks any more."""
    server.wait_durable()
    wait_until(lambda: not value(server.metrics(), "kvgate:tier_read_queue_blocks"), "no reads")
    server.reset(external=True)
    metrics = server.metrics()
    names = (
        "kvgate:tier_host_used_bytes",
        "vllm:num_requests_waiting",
        "vllm:num_requests_running",
    )
    return [f"{name} {value(metrics, name):g}" for name in names if value(metrics, name)]


def _print_counters(metrics: Metrics) -> None:
    counters = {
        " ".join([name.removeprefix("kvgate:tier_"), *_own_labels(labels)]): number
        for (name, labels), number in sorted(metrics.items())
        if name.startswith("kvgate:tier_") and name.endswith("_total") and number
    }
    print(json.dumps(counters, indent=1))


def _own_labels(labels: Sequence[tuple[str, str]]) -> Iterator[str]:
    for name, text in labels:
        if name in ("tier", "reason", "op"):
            yield text


def main() -> int:
    """Runs the soak; see the module's text for the exit codes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--without", action="store_true", help="no connector: what vLLM itself grows by"
    )
    arguments = parser.parse_args()
    seconds = arguments.minutes * 60
    with tempfile.TemporaryDirectory(prefix="kvgate-soak-") as folder:
        root = Path(folder)
        model = ensure_model(ModelArchitecture(num_layers=2), root)
        settings = {
            "host_pool_bytes": POOL_BLOCKS * FILE_BYTES,
            "directory": str(root / "tier"),
            "disk_capacity_bytes": DISK_BLOCKS * FILE_BYTES,
            "reset_scope": "host",
        }
        log = root / "server.log"
        connector = None if arguments.without else transfer(settings)
        with serve(
            model, log, connector, device_blocks=DEVICE_BLOCKS, arguments=ARGUMENTS
        ) as server:
            soak = Soak(server, arguments.seed, has_tier=not arguments.without)
            soak.run(seconds, seconds * WARM_UP_SHARE)
            verdicts = _report(soak)
            if not arguments.without and POOL_SERIES not in soak.series:
                print(f"{POOL_SERIES}: never read")
                verdicts.append("undecided")
            left = [] if arguments.without else _what_is_left(server)
            metrics = server.metrics()
            print(json.dumps(dict(sorted(soak.tally.done.items())), indent=1))
            _print_counters(metrics)
    count = len(soak.series["engine threads"].values)
    print(
        f"{arguments.minutes:g} minutes, {count} samples after the first "
        f"{seconds * WARM_UP_SHARE / 60:g}; "
        f"wrong answers {len(soak.tally.wrong)}; left over: {', '.join(left) or 'nothing'}"
    )
    errors = [what for what in soak.tally.done if what.startswith("error")]
    if "NOT FLAT" in verdicts or left or errors or soak.tally.wrong:
        print("CHECK not flat, or something left or wrong")
        return 1
    if "undecided" in verdicts:
        print("CHECK undecided: run longer")
        return 2
    print("CHECK flat")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
