"""The scheduler side: finds hits, plans loads and stores, owns every index. Stdlib only.

Requests are looked at through three attributes only (``_Request`` below), so tests use plain
objects. Single-threaded: everything here runs in the engine core's scheduling loop and must stay
short.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from harness.connector.breaker import BreakerState
from harness.connector.config import ResetScope, TierConfig
from harness.connector.disk_index import DirectoryWatcher, DiskIndex
from harness.connector.file_store import FileStore, StoreUnavailable
from harness.connector.host_pool import HostPool
from harness.connector.keys import next_key, root_key
from harness.connector.meta import (
    NO_BLOCK,
    NO_SLOT,
    LoadBlock,
    LoadRequest,
    LoadSource,
    StepPlan,
    StoreBlock,
    WorkerFacts,
    WorkerReport,
)

logger = logging.getLogger("vllm.kvgate.scheduler")


class _Request(Protocol):
    @property
    def request_id(self) -> str: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def all_token_ids(self) -> Sequence[int]: ...


# (request, first token, end token, index of the first image to look at) -> (what else the block's
# KV depends on, next image index): the contract of vLLM's generate_block_hash_extra_keys.
ExtraKeys = Callable[[Any, int, int, int], "tuple[Sequence[Any] | None, int]"]


# At start, the first requests wait this long at most for the directory to be listed.
_FIRST_LISTING_S = 30.0
# Waiting requests that files are read for ahead, and the part of the pool they may take.
_PREFETCH_REQUESTS = 8
_PREFETCH_POOL_PART = 4


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's share of a step. ``block_ids`` replace or extend its known blocks."""

    request_id: str
    computed_tokens: int  # before this step
    scheduled_tokens: int
    block_ids: Sequence[int]
    replaces_blocks: bool


@dataclass(slots=True)
class _RequestState:
    request: _Request
    keys: list[bytes] = field(default_factory=list)
    image_index: int = 0
    local_tokens: int = 0  # device hit of the last lookup
    block_ids: list[int] = field(default_factory=list)
    next_store: int = 0  # first block not yet considered for storing
    next_prefetch: int = 0  # first block not yet considered for reading ahead
    is_reuse_counted: bool = False  # its hit has renewed the host pool's order
    is_tier_off: bool = False  # a load failed: recompute, do not look up again
    host_tokens: int = 0  # of the last planned load, by source
    disk_tokens: int = 0
    is_in_step: bool = False  # its load is copied by the step that runs it


class TierScheduler:
    """Index of the tier and planner of its work. Off (answers nothing) until ``attach``."""

    def __init__(
        self,
        config: TierConfig,
        *,
        block_tokens: int,
        extra_keys: ExtraKeys,
        are_loads_allowed: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._block_tokens = block_tokens
        self._extra_keys = extra_keys
        self._are_loads_allowed = are_loads_allowed
        self._clock = clock
        self._facts = WorkerFacts(problem="the worker has not reported yet")
        self._pool: HostPool | None = None
        self._stores: list[FileStore] = []  # by rank; empty without a disk tier
        self._on_disk = DiskIndex()
        self._watchers: list[DirectoryWatcher] = []
        self._writing: dict[bytes, int] = {}  # key -> pinned slot, until durable or failed
        # What ranks have yet to report, by key, slot and request.
        self._writes_left: dict[bytes, int] = {}
        self._fills_left: dict[int, int] = {}
        self._loads_left: dict[str, int] = {}
        self._streaming: Counter[bytes] = Counter()  # loads through staging buffers, by key
        self._loading: dict[str, LoadRequest] = {}
        self._requests: dict[str, _RequestState] = {}
        self._new_loads: list[LoadRequest] = []
        self._new_cancels: list[str] = []
        self._new_touches: list[tuple[bytes, ...]] = []
        self._waiting: dict[str, _RequestState] = {}  # arrived, not yet scheduled
        self._prefetched: set[bytes] = set()  # read ahead, not yet restored
        self._sick_ranks: set[int] = set()
        self._dropped_stores = 0
        self._told_evictions = 0

    def attach(self, facts: WorkerFacts, store: FileStore | None) -> None:
        """Starts serving with what the workers reported; finds the blocks that earlier runs left.

        ``store`` is that of any rank; those of the others lie beside it.
        """
        self._facts = facts
        if facts.problem:
            return
        self._pool = HostPool(facts.slot_count, holders=facts.rank_count)
        self._on_disk = DiskIndex(facts.rank_count)
        if store is not None:
            self._stores = [store.of_rank(rank) for rank in range(facts.rank_count)]
            self._watchers = [
                DirectoryWatcher(each, self._config.rescan_interval_s) for each in self._stores
            ]
            for watcher in self._watchers:
                watcher.start(_FIRST_LISTING_S)
            self._take_listings()

    def stop(self) -> None:
        """Ends the listing threads."""
        for watcher in self._watchers:
            watcher.stop()

    @property
    def is_serving(self) -> bool:
        """Whether the tier stores and answers lookups."""
        return self._pool is not None

    @property
    def disk_block_count(self) -> int:
        """Blocks known to be on disk."""
        return len(self._on_disk)

    def arrive(self, request: _Request) -> None:
        """A request came in. While it waits to be scheduled, its files are read ahead."""
        if self._pool is not None and self._are_loads_allowed and self._config.prefetch:
            self._waiting[request.request_id] = self._state_of(request)

    def lookup(self, request: _Request, computed_tokens: int) -> int:
        """Tokens after ``computed_tokens`` that the tier can load: whole blocks, up to all."""
        if self._pool is None:
            return 0
        state = self._state_of(request)
        state.local_tokens = computed_tokens
        state.is_in_step = False
        if not self._are_loads_allowed or state.is_tier_off:
            return 0
        keys = self._keys(state, request.num_tokens // self._block_tokens)
        first = computed_tokens // self._block_tokens
        end = first
        while end < len(keys) and self._source_of(keys[end]) is not LoadSource.MISSING:
            end += 1
        if not state.is_reuse_counted:
            state.is_reuse_counted = end > 0
            self._pool.reuse_chain(keys[:end])
        return (end - first) * self._block_tokens

    def can_copy_in_step(self, request: _Request, external_tokens: int) -> bool:
        """Whether a step can itself restore what was just looked up: all of it in host memory.

        True binds the ``plan_load`` that follows at once, as vLLM calls it.
        """
        state = self._requests[request.request_id]
        first, end = self._loaded_blocks(state, external_tokens)
        state.is_in_step = all(
            self._source_of(key) is LoadSource.HOST for key in state.keys[first:end]
        )
        return state.is_in_step

    def plan_load(self, request: _Request, block_ids: Sequence[int], external_tokens: int) -> None:
        """Plans a load of ``external_tokens``; ``block_ids`` are all blocks of the request."""
        if external_tokens <= 0:
            return
        state = self._requests[request.request_id]
        self._waiting.pop(request.request_id, None)
        first, end = self._loaded_blocks(state, external_tokens)
        targets = list(zip(state.keys[first:end], block_ids[first:end], strict=True))
        # Pins first: a slot given to one block must not evict another block of the same load.
        resident = {
            key: slot for key, _ in targets if (slot := self._pin_resident(key)) is not None
        }
        blocks: list[LoadBlock] = []
        state.host_tokens = state.disk_tokens = 0
        for key, block_id in targets:
            if key in resident:
                is_read = key in self._prefetched or self._is_filling(resident[key])
                source = LoadSource.FILLING if is_read else LoadSource.HOST
                block = LoadBlock(key, block_id, source, resident[key])
            else:
                block = self._plan_disk_block(key, block_id)
            self._prefetched.discard(key)
            blocks.append(block)
            if block.source is LoadSource.HOST:
                state.host_tokens += self._block_tokens
            else:
                state.disk_tokens += self._block_tokens
        self._add_load(LoadRequest(request.request_id, tuple(blocks), state.is_in_step))

    def plan_failed_load(
        self, request: _Request, block_ids: Sequence[int], external_tokens: int
    ) -> None:
        """Plans a load that fails at once, so that its request is recomputed."""
        self._waiting.pop(request.request_id, None)
        state = self._state_of(request)
        first, end = self._loaded_blocks(state, external_tokens)
        blocks = tuple(
            LoadBlock(b"", block_id, LoadSource.MISSING) for block_id in block_ids[first:end]
        )
        self._add_load(LoadRequest(request.request_id, blocks, state.is_in_step))

    def hit_tokens(self, request_id: str) -> tuple[int, int]:
        """Tokens from (host, disk) of the request's last planned load."""
        state = self._requests.get(request_id)
        return (0, 0) if state is None else (state.host_tokens, state.disk_tokens)

    def build_plan(self, scheduled: Iterable[ScheduledRequest], *, is_idle: bool) -> StepPlan:
        """This step's work: loads planned since the last, and stores of blocks it completes.

        The stores run after the step's forward pass, when the KV is in the device blocks.
        """
        loads, self._new_loads = tuple(self._new_loads), []
        cancels, self._new_cancels = tuple(self._new_cancels), []
        touches, self._new_touches = tuple(self._new_touches), []
        stores: list[StoreBlock] = []
        prefetches: list[LoadBlock] = []
        try:
            for share in scheduled:
                self._waiting.pop(share.request_id, None)
                stores += self._plan_stores(share)
            prefetches = self._plan_prefetches()
            self._take_listings()
        except Exception:  # the loads must go out whatever happens here
            logger.exception("event=plan_stores_failed effect=stores_of_this_step_lost")
        return StepPlan(loads, tuple(prefetches), tuple(stores), touches, cancels, is_idle)

    def apply_report(self, report: WorkerReport) -> None:
        """Takes in what one rank's worker finished.

        A block counts as filled or on disk when every rank says so, a load as ended as well.
        """
        pool = self._pool
        if pool is None:
            for request_id in report.finished:
                if _count_down(self._loads_left, request_id):
                    del self._loading[request_id]
            return
        for key in report.bad:
            self._on_disk.discard(key, self._clock(), report.rank)
            pool.forget(key)
        for key in report.gone:
            self._on_disk.discard(key, self._clock(), report.rank)
        for slot in report.unfilled:
            self._fills_left.pop(slot, None)
            pool.filled(slot, is_valid=False)
        for slot in report.filled:
            # Another rank's part may have failed: then the slot is forgotten already.
            if slot in self._fills_left and _count_down(self._fills_left, slot):
                pool.filled(slot, is_valid=True)
        for key in report.written:
            self._on_disk.add(key, self._clock(), report.rank)
        for key in (*report.written, *report.unwritten):
            pool.unpin(self._writing[key])
            if _count_down(self._writes_left, key):
                del self._writing[key]
        for slot in report.released:
            pool.unpin(slot)
        if report.read_breaker is not None:
            # A directory being probed is left alone as well.
            if report.read_breaker is BreakerState.CLOSED:
                self._sick_ranks.discard(report.rank)
            else:
                self._sick_ranks.add(report.rank)
        for request_id in report.failed:
            if (state := self._requests.get(request_id)) is not None:
                state.is_tier_off = True
        for request_id in report.finished:
            if not _count_down(self._loads_left, request_id):
                continue
            for block in self._loading.pop(request_id).blocks:
                if block.source is LoadSource.DISK and block.slot == NO_SLOT:
                    self._streaming[block.key] -= 1
                    if self._streaming[block.key] <= 0:
                        del self._streaming[block.key]

    def finish(self, request_id: str) -> None:
        """Forgets a finished request. A load under way is cancelled; its end is reported later."""
        state = self._requests.pop(request_id, None)
        self._waiting.pop(request_id, None)
        if request_id in self._loading:
            self._new_cancels.append(request_id)
        if state is not None and self._stores:
            self._prefetched.difference_update(state.keys)
            used = tuple(k for k in state.keys if k in self._on_disk or k in self._writing)
            if used:
                self._new_touches.append(used)

    def reset(self) -> bool:
        """Drops what ``reset_scope`` says. False, without effect, while blocks move.

        Refusing then keeps blocks that wait for the writer from being lost, and never frees a slot
        under a copy.
        """
        if self._pool is None:
            return True
        if self._writing or self._loading or self._pool.pinned_count:
            logger.warning(
                "event=reset_refused backlog_blocks=%d loads=%d pinned_slots=%d",
                len(self._writing),
                len(self._loading),
                self._pool.pinned_count,
            )
            return False
        if self._config.reset_scope is ResetScope.ALL and self._stores:
            try:
                for store in self._stores:
                    store.clear()
            except StoreUnavailable as error:
                logger.error("event=reset_failed reason=%s", error)
                return False
            self._on_disk.clear(self._clock())
        self._pool.clear()
        logger.info("event=reset scope=%s", self._config.reset_scope.value)
        return True

    def take_counts(self) -> dict[str, int]:
        """Counters since the last call, by short metric name; without those at zero."""
        evicted = 0 if self._pool is None else self._pool.evicted_count
        counts = {
            "dropped_store_blocks.no_slot": self._dropped_stores,
            "evicted_blocks.host": evicted - self._told_evictions,
        }
        self._dropped_stores, self._told_evictions = 0, evicted
        return {name: count for name, count in counts.items() if count}

    def gauges(self) -> dict[str, float]:
        """The state now, by short metric name."""
        used = 0 if self._pool is None else self._pool.used_count
        return {
            "serving": int(self.is_serving),
            "store_backlog_blocks": len(self._writing),
            "host_used_bytes": used * self._facts.slot_bytes,
            "host_capacity_bytes": self._facts.slot_count * self._facts.slot_bytes,
            "disk_enabled": int(self._is_disk_usable()),
            "direct_io": int(self._facts.direct_io),
        }

    def _loaded_blocks(self, state: _RequestState, external_tokens: int) -> tuple[int, int]:
        """First and end index of the blocks that hold these tokens after the device's own."""
        first = state.local_tokens // self._block_tokens
        # In a step the prompt's last token is computed, so the last block may be counted in part.
        return first, first + -(-external_tokens // self._block_tokens)

    def _add_load(self, load: LoadRequest) -> None:
        self._loading[load.request_id] = load
        self._loads_left[load.request_id] = self._facts.rank_count
        self._new_loads.append(load)

    def _state_of(self, request: _Request) -> _RequestState:
        state = self._requests.get(request.request_id)
        if state is None or state.request is not request:
            state = self._requests[request.request_id] = _RequestState(request)
        return state

    def _take_listings(self) -> None:
        for watcher in self._watchers:
            for listing in watcher.take():
                self._on_disk.apply(listing)

    def _is_disk_usable(self) -> bool:
        return bool(self._stores) and not self._sick_ranks

    def _is_filling(self, slot: int) -> bool:
        return self._pool is not None and self._pool.is_filling(slot)

    def _source_of(self, key: bytes) -> LoadSource:
        slot = None if self._pool is None else self._pool.slot_of(key)
        if slot is not None and self._pool is not None and not self._pool.is_filling(slot):
            return LoadSource.HOST
        # A slot that is still being filled is worth as much as its read: nothing while the disk
        # hangs.
        if (slot is not None or key in self._on_disk) and self._is_disk_usable():
            return LoadSource.DISK
        return LoadSource.MISSING

    def _pin_resident(self, key: bytes) -> int | None:
        slot = None if self._pool is None else self._pool.slot_of(key)
        if slot is not None and self._pool is not None:
            self._pool.pin(slot)
        return slot

    def _plan_disk_block(self, key: bytes, block_id: int) -> LoadBlock:
        if key not in self._on_disk or self._pool is None:
            return LoadBlock(key, block_id, LoadSource.MISSING)
        # A key that another request reads through a staging buffer is not read twice: join that
        # read.
        slot = None if key in self._streaming else self._allocate_to_fill(key)
        if slot is None:
            self._streaming[key] += 1
            return LoadBlock(key, block_id, LoadSource.DISK)
        return LoadBlock(key, block_id, LoadSource.DISK, slot)

    def _allocate_to_fill(self, key: bytes) -> int | None:
        slot = None if self._pool is None else self._pool.allocate(key, filling=True)
        if slot is not None:
            self._fills_left[slot] = self._facts.rank_count
        return slot

    def _plan_prefetches(self) -> list[LoadBlock]:
        """Reads ahead for requests that this step left waiting, in their order of arrival."""
        planned: list[LoadBlock] = []
        if self._pool is None or not self._is_disk_usable():
            return planned
        room = self._pool.slot_count // _PREFETCH_POOL_PART - len(self._prefetched)
        for state in list(self._waiting.values())[:_PREFETCH_REQUESTS]:
            keys = self._keys(state, state.request.num_tokens // self._block_tokens)
            first = max(state.next_prefetch, state.local_tokens // self._block_tokens)
            for index in range(first, len(keys)):
                if room <= 0:
                    return planned
                key = keys[index]
                if key not in self._pool and key not in self._streaming:
                    if key not in self._on_disk:
                        break
                    slot = self._allocate_to_fill(key)
                    if slot is None:
                        return planned
                    self._prefetched.add(key)
                    planned.append(LoadBlock(key, NO_BLOCK, LoadSource.DISK, slot))
                    room -= 1
                # Considered once: a block read ahead and evicted since shows a pool too small.
                state.next_prefetch = index + 1
        return planned

    def _plan_stores(self, share: ScheduledRequest) -> list[StoreBlock]:
        state = self._requests.get(share.request_id)
        if state is None or self._pool is None:
            return []
        if share.replaces_blocks:
            state.block_ids = list(share.block_ids)
            # What lies before was loaded or hit on the device, never computed: not stored again.
            state.next_store = share.computed_tokens // self._block_tokens
        else:
            state.block_ids.extend(share.block_ids)
        # Tokens beyond num_tokens are unverified drafts, or sampled ones not known yet.
        known = min(share.computed_tokens + share.scheduled_tokens, state.request.num_tokens)
        complete = min(known // self._block_tokens, len(state.block_ids))
        if complete <= state.next_store:
            return []
        keys = self._keys(state, complete)
        stores: list[StoreBlock] = []
        for index in range(state.next_store, complete):
            key = keys[index]
            if key in self._pool or key in self._on_disk or key in self._writing:
                continue
            slot = self._pool.allocate(key)
            if slot is None:
                self._dropped_stores += 1
                continue
            to_disk = bool(self._stores)
            if to_disk:
                self._writing[key] = slot
                self._writes_left[key] = self._facts.rank_count
            stores.append(StoreBlock(key, state.block_ids[index], slot, to_disk))
        for store in stores:
            if not store.to_disk:
                # Nothing reads the slot behind the worker's back: plans run in order, so a later
                # plan may reuse it at once.
                self._pool.unpin_all(store.slot)
        state.next_store = complete
        self._pool.order_chain(keys)
        return stores

    def _keys(self, state: _RequestState, count: int) -> list[bytes]:
        """The first ``count`` keys of a request's chain; extends the chain as needed."""
        keys, size = state.keys, self._block_tokens
        parent = keys[-1] if keys else root_key(self._facts.namespace)
        for index in range(len(keys), count):
            start, end = index * size, (index + 1) * size
            extra, state.image_index = self._extra_keys(
                state.request, start, end, state.image_index
            )
            parent = next_key(parent, state.request.all_token_ids[start:end], extra)
            keys.append(parent)
        return keys[:count]


_Name = TypeVar("_Name")


def _count_down(left: dict[_Name, int], name: _Name) -> bool:
    """One rank fewer to report; True, and forgotten, with the last one."""
    left[name] -= 1
    if left[name]:
        return False
    del left[name]
    return True
