"""Which block is in which slot of the host DRAM pool. Pure bookkeeping; holds no memory itself.

Lives on the scheduler side, which alone decides what a slot holds. The worker owns the bytes and
checks the key again before it uses a slot. Standard library only; not thread-safe.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

# Share of the slots that keys used more than once may hold against keys seen once.
_PROTECTED_SHARE = 0.8


class HostPool:
    """A bounded map from content key to slot, with pins and a scan-resistant order of eviction.

    Segmented LRU (Karedla, Love, Wherry 1994): a key starts on probation and is protected once a
    later request uses it; the probation's least recently used key goes first. A long document read
    once therefore passes through the probation and leaves shared prefixes alone. S3-FIFO would
    scan-resist as well but keeps no order inside a prompt, whose tail must go before its head.

    A slot is free, or holds one key. A pinned slot (being filled, read or written) is never
    evicted; a key may be forgotten while its slot is pinned, and the slot becomes free when the
    last pin goes. ``holders`` workers hold each slot's part of a block, so one use puts as many
    pins, and each worker takes one back.
    """

    def __init__(self, slot_count: int, *, holders: int = 1) -> None:
        if slot_count < 1:
            raise ValueError(f"slot_count is {slot_count}; a pool has at least one slot")
        self.slot_count = slot_count
        self._holders = holders
        self.evicted_count = 0  # since the start
        self._probation: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._protected: OrderedDict[bytes, int] = OrderedDict()
        self._protected_max = int(slot_count * _PROTECTED_SHARE)
        self._key_of: dict[int, bytes] = {}
        self._pins: dict[int, int] = {}
        self._filling: set[int] = set()
        self._free = list(range(slot_count - 1, -1, -1))

    def __contains__(self, key: bytes) -> bool:
        return key in self._probation or key in self._protected

    def __len__(self) -> int:
        """Number of keys held, being filled or not."""
        return len(self._key_of)

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
        slot = self._probation.get(key)
        return self._protected.get(key) if slot is None else slot

    def is_filling(self, slot: int) -> bool:
        """Whether the slot's bytes are still on their way from disk."""
        return slot in self._filling

    def allocate(self, key: bytes, *, filling: bool = False) -> int | None:
        """Gives ``key`` a slot, pinned for one use, on probation; evicts an unpinned key if needed.

        Returns None when every slot is pinned. ``filling`` says that the bytes come later
        (``filled``).
        """
        if key in self:
            raise ValueError(f"key {key.hex()} already has a slot")
        if not self._free and not self._evict_one():
            return None
        slot = self._free.pop()
        self._probation[key] = slot
        self._key_of[slot] = key
        self._pins[slot] = self._holders
        if filling:
            self._filling.add(slot)
        return slot

    def filled(self, slot: int, *, is_valid: bool) -> None:
        """Ends a fill. An invalid one forgets the key, so that nobody finds it any more."""
        self._filling.discard(slot)
        if not is_valid and slot in self._key_of:
            self.forget(self._key_of[slot])

    def pin(self, slot: int) -> None:
        """Protects a used slot from eviction for one more use, until every holder has unpinned."""
        self._pins[slot] = self._pins.get(slot, 0) + self._holders

    def unpin_all(self, slot: int) -> None:
        """Ends a use for every holder at once."""
        for _ in range(self._holders):
            self.unpin(slot)

    def unpin(self, slot: int) -> None:
        """Takes one holder's pin back; frees the slot if its key was forgotten meanwhile."""
        count = self._pins[slot] - 1
        if count:
            self._pins[slot] = count
            return
        del self._pins[slot]
        if slot not in self._key_of:
            self._free.append(slot)

    def order_chain(self, keys: Sequence[bytes]) -> None:
        """Makes a prompt's keys the most recent of their segments, its head more than its tail.

        A block without the blocks before it cannot be used, so evicting the head first would waste
        the rest.
        """
        for key in reversed(keys):
            if key in self._probation:
                self._probation.move_to_end(key)
            elif key in self._protected:
                self._protected.move_to_end(key)

    def reuse_chain(self, keys: Sequence[bytes]) -> None:
        """Protects the keys that a later request found, and orders them as ``order_chain`` does."""
        for key in reversed(keys):
            slot = self._probation.pop(key, None)
            if slot is not None:
                self._protected[key] = slot
            elif key in self._protected:
                self._protected.move_to_end(key)
        while len(self._protected) > self._protected_max:
            key, slot = self._protected.popitem(last=False)
            self._probation[key] = slot

    def forget(self, key: bytes) -> None:
        """Drops a key; no effect when it is not held."""
        slot = self._probation.pop(key, None)
        if slot is None:
            slot = self._protected.pop(key, None)
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
        for key in list(self._key_of.values()):
            self.forget(key)
        return True

    def _evict_one(self) -> bool:
        for segment in (self._probation, self._protected):
            for key, slot in segment.items():
                if slot not in self._pins:
                    self.forget(key)
                    self.evicted_count += 1
                    return True
        return False
