"""Two tensor-parallel ranks under one scheduler side: a block counts when both have their part."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from .rig import BLOCK_TOKENS, Make, Rig, kv_of

A = list(range(20))  # five blocks
B = list(range(100, 120))


@pytest.fixture
def make(make: Make) -> Make:
    """Rigs of two ranks."""
    return functools.partial(make, ranks=2)


def _files(directory: Path, rank: int) -> list[Path]:
    return sorted(directory.glob(f"*/r{rank}/*/*.kv"))


def _pinned(rig: Rig) -> int:
    assert rig.scheduler._pool is not None
    return rig.scheduler._pool.pinned_count


def test_both_parts_come_back_from_host_and_disk(make: Make, tmp_path: Path) -> None:
    rig = make(tmp_path, pool_slots=8)
    rig.serve(A)
    rig.drain()
    assert [len(_files(tmp_path, rank)) for rank in (0, 1)] == [5, 5]
    served = rig.serve(A)
    assert (served.blocks, served.hits) == (kv_of(A), (20, 0))
    again = make(tmp_path, pool_slots=8)
    served = again.serve(A)
    assert (served.blocks, served.hits) == (kv_of(A), (0, 20))
    assert (_pinned(rig), _pinned(again)) == (0, 0)


def test_tokens_count_once_and_bytes_by_rank(make: Make) -> None:
    rig = make(None, pool_slots=8)
    rig.serve(A)
    rig.serve(A)
    counted = [worker.take_statistics(BLOCK_TOKENS)["counters"] for worker in rig.workers]
    assert [each.get("hit_tokens.host") for each in counted] == [20, None]
    assert [each["read_bytes.host"] for each in counted] == [5 * 48, 5 * 48]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_part_damaged_on_one_rank_is_recomputed_and_stored_again(
    make: Make, tmp_path: Path, rank: int
) -> None:
    first = make(tmp_path, pool_slots=8)
    first.serve(A)
    first.drain()
    rig = make(tmp_path, pool_slots=8)
    _files(tmp_path, rank)[2].write_bytes(b"damage")
    served = rig.serve(A)
    assert (served.blocks, served.has_failed) == (kv_of(A), True)
    rig.drain()
    assert len(_files(tmp_path, rank)) == 5
    served = rig.serve(A)
    assert (served.blocks, served.external_tokens, served.has_failed) == (kv_of(A), 20, False)
    assert _pinned(rig) == 0


def test_a_block_is_a_hit_only_with_all_its_parts(make: Make, tmp_path: Path) -> None:
    first = make(tmp_path, pool_slots=8)
    first.serve(A)
    first.drain()
    for path in _files(tmp_path, 1):
        path.unlink()
    assert make(tmp_path, pool_slots=8).serve(A).external_tokens == 0


def test_a_small_pool_streams_on_both_ranks(make: Make, tmp_path: Path) -> None:
    first = make(tmp_path, pool_slots=16)
    first.serve(A)
    first.serve(B)
    first.drain()
    rig = make(tmp_path, pool_slots=1, staging=1)
    for tokens in (A, B, A):
        served = rig.serve(tokens)
        assert (served.blocks, served.external_tokens) == (kv_of(tokens), 20)
    assert not rig.scheduler._streaming
    assert _pinned(rig) == 0


def test_one_bound_holds_for_both_ranks(make: Make, tmp_path: Path) -> None:
    rig = make(tmp_path, pool_slots=8, disk_capacity_bytes=20 * 8192)
    for number in range(8):
        rig.serve([1000 * number + token for token in A])
        rig.drain()
        # Each rank has one writer, and one block per writer is the slack of a recount.
        assert len(_files(tmp_path, 0)) + len(_files(tmp_path, 1)) <= 20 + 2
    assert rig.serve([7000 + token for token in A]).external_tokens == 20


def test_reset_drops_the_files_of_both(make: Make, tmp_path: Path) -> None:
    rig = make(tmp_path, pool_slots=8)
    rig.serve(A)
    rig.drain()
    assert rig.scheduler.reset()
    assert rig.serve(A).external_tokens == 0
