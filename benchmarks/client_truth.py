"""How truly load clients time a server, and whether they really load it: ours beside three peers.

The simulator is the server: it writes of each request when it had been read and when its first and
last token were given away. TTFT is log-normal around 0.5 s, tokens come every 20 ms, whatever the
concurrency. Each client drives a closed loop of C streams and 4 x C requests of 8 KB and 64 tokens,
all started at once, the server on one core and the client's whole process tree on another.

Error = a quantile of the TTFTs that the client told, minus the same quantile of the true ones: the
same rule for all, because no peer says which request a TTFT belongs to. Installs the peers into
environments of their own below KVGATE_HOME/bench on first use.

Run: python -m benchmarks.client_truth [--help]. Exit status: 0 when ours meets its bounds, 1 when
it does not or they cannot be told, 2 when a peer is missing or failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.truth_clients import (
    CLIENTS,
    MODEL_NAME,
    OUTPUT_TOKENS,
    Client,
    Job,
    Told,
    drive_ours,
    environment,
)
from harness.campaign.arms import default_home
from harness.campaign.generated_model import ModelArchitecture, ensure_model
from harness.load.driver import USERS_PER_WORKER
from harness.load.witness import nearest_rank
from harness.records import Record
from harness.sim.truth import TruthRecord, read_truth

TOKEN_S = 0.02
CONCURRENCIES = (8, 32, 128, 512)
# Two processes at 512 are what the project promises; by itself the client would take four.
OUR_WORKERS_MAX = 2
RUN_S = 240.0
SAMPLE_S = 0.25
# |error| of ours at 32, ms; and what at 128 may be a difference of nothing.
P50_MS, P99_MS, RESOLUTION_MS = 2.0, 3.0, 0.5

ARCHITECTURE = ModelArchitecture(
    hidden_size=64, intermediate_size=128, num_layers=2, num_attention_heads=2, num_kv_heads=1
)
SIM = {
    "block_tokens": 64,
    "device_blocks": 200_000,
    "prefix_caching": False,
    "chunk_tokens": 2**23,
    "prefill_tokens_per_s": 1e9,
    "step_s": 1e-6,
    "decode_s": TOKEN_S,
    "front_s": 0.5,
    "front_sigma": 0.3,
}


@dataclass(frozen=True)
class Cell(Record):
    """One run. Times in ms, processor time in seconds.

    ``own_*``: error request by request, where the client says whose a TTFT is. ``in_flight_mean``:
    over the middle half of the requests. ``cpu_*``: per 1,000 output tokens, while requests were in
    flight and of the whole process tree from start to end. ``server_late_*``: how much longer an
    answer took to leave the server than its 63 token times, the error of the truth's own clockwork.
    """

    client: str
    concurrency: int
    seed: int
    requests: int
    told: int
    failed: int
    p50_error_ms: float | None
    p99_error_ms: float | None
    own_p50_ms: float | None
    own_p99_ms: float | None
    in_flight_max: int
    in_flight_mean: float
    cpu_s: float
    cpu_whole_s: float
    server_late_p50_ms: float
    server_late_p99_ms: float
    server_cpu_share: float


# -- running ------------------------------------------------------------------


@contextmanager
def on_core(core: int | None) -> Iterator[None]:
    """What is started inside runs there; None: anywhere."""
    before = os.sched_getaffinity(0)
    if core is not None:
        os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def process(
    command: Sequence[str], core: int | None, env: Mapping[str, str], log: Path
) -> Iterator[tuple[subprocess.Popen[bytes], Tree]]:
    """Started on a core, in a session of its own; its tree is gone afterwards."""
    with log.open("ab") as output, on_core(core):
        running = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=dict(env),
            cwd=log.parent,
            start_new_session=True,
        )
    tree = Tree(running.pid)
    try:
        yield running, tree
    finally:
        tree.sample()
        with suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        tree.kill()
        running.wait()


class Tree:
    """Processor time of a process and all it started, also of those that ended meanwhile."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._known: dict[psutil.Process, float] = {}
        self.samples: list[tuple[int, float]] = []

    def sample(self) -> None:
        """Looks once. Cheap, since it may take place on the client's core."""
        asked = [self._root, *self._known]
        seen: set[psutil.Process] = set()
        while asked:
            one = asked.pop()
            if one in seen:
                continue
            seen.add(one)
            with suppress(psutil.NoSuchProcess):
                times = one.cpu_times()
                self._known[one] = times.user + times.system
                asked += [psutil.Process(pid) for pid in children(one.pid)]
        self.samples.append((time.monotonic_ns(), sum(self._known.values())))

    def at(self, t_ns: int) -> float:
        """Seconds spent by then, straight between two samples."""
        before = max((s for s in self.samples if s[0] <= t_ns), default=self.samples[0])
        after = min((s for s in self.samples if s[0] > t_ns), default=before)
        if after[0] == before[0]:
            return before[1]
        return before[1] + (after[1] - before[1]) * (t_ns - before[0]) / (after[0] - before[0])

    def kill(self) -> None:
        """Ends what still runs."""
        for one in self._known:
            with suppress(psutil.NoSuchProcess):
                one.kill()


def children(pid: int) -> list[int]:
    """Of all threads; psutil would look at every process of the machine."""
    found: list[int] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):
                text = Path(f"/proc/{pid}/task/{thread}/children").read_text()
                found += [int(child) for child in text.split()]
    return found


def run_cell(client: Client, python: Path, home: Path, job: Job, cores: Sequence[int]) -> Cell:
    """Raises RuntimeError when the client failed; nothing runs afterwards."""
    place = Path(job.place)
    server_core, client_core = (cores[0], cores[1]) if len(cores) > 1 else (None, None)
    truth_path = place / "truth.jsonl"
    config = {**SIM, "seed": job.seed, "truth_path": str(truth_path)}
    server = (
        *(sys.executable, "-m", "harness.sim", "--config", json.dumps(config)),
        *("--model", job.model_dir, "--served-model-name", MODEL_NAME),
        *("--port", job.base_url.rpartition(":")[2]),
    )
    root = Path(__file__).resolve().parents[1]
    env = {**os.environ, "PYTHONPATH": str(root)}
    with process(server, server_core, env, place / "server.log") as (serving, server_tree):
        await_server(job.base_url, serving)
        command = client.command(python, job)
        env = environment(client, home, place)
        with (
            process(command, client_core, env, place / "client.log") as (running, tree),
            on_core(client_core),
        ):
            status = follow(running, [tree, server_tree])
        if status != 0:
            tail = (place / "client.log").read_text(errors="replace").splitlines()[-8:]
            raise RuntimeError(f"{client.name}: exit status {status}\n" + "\n".join(tail))
    with truth_path.open() as lines:
        # A client may try the server out before it begins.
        truth = read_truth(lines)[-job.requests :]
    return cell_of(client.name, job, client.read(job), truth, tree, server_tree)


def follow(running: subprocess.Popen[bytes], trees: Sequence[Tree]) -> int:
    """Samples until the client ends; its exit status. Raises RuntimeError past RUN_S."""
    deadline = time.monotonic() + RUN_S
    while True:
        for tree in trees:
            tree.sample()
        with suppress(subprocess.TimeoutExpired):
            return running.wait(SAMPLE_S)
        if time.monotonic() > deadline:
            raise RuntimeError(f"not done after {RUN_S:.0f} s")


def await_server(base_url: str, serving: subprocess.Popen[bytes]) -> None:
    """Raises RuntimeError when it does not come up."""
    deadline = time.monotonic() + 20.0
    while time.monotonic() < deadline and serving.poll() is None:
        with suppress(OSError), urllib.request.urlopen(f"{base_url}/health", timeout=1.0):
            return
        time.sleep(0.05)
    raise RuntimeError("the simulator did not start")


def free_port() -> int:
    """One that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# -- comparing ----------------------------------------------------------------


def cell_of(
    name: str,
    job: Job,
    told: Told,
    truth: Sequence[TruthRecord],
    tree: Tree,
    server_tree: Tree,
) -> Cell:
    """What came of a run."""
    whole = [t for t in truth if t.first_token_ns is not None and t.last_token_ns is not None]
    if not whole:
        raise RuntimeError(f"{name}: the server answered no request")
    true_ms = [((t.first_token_ns or 0) - t.received_ns) / 1e6 for t in whole]
    late_ms = [
        ((t.last_token_ns or 0) - (t.first_token_ns or 0)) / 1e6
        - (len(t.token_ids) - 1) * TOKEN_S * 1e3
        for t in whole
    ]
    first_ns = min(t.received_ns for t in whole)
    last_ns = max(t.last_token_ns or 0 for t in whole)
    thousands = sum(len(t.token_ids) for t in whole) / 1000
    most, mean = in_flight(whole, job.concurrency)
    by_digest = dict(zip([t.prompt_digest for t in whole], true_ms, strict=True))
    own = [
        ttft - by_digest[digest]
        for ttft, digest in zip(told.ttft_ms, told.prompt_digests, strict=False)
        if digest in by_digest
    ]
    return Cell(
        client=name,
        concurrency=job.concurrency,
        seed=job.seed,
        requests=job.requests,
        told=len(told.ttft_ms),
        failed=told.failed + job.requests - sum(len(t.token_ids) == OUTPUT_TOKENS for t in whole),
        p50_error_ms=error_ms(told.ttft_ms, true_ms, 0.5),
        p99_error_ms=error_ms(told.ttft_ms, true_ms, 0.99),
        own_p50_ms=nearest_rank(own, 0.5),
        own_p99_ms=nearest_rank(own, 0.99),
        in_flight_max=most,
        in_flight_mean=mean,
        cpu_s=(tree.at(last_ns) - tree.at(first_ns)) / thousands,
        cpu_whole_s=tree.samples[-1][1] / thousands,
        server_late_p50_ms=nearest_rank(late_ms, 0.5) or 0.0,
        server_late_p99_ms=nearest_rank(late_ms, 0.99) or 0.0,
        server_cpu_share=(server_tree.at(last_ns) - server_tree.at(first_ns))
        / ((last_ns - first_ns) / 1e9),
    )


def error_ms(told: Sequence[float], true: Sequence[float], ratio: float) -> float | None:
    """None when nothing was told."""
    ours, theirs = nearest_rank(told, ratio), nearest_rank(true, ratio)
    return None if ours is None or theirs is None else ours - theirs


def in_flight(truth: Sequence[TruthRecord], concurrency: int) -> tuple[int, float]:
    """Most requests in the server at once, and their mean while the client was in full swing.

    From the moment when as many as C had come until three quarters had: later a client that gives
    each user its own four requests runs out of users, one that deals them out does not.
    """
    changes = sorted(
        change for t in truth for change in ((t.received_ns, 1), (t.last_token_ns or 0, -1))
    )
    arrivals = sorted(t.received_ns for t in truth)
    start_ns, end_ns = arrivals[concurrency - 1], arrivals[3 * len(arrivals) // 4 - 1]
    most = now = 0
    area, before_ns = 0, start_ns
    for t_ns, change in changes:
        inside_ns = min(max(t_ns, start_ns), end_ns)
        area += now * (inside_ns - before_ns)
        before_ns = inside_ns
        now += change
        most = max(most, now)
    return most, area / max(1, end_ns - start_ns)


# -- showing and judging ------------------------------------------------------

_COLUMNS = (
    ("p50 error ms", "p50_error_ms", 1),
    ("p99 error ms", "p99_error_ms", 1),
    ("in flight max", "in_flight_max", 0),
    ("mean", "in_flight_mean", 0),
    ("CPU s/1k tokens", "cpu_s", 3),
    ("whole run", "cpu_whole_s", 3),
    ("failed", "failed", 0),
    ("server late p50 ms", "server_late_p50_ms", 1),
    ("p99", "server_late_p99_ms", 1),
    ("cores", "server_cpu_share", 2),
)


def show(cells: Sequence[Cell]) -> None:
    """A table: median over the runs, and their range where there are several."""
    print("| C | client | runs | " + " | ".join(title for title, _, _ in _COLUMNS) + " |")
    print("|---" * (len(_COLUMNS) + 3) + "|")
    for concurrency in sorted({cell.concurrency for cell in cells}):
        for name in CLIENTS:
            own = chosen(cells, name, concurrency)
            if own:
                texts = [spread([getattr(cell, f) for cell in own], d) for _, f, d in _COLUMNS]
                print(f"| {concurrency} | {name} | {len(own)} | " + " | ".join(texts) + " |")
    ours = [cell for cell in cells if cell.own_p50_ms is not None]
    for concurrency in sorted({cell.concurrency for cell in ours}):
        own = chosen(ours, "ours", concurrency)
        p50, p99 = (spread([getattr(c, f) for c in own], 2) for f in ("own_p50_ms", "own_p99_ms"))
        print(f"ours at {concurrency}, request by request: error p50 {p50} ms, p99 {p99} ms")


def spread(values: Sequence[float | None], digits: int) -> str:
    """Median and range."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    median = f"{statistics.median(known):.{digits}f}"
    if min(known) == max(known):
        return median
    return f"{median} ({min(known):.{digits}f} to {max(known):.{digits}f})"


def chosen(cells: Sequence[Cell], name: str, concurrency: int) -> list[Cell]:
    """The runs of one row."""
    return [cell for cell in cells if (cell.client, cell.concurrency) == (name, concurrency)]


def middle(cells: Sequence[Cell], field: str) -> float | None:
    """Median of the size of an error; None of nothing."""
    values = [getattr(cell, field) for cell in cells]
    known = [abs(value) for value in values if value is not None]
    return statistics.median(known) if known else None


def verdicts(cells: Sequence[Cell]) -> Iterator[tuple[bool, str]]:
    """Each bound of ours: whether it holds, and with what figures. None measured: it does not."""
    at_32 = chosen(cells, "ours", 32)
    for field, bound in (("p50_error_ms", P50_MS), ("p99_error_ms", P99_MS)):
        size = middle(at_32, field)
        yield (
            size is not None and size <= bound,
            f"at 32: |{field}| {_said(size)}, allowed {bound}",
        )
    for field in ("p50_error_ms", "p99_error_ms"):
        size = middle(chosen(cells, "ours", 128), field)
        peers = {
            name: found
            for name in CLIENTS
            if name != "ours" and (found := middle(chosen(cells, name, 128), field)) is not None
        }
        best = min(peers, key=lambda name: peers[name], default=None)
        said = "no peer" if best is None else f"{best} {_said(peers[best])}"
        yield (
            size is not None and best is not None and size <= peers[best] + RESOLUTION_MS,
            f"at 128: |{field}| {_said(size)}, best peer {said}, allowed {RESOLUTION_MS} more",
        )
    at_512 = chosen(cells, "ours", 512)
    least = min((cell.in_flight_max for cell in at_512), default=0)
    yield least >= 512, f"at 512: {least} truly in flight, with {OUR_WORKERS_MAX} workers"
    failed = sum(cell.failed for cell in cells if cell.client == "ours")
    yield failed == 0, f"{failed} of our requests failed"


def _said(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.2f}"


# -- the command --------------------------------------------------------------


def measure(
    names: Sequence[str], concurrencies: Sequence[int], seeds: Sequence[int], results: Path
) -> tuple[list[Cell], list[str]]:
    """The cells, each saved as it is done, and what could not be measured."""
    home = default_home()
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        say("one core only: server and client share it, and nothing below means much")
    model_dir = ensure_model(ARCHITECTURE, home / "models")
    cells: list[Cell] = []
    problems: list[str] = []
    pythons: dict[str, Path] = {}
    for name in names:
        try:
            pythons[name] = CLIENTS[name].install(home, say)
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            problems.append(f"{name}: {error}")
    for number, seed in enumerate(seeds, 1):
        for concurrency in concurrencies:
            for name, python in pythons.items():
                place = Path(tempfile.mkdtemp(prefix="kvgate-truth-"))
                workers = min(OUR_WORKERS_MAX, -(-concurrency // USERS_PER_WORKER))
                url = f"http://127.0.0.1:{free_port()}"
                job = Job(
                    url, str(model_dir), str(place), concurrency, 1000 * seed + concurrency, workers
                )
                say(f"run {number}/{len(seeds)}: {name} at {concurrency}")
                try:
                    cell = run_cell(CLIENTS[name], python, home, job, cores)
                except (OSError, RuntimeError, ValueError, LookupError) as error:
                    problems.append(f"{name} at {concurrency}: {type(error).__name__}: {error}")
                    say(problems[-1])
                else:
                    cells.append(cell)
                    with results.open("a") as file:
                        file.write(json.dumps(cell.to_json()) + "\n")
                finally:
                    shutil.rmtree(place, ignore_errors=True)
    return cells, problems


def say(text: str) -> None:
    """Progress."""
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str]) -> int:
    """The exit status; see the module."""
    parser = argparse.ArgumentParser(prog="client_truth", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--concurrency", type=int, nargs="+", default=list(CONCURRENCIES))
    parser.add_argument("--clients", nargs="+", choices=list(CLIENTS), default=list(CLIENTS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1, help="of the first repeat")
    parser.add_argument("--results", type=Path, help="JSON lines; the runs in it count too")
    parser.add_argument("--as-client", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.as_client is not None:
        drive_ours(Job.from_json(json.loads(given.as_client)))
        return 0
    earlier: list[Cell] = []
    if given.results is not None and given.results.exists():
        lines = given.results.read_text().splitlines()
        earlier = [Cell.from_json(json.loads(line)) for line in lines]
    results = given.results or Path(os.devnull)
    seeds = range(given.seed, given.seed + given.repeats)
    cells, problems = measure(given.clients, given.concurrency, seeds, results)
    cells = earlier + cells
    show(cells)
    for problem in problems:
        print(f"NOT MEASURED {problem}")
    found = list(verdicts(cells))
    for holds, text in found:
        print(f"{'holds' if holds else 'MISSED'}: {text}")
    if problems:
        return 2
    return 0 if all(holds for holds, _ in found) else 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
