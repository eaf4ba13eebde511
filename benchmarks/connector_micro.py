"""The micro part of `benchmarks.connector`: restores without vLLM, against plain copies and reads.

Blocks have the size and layout of the demonstration model: 1 MiB in four runs. DRAM: the worker
restores loads of 32 blocks from host slots, everything it does per load included; the yardstick
copies the same slots in one piece each, with one thread, to the same memory. Nothing is copied
twice before 768 MiB of other data went through the caches. Disk: the worker reads, verifies and
restores files with its default threads; the yardstick reads the same files into as
much memory of the same kind with O_DIRECT and does nothing else, at several queue depths.
"""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.connector_report import Report, figure, ratio, say
from harness.connector.blockfile import PAGE_BYTES, file_bytes
from harness.connector.config import TierConfig
from harness.connector.file_store import FileStore
from harness.connector.layout import BlockLayout, ByteArray, CacheTensor
from harness.connector.meta import LoadBlock, LoadRequest, LoadSource, StepPlan, StoreBlock
from harness.connector.worker import HostMemory, TierWorker
from harness.errors import HarnessError

LAYERS, RUN_BYTES = 4, 256 << 10
BLOCK_BYTES = LAYERS * RUN_BYTES
LOAD_BLOCKS = 32
DRAM_BLOCKS = 768
DISK_BLOCKS = 256
DEPTHS = (1, 2, 4, 8)
NAMESPACE = "ab" * 16
WAIT_S = 120.0


def run_micro(report: Report, *, passes: int, directory: Path) -> None:
    """Measures, prints both tables, adds the bounds. Raises HarnessError when a load fails."""
    _run_dram(report, passes)
    _run_disk(report, passes, directory)


class _Rig:
    """A worker on a device cache of its own, one allocation with the layers one after another."""

    def __init__(self, block_count: int, store: FileStore | None) -> None:
        config = TierConfig(host_pool_bytes=block_count * file_bytes(BLOCK_BYTES))
        self.storage: ByteArray = _memory(block_count * BLOCK_BYTES)
        layout = BlockLayout(
            [
                CacheTensor(
                    name=f"layer{layer}",
                    storage=self.storage,
                    offset_bytes=layer * block_count * RUN_BYTES,
                    shape=(block_count, RUN_BYTES),
                    strides=(RUN_BYTES, 1),
                    item_bytes=1,
                    dtype="uint8",
                )
                for layer in range(LAYERS)
            ],
            block_count,
        )
        self.memory = HostMemory(block_count, file_bytes(BLOCK_BYTES))
        self.worker = TierWorker(config, layout, self.memory, pool_slots=block_count, store=store)
        self._names = map(str, itertools.count())

    def fill(self, keys: Sequence[bytes], *, to_disk: bool) -> None:
        """Stores device block i under key i in slot i; with ``to_disk`` waits for the files."""
        self.storage[:] = np.frombuffer(
            np.random.default_rng(len(keys)).bytes(self.storage.size), np.uint8
        )
        plan = StepPlan(
            stores=tuple(StoreBlock(key, index, index, to_disk) for index, key in enumerate(keys))
        )
        self.worker.begin_step(plan)
        self.worker.save(plan)
        deadline = time.monotonic() + WAIT_S
        missing = len(keys) if to_disk else 0
        while missing:
            self.worker.poll(is_idle=False)
            written = self.worker.take_report()
            missing -= len(written.written)
            if written.unwritten or time.monotonic() > deadline:
                raise HarnessError(f"{missing} of {len(keys)} files were not written")
            time.sleep(0.01)  # the writer's own time

    def restore(self, loads: Sequence[Sequence[LoadBlock]]) -> float:
        """Seconds from planning these loads to the last one's end."""
        requests = tuple(LoadRequest(next(self._names), tuple(blocks)) for blocks in loads)
        started = time.perf_counter()
        plan = StepPlan(loads=requests, is_idle=True)
        self.worker.begin_step(plan)
        self.worker.copy_ready()
        waiting = {request.request_id for request in requests}
        while waiting:
            waiting -= self.worker.poll(is_idle=True)
            if time.perf_counter() - started > WAIT_S:
                raise HarnessError(f"{len(waiting)} loads did not end in {WAIT_S:.0f} s")
        failed = self.worker.take_failed_blocks()
        self.worker.take_report()
        spent_s = time.perf_counter() - started
        if failed:
            raise HarnessError(f"{len(failed)} blocks could not be restored")
        return spent_s


def _run_dram(report: Report, passes: int) -> None:
    rig = _Rig(DRAM_BLOCKS, store=None)
    keys = [os.urandom(16) for _ in range(DRAM_BLOCKS)]
    rig.fill(keys, to_disk=False)
    whole = rig.storage.reshape(DRAM_BLOCKS, BLOCK_BYTES)
    order = list(range(DRAM_BLOCKS))
    random.Random(1).shuffle(order)
    groups = [order[at : at + LOAD_BLOCKS] for at in range(0, DRAM_BLOCKS, LOAD_BLOCKS)]

    def ours() -> float:
        return sum(
            rig.restore([[LoadBlock(keys[i], i, LoadSource.HOST, i) for i in group]])
            for group in groups
        )

    def plain() -> float:
        started = time.perf_counter()
        for i in order:
            whole[i] = rig.memory.slots[i, PAGE_BYTES : PAGE_BYTES + BLOCK_BYTES]
        return time.perf_counter() - started

    found = _interleaved({"memcpy": plain, "restore": ours}, 2 * passes + 1)
    rates = {
        name: [DRAM_BLOCKS * BLOCK_BYTES / seconds / 1e9 for seconds in values[1:]]
        for name, values in found.items()
    }
    rig.worker.stop()
    say("DRAM, GB/s, one thread, cache-cold")
    for name, values in rates.items():
        say(f"  {name}: {figure(values).text(digits=2)}")
    report.check("DRAM restore / memcpy", ratio(rates["restore"], rates["memcpy"]), ">=", 0.90)


def _run_disk(report: Report, passes: int, directory: Path) -> None:
    say(f"disk, GB/s, {DISK_BLOCKS} files, O_DIRECT")
    rates: dict[str, list[float]] = {}
    store = FileStore(directory / "micro", NAMESPACE, BLOCK_BYTES)
    store.open({"made_by": "benchmarks.connector"})
    if not store.direct_io:
        raise HarnessError(f"{directory} does not support O_DIRECT; choose another --directory")
    rig = _Rig(DISK_BLOCKS, store)
    memory = HostMemory(DISK_BLOCKS, file_bytes(BLOCK_BYTES))
    buffers = [memory.buffer(index) for index in range(DISK_BLOCKS)]
    for number in range(passes):
        keys = [os.urandom(16) for _ in range(DISK_BLOCKS)]
        rig.fill(keys, to_disk=True)
        os.sync()  # no write of ours may be in the reads' way
        paths = [store.path_of(key) for key in keys]
        jobs: dict[str, Callable[[], float]] = {"restore": _disk_restore(rig, keys)}
        for depth in DEPTHS:
            jobs[f"reader, {depth} deep"] = _plain_reader(paths, buffers, depth)
        jobs["reader, 1 deep"]()  # whatever lies below O_DIRECT has then seen the files once
        names = list(jobs)
        at = number % len(names)
        for name in [*names[at:], *names[:at]]:
            rates.setdefault(name, []).append(
                DISK_BLOCKS * file_bytes(BLOCK_BYTES) / jobs[name]() / 1e9
            )
        for key in keys:
            store.drop(key)
        say(f"  pass {number + 1}/{passes}: restore {rates['restore'][-1]:.2f}, reader "
            + ", ".join(f"{rates[f'reader, {d} deep'][-1]:.2f}" for d in DEPTHS))  # fmt: skip
    rig.worker.stop()
    for name, values in rates.items():
        say(f"  {name}: {figure(values).text(digits=2)}")
    best = max((n for n in rates if n != "restore"), key=lambda n: figure(rates[n]).median)
    report.check(f"disk restore / {best}", ratio(rates["restore"], rates[best]), ">=", 0.85)


def _disk_restore(rig: _Rig, keys: Sequence[bytes]) -> Callable[[], float]:
    blocks = [LoadBlock(key, i, LoadSource.DISK, i) for i, key in enumerate(keys)]
    loads = [blocks[at : at + LOAD_BLOCKS] for at in range(0, len(blocks), LOAD_BLOCKS)]
    return lambda: rig.restore(loads)


def _plain_reader(
    paths: Sequence[Path], buffers: Sequence[memoryview], depth: int
) -> Callable[[], float]:
    """Reads every file once with ``depth`` threads, each file into its own buffer."""

    def read() -> float:
        left = iter(list(zip(paths, buffers, strict=True)))
        lock = threading.Lock()
        short: list[Path] = []

        def work() -> None:
            while True:
                with lock:
                    path, buffer = next(left, (None, None))
                if path is None or buffer is None:
                    return
                descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
                try:
                    if os.preadv(descriptor, [buffer], 0) != len(buffer):
                        short.append(path)
                finally:
                    os.close(descriptor)

        threads = [threading.Thread(target=work) for _ in range(depth)]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        spent_s = time.perf_counter() - started
        if short:
            raise HarnessError(f"{len(short)} short reads, the first of {short[0]}")
        return spent_s

    return read


def _interleaved(jobs: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in jobs}
    for number in range(rounds):
        names = list(jobs)
        for name in names if number % 2 else reversed(names):
            found[name].append(jobs[name]())
    return found


def _memory(size_bytes: int) -> ByteArray:
    """Page-aligned memory whose pages are there already, large ones as in the host pool."""
    slots = -(-size_bytes // PAGE_BYTES)
    flat: ByteArray = HostMemory(slots, PAGE_BYTES).slots.reshape(-1)[:size_bytes]
    return flat
