"""The scheduler part of `benchmarks.connector`: time and memory of the index, without vLLM.

The index is told of its blocks as at a start: by listing a directory, here a made-up one. A step is
what the scheduler's side does for one request of 4096 tokens that is found on disk: arrival, lookup
of 32 blocks, load plan, step plan, the worker's report, end. Keys are computed from token ids in
each step, as for a new request. The pool is smaller than what is asked for in turn, so every step
allocates and evicts too.
"""

from __future__ import annotations

import gc
import statistics
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.connector_report import Report, figure, ratio, say
from harness.connector.blockfile import KEY_BYTES, file_bytes
from harness.connector.config import TierConfig
from harness.connector.file_store import FileStore
from harness.connector.keys import chain_keys
from harness.connector.meta import NO_SLOT, LoadSource, StepPlan, WorkerFacts, WorkerReport
from harness.connector.scheduler import ScheduledRequest, TierScheduler
from harness.errors import HarnessError

SIZES = (10_000, 1_000_000)
BLOCK_TOKENS = 128
SESSION_TOKENS = 4096
SESSION_BLOCKS = SESSION_TOKENS // BLOCK_TOKENS
SESSIONS = 200
POOL_SLOTS = 2048
BLOCK_BYTES = 1 << 20
ROUNDS = 5
NAMESPACE = "ab" * 16


@dataclass(frozen=True)
class _Request:
    """What the scheduler's side looks at."""

    request_id: str
    all_token_ids: Sequence[int]

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


class _ListedStore(FileStore):
    """A directory that says it holds these keys; nothing is on disk."""

    def __init__(self, keys: np.ndarray) -> None:
        """``keys``: ``(count, 16) uint8``, so that they are no Python objects before a listing."""
        super().__init__(Path("/nonexistent"), NAMESPACE, BLOCK_BYTES)
        self._keys = keys[np.argsort(keys[:, 0], kind="stable")]
        self._starts = np.searchsorted(self._keys[:, 0], np.arange(257))

    def of_rank(self, rank: int) -> FileStore:
        """One rank is all there is."""
        return self

    def check_present(self) -> None:
        """Always there."""

    def bucket_changes(self) -> list[int]:
        """Every bucket changed once, long ago."""
        return [1] * 256

    def list_bucket(self, bucket: int) -> frozenset[bytes]:
        """The keys that begin with this byte."""
        part = self._keys[self._starts[bucket] : self._starts[bucket + 1]]
        return frozenset(row.tobytes() for row in part)


def run_scheduler(report: Report) -> None:
    """Measures, prints, adds the bounds. Raises HarnessError when a hit is not found."""
    prompts = [
        np.random.default_rng(session).integers(0, 50_000, SESSION_TOKENS).tolist()
        for session in range(SESSIONS)
    ]
    chains = [chain_keys(NAMESPACE, prompt, BLOCK_TOKENS) for prompt in prompts]
    wanted = np.frombuffer(b"".join(key for keys in chains for key in keys), np.uint8)
    wanted = wanted.reshape(-1, KEY_BYTES)

    bytes_per_block: dict[int, float] = {}
    runners: dict[int, Callable[[], list[float]]] = {}
    for size in SIZES:
        others = np.frombuffer(
            np.random.default_rng(size).bytes((size - len(wanted)) * KEY_BYTES), np.uint8
        ).reshape(-1, KEY_BYTES)
        store = _ListedStore(np.concatenate([wanted, others]))
        bytes_per_block[size] = _index_bytes(store) / size
        say(f"index of {size} blocks: {bytes_per_block[size]:.0f} bytes per block")
        runners[size] = _runner(_attached(store), prompts)
    found: dict[int, list[float]] = {size: [] for size in SIZES}
    for number in range(ROUNDS + 1):
        for size in SIZES if number % 2 else reversed(SIZES):
            steps_s = runners[size]()
            if number:  # the first fills the pool
                found[size].append(statistics.median(steps_s))
    for size in SIZES:
        text = figure(found[size]).text(1e6)
        say(f"step of a {SESSION_BLOCKS}-block hit, {size} blocks indexed: p50 {text} us")
    small, large = SIZES
    report.check(
        f"scheduler step p50, {large} blocks / {small}", ratio(found[large], found[small]), "<=", 2
    )
    report.check("index", figure([bytes_per_block[large]]), "<=", 200, " bytes per block")


def _attached(store: FileStore) -> TierScheduler:
    scheduler = TierScheduler(
        TierConfig(host_pool_bytes=POOL_SLOTS * file_bytes(BLOCK_BYTES)),
        block_tokens=BLOCK_TOKENS,
        extra_keys=lambda _request, _start, _end, image_index: (None, image_index),
    )
    facts = WorkerFacts(
        namespace=NAMESPACE,
        payload_bytes=BLOCK_BYTES,
        slot_bytes=file_bytes(BLOCK_BYTES),
        slot_count=POOL_SLOTS,
        has_disk=True,
        direct_io=True,
    )
    scheduler.attach(facts, store)
    return scheduler


def _index_bytes(store: FileStore) -> int:
    """What an attached scheduler holds, the slots of its pool included."""
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        scheduler = _attached(store)
        gc.collect()
        held = tracemalloc.get_traced_memory()[0] - before
        scheduler.stop()
    finally:
        tracemalloc.stop()
    return held


def _runner(
    scheduler: TierScheduler, prompts: Sequence[Sequence[int]]
) -> Callable[[], list[float]]:
    """A function that serves every prompt once and returns each step's seconds."""
    turns = iter(range(1 << 62))

    def run() -> list[float]:
        turn = next(turns)
        return [
            _step(scheduler, _Request(f"{turn}-{index}", prompt))
            for index, prompt in enumerate(prompts)
        ]

    return run


def _step(scheduler: TierScheduler, request: _Request) -> float:
    blocks = range(SESSION_BLOCKS)
    started = time.perf_counter()
    scheduler.arrive(request)
    tokens = scheduler.lookup(request, 0)
    scheduler.plan_load(request, blocks, tokens)
    plan = scheduler.build_plan((), is_idle=True)
    spent_s = time.perf_counter() - started
    if tokens != SESSION_TOKENS:
        raise HarnessError(f"{tokens} tokens were found, {SESSION_TOKENS} are on disk")
    restored = _restored(plan)
    started = time.perf_counter()
    scheduler.apply_report(restored)
    share = ScheduledRequest(request.request_id, tokens, 1, blocks, replaces_blocks=True)
    scheduler.build_plan((share,), is_idle=False)
    scheduler.finish(request.request_id)
    return spent_s + time.perf_counter() - started


def _restored(plan: StepPlan) -> WorkerReport:
    """The report of a worker that did all of a plan's loads."""
    report = WorkerReport()
    for load in plan.loads:
        report.finished.append(load.request_id)
        slots = [block.slot for block in load.blocks if block.slot != NO_SLOT]
        report.released += slots
        report.filled += [
            block.slot
            for block in load.blocks
            if block.source is LoadSource.DISK and block.slot != NO_SLOT
        ]
    return report
