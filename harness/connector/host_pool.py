"""Which block is in which slot of the host DRAM pool. Pure bookkeeping; holds no memory itself.

Lives on the scheduler side, which alone decides what a slot holds. The worker owns the bytes and
checks the key again before it uses a slot. Standard library only; not thread-safe.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class HostPool:
    """A bounded map from content key to slot with least-recently-used eviction and pins.

    A slot is free, or holds one key. A pinned slot (being filled, read or written) is never
    evicted; a key may be forgotten while its slot is pinned, and the slot becomes free when the
    last pin goes.
    """

    def __init__(self, slot_count: int) -> None:
        if slot_count < 1:
            raise ValueError(f"slot_count is {slot_count}; a pool has at least one slot")
        self.slot_count = slot_count
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._key_of: dict[int, bytes] = {}
        self._pins: dict[int, int] = {}
        self._filling: set[int] = set()
        self._free = list(range(slot_count - 1, -1, -1))

    def __contains__(self, key: bytes) -> bool:
        return key in self._slot_of

    def __len__(self) -> int:
        """Number of keys held, being filled or not."""
        return len(self._slot_of)

    @property
    def used_count(self) -> int:
        """Slots not free, forgotten but still pinned ones included."""
        return self.slot_count - len(self._free)

    @property
    def pinned_count(self) -> int:
        """Slots with at least one pin."""
        return len(self._pins)

    def slot_of(self, key: bytes) -> int | None:
        """The slot that holds, or is being filled with, ``key``."""
        return self._slot_of.get(key)

    def is_filling(self, slot: int) -> bool:
        """Whether the slot's bytes are still on their way from disk."""
        return slot in self._filling

    def allocate(self, key: bytes, *, filling: bool = False) -> int | None:
        """Gives ``key`` a slot with one pin; evicts the least recently used unpinned key if needed.

        Returns None when every slot is pinned. ``filling`` says that the bytes come later
        (``filled``).
        """
        if key in self._slot_of:
            raise ValueError(f"key {key.hex()} already has a slot")
        if not self._free and not self._evict_one():
            return None
        slot = self._free.pop()
        self._slot_of[key] = slot
        self._key_of[slot] = key
        self._pins[slot] = 1
        if filling:
            self._filling.add(slot)
        return slot

    def filled(self, slot: int, *, is_valid: bool) -> None:
        """Ends a fill. An invalid one forgets the key, so that nobody finds it any more."""
        self._filling.discard(slot)
        if not is_valid and slot in self._key_of:
            self.forget(self._key_of[slot])

    def pin(self, slot: int) -> None:
        """Protects a used slot from eviction until a matching ``unpin``."""
        self._pins[slot] = self._pins.get(slot, 0) + 1

    def unpin(self, slot: int) -> None:
        """Takes one pin back; frees the slot if its key was forgotten meanwhile."""
        count = self._pins[slot] - 1
        if count:
            self._pins[slot] = count
            return
        del self._pins[slot]
        if slot not in self._key_of:
            self._free.append(slot)

    def touch_chain(self, keys: Iterable[bytes]) -> None:
        """Marks a prefix as used, given in prompt order; its tail will be evicted before its head.

        A block without the blocks before it cannot be used, so evicting head first would waste the
        rest.
        """
        for key in reversed(list(keys)):
            if key in self._slot_of:
                self._slot_of.move_to_end(key)

    def forget(self, key: bytes) -> None:
        """Drops a key; no effect when it is not held."""
        slot = self._slot_of.pop(key, None)
        if slot is None:
            return
        del self._key_of[slot]
        self._filling.discard(slot)
        if slot not in self._pins:
            self._free.append(slot)

    def clear(self) -> bool:
        """Drops every key. Refused (False, no effect) while any slot is pinned."""
        if self._pins:
            return False
        for key in list(self._slot_of):
            self.forget(key)
        return True

    def _evict_one(self) -> bool:
        for key, slot in self._slot_of.items():
            if slot not in self._pins:
                self.forget(key)
                return True
        return False
