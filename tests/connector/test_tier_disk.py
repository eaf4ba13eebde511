"""The disk tier over time: bounds, sickness and recovery, other servers, reading ahead."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from harness.connector import file_io
from harness.connector.file_store import FileStore
from harness.connector.keys import chain_keys
from harness.connector.quota import USAGE_NAME

from .rig import BLOCK_TOKENS, NAMESPACE, Make, Rig, kv_of, used_bytes

FILE_BYTES = 8192


def _prompt(number: int, blocks: int = 5) -> list[int]:
    return list(range(1000 * number, 1000 * number + blocks * BLOCK_TOKENS))


def _count(rig: Rig, name: str) -> float:
    """The counter's sum over the rig's life."""
    taken = rig.worker.counters.take(BLOCK_TOKENS)["counters"]
    seen: dict[str, float] = rig.__dict__.setdefault("seen", {})
    for key, value in taken.items():
        seen[key] = seen.get(key, 0.0) + value
    return seen.get(name, 0.0)


def _until(rig: Rig, condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < limit
        rig.step()


def _files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*/r0/*/*.kv"))


def test_the_bound_holds_and_used_prompts_stay(make: Make, tmp_path: Path) -> None:
    """Three times the bound passes through; a prompt used again and again survives."""
    bound = 20 * FILE_BYTES
    rig = make(
        tmp_path, pool_slots=8, disk_capacity_bytes=bound,
        disk_high_watermark=0.95, disk_low_watermark=0.9,
    )  # fmt: skip
    canary = _prompt(99)
    rig.serve(canary)
    rig.drain()
    for number in range(12):
        rig.serve(_prompt(number))
        rig.drain()
        served = rig.serve(canary)
        assert (served.blocks, served.external_tokens, served.has_failed) == (
            kv_of(canary), 20, False,
        )  # fmt: skip
        rig.drain()
        assert len(_files(tmp_path)) * FILE_BYTES <= bound
    assert _count(rig, "stored_blocks.disk") == 13 * 5
    assert _count(rig, "evicted_blocks.disk") >= 13 * 5 - 20
    assert _count(rig, "dropped_store_blocks.no_space") == 0
    assert set(rig.scheduler._on_disk) == {bytes.fromhex(p.stem) for p in _files(tmp_path)}


def test_the_tail_of_a_prompt_is_evicted_before_its_head(make: Make, tmp_path: Path) -> None:
    rig = make(tmp_path, pool_slots=8, disk_capacity_bytes=6 * FILE_BYTES, disk_low_watermark=0.95)
    old, new = _prompt(1), _prompt(2, blocks=2)
    rig.serve(old)
    rig.drain()
    _until_touched(rig, tmp_path, old)
    rig.serve(new)
    rig.drain()
    left = {path.stem for path in _files(tmp_path)}
    keys = [key.hex() for key in chain_keys(NAMESPACE, old, BLOCK_TOKENS)]
    assert [key in left for key in keys] == [True] * 3 + [False] * 2


def _until_touched(rig: Rig, directory: Path, prompt: list[int]) -> None:
    """Steps until the prompt's files are the newest of all, its head newer than its tail."""
    keys = chain_keys(NAMESPACE, prompt, BLOCK_TOKENS)
    names = [key.hex() for key in reversed(keys)]

    def is_touched() -> bool:
        files = sorted(_files(directory), key=lambda path: path.stat().st_mtime_ns)
        times = [path.stat().st_mtime_ns for path in files[-len(names) :]]
        return [path.stem for path in files[-len(names) :]] == names and all(
            after - before == 1000 for before, after in pairwise(times)
        )

    _until(rig, is_touched)


def test_the_order_of_use_survives_a_restart(make: Make, tmp_path: Path) -> None:
    first = make(tmp_path, pool_slots=16)
    for number in (1, 2):
        first.serve(_prompt(number))
        first.drain()
    first.serve(_prompt(1))
    first.drain()
    _until_touched(first, tmp_path, _prompt(1))
    first.close()
    again = make(tmp_path, pool_slots=16, disk_capacity_bytes=10 * FILE_BYTES,
                 disk_low_watermark=0.95)  # fmt: skip
    again.serve(_prompt(3, blocks=3))
    again.drain()
    assert again.serve(_prompt(1)).external_tokens == 20


def test_the_count_is_right_after_a_crash_and_foreign_deletions(make: Make, tmp_path: Path) -> None:
    first = make(tmp_path, pool_slots=8)
    first.serve(_prompt(1))
    first.drain()
    first.close()
    (tmp_path / USAGE_NAME).write_bytes((10**9).to_bytes(8, "little") * 2)
    _files(tmp_path)[0].unlink()
    again = make(tmp_path, pool_slots=8, disk_capacity_bytes=50 * FILE_BYTES)
    again.serve(_prompt(2))
    again.drain()
    assert used_bytes(tmp_path) == 9 * FILE_BYTES
    assert _count(again, "evicted_blocks.disk") == 0


class _SickStore(FileStore):
    """Fails with ``code`` while it is set; class attributes let a test turn it on and off."""

    read_code = write_code = 0

    def read_into(self, key: bytes, buffer: memoryview) -> int:
        if self.read_code:
            raise OSError(self.read_code, os.strerror(self.read_code))
        return super().read_into(key, buffer)

    def write_from(self, key: bytes, buffer: memoryview) -> bool:
        if self.write_code:
            raise OSError(self.write_code, os.strerror(self.write_code))
        return super().write_from(key, buffer)

    def probe(self) -> None:
        if self.write_code:
            raise OSError(self.write_code, os.strerror(self.write_code))
        super().probe()


@pytest.fixture
def sick() -> Iterator[type[_SickStore]]:
    yield _SickStore
    _SickStore.read_code = _SickStore.write_code = 0


def _wrap(kind: type[FileStore]) -> Callable[[FileStore], FileStore]:
    return lambda s: kind(s.directory, s.namespace, s.payload_bytes, quota=s.quota)


def test_read_errors_open_the_breaker_and_a_probe_closes_it(
    make: Make, tmp_path: Path, sick: type[_SickStore]
) -> None:
    first = make(tmp_path, pool_slots=8)
    for number in (1, 2):
        first.serve(_prompt(number))
        first.drain()
    rig = make(tmp_path, pool_slots=8, wrap_store=_wrap(sick), probe_interval_s=0.05)
    sick.read_code = sick.write_code = errno.EIO
    served = rig.serve(_prompt(1))
    assert (served.blocks, served.has_failed) == (kv_of(_prompt(1)), True)
    assert rig.scheduler.gauges()["disk_enabled"] == 0
    failed = _count(rig, "load_failed_blocks.unreadable") + _count(rig, "load_failed_blocks.sick")
    assert failed == 5
    assert _count(rig, "load_failed_blocks.unreadable") >= 3
    assert _count(rig, "io_errors.read") >= 3
    assert _count(rig, "breaker_opened") >= 1
    assert rig.serve(_prompt(2)).external_tokens == 0, "the sick directory is left alone"
    sick.read_code = sick.write_code = 0
    _until(rig, lambda: rig.scheduler.gauges()["disk_enabled"] == 1)
    again = make(tmp_path, pool_slots=8).serve(_prompt(2))
    assert (again.blocks, again.external_tokens) == (kv_of(_prompt(2)), 20)


def test_a_read_only_directory_still_serves_reads(
    make: Make, tmp_path: Path, sick: type[_SickStore]
) -> None:
    first = make(tmp_path, pool_slots=8)
    first.serve(_prompt(1))
    first.drain()
    sick.write_code = errno.EROFS
    rig = make(tmp_path, pool_slots=8, wrap_store=_wrap(_SickStore), probe_interval_s=60)
    rig.serve(_prompt(2))
    rig.drain()
    rig.serve(_prompt(3))
    rig.drain()
    assert _count(rig, "dropped_store_blocks.io_error") == 3
    assert _count(rig, "dropped_store_blocks.sick") == 7
    assert rig.worker.take_statistics(BLOCK_TOKENS)["gauges"]["breaker_state"] == 1
    served = rig.serve(_prompt(1))
    assert (served.blocks, served.hits, served.has_failed) == (kv_of(_prompt(1)), (0, 20), False)


def test_a_directory_that_vanished_keeps_its_index(make: Make, tmp_path: Path) -> None:
    directory = tmp_path / "tier"
    first = make(directory, pool_slots=8)
    first.serve(_prompt(1))
    first.drain()
    rig = make(directory, pool_slots=8, probe_interval_s=0.05, rescan_interval_s=60)
    directory.rename(tmp_path / "away")
    served = rig.serve(_prompt(1))
    assert (served.blocks, served.has_failed) == (kv_of(_prompt(1)), True)
    assert rig.scheduler.gauges()["disk_enabled"] == 0
    (tmp_path / "away").rename(directory)
    _until(rig, lambda: rig.scheduler.gauges()["disk_enabled"] == 1)
    rig.drain()
    rig.scheduler._pool.clear()  # type: ignore[union-attr]
    again = rig.serve(_prompt(1))
    assert (again.blocks, again.hits) == (kv_of(_prompt(1)), (0, 20))


class _HangingWrites(FileStore):
    gate = threading.Event()

    def write_from(self, key: bytes, buffer: memoryview) -> bool:
        self.gate.wait(30)
        return super().write_from(key, buffer)


def test_a_hanging_write_opens_the_breaker(make: Make, tmp_path: Path) -> None:
    _HangingWrites.gate = threading.Event()
    rig = make(
        tmp_path, pool_slots=8, deadline_s=0.05, wrap_store=_wrap(_HangingWrites),
        probe_interval_s=0.05,
    )  # fmt: skip
    rig.serve(_prompt(1))
    _until(rig, lambda: _count(rig, "breaker_opened") == 1)
    served = rig.serve(_prompt(1))
    assert (served.blocks, served.hits) == (kv_of(_prompt(1)), (20, 0))
    _HangingWrites.gate.set()
    rig.drain()
    assert len(_files(tmp_path)) >= 1


def test_no_space_is_a_dropped_store_and_nothing_else(
    make: Make, tmp_path: Path, sick: type[_SickStore]
) -> None:
    rig = make(tmp_path, pool_slots=8, wrap_store=_wrap(sick))
    sick.write_code = errno.ENOSPC
    rig.serve(_prompt(1))
    rig.drain()
    assert _count(rig, "dropped_store_blocks.no_space") == 5
    assert _count(rig, "io_errors.write") == 0
    assert used_bytes(tmp_path) == 0
    sick.write_code = 0
    rig.serve(_prompt(2))
    rig.drain()
    assert len(_files(tmp_path)) == 5


class _WatchingStore(FileStore):
    """Notes whether the engine computed when a write began."""

    is_computing: Callable[[], bool] = staticmethod(lambda: False)
    seen: list[bool]

    def write_from(self, key: bytes, buffer: memoryview) -> bool:
        self.seen.append(self.is_computing())
        return super().write_from(key, buffer)


@pytest.mark.parametrize(("blocks", "pool_slots", "waits"), [(1, 8, True), (3, 4, False)])
def test_writes_wait_for_a_pause_unless_the_backlog_presses(
    make: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    blocks: int,
    pool_slots: int,
    waits: bool,
) -> None:
    monkeypatch.setattr(file_io, "_YIELD_S", 60.0)
    rig = make(tmp_path, pool_slots=pool_slots, wrap_store=_wrap(_WatchingStore))
    io, store = rig.worker._io, rig.stores[0]
    assert io is not None
    assert isinstance(store, _WatchingStore)
    store.seen, store.is_computing = [], lambda: io._is_computing
    io.set_computing(is_computing=True)
    for number in range(blocks):
        io.submit_write(bytes([number]) * 16, number)
    if not waits:
        _until_written(io, blocks - pool_slots // 2)
    io.set_computing(is_computing=False)
    _until_written(io, blocks if waits else pool_slots // 2)
    assert store.seen[0] is not waits


def _until_written(io: file_io.FileIo, count: int) -> None:
    limit = time.monotonic() + 30
    while count > 0:
        assert time.monotonic() < limit
        count -= len(io.take_results())
        time.sleep(0.001)


class _ResetBetween(FileStore):
    """Another server resets the directory just before the first write."""

    is_done = False

    def write_from(self, key: bytes, buffer: memoryview) -> bool:
        if not self.is_done:
            self.is_done = True
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return super().write_from(key, buffer)


def test_a_write_during_another_servers_reset_is_tried_again(make: Make, tmp_path: Path) -> None:
    rig = make(tmp_path, pool_slots=8, wrap_store=_wrap(_ResetBetween))
    rig.serve(_prompt(1))
    rig.drain()
    assert len(_files(tmp_path)) == 5
    assert _count(rig, "io_errors.write") == 0
    assert used_bytes(tmp_path) == 5 * FILE_BYTES


def test_two_servers_find_each_others_files(make: Make, tmp_path: Path) -> None:
    one, two = make(tmp_path, pool_slots=8), make(tmp_path, pool_slots=8)
    one.serve(_prompt(1))
    one.drain()
    keys = chain_keys(NAMESPACE, _prompt(1), BLOCK_TOKENS)
    _until(two, lambda: all(key in two.scheduler._on_disk for key in keys))
    served = two.serve(_prompt(1))
    assert (served.blocks, served.hits) == (kv_of(_prompt(1)), (0, 20))
    two.drain()
    assert _count(two, "stored_blocks.disk") == 0
    for path in _files(tmp_path):
        path.unlink()
    _until(one, lambda: not len(one.scheduler._on_disk))


def test_a_waiting_request_is_read_ahead_once_and_counts_as_disk(
    make: Make, tmp_path: Path
) -> None:
    first = make(tmp_path, pool_slots=40)
    first.serve(_prompt(1))
    first.drain()
    rig = make(tmp_path, pool_slots=40)
    request = rig.request(_prompt(1))
    rig.scheduler.arrive(request)
    _until(rig, lambda: _count(rig, "prefetched_blocks") == 5)
    ids, external = rig.start(request)
    assert (external, rig.scheduler.hit_tokens(request.request_id)) == (20, (0, 20))
    rig.wait(request)
    assert [rig._get(block) for block in ids] == kv_of(_prompt(1))
    assert _count(rig, "hit_tokens.disk") == 20
    assert _count(rig, "file_read_bytes") == 5 * FILE_BYTES
    rig.scheduler.finish(request.request_id)
    assert rig.serve(_prompt(1)).hits == (20, 0)
    assert rig.scheduler._pool.pinned_count == 0  # type: ignore[union-attr]


def test_a_file_found_missing_by_reading_ahead_is_counted(make: Make, tmp_path: Path) -> None:
    first = make(tmp_path, pool_slots=40)
    first.serve(_prompt(1))
    first.drain()
    rig = make(tmp_path, pool_slots=40, rescan_interval_s=3600)
    chain_path = rig.worker._io._store.path_of  # type: ignore[union-attr]
    chain_path(chain_keys(NAMESPACE, _prompt(1), BLOCK_TOKENS)[4]).unlink()
    rig.scheduler.arrive(rig.request(_prompt(1)))
    _until(rig, lambda: _count(rig, "missing_files") + _count(rig, "prefetched_blocks") == 5)
    assert _count(rig, "missing_files") == 1
    assert rig.serve(_prompt(1)).hits == (0, 16)


def test_reading_ahead_takes_a_quarter_of_the_pool_at_most(make: Make, tmp_path: Path) -> None:
    first = make(tmp_path, pool_slots=40)
    for number in range(4):
        first.serve(_prompt(number))
        first.drain()
    rig = make(tmp_path, pool_slots=16)
    requests = [rig.request(_prompt(number)) for number in range(4)]
    for request in requests:
        rig.scheduler.arrive(request)
    for _ in range(20):
        rig.step()
    _until(rig, lambda: _count(rig, "prefetched_blocks") == 4)
    assert _count(rig, "file_read_bytes") == 4 * FILE_BYTES
    for request in requests:
        rig.scheduler.finish(request.request_id)
    assert not rig.scheduler._prefetched
    assert not rig.scheduler._waiting


def test_a_request_that_is_scheduled_at_once_is_not_read_ahead(make: Make, tmp_path: Path) -> None:
    first = make(tmp_path, pool_slots=40)
    first.serve(_prompt(1))
    first.drain()
    rig = make(tmp_path, pool_slots=40)
    request = rig.request(_prompt(1))
    rig.scheduler.arrive(request)
    rig.start(request)
    assert rig.step().prefetches == ()
    rig.wait(request)
    assert _count(rig, "prefetched_blocks") == 0


def test_a_scan_leaves_shared_prompts_in_host_memory(make: Make) -> None:
    rig = make(None, pool_slots=20)
    rig.serve(_prompt(1))
    assert rig.serve(_prompt(1)).hits == (20, 0)
    for number in range(2, 12):
        rig.serve(_prompt(number))
    assert rig.serve(_prompt(1)).hits == (20, 0)
    assert rig.scheduler.take_counts()["evicted_blocks.host"] == 55 - 20
