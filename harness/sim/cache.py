"""Block stores that evict the least recently used: device memory with references, a plain tier."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice


@dataclass
class _Resident:
    payload: bytes
    references: int


class DeviceCache:
    """KV blocks in device memory. Counts blocks; a block that is not full yet has no key.

    A full block stays after its last user and is found by its key until the space is needed: the
    block freed longest ago goes first.
    """

    def __init__(self, block_count: int, *, keeps_all: bool = False) -> None:
        """``keeps_all``: a fault; unused blocks are remembered beyond the capacity."""
        self.block_count = block_count
        self.keeps_all = keeps_all
        self._resident: OrderedDict[bytes, _Resident] = OrderedDict()
        self._unnamed = 0
        self._used = 0

    @property
    def available(self) -> int:
        """Blocks that an allocation could have: free, or cached without a user."""
        return self.block_count - self._unnamed - self._used

    def match(self, keys: Sequence[bytes]) -> int:
        """How many leading blocks are there. Changes nothing."""
        for index, key in enumerate(keys):
            if key not in self._resident:
                return index
        return len(keys)

    def unused_among(self, keys: Sequence[bytes]) -> int:
        """Of resident blocks, those that no request uses; taking them uses up available space."""
        return sum(1 for key in keys if not self._resident[key].references)

    def take(self, key: bytes) -> bytes:
        """One more user of a resident block; returns its payload."""
        block = self._resident[key]
        self._used += not block.references
        block.references += 1
        return block.payload

    def allocate(self, count: int) -> None:
        """Unnamed blocks for a request; evicts as needed. The caller has asked `available`."""
        assert count <= self.available, "allocation beyond what is available"
        self._unnamed += count
        excess = len(self._resident) + self._unnamed - self.block_count
        if excess <= 0 or self.keeps_all:
            return
        unused = (key for key, block in self._resident.items() if not block.references)
        for key in list(islice(unused, excess)):
            del self._resident[key]

    def name(self, key: bytes, payload: bytes) -> bool:
        """An unnamed block is full now. False when another copy has the name: it stays unnamed."""
        if key in self._resident:
            return False
        self._unnamed -= 1
        self._used += 1
        self._resident[key] = _Resident(payload, 1)
        return True

    def release(self, keys: Sequence[bytes], unnamed: int) -> None:
        """A request is done with its blocks; the last of its prompt will be evicted first."""
        self._unnamed -= unnamed
        for key in reversed(keys):
            block = self._resident[key]
            block.references -= 1
            self._used -= not block.references
            self._resident.move_to_end(key)

    def forget(self) -> bool:
        """Empties the cache; False, and nothing done, while a block is in use."""
        if self._unnamed or self._used:
            return False
        self._resident.clear()
        return True


class BlockStore:
    """A tier: payloads by key, the least recently used goes when a new one needs its place."""

    def __init__(self, block_count: int | None) -> None:
        """None: unbounded."""
        self.block_count = block_count
        self._blocks: OrderedDict[bytes, bytes] = OrderedDict()
        self._pinned: set[bytes] = set()

    def __contains__(self, key: object) -> bool:
        return key in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._blocks)

    def get(self, key: bytes) -> bytes:
        """The payload; counts as a use."""
        self._blocks.move_to_end(key)
        return self._blocks[key]

    def peek(self, key: bytes) -> bytes:
        """The payload; not a use. Raises KeyError."""
        return self._blocks[key]

    def put(self, key: bytes, payload: bytes, *, pinned: bool = False) -> bool:
        """False when there is no room and nothing that may go."""
        if key not in self._blocks and self.block_count is not None:
            while len(self._blocks) >= self.block_count:
                victim = next((k for k in self._blocks if k not in self._pinned), None)
                if victim is None:
                    return False
                del self._blocks[victim]
        self._blocks[key] = payload
        self._blocks.move_to_end(key)
        if pinned:
            self._pinned.add(key)
        return True

    def replace(self, key: bytes, payload: bytes) -> None:
        """Other content under a name that is there; not a use. Raises KeyError."""
        if key not in self._blocks:
            raise KeyError(key)
        self._blocks[key] = payload

    def unpin(self, key: bytes) -> None:
        """The block may go again."""
        self._pinned.discard(key)

    def clear(self) -> None:
        """Drops all blocks that are not pinned."""
        for key in [key for key in self._blocks if key not in self._pinned]:
            del self._blocks[key]
