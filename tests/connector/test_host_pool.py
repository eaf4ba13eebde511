"""The host pool against a dictionary that remembers everything."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from harness.connector.host_pool import HostPool


def _key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def _filled(*numbers: int) -> HostPool:
    pool = HostPool(len(numbers))
    for number in numbers:
        slot = pool.allocate(_key(number))
        assert slot is not None
        pool.unpin(slot)
    return pool


def test_least_recently_used_goes_first() -> None:
    pool = _filled(1, 2, 3)
    pool.reuse_chain([_key(1)])
    assert pool.allocate(_key(4)) is not None
    assert _key(2) not in pool
    assert _key(1) in pool


def test_the_tail_of_a_touched_chain_goes_before_its_head() -> None:
    pool = _filled(1, 2, 3)
    pool.reuse_chain([_key(1), _key(2), _key(3)])
    assert pool.allocate(_key(4)) is not None
    assert _key(3) not in pool
    assert _key(1) in pool


def test_pinned_slots_are_never_evicted() -> None:
    pool = HostPool(1)
    slot = pool.allocate(_key(1))
    assert pool.allocate(_key(2)) is None
    assert slot is not None
    pool.unpin(slot)
    assert pool.allocate(_key(2)) == slot


def test_forgotten_key_frees_its_slot_with_the_last_pin() -> None:
    pool = HostPool(1)
    slot = pool.allocate(_key(1))
    assert slot is not None
    pool.pin(slot)
    pool.forget(_key(1))
    assert pool.used_count == 1
    pool.unpin(slot)
    assert pool.allocate(_key(2)) is None
    pool.unpin(slot)
    assert pool.used_count == 0


def test_failed_fill_forgets_the_key() -> None:
    pool = HostPool(1)
    slot = pool.allocate(_key(1), filling=True)
    assert slot is not None
    assert pool.is_filling(slot)
    pool.filled(slot, is_valid=False)
    assert _key(1) not in pool
    pool.unpin(slot)
    assert pool.used_count == 0


def test_clear_is_refused_while_pinned() -> None:
    pool = HostPool(2)
    slot = pool.allocate(_key(1))
    assert not pool.clear()
    assert _key(1) in pool
    assert slot is not None
    pool.unpin(slot)
    assert pool.clear()
    assert (len(pool), pool.used_count) == (0, 0)


def test_a_key_has_one_slot() -> None:
    pool = HostPool(2)
    pool.allocate(_key(1))
    with pytest.raises(ValueError, match="already has a slot"):
        pool.allocate(_key(1))


def test_a_pool_has_a_slot() -> None:
    with pytest.raises(ValueError, match="slot_count is 0"):
        HostPool(0)


class PoolMachine(RuleBasedStateMachine):
    """Oracle: ``held`` maps key to slot, ``pins`` counts; both as simple as can be."""

    SLOTS = 4

    def __init__(self) -> None:
        super().__init__()
        self.pool = HostPool(self.SLOTS)
        self.held: dict[bytes, int] = {}
        self.pins: dict[int, int] = {}

    @rule(number=st.integers(0, 9), filling=st.booleans())
    def allocate(self, number: int, filling: bool) -> None:
        key = _key(number)
        if key in self.held:
            return
        slot = self.pool.allocate(key, filling=filling)
        if slot is None:
            assert len(self.pins) == self.SLOTS
            return
        assert slot not in self.pins
        self.held = {k: s for k, s in self.held.items() if s != slot}
        self.held[key] = slot
        self.pins[slot] = 1

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.pins)))
        self.pool.unpin(slot)
        self.pins[slot] -= 1
        if not self.pins[slot]:
            del self.pins[slot]

    @precondition(lambda self: self.held)
    @rule(data=st.data(), action=st.sampled_from(["pin", "touch", "forget", "good", "bad"]))
    def act(self, data: st.DataObject, action: str) -> None:
        key = data.draw(st.sampled_from(sorted(self.held)))
        slot = self.held[key]
        if action == "pin":
            self.pool.pin(slot)
            self.pins[slot] = self.pins.get(slot, 0) + 1
        elif action == "touch":
            self.pool.reuse_chain([key])
        elif action == "good":
            self.pool.filled(slot, is_valid=True)
            assert not self.pool.is_filling(slot)
        else:
            if action == "forget":
                self.pool.forget(key)
            else:
                self.pool.filled(slot, is_valid=False)
            del self.held[key]

    @rule()
    def clear(self) -> None:
        if self.pool.clear():
            assert not self.pins
            self.held = {}
        else:
            assert self.pins

    @invariant()
    def agrees(self) -> None:
        assert len(self.pool) == len(self.held)
        for number in range(10):
            assert self.pool.slot_of(_key(number)) == self.held.get(_key(number))
        assert self.pool.pinned_count == len(self.pins)
        assert self.pool.used_count == len(set(self.held.values()) | set(self.pins))


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
