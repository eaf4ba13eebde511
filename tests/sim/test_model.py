"""Content, caches and bandwidth against numbers worked by hand."""

from __future__ import annotations

import math

import pytest

from harness.sim.cache import BlockStore, DeviceCache
from harness.sim.content import (
    ROUNDING_NATS,
    block_keys,
    computed_payload,
    damaged,
    next_state,
    output_token,
    root_state,
)
from harness.sim.media import SharedMedium, total_bandwidth
from workloads.cold_recovery import CONTROLS

A, B, C, D = b"a", b"b", b"c", b"d"


def state_after(tokens: list[int], *, wrong_block: int | None = None) -> bytes:
    """State after whole blocks of four tokens."""
    state = root_state(0)
    for start in range(0, len(tokens), 4):
        payload = computed_payload(state, tokens[start : start + 4], layers=2)
        if start // 4 == wrong_block:
            payload = bytes(len(payload))
        state = next_state(state, payload)
    return state


# --- content ------------------------------------------------------------------


def test_only_whole_blocks_have_keys() -> None:
    assert len(block_keys(range(11), 4)) == 2
    assert block_keys(range(3), 4) == []


def test_a_key_covers_every_token_before_it() -> None:
    same = block_keys([1, 2, 3, 4, 5, 6, 7, 8], 4)
    other = block_keys([9, 2, 3, 4, 5, 6, 7, 8], 4)
    assert same[1] != other[1]
    assert block_keys([1, 2, 3, 4, 0, 0, 0, 0], 4)[0] == same[0]


def test_output_follows_from_kv_alone() -> None:
    tokens = list(range(8))
    right = output_token(state_after(tokens), [9], 0, vocab_size=512, cached_tokens=8)
    again = output_token(state_after(tokens), [9], 0, vocab_size=512, cached_tokens=8)
    wrong = output_token(
        state_after(tokens, wrong_block=0), [9], 0, vocab_size=512, cached_tokens=8
    )
    assert right == again
    assert right.logprob != wrong.logprob


def test_cold_and_cached_differ_by_rounding_and_no_more() -> None:
    state = state_after(list(range(8)))
    cold = output_token(state, [9], 0, vocab_size=512, cached_tokens=0)
    cached = output_token(state, [9], 0, vocab_size=512, cached_tokens=8)
    assert cold.id == cached.id
    assert 0 < abs(cold.logprob - cached.logprob) < ROUNDING_NATS


def test_another_seed_is_another_model() -> None:
    assert root_state(0) != root_state(1)


@pytest.mark.parametrize("control", CONTROLS)
def test_each_planted_fault_changes_the_blocks_it_names_and_no_other(control: str) -> None:
    payloads = [bytes([i] * 8 + [10 * i + 1] * 8) for i in range(1, 5)]
    donor = [bytes([i]) * 16 for i in range(11, 15)]
    wrong = damaged(control, payloads, donor, layers=2)
    expected = {
        "zeroed_block": {3: bytes(16)},
        "other_session": {3: donor[3]},
        "swapped_layers": {3: bytes([41] * 8 + [4] * 8)},
        "zeroed_layer": {3: bytes([4] * 8) + bytes(8)},
        "flipped_exponent": {3: bytes([4] * 8 + [41 ^ 0x20] + [41] * 7)},
    }
    assert wrong == expected[control]


def test_an_unknown_control_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown control 'x'"):
        damaged("x", [A, B], [C, D], layers=1)


# --- device cache -------------------------------------------------------------


def filled(*keys: bytes, block_count: int = 3) -> DeviceCache:
    """Blocks computed and freed, in this order."""
    cache = DeviceCache(block_count)
    for key in keys:
        cache.allocate(1)
        assert cache.name(key, key)
        cache.release([key], 0)
    return cache


def test_the_block_freed_longest_ago_is_evicted_first() -> None:
    cache = filled(A, B, C)
    cache.allocate(1)
    assert [cache.match([key]) for key in (A, B, C)] == [0, 1, 1]


def test_a_use_makes_a_block_young_again() -> None:
    cache = filled(A, B, C)
    assert cache.take(A) == A
    cache.release([A], 0)
    cache.allocate(1)
    assert [cache.match([key]) for key in (A, B, C)] == [1, 0, 1]


def test_a_block_in_use_is_never_evicted_and_not_available() -> None:
    cache = filled(A, B, C)
    cache.take(A)
    assert cache.available == 2
    cache.allocate(2)
    assert cache.match([A]) == 1
    assert cache.available == 0


def test_the_end_of_a_prompt_is_evicted_before_its_start() -> None:
    cache = DeviceCache(3)
    cache.allocate(3)
    for key in (A, B, C):
        cache.name(key, key)
    cache.release([A, B, C], 0)
    cache.allocate(1)
    assert cache.match([A, B, C]) == 2


def test_a_second_copy_of_a_block_gets_no_name() -> None:
    cache = filled(A)
    cache.allocate(1)
    assert not cache.name(A, A)
    cache.release([], 1)
    assert cache.available == 3


def test_a_cache_in_use_is_not_emptied() -> None:
    cache = filled(A, B)
    cache.take(A)
    assert not cache.forget()
    cache.release([A], 0)
    assert cache.forget()
    assert cache.match([A]) == 0


# --- tier store ---------------------------------------------------------------


def test_a_full_tier_drops_the_least_recently_used() -> None:
    store = BlockStore(2)
    store.put(A, A)
    store.put(B, B)
    store.get(A)
    assert store.put(C, C)
    assert [key in store for key in (A, B, C)] == [True, False, True]


def test_a_tier_full_of_pinned_blocks_takes_no_more() -> None:
    store = BlockStore(1)
    store.put(A, A, pinned=True)
    assert not store.put(B, B)
    store.unpin(A)
    assert store.put(B, B)
    assert list(store) == [B]


# --- bandwidth ----------------------------------------------------------------

CURVE = ((1.0, 100.0), (3.0, 200.0))


@pytest.mark.parametrize(
    ("loads", "expected"),
    [
        pytest.param(1, 100.0, id="at the first point"),
        pytest.param(2, 150.0, id="half way"),
        pytest.param(3, 200.0, id="at the last point"),
        pytest.param(9, 200.0, id="beyond the last point"),
    ],
)
def test_bandwidth_lies_on_the_curve(loads: int, expected: float) -> None:
    assert total_bandwidth(CURVE, loads) == expected


def test_one_load_takes_its_size_over_the_bandwidth() -> None:
    medium = SharedMedium(CURVE)
    medium.start(0.0, 250)
    assert medium.next_end() == 2.5


def test_two_loads_share_what_two_loads_get() -> None:
    # 150 bytes/s in all, 75 each.
    medium = SharedMedium(CURVE)
    medium.start(0.0, 150)
    medium.start(0.0, 150)
    assert medium.next_end() == 2.0


def test_a_later_load_slows_the_first_and_is_alone_after_it() -> None:
    # First: 50 bytes by 0.5 s, then 75 bytes/s: 0.5 + 50 / 75 = 1.1667 s.
    # Second: 50 bytes by then, the other 50 alone at 100 bytes/s: 1.6667 s.
    medium = SharedMedium(CURVE)
    first = medium.start(0.0, 100)
    second = medium.start(0.5, 100)
    assert medium.next_end() == pytest.approx(1.1667, abs=1e-4)
    medium.advance(1.2)
    assert (medium.is_done(first), medium.is_done(second)) == (True, False)
    assert medium.next_end() == pytest.approx(1.6667, abs=1e-4)
    medium.advance(1.7)
    assert medium.is_done(second)
    assert math.isinf(medium.next_end())
    assert medium.read_bytes == 200
