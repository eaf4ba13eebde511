"""Loads that are copied by the very step that runs their request: all blocks in host memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.connector.layout import BlockLayout
from tests.connector.conftest import Make
from tests.connector.rig import BLOCK_TOKENS, kv_of

A = list(range(100, 116))  # four blocks


def _step_count(rig: Any, tokens: list[int]) -> tuple[Any, int]:
    plans = []
    step = rig.step

    def counted(*arguments: Any) -> Any:
        plans.append(step(*arguments))
        return plans[-1]

    rig.step = counted
    served = rig.serve(tokens)
    rig.step = step
    return served, len(plans)


@pytest.mark.parametrize("tokens", [A, A[:-1], A[:-3]], ids=["whole blocks", "rest 3", "rest 1"])
def test_a_host_hit_runs_in_one_step_and_is_right(make: Make, tokens: list[int]) -> None:
    rig = make(None, pool_slots=8, steps_copy=True)
    rig.serve(tokens)
    served, steps = _step_count(rig, tokens)
    assert steps == 1
    assert served.blocks == kv_of(tokens)
    # A step computes at least the last token, whose block is restored all the same.
    assert served.external_tokens == min(
        len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS, len(tokens) - 1
    )
    assert sum(served.hits) == len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS


def test_without_leave_of_vllm_a_host_hit_waits(make: Make) -> None:
    rig = make(None, pool_slots=8)
    rig.serve(A)
    served, steps = _step_count(rig, A)
    assert (steps, served.external_tokens) == (2, 16)


def test_a_hit_with_one_block_on_disk_waits(make: Make, tmp_path: Path) -> None:
    first = make(tmp_path, pool_slots=8)
    first.serve(A)
    first.drain()
    rig = make(tmp_path, pool_slots=8, steps_copy=True)
    rig.serve(A[:BLOCK_TOKENS])  # this block, and only this one, now lies in host memory
    served, steps = _step_count(rig, A)
    assert steps > 1
    assert served.blocks == kv_of(A)
    assert served.external_tokens == 16


def test_slots_are_free_again_after_the_step(make: Make) -> None:
    rig = make(None, pool_slots=4, steps_copy=True)
    rig.serve(A)
    rig.serve(A)
    assert rig.scheduler.reset()


def test_a_slot_that_holds_another_block_is_not_proved(make: Make) -> None:
    rig = make(None, pool_slots=8, steps_copy=True)
    rig.serve(A)
    slot = next(iter(rig.worker._slot_key))
    rig.worker._slot_key[slot] = b"another"
    served = rig.serve(A)
    assert served.has_failed
    assert served.blocks == kv_of(A)


def test_a_copy_that_fails_is_not_proved(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make(None, pool_slots=8, steps_copy=True)
    rig.serve(A)
    scatter, count = BlockLayout.scatter, iter(range(100))

    def fail_once(self: BlockLayout, *arguments: Any) -> None:
        if next(count) == 2:
            raise RuntimeError("no such memory")
        scatter(self, *arguments)

    monkeypatch.setattr(BlockLayout, "scatter", fail_once)
    served = rig.serve(A)
    assert served.has_failed
    assert served.blocks == kv_of(A)


def test_a_load_that_its_step_did_not_end_is_given_up(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever keeps the copies from being made, the request must not run on what is there."""
    rig = make(None, pool_slots=8, steps_copy=True)
    rig.serve(A)
    monkeypatch.setattr(rig.worker, "copy_ready", lambda: None)
    request = rig.request(A)
    ids, external = rig.start(request)
    rig.compute(request, ids, external)
    assert rig.restored_in_step == set()
    assert set(ids) <= rig.invalid
    assert not rig.finished


def test_two_ranks_copy_in_their_step(make: Make) -> None:
    rig = make(None, pool_slots=8, steps_copy=True, ranks=2)
    rig.serve(A)
    served, steps = _step_count(rig, A)
    assert steps == 1
    assert served.blocks == kv_of(A)
