"""What the scheduler side tells the worker each step, and what comes back. Plain values, no vLLM.

They are pickled every step, so they hold integers and 16-byte keys only. Directions never cross:
plans go down, reports come up, and neither side waits for the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

from harness.connector.breaker import BreakerState

NO_SLOT = -1
NO_BLOCK = -1


class LoadSource(IntEnum):
    """Where a block to load is, as the scheduler side knows it."""

    HOST = 0  # in the slot
    DISK = 1  # in a file; goes through the slot, or through a staging buffer when there is none
    MISSING = 2  # nowhere: fails, so that the block is recomputed
    FILLING = 3  # in the slot, or on its way there from a file that was read for this request


@dataclass(frozen=True, slots=True)
class LoadBlock:
    """One block to bring into device block ``block_id``; ``slot`` is pinned until released."""

    key: bytes
    block_id: int
    source: LoadSource
    slot: int = NO_SLOT


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """All blocks one request needs, in prompt order.

    ``in_step``: the request runs in the very step that copies them, instead of waiting for a report
    that they are there; they lie in host memory.
    """

    request_id: str
    blocks: tuple[LoadBlock, ...]
    in_step: bool = False


@dataclass(frozen=True, slots=True)
class StoreBlock:
    """One completed device block to copy into ``slot``; with ``to_disk`` then to a file."""

    key: bytes
    block_id: int
    slot: int
    to_disk: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One engine step's work. ``is_idle``: no tokens are computed in this step.

    ``prefetches``: blocks to read into their pinned slots for requests that still wait.
    ``touched``: keys of finished requests, in prompt order, whose files count as just used.
    """

    loads: tuple[LoadRequest, ...] = ()
    prefetches: tuple[LoadBlock, ...] = ()
    stores: tuple[StoreBlock, ...] = ()
    touched: tuple[tuple[bytes, ...], ...] = ()
    cancelled: tuple[str, ...] = ()
    is_idle: bool = False


@dataclass(slots=True)
class WorkerReport:
    """What the worker of one rank finished since its last report."""

    rank: int = 0  # tensor-parallel rank
    released: list[int] = field(default_factory=list)  # one pin each; a slot may occur repeatedly
    filled: list[int] = field(default_factory=list)  # slots whose bytes arrived from disk
    unfilled: list[int] = field(default_factory=list)  # slots whose bytes will not arrive
    written: list[bytes] = field(default_factory=list)  # keys now on disk
    unwritten: list[bytes] = field(default_factory=list)  # keys whose write failed
    bad: list[bytes] = field(default_factory=list)  # keys to forget everywhere
    gone: list[bytes] = field(default_factory=list)  # keys whose file is gone
    finished: list[str] = field(default_factory=list)  # requests whose load ended, well or not
    failed: list[str] = field(default_factory=list)  # those of them with at least one failed block
    read_breaker: BreakerState | None = None  # when it changed

    def __bool__(self) -> bool:
        return bool(
            self.released
            or self.filled
            or self.unfilled
            or self.written
            or self.unwritten
            or self.bad
            or self.finished
            or self.failed
            or self.gone
            or self.read_breaker is not None
        )


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What the worker learnt at registration; sent up once, before any request.

    ``problem`` is empty when the worker can serve; otherwise it says why the tier is off.
    """

    problem: str = ""
    namespace: str = ""
    payload_bytes: int = 0  # bytes of one block on the device, all layers
    slot_bytes: int = 0  # bytes of one host slot, header page and padding included
    slot_count: int = 0  # host slots the scheduler side may fill, of each worker
    rank_count: int = 1  # tensor-parallel workers, each with its part of every block
    has_disk: bool = False
    direct_io: bool = False


def combined(facts: Sequence[WorkerFacts], rank_count: int) -> WorkerFacts:
    """What all ranks can do together. Pure."""
    if len(facts) != rank_count:
        return WorkerFacts(problem=f"{len(facts)} of {rank_count} workers reported their cache")
    first = facts[0]
    if problem := next((each.problem for each in facts if each.problem), ""):
        return WorkerFacts(problem=problem)
    if any(
        (each.namespace, each.payload_bytes) != (first.namespace, first.payload_bytes)
        for each in facts
    ):
        return WorkerFacts(problem="the workers' caches differ in layout")
    return replace(
        first,
        slot_count=min(each.slot_count for each in facts),
        has_disk=all(each.has_disk for each in facts),
        direct_io=all(each.direct_io for each in facts),
        rank_count=rank_count,
    )
