"""The live part of `benchmarks.connector`: real CPU vLLM, four servers side by side.

All servers stay up; one at a time is under load. A pass takes fresh sessions: each arm computes
them once (that run is the populate measurement), then they are read back at every concurrency from
each medium, the arms taking turns. Before each reading the device cache is made empty by a reset;
for disk the host tier too, and reads are O_DIRECT, so what is read comes from the medium.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.connector_report import Report, figure, ratio, say
from benchmarks.foreign_cpu import ForeignCpu
from harness.campaign import arms
from harness.campaign.generated_model import ensure_model
from harness.campaign.reading import load_campaign
from harness.campaign.sections import Arm, Campaign
from harness.collectors.prometheus import Page
from harness.errors import ServerError
from harness.load.driver import LoadClient, LoadResult
from harness.records import Outcome, PlannedRequest, PromptRecipe, RequestRecord, Schedule
from harness.server.managed import ManagedServer

BLOCK_TOKENS = 128
SESSION_TOKENS = 4096
SESSIONS = 8
OUTPUT_TOKENS = 8
# The wave, a block per session for what is generated, and room for one more session.
DEVICE_BLOCKS = SESSIONS * (SESSION_TOKENS // BLOCK_TOKENS + 1) + SESSION_TOKENS // BLOCK_TOKENS + 4
WAIT_S = 120.0
# vLLM's processes spin for a second after their last message; another server's wave must not begin
# before that.
QUIET_WATCH_S = 0.3
QUIET_CORES = 0.1
# A reading that others disturbed is taken again: chosen by their processor time, never by its own.
ATTEMPTS = 5

RECOMPUTE, DEVICE, OURS, PEER = "recompute", "device", "ours", "peer"


@dataclass(frozen=True)
class Cell:
    """One way of reading sessions back. ``name`` is arm and medium."""

    name: str
    arm: str
    reset: str | None  # what is emptied first: the device cache, the host tier as well, or nothing
    cached_tokens: int  # what every request must report


_WHOLE = SESSION_TOKENS
CELLS = (
    Cell("device hit", DEVICE, None, _WHOLE - BLOCK_TOKENS),
    # The step that copies computes the last token.
    Cell("ours, DRAM", OURS, "device", _WHOLE - 1),
    Cell("peer, DRAM", PEER, "device", _WHOLE),
    Cell("ours, disk", OURS, "host", _WHOLE),
    Cell("peer, disk", PEER, "host", _WHOLE),
)
RECOMPUTED = Cell("recompute", RECOMPUTE, None, 0)


def run_live(
    report: Report, *, passes: int, rounds: int, levels: Sequence[int], directory: Path
) -> None:
    """Measures, prints the tables, adds the bounds. Raises HarnessError when a server fails."""
    with running(directory) as servers:
        bench = Bench(servers, levels, rounds)
        bench.warm_up()
        started = time.monotonic()
        for index in range(passes):
            bench.run_pass(index)
            elapsed = time.monotonic() - started
            say(f"pass {index + 1}/{passes} done, {elapsed:.0f} s of about "
                f"{elapsed / (index + 1) * passes:.0f} s")  # fmt: skip
    _print_tables(bench.ttft_s, bench.populate_s, levels)
    _add_bounds(report, bench.ttft_s, bench.populate_s, levels)
    report.check_quiet(bench.foreign_cores, bench.repeated)


class _Arm:
    """A server with its load client."""

    def __init__(self, server: ManagedServer, load: LoadClient, records: Path) -> None:
        self.name = server.spec.arm
        self.server = server
        self._load = load
        self._records = records
        self._processes = [psutil.Process(pid) for pid in server.pids()]

    def run(self, schedule: Schedule) -> LoadResult:
        """Raises ServerError unless every request is complete."""
        result = self._load.run(
            schedule, records_path=self._records, deadline_s=600.0, watch=self.server.check_alive
        )
        bad = [record for record in result.records if record.outcome is not Outcome.OK]
        if bad:
            raise ServerError(f"arm {self.name}: {len(bad)} requests failed, the first: {bad[0]}")
        return result

    def cpu_s(self) -> float:
        """Processor seconds of the server's processes since their start."""
        total = 0.0
        for process in self._processes:
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def step(self) -> None:
        """One engine step: statistics and stores travel with steps only."""
        body = {"model": self.server.model, "prompt": [1, 2, 3], "max_tokens": 1}
        self.server.access.post("/v1/completions", json=body, timeout_s=60.0).raise_for_status()

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the series with these labels, now; 0 when there is none yet."""
        text = self.server.access.get("/metrics", timeout_s=30.0).text
        return sum(
            reading.value
            for reading in Page(text).readings(name)
            if reading.value is not None and labels.items() <= reading.labels.items()
        )

    def reset(self, what: str) -> None:
        """Empties the device cache; with ``host`` the host tier too, and never the files."""
        query = "?reset_external=true" if what == "host" else ""
        deadline = time.monotonic() + WAIT_S
        while True:
            reply = self.server.access.post(f"/reset_prefix_cache{query}", timeout_s=60.0)
            if reply.status_code == 200 and reply.json().get("success", True):
                return
            if time.monotonic() > deadline:
                raise ServerError(f"arm {self.name}: the reset was refused for {WAIT_S:.0f} s")
            self.step()  # blocks still on their way; the next step reports them finished

    def wait_written(self) -> None:
        """Waits until nothing is on its way to disk."""
        backlog = {
            OURS: "kvgate:tier_store_backlog_blocks",
            PEER: "vllm:kv_offload_tiering_active_cascade_jobs",
        }.get(self.name)
        if backlog is None:
            return
        deadline = time.monotonic() + WAIT_S
        quiet = 0
        while quiet < 2:  # the first zero may be older than the last stores
            self.step()
            quiet = quiet + 1 if self.metric(backlog) == 0 else 0
            if time.monotonic() > deadline:
                raise ServerError(f"arm {self.name}: writes did not end in {WAIT_S:.0f} s")

    def disk_bytes(self) -> float:
        """Bytes restored from disk since the start, by the arm's own count."""
        self.step()
        if self.name == OURS:
            return self.metric("kvgate:tier_read_bytes_total", tier="disk")
        return self.metric("vllm:kv_offload_tiering_read_bytes_total")


@dataclass
class Bench:
    """Runs passes and keeps their figures: one value per pass."""

    servers: dict[str, _Arm]
    levels: Sequence[int]
    rounds: int
    ttft_s: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    populate_s: dict[str, list[float]] = field(default_factory=dict)
    foreign_cores: dict[str, float] = field(default_factory=dict)
    repeated: int = 0
    seeds: dict[str, int] = field(default_factory=dict)
    _disk_waves: dict[str, int] = field(default_factory=dict)

    def warm_up(self) -> None:
        """First requests pay for lazy imports and page faults; nobody's figures."""
        for arm in self.servers.values():
            say(f"warm-up: {arm.name}")
            for _ in range(2):
                arm.run(_schedule("warm_up", seed=0, users=2, sessions=2))
            arm.wait_written()
            if arm.name in (OURS, PEER):
                for what in ("device", "host"):
                    arm.reset(what)
                    arm.run(_schedule("warm_up", seed=0, users=2, sessions=2))

    def run_pass(self, index: int) -> None:
        """Fresh sessions: computed once by each arm, then read back everywhere."""
        self.populate(index, (DEVICE, OURS, PEER))
        self._disk_waves = dict.fromkeys((OURS, PEER), 0)
        disk_before = {name: self.servers[name].disk_bytes() for name in (OURS, PEER)}
        for level in self.levels:
            watch = ForeignCpu()
            values = _ttft_s(self.wave(RECOMPUTED, level, watch))
            self._note(index, RECOMPUTED.name, level, values, watch)
            found: dict[str, list[float]] = {cell.name: [] for cell in CELLS}
            watches = {cell.name: ForeignCpu() for cell in CELLS}
            for number in range(self.rounds):
                for cell in _rotated(CELLS, index + number):
                    found[cell.name] += _ttft_s(self.wave(cell, level, watches[cell.name]))
            for name, values in found.items():
                self._note(index, name, level, values, watches[name])
        self._check_cold(disk_before)

    def populate(self, index: int, names: Sequence[str]) -> None:
        """Sessions nobody has seen, computed once by each of these arms."""
        self.seeds[RECOMPUTE] = 1000 * (index + 1)
        for name in _rotated(names, index):
            arm = self.servers[name]
            for attempt in range(ATTEMPTS):
                self.seeds[name] = 1000 * (index + 1) + attempt  # sessions nobody has seen
                arm.reset("device")
                _wait_quiet(self.servers)
                watch = ForeignCpu()
                with watch:
                    result = self._run(arm, "populate", users=SESSIONS)
                _check_cached(arm.name, result, 0)
                arm.wait_written()
                if not self._again(watch, attempt):
                    break
            self.foreign_cores[f"pass {index + 1}, populate {name}"] = watch.cores
            spent_s = result.witness.duration_s
            self.populate_s.setdefault(name, []).append(spent_s)
            say(f"  populate {name}: {spent_s:.2f} s; others: {watch.cores:.2f} cores")

    def wave(self, cell: Cell, level: int, watch: ForeignCpu) -> Sequence[RequestRecord]:
        """Each session, read once at this concurrency."""
        arm = self.servers[cell.arm]
        for attempt in range(ATTEMPTS):
            if cell.reset is not None:
                arm.reset(cell.reset)
            _wait_quiet(self.servers)
            own = ForeignCpu()
            with own:
                result = self._run(arm, "wave", users=level)
            _check_cached(cell.name, result, cell.cached_tokens)
            if cell.reset == "host":
                self._disk_waves[cell.arm] = self._disk_waves.get(cell.arm, 0) + 1
            if not self._again(own, attempt):
                break
        watch.add(own)
        return result.records

    def _run(self, arm: _Arm, phase: str, *, users: int) -> LoadResult:
        seed = self.seeds[arm.name]
        return arm.run(_schedule(phase, seed=seed, users=users, sessions=SESSIONS))

    def _again(self, watch: ForeignCpu, attempt: int) -> bool:
        """Whether a reading is taken once more. The last attempt stands, loud or not."""
        is_again = watch.is_loud and attempt < ATTEMPTS - 1
        self.repeated += is_again
        return is_again

    def _note(
        self, index: int, name: str, level: int, values: list[float], watch: ForeignCpu
    ) -> None:
        self.foreign_cores[f"pass {index + 1}, {name} at {level}"] = watch.cores
        p50_s = figure(values).median
        self.ttft_s.setdefault((name, level), []).append(p50_s)
        say(
            f"  concurrency {level}, {name}: TTFT p50 {p50_s * 1e3:.1f} ms, "
            f"max {max(values) * 1e3:.1f} ms, n={len(values)}; others: {watch.cores:.2f} cores"
        )

    def _check_cold(self, before: dict[str, float]) -> None:
        """The disk cells, and they alone, read all their bytes from disk."""
        wave_bytes = SESSIONS * SESSION_TOKENS * _campaign().model.generated.kv_bytes_per_token
        for name, bytes_before in before.items():
            found = self.servers[name].disk_bytes() - bytes_before
            wanted = self._disk_waves[name] * wave_bytes
            if found != wanted:
                raise ServerError(
                    f"arm {name}: {found:.0f} bytes came from disk in this pass, expected "
                    f"{wanted}: the cells do not measure what they are named after"
                )


def _ttft_s(records: Sequence[RequestRecord]) -> list[float]:
    return [record.ttft_s for record in records if record.ttft_s is not None]


def vocabulary() -> int:
    """Token ids of prompts lie below this."""
    return _campaign().model.generated.vocab_size


def _campaign() -> Campaign:
    """The demonstration campaign with a device cache that holds the wave."""
    campaign, _text = load_campaign("cpu-demo")
    server = campaign.server.model_copy(
        update={"block_tokens": BLOCK_TOKENS, "device_kv_tokens": DEVICE_BLOCKS * BLOCK_TOKENS}
    )
    return campaign.model_copy(update={"server": server})


def _arms(kv_bytes_per_token: int) -> list[Arm]:
    pool_bytes = 2 * SESSIONS * SESSION_TOKENS * kv_bytes_per_token
    ours = {
        "kv_connector": "KvgateTierConnector",
        "kv_connector_module_path": "harness.connector.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "host_pool_bytes": pool_bytes + pool_bytes // 16,  # header pages and read buffers
            "directory": "{tier_dir}",
            "reset_scope": "host",
        },
    }
    peer = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringOffloadingSpec",
            "spec_module_path": "harness.connector.peer",
            "cpu_bytes_to_use": pool_bytes,
            "secondary_tiers": [{"type": "fs", "root_dir": "{tier_dir}"}],
        },
    }
    return [
        Arm(name=RECOMPUTE, role="recompute"),
        Arm(name=DEVICE, role="hbm_only"),
        Arm(name=OURS, role="tiered", medium="disk", kv_transfer=ours),
        Arm(name=PEER, role="tiered", medium="disk", kv_transfer=peer),
    ]


@contextlib.contextmanager
def running(
    directory: Path,
    names: Sequence[str] = (RECOMPUTE, DEVICE, OURS, PEER),
    change: Callable[[Arm], Arm] = lambda arm: arm,
) -> Iterator[dict[str, _Arm]]:
    """The servers of these arms, each changed as asked, with their load clients."""
    campaign, home = _campaign(), arms.default_home()
    architecture = campaign.model.generated
    model = ensure_model(architecture, home / "models")
    with contextlib.ExitStack() as stack:
        found: dict[str, _Arm] = {}
        for arm in _arms(architecture.kv_bytes_per_token):
            if arm.name not in names:
                continue
            arm = change(arm)
            place = directory / arm.name
            place.mkdir()
            spec = arms.launch_spec(
                campaign,
                arm,
                home=home,
                model_dir=model,
                tier_dir=place / "tier",
                import_path=arms.link_package(directory / "import"),
                allowed_cores=arms.allowed_cores(),
                inherited=dict(os.environ),
            )
            say(f"starting {arm.name}")
            server = stack.enter_context(ManagedServer(spec, log_path=place / "server.log"))
            load = stack.enter_context(
                LoadClient(
                    base_url=server.base_url,
                    model=server.model,
                    log_path=place / "load.log",
                    workers=1,  # eight users are few, and the processors are the servers'
                )
            )
            found[arm.name] = _Arm(server, load, place / "records.jsonl")
        _check_equal(found)
        yield found


def _check_equal(servers: dict[str, _Arm]) -> None:
    """Arms differ in nothing that alone changes the figures; both tiers bypass the page cache."""
    threads = {
        arm.name: arm.server.facts().effective.get("compute_threads") for arm in servers.values()
    }
    say(f"OpenMP threads: {json.dumps(threads)}")
    if len(set(threads.values())) != 1 or None in threads.values():
        raise ServerError(f"the arms run on different OpenMP threads: {threads}")
    ours, peer = servers[OURS], servers[PEER]
    is_direct = '"direct_io": true' in ours.server.log_text()
    if not is_direct or "O_DIRECT is not supported" in peer.server.log_text():
        raise ServerError("a tier does not use O_DIRECT; choose another --directory")


def _wait_quiet(servers: dict[str, _Arm]) -> None:
    """Waits until no server uses processor time. Raises ServerError when that never happens."""
    deadline = time.monotonic() + WAIT_S
    before = sum(arm.cpu_s() for arm in servers.values())
    while True:
        time.sleep(QUIET_WATCH_S)
        now = sum(arm.cpu_s() for arm in servers.values())
        cores = (now - before) / QUIET_WATCH_S
        if cores <= QUIET_CORES:
            return
        if time.monotonic() > deadline:
            raise ServerError(f"idle servers use {cores:.2f} cores (allowed: {QUIET_CORES})")
        before = now


def _schedule(phase: str, *, seed: int, users: int, sessions: int) -> Schedule:
    """Every session once; users are released together and take the next when one is done."""
    return Schedule(
        "benchmark",
        phase,
        tuple(
            PlannedRequest(
                seq=session,
                user=session % users,
                session=session,
                turn=session // users,
                prompt=PromptRecipe(seed, session, SESSION_TOKENS, vocabulary()),
                output_tokens=OUTPUT_TOKENS,
            )
            for session in range(sessions)
        ),
        logprobs=False,
    )


def _check_cached(who: str, result: LoadResult, wanted: int) -> None:
    found = {record.cached_tokens for record in result.records}
    if found != {wanted}:
        raise ServerError(
            f"{who}: requests report {sorted(map(str, found))} cached tokens, expected {wanted}"
        )


def _rotated(items: Sequence[Any], by: int) -> Sequence[Any]:
    at = by % len(items)
    return [*items[at:], *items[:at]]


def _print_tables(
    ttft_s: dict[tuple[str, int], list[float]],
    populate_s: dict[str, list[float]],
    levels: Sequence[int],
) -> None:
    say("\nTTFT p50, ms: median over passes [95 % bootstrap interval]")
    say("  " + "".join(f"{text:>28}" for text in ("", *(f"concurrency {n}" for n in levels))))
    for cell in (RECOMPUTED, *CELLS):
        texts = [figure(ttft_s[cell.name, level]).text(1e3) for level in levels]
        say("  " + "".join(f"{text:>28}" for text in (cell.name, *texts)))
    say("\nratio, pass by pass")
    for one, other in (
        ("ours, DRAM", "peer, DRAM"),
        ("ours, DRAM", "device hit"),
        ("ours, DRAM", "recompute"),
        ("ours, disk", "peer, disk"),
        ("ours, disk", "device hit"),
        ("ours, disk", "recompute"),
    ):
        texts = [ratio(ttft_s[one, n], ttft_s[other, n]).text(digits=3) for n in levels]
        say("  " + "".join(f"{text:>28}" for text in (f"{one} / {other}", *texts)))
    say(f"\npopulate, s for {SESSIONS} sessions at concurrency {SESSIONS}")
    for name, values in populate_s.items():
        text = figure(values).text(digits=2)
        say(
            f"  {name}: {text}, against {DEVICE} {ratio(values, populate_s[DEVICE]).text(digits=3)}"
        )


def _add_bounds(
    report: Report,
    ttft_s: dict[tuple[str, int], list[float]],
    populate_s: dict[str, list[float]],
    levels: Sequence[int],
) -> None:
    for level in levels:
        dram, disk = ttft_s["ours, DRAM", level], ttft_s["ours, disk", level]
        if level <= 4:
            report.check(
                f"DRAM / peer DRAM at {level}", ratio(dram, ttft_s["peer, DRAM", level]), "<=", 0.95
            )
            report.check(
                f"DRAM / device hit at {level}", ratio(dram, ttft_s["device hit", level]), "<", 1
            )
        report.check(
            f"disk / peer disk at {level}", ratio(disk, ttft_s["peer, disk", level]), "<", 1
        )
    report.check(
        "populate with stores / without",
        ratio(populate_s[OURS], populate_s[DEVICE]),
        "<=",
        1.03,
    )
