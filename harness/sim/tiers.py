"""The tiers below device memory, as the bundled connector runs them: host pool, and a disk.

Host pool: blocks wait there for the disk, and what was read from disk stays until its place is
needed. Pure: time is an argument, in simulated seconds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from harness.sim.cache import BlockStore
from harness.sim.config import SimConfig
from harness.sim.media import SharedMedium


@dataclass
class Load:
    """Blocks on their way to the device, with their payloads as they were when it began."""

    keys: tuple[bytes, ...]
    sources: tuple[str, ...]
    payloads: list[bytes]
    ready_s: float
    ids: Mapping[str, int] = field(default_factory=dict)


class Tiers:
    """Lookup, load and store. ``writes_stop_after``: a fault, blocks until stores are dropped."""

    def __init__(self, config: SimConfig, block_bytes: int) -> None:
        self.config, self.block_bytes = config, block_bytes
        self.host = BlockStore(config.host_pool_bytes // block_bytes)
        disk_blocks = None if config.disk_bytes is None else config.disk_bytes // block_bytes
        self.disk = BlockStore(disk_blocks)
        self.media = {
            "host": SharedMedium(config.host_curve),
            "disk": SharedMedium(config.disk_curve),
        }
        self.writes_stop_after: int | None = None
        self.stored_blocks = 0
        self.dropped_blocks = 0
        self._writes: deque[tuple[float, bytes]] = deque()
        self._write_end_s = 0.0

    @property
    def backlog_blocks(self) -> int:
        """Blocks that wait to become durable."""
        return len(self._writes)

    def sources(self, keys: Sequence[bytes]) -> list[str]:
        """Where each leading block would come from; ends before the first that is nowhere."""
        found = []
        for key in keys:
            if key in self.host:
                found.append("host")
            elif key in self.disk:
                found.append("disk")
            else:
                break
        return found

    def load(
        self, keys: Sequence[bytes], sources: Sequence[str], now_s: float, *, latency_s: float
    ) -> Load:
        """Begins to read; what comes from disk goes through the host pool and stays there."""
        payloads = []
        for key, source in zip(keys, sources, strict=True):
            payload = (self.host if source == "host" else self.disk).get(key)
            if source == "disk":
                self.host.put(key, payload)
            payloads.append(payload)
        ids = {
            name: medium.start(now_s, sources.count(name) * self.block_bytes)
            for name, medium in self.media.items()
            if name in sources
        }
        return Load(tuple(keys), tuple(sources), payloads, now_s + latency_s, ids)

    def is_done(self, load: Load, now_s: float) -> bool:
        """Whether all of it has arrived."""
        done = all(self.media[name].is_done(number) for name, number in load.ids.items())
        return done and now_s >= load.ready_s

    def store(self, key: bytes, payload: bytes, now_s: float) -> None:
        """Takes a block into the pool at once and onto the disk when its turn comes."""
        if self.writes_stop_after is not None and self.stored_blocks >= self.writes_stop_after:
            return
        to_disk = self.config.medium == "disk"
        if key in (self.disk if to_disk else self.host):
            return
        if not self.host.put(key, payload, pinned=to_disk):
            self.dropped_blocks += 1
            return
        self.stored_blocks += 1
        if to_disk:
            start_s = max(now_s, self._write_end_s)
            self._write_end_s = start_s + self.block_bytes / self.config.disk_write_bytes_per_s
            self._writes.append((self._write_end_s, key))

    def advance(self, now_s: float) -> None:
        """Lets loads and writes go on until now."""
        for medium in self.media.values():
            medium.advance(now_s)
        while self._writes and self._writes[0][0] <= now_s:
            _end_s, key = self._writes.popleft()
            self.disk.put(key, self.host.get(key))
            self.host.unpin(key)

    def next_event(self, loads: Sequence[Load], now_s: float) -> float:
        """When something ends next; infinity when nothing is under way."""
        ends = [medium.next_end() for medium in self.media.values()]
        ends += [load.ready_s for load in loads if load.ready_s > now_s]
        return min([*ends, *(end for end, _key in self._writes)], default=math.inf)

    def empty_host(self) -> bool:
        """Empties the host pool; False while blocks in it are not durable."""
        if self._writes:
            return False
        self.host.clear()
        return True

    def replace(self, changed: Mapping[bytes, bytes]) -> None:
        """Other bytes under the same names, on the medium itself. Raises KeyError."""
        for key, payload in changed.items():
            (self.disk if self.config.medium == "disk" else self.host).replace(key, payload)

    def stored(self, keys: Sequence[bytes]) -> Iterator[bytes]:
        """Payloads on the medium, not a use. Raises KeyError."""
        store = self.disk if self.config.medium == "disk" else self.host
        for key in keys:
            yield store.peek(key)
