"""Scheduler side and worker side together, without vLLM: every answer must be right."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.connector.blockfile import read_block, write_block
from harness.connector.config import ResetScope
from harness.connector.file_store import FileStore
from harness.connector.keys import block_path, chain_keys
from harness.connector.scheduler import ScheduledRequest

from .rig import BLOCK_TOKENS, NAMESPACE, FakeRequest, Make, Rig, kv_of

A = list(range(20))  # five blocks
B = list(range(100, 120))


def _counts(rig: Rig) -> dict[str, int]:
    counters: dict[str, int] = rig.worker.counters.take(BLOCK_TOKENS)["counters"]
    return {name: count for name, count in counters.items() if "seconds" not in name}


def _path(directory: Path, tokens: list[int], index: int) -> Path:
    return block_path(directory, NAMESPACE, chain_keys(NAMESPACE, tokens, BLOCK_TOKENS)[index])


def test_restore_from_host(make: Make) -> None:
    rig = make(None, pool_slots=8)
    assert rig.serve(A).external_tokens == 0
    served = rig.serve(A)
    assert (served.blocks, served.external_tokens, served.hits) == (kv_of(A), 20, (20, 0))


def test_restore_from_disk_after_a_restart(make: Make, tmp_path: Path) -> None:
    first = make(tmp_path, pool_slots=8)
    first.serve(A)
    first.drain()
    served = make(tmp_path, pool_slots=8).serve(A)
    assert (served.blocks, served.external_tokens, served.hits) == (kv_of(A), 20, (0, 20))


def test_counters_of_a_store_and_a_disk_restore(make: Make, tmp_path: Path) -> None:
    rig = make(tmp_path, pool_slots=8)
    rig.serve(A)
    rig.drain()
    assert _counts(rig) == {
        "stored_blocks.host": 5,
        "stored_blocks.disk": 5,
        "write_bytes.host": 5 * 48,
        "write_bytes.disk": 5 * 48,
    }
    other = make(tmp_path, pool_slots=8)
    other.serve(A)
    assert _counts(other) == {
        "hit_tokens.disk": 20,
        "read_bytes.disk": 5 * 48,
        "file_read_bytes": 5 * 8192,
    }


def test_a_partial_block_is_not_stored(make: Make) -> None:
    rig = make(None, pool_slots=8)
    rig.serve(A[:7])
    assert rig.serve(A[:7]).external_tokens == 4


def test_load_starts_after_the_device_hit(make: Make) -> None:
    rig = make(None, pool_slots=8)
    rig.serve(A)
    served = rig.serve(A, device_blocks=2)
    assert (served.blocks, served.external_tokens) == (kv_of(A), 12)


def test_loaded_blocks_are_not_stored_again(make: Make, tmp_path: Path) -> None:
    first = make(tmp_path, pool_slots=8)
    first.serve(A)
    first.drain()
    rig = make(tmp_path, pool_slots=8)
    rig.serve([*A, 7, 7, 7, 7])
    rig.drain()
    assert _counts(rig)["write_bytes.host"] == 48


def test_disk_hit_fills_the_host_pool(make: Make, tmp_path: Path) -> None:
    first = make(tmp_path, pool_slots=8)
    first.serve(A)
    first.drain()
    rig = make(tmp_path, pool_slots=8)
    rig.serve(A)
    assert rig.serve(A).hits == (20, 0)


@pytest.mark.parametrize("staging", [1, 2, 8])
@pytest.mark.parametrize("pool_slots", [1, 3])
def test_a_small_pool_streams_instead_of_missing(
    make: Make, tmp_path: Path, pool_slots: int, staging: int
) -> None:
    first = make(tmp_path, pool_slots=16)
    first.serve(A)
    first.serve(B)
    first.drain()
    rig = make(tmp_path, pool_slots=pool_slots, staging=staging)
    for tokens in (A, B, A):
        served = rig.serve(tokens)
        assert (served.blocks, served.external_tokens) == (kv_of(tokens), 20)


def test_stores_beyond_the_pool_are_dropped_and_counted(make: Make, tmp_path: Path) -> None:
    rig = make(tmp_path, pool_slots=3)
    rig.serve(A)
    assert rig.scheduler.take_counts() == {"dropped_store_blocks.no_slot": 2}
    rig.drain()
    assert rig.serve(A).external_tokens == 12


def test_concurrent_loads_of_one_key_read_its_file_once(make: Make, tmp_path: Path) -> None:
    first = make(tmp_path, pool_slots=8)
    first.serve(A)
    first.drain()
    for pool_slots in (8, 1):
        rig = make(tmp_path, pool_slots=pool_slots)
        requests = [rig.request(A) for _ in range(3)]
        ids = [rig.start(request)[0] for request in requests]
        for request in requests:
            rig.wait(request)
        assert not rig.invalid
        for blocks in ids:
            assert [rig._get(block) for block in blocks] == kv_of(A)
        assert _counts(rig)["file_read_bytes"] == 5 * 8192
        assert rig.scheduler._pool is not None
        assert rig.scheduler._pool.pinned_count == 0
        assert not rig.scheduler._streaming


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "swap", "empty", "directory"])
def test_damaged_file_is_recomputed_forgotten_and_stored_again(
    make: Make, tmp_path: Path, damage: str
) -> None:
    first = make(tmp_path, pool_slots=8)
    first.serve(A)
    first.drain()
    rig = make(tmp_path, pool_slots=8)
    path = _path(tmp_path, A, 2)
    if damage == "flip":
        content = bytearray(path.read_bytes())
        content[4100] ^= 1
        path.write_bytes(content)
    elif damage == "truncate":
        os.truncate(path, 4096)
    elif damage == "swap":
        path.write_bytes(_path(tmp_path, A, 3).read_bytes())
    elif damage == "empty":
        os.truncate(path, 0)
    else:
        path.unlink()
        if damage == "directory":
            path.mkdir()
    served = rig.serve(A)
    assert (served.blocks, served.has_failed) == (kv_of(A), True)
    counts = _counts(rig)
    reason = {"remove": "gone", "directory": "unreadable"}.get(damage, "damaged")
    assert counts[f"load_failed_blocks.{reason}"] == 1
    assert counts.get("missing_files", 0) == (damage == "remove")
    assert counts.get("verify_failed_blocks", 0) == (damage not in ("remove", "directory"))
    rig.drain()
    again = rig.serve(A)
    assert (again.blocks, again.external_tokens, again.has_failed) == (kv_of(A), 20, False)
    if damage != "directory":
        assert read_block(path)[1] == kv_of(A)[2]


def test_a_forged_payload_with_a_valid_checksum_is_restored(make: Make, tmp_path: Path) -> None:
    """The harness's negative controls need wrong bytes to arrive."""
    first = make(tmp_path, pool_slots=8)
    first.serve(A)
    first.drain()
    header, payload = read_block(_path(tmp_path, A, 1))
    assert payload == kv_of(A)[1]
    write_block(_path(tmp_path, A, 1), header, bytes(len(payload)))
    served = make(tmp_path, pool_slots=8).serve(A)
    assert served.blocks == [kv_of(A)[0], bytes(48), *kv_of(A)[2:]]
    assert not served.has_failed


class _HangingStore(FileStore):
    """Reads wait for ``gate``; the class attribute lets a test open it."""

    gate = threading.Event()

    def read_into(self, key: bytes, buffer: memoryview) -> int:
        self.gate.wait(30)
        return super().read_into(key, buffer)


def _hanging(store: FileStore) -> FileStore:
    return _HangingStore(store.directory, store.namespace, store.payload_bytes, quota=store.quota)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    _HangingStore.gate = threading.Event()
    yield _HangingStore.gate
    _HangingStore.gate.set()


def test_hung_reads_are_given_up_and_the_disk_rests(
    make: Make, tmp_path: Path, gate: threading.Event
) -> None:
    first = make(tmp_path, pool_slots=8)
    first.serve(A)
    first.drain()
    rig = make(tmp_path, pool_slots=8, deadline_s=0.2, wrap_store=_hanging)
    served = rig.serve(A)
    assert (served.blocks, served.has_failed) == (kv_of(A), True)
    assert rig.scheduler.gauges()["disk_enabled"] == 0
    assert rig.serve(A).external_tokens == 0
    assert not rig.scheduler.reset(), "a hung read still owns its slot"
    gate.set()
    for _ in range(200):
        rig.step()
        if rig.scheduler.reset():
            break
    else:
        pytest.fail("slots were not given back")
    assert not rig.invalid


def test_a_late_read_does_not_touch_reused_blocks(
    make: Make, tmp_path: Path, gate: threading.Event
) -> None:
    first = make(tmp_path, pool_slots=8)
    first.serve(A)
    first.drain()
    rig = make(tmp_path, pool_slots=8, deadline_s=0.1, wrap_store=_hanging)
    request = rig.request(A)
    ids, _ = rig.start(request)
    rig.wait(request)
    rig.device[:] = 0x11
    gate.set()
    for _ in range(50):
        rig.step()
    assert (rig.device == 0x11).all()
    assert rig.invalid == set(ids)


def test_abort_during_load_reports_its_end_without_failures(
    make: Make, tmp_path: Path, gate: threading.Event
) -> None:
    first = make(tmp_path, pool_slots=8)
    first.serve(A)
    first.drain()
    rig = make(tmp_path, pool_slots=2, wrap_store=_hanging)
    request = rig.request(A)
    rig.start(request)
    rig.step()
    rig.scheduler.finish(request.request_id)
    rig.step()
    assert request.request_id in rig.finished
    assert not rig.invalid
    rig.device[:] = 0x11
    gate.set()
    for _ in range(50):
        rig.step()
    assert (rig.device == 0x11).all()
    served = rig.serve(A)
    assert (served.blocks, served.has_failed) == (kv_of(A), False)
    assert rig.scheduler.reset()


def test_abort_of_one_of_two_requests_leaves_the_other(
    make: Make, tmp_path: Path, gate: threading.Event
) -> None:
    first = make(tmp_path, pool_slots=8)
    first.serve(A)
    first.drain()
    rig = make(tmp_path, pool_slots=8, wrap_store=_hanging)
    leaving, staying = rig.request(A), rig.request(A)
    rig.start(leaving)
    ids, _ = rig.start(staying)
    rig.step()
    rig.scheduler.finish(leaving.request_id)
    rig.step()
    gate.set()
    rig.wait(staying)
    assert [rig._get(block) for block in ids] == kv_of(A)
    assert rig.scheduler.reset()


class _FullStore(FileStore):
    def write_from(self, key: bytes, buffer: memoryview) -> bool:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_keeps_the_host_copy(make: Make, tmp_path: Path) -> None:
    rig = make(
        tmp_path,
        pool_slots=8,
        wrap_store=lambda s: _FullStore(s.directory, s.namespace, s.payload_bytes),
    )
    rig.serve(A)
    rig.drain()
    served = rig.serve(A)
    assert (served.blocks, served.hits) == (kv_of(A), (20, 0))


class _SlowStore(FileStore):
    gate = threading.Event()

    def write_from(self, key: bytes, buffer: memoryview) -> bool:
        self.gate.wait(30)
        return super().write_from(key, buffer)


def test_reset_waits_for_the_backlog(make: Make, tmp_path: Path) -> None:
    _SlowStore.gate = threading.Event()
    rig = make(
        tmp_path,
        pool_slots=8,
        reset_scope=ResetScope.HOST,
        wrap_store=lambda s: _SlowStore(s.directory, s.namespace, s.payload_bytes),
    )
    rig.serve(A)
    assert rig.scheduler.gauges()["store_backlog_blocks"] == 5
    assert not rig.scheduler.reset()
    _SlowStore.gate.set()
    rig.drain()
    assert rig.scheduler.reset()
    assert rig.scheduler.gauges()["host_used_bytes"] == 0
    assert rig.serve(A).hits == (0, 20)


def test_reset_all_drops_files_too(make: Make, tmp_path: Path) -> None:
    rig = make(tmp_path, pool_slots=8)
    rig.serve(A)
    rig.drain()
    assert rig.scheduler.reset()
    assert rig.serve(A).external_tokens == 0
    rig.drain()
    assert make(tmp_path, pool_slots=8).serve(A).external_tokens == 20


def test_failed_reset_of_files_says_so_and_keeps_the_host(make: Make, tmp_path: Path) -> None:
    rig = make(tmp_path, pool_slots=8)
    rig.serve(A)
    rig.drain()
    (tmp_path / NAMESPACE).rename(tmp_path / "gone")
    assert not rig.scheduler.reset()
    assert rig.serve(A).hits == (20, 0)


def test_loads_can_be_off_while_stores_go_on(make: Make) -> None:
    rig = make(None, pool_slots=8, are_loads_allowed=False)
    rig.serve(A)
    assert rig.serve(A).external_tokens == 0
    assert rig.scheduler.gauges()["host_used_bytes"] > 0


def test_a_failed_request_does_not_look_up_again(make: Make, tmp_path: Path) -> None:
    """With nothing valid vLLM asks again; answering the same would never end."""
    first = make(tmp_path, pool_slots=8)
    first.serve(A)
    first.drain()
    rig = make(tmp_path, pool_slots=8)
    _path(tmp_path, A, 0).unlink()
    request = rig.request(A)
    rig.start(request)
    rig.wait(request)
    assert rig.scheduler.lookup(request, 0) == 0


def test_load_whose_planning_failed_ends_with_failed_blocks(make: Make) -> None:
    rig = make(None, pool_slots=8)
    request = rig.request(A)
    rig.scheduler.lookup(request, 0)
    rig.scheduler.plan_failed_load(request, [3, 4], 2 * BLOCK_TOKENS)
    rig.wait(request)
    assert rig.invalid == {3, 4}


def test_blocks_completed_by_decoding_are_stored(make: Make) -> None:
    rig = make(None, pool_slots=8)
    request: FakeRequest = rig.request(A[:6])
    ids, _ = rig.start(request)
    ids += rig.blocks(1)
    rig.compute(request, ids[:2], 0)
    for token in A[6:10]:
        request.all_token_ids.append(token)
        for block, kv in zip(ids, kv_of(request.all_token_ids), strict=False):
            rig._put(block, kv)
        computed = request.num_tokens - 1
        new = ids[2:] if computed == 8 else []
        rig.step([ScheduledRequest(request.request_id, computed, 1, new, replaces_blocks=False)])
    assert rig.serve(A[:10]).external_tokens == 8


def test_a_block_whose_tokens_arrive_late_is_stored_late(make: Make) -> None:
    """Asynchronous scheduling may complete a block whose last token is not known yet."""
    rig = make(None, pool_slots=8)
    request = rig.request(A[:7])
    ids, _ = rig.start(request)
    rig.compute(request, ids, 0)
    rig.step([ScheduledRequest(request.request_id, 7, 1, [], replaces_blocks=False)])
    request.all_token_ids.append(A[7])
    rig._put(ids[1], kv_of(A[:8])[1])
    rig.step([ScheduledRequest(request.request_id, 8, 1, rig.blocks(1), replaces_blocks=False)])
    assert rig.serve(A[:8]).external_tokens == 8


def test_unknown_requests_are_ignored(make: Make) -> None:
    rig = make(None, pool_slots=8)
    plan = rig.step([ScheduledRequest("stranger", 0, 8, [0, 1], replaces_blocks=True)])
    assert plan.stores == ()


_PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=24)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    actions=st.lists(
        st.one_of(
            st.tuples(st.just("serve"), _PROMPTS, st.integers(0, 3)),
            st.sampled_from([("drain",), ("reset",), ("restart",), ("damage",)]),
        ),
        max_size=25,
    ),
    pool_slots=st.integers(1, 6),
    has_disk=st.booleans(),
    steps_copy=st.booleans(),
)
def test_against_a_dictionary(
    tmp_path_factory: pytest.TempPathFactory,
    actions: list[Any],
    pool_slots: int,
    has_disk: bool,
    steps_copy: bool,
) -> None:
    """Whatever happens, KV is right; a hit was stored before; and on disk nothing is forgotten."""
    directory = tmp_path_factory.mktemp("tier") if has_disk else None
    rig = Rig(directory, pool_slots=pool_slots, steps_copy=steps_copy)
    stored: set[bytes] = set()
    durable: set[bytes] = set()
    try:
        for action in actions:
            if action[0] == "serve":
                _, tokens, device_blocks = action
                device_blocks = min(device_blocks, len(tokens) // BLOCK_TOKENS)
                keys = chain_keys(NAMESPACE, tokens, BLOCK_TOKENS)
                served = rig.serve(tokens, device_blocks)
                assert served.blocks == kv_of(tokens)
                count = -(-served.external_tokens // BLOCK_TOKENS)
                hit = keys[device_blocks : device_blocks + count]
                assert set(hit) <= stored
                assert sum(served.hits) == count * BLOCK_TOKENS or not count
                if device_blocks + count < len(keys):
                    assert keys[device_blocks + count] not in durable
                stored |= set(keys[device_blocks:])
            elif action[0] == "drain":
                rig.drain()
                durable = set(rig.scheduler._on_disk)
            elif action[0] == "reset":
                rig.drain()
                assert rig.scheduler.reset()
                stored, durable = set(), set()
            elif action[0] == "restart":
                rig.drain()
                durable = set(rig.scheduler._on_disk)
                rig.close()
                rig = Rig(directory, pool_slots=pool_slots, steps_copy=steps_copy)
                stored = set(durable)
            elif directory is not None:
                durable = set()
                for path in directory.glob("*/r0/*/*.kv"):
                    path.write_bytes(b"damage")
    finally:
        rig.close()
