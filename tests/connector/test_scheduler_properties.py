"""The scheduler side against a dictionary oracle, with a worker that answers in any order.

Requests arrive, are looked up, loaded, computed, preempted, aborted and finished as vLLM does it;
plans are answered late, in random order and with every failure; files are evicted, written by other
servers and lost unnoticed. With two ranks, each answers for itself. The oracle is told of nothing
but plans and reports. What must hold: every lookup is what the oracle says; no load is stranded or
ends twice; every pin is given back; and no plan asks what the worker would refuse.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, TypeVar
from unittest.mock import patch

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from harness.connector import scheduler as scheduler_module
from harness.connector.breaker import BreakerState
from harness.connector.config import ResetScope, TierConfig
from harness.connector.disk_index import Listing
from harness.connector.meta import LoadRequest, WorkerFacts
from harness.connector.scheduler import ScheduledRequest, TierScheduler

from .answering_worker import AnsweringWorker
from .scheduler_oracle import BLOCK_TOKENS, NAMESPACE, Oracle, Request, Store, Watcher, chain

SLOT_BYTES = 100


class _Logger(logging.Logger):
    """Quiet, but for exceptions that the scheduler side survives: here they are failures."""

    def __init__(self) -> None:
        super().__init__("quiet", logging.CRITICAL)

    def exception(self, *_: object, **__: object) -> None:
        raise


# Whole blocks of few kinds and a rest, so that prompts share beginnings.
_PROMPTS = ((0,), (0, 0), (0, 1), (0, 0, 0), (0, 0, 1), (0, 0, 0, 0, 0), (1, 0, 1, 0))


def _tokens(blocks: Sequence[int], rest: int) -> list[int]:
    return [kind for kind in blocks for _ in range(BLOCK_TOKENS)] + [7] * rest


_TOKENS = st.builds(_tokens, st.sampled_from(_PROMPTS), st.integers(0, BLOCK_TOKENS - 1))
_PICK = st.integers(0, 1000)
_OUTCOMES = ("ok", "ok", "ok", "ok", "damaged", "unreadable", "kept", "overdue")


_Item = TypeVar("_Item")


def _nth(items: Sequence[_Item], number: int) -> _Item:
    return items[number % len(items)]


def _end_read(worker: AnsweringWorker, key: bytes, outcome: str) -> None:
    waiters = worker.reads[key].waiters
    if outcome != "overdue":
        worker.read(key, outcome)
    elif waiters:
        worker.give_up(waiters[0][0])


class SchedulerMachine(RuleBasedStateMachine):
    """One scheduler side, one worker, a handful of requests."""

    has_disk = True

    @initialize(
        slots=st.sampled_from([1, 2, 3, 4, 5, 8, 16]),
        rank_count=st.integers(1, 2),
        scope=st.sampled_from(ResetScope),
        prefetch=st.sampled_from([True, True, False]),
        is_populated=st.booleans(),
    )
    def start(
        self, slots: int, rank_count: int, scope: ResetScope, prefetch: bool, is_populated: bool
    ) -> None:
        self.now_s = 1.0
        self.slot_count = slots
        self.scope = scope
        self.workers = [AnsweringWorker(r, has_disk=self.has_disk) for r in range(rank_count)]
        self.oracle = Oracle(rank_count, has_disk=self.has_disk)
        self.requests: dict[str, Request] = {}
        self.leaving: set[str] = set()  # aborted during their load, whose end is still to come
        self.cancels: set[str] = set()
        self.ranks_ended: Counter[str] = Counter()
        self.failed_blocks: dict[str, set[int]] = {}
        self.loads: dict[str, LoadRequest] = {}
        self.touchable: list[list[bytes]] = []  # of each finished request: keys with files
        self.planned_loads = self.ended_loads = 0
        self.count = self.next_block = 0
        self.watchers = [Watcher() for _ in range(rank_count)]
        self.scheduler = TierScheduler(
            TierConfig(1, reset_scope=scope, prefetch=prefetch),
            block_tokens=BLOCK_TOKENS,
            extra_keys=lambda request, start, end, index: (None, index),
            clock=lambda: self.now_s,
        )
        facts = WorkerFacts(
            namespace=NAMESPACE,
            slot_bytes=SLOT_BYTES,
            slot_count=slots,
            rank_count=rank_count,
            has_disk=self.has_disk,
        )
        store: Any = Store(self.workers) if self.has_disk else None

        def watcher_of(of: Store, _interval_s: float) -> Watcher:
            return self.watchers[of.rank]

        self.patches = [
            patch.object(scheduler_module, "DirectoryWatcher", watcher_of),
            patch.object(scheduler_module, "logger", _Logger()),
        ]
        for each in self.patches:
            each.start()
        if self.has_disk and is_populated:
            for blocks in _PROMPTS:
                self.another_server_writes(_tokens(blocks, 0), slice(None))
        listings = [listing for watcher in self.watchers for listing in watcher.found]
        self.scheduler.attach(facts, store)
        for listing in listings:
            self.oracle.list_bucket(listing)

    # Requests.

    @rule(tokens=_TOKENS, is_announced=st.booleans())
    def arrive(self, tokens: list[int], is_announced: bool) -> None:
        if len(self.requests) < 6:
            request = Request(f"r{self.count}", tokens)
            self.count += 1
            self.requests[request.request_id] = request
            if is_announced:
                self.scheduler.arrive(request)

    @rule(
        on_device=st.sampled_from([0, 0, 0, 1, 2]),
        room=st.integers(1, 6),
        is_planned=st.sampled_from([True] * 7 + [False]),
    )
    def schedule(self, on_device: int, room: int, is_planned: bool) -> None:
        """All waiting requests are looked up; there is room for the first ones only."""
        for index, request in enumerate(self.of("waiting")):
            first = min(on_device, request.num_tokens // BLOCK_TOKENS)
            found = self.look_up(request, first)
            if index >= room:
                continue  # vLLM asks again in a later step
            request.local_tokens = first * BLOCK_TOKENS
            request.block_ids = self.new_blocks(-(-request.num_tokens // BLOCK_TOKENS))
            request.told_blocks = 0
            request.computed_tokens = min(request.local_tokens + found, request.num_tokens - 1)
            if not found:
                request.phase = "running"
            elif is_planned:
                self.plan_load(request, first, found)
            else:  # the connector's own way out: the request waits, so it must be sent on
                self.scheduler.plan_failed_load(request, request.block_ids, found)
                request.phase = "loading"

    def look_up(self, request: Request, first: int) -> int:
        found = self.scheduler.lookup(request, first * BLOCK_TOKENS)
        keys = request.keys[first:]
        expected = next(
            (i for i, key in enumerate(keys) if not self.oracle.can_load(key)), len(keys)
        )
        assert found == (0 if request.has_failed else expected * BLOCK_TOKENS)
        return found

    def plan_load(self, request: Request, first: int, found: int) -> None:
        self.scheduler.plan_load(request, request.block_ids, found)
        load = self.scheduler._new_loads[-1]
        end = first + found // BLOCK_TOKENS
        assert [b.key for b in load.blocks] == request.keys[first:end]
        assert [b.block_id for b in load.blocks] == request.block_ids[first:end]
        assert sum(self.scheduler.hit_tokens(request.request_id)) == found
        self.oracle.plan_load(load)
        self.loads[request.request_id] = load
        request.phase = "loading"

    @precondition(lambda self: self.of("running"))
    @rule(pick=_PICK)
    def preempt(self, pick: int) -> None:
        request = _nth(self.of("running"), pick)
        request.phase, request.block_ids, request.computed_tokens = "waiting", [], 0

    @precondition(lambda self: self.requests)
    @rule(pick=_PICK)
    def finish(self, pick: int) -> None:
        """The end of a request, or its abort, whatever it was doing."""
        request = _nth(list(self.requests.values()), pick)
        del self.requests[request.request_id]
        if request.phase == "loading":
            self.leaving.add(request.request_id)
            self.cancels.add(request.request_id)
        self.scheduler.finish(request.request_id)
        on_disk = [k for k in request.keys if self.oracle.has_files(k) or k in self.oracle.writing]
        self.touchable.append(on_disk)

    # Steps and answers.

    @rule(skips=st.integers(0, 2), chunk=st.integers(1, 16), fails_store=st.booleans())
    def step(self, skips: int, chunk: int, fails_store: bool) -> None:
        """Some of the running requests are computed."""
        chosen = self.of("running")[skips:]
        shares = [self.share(request, chunk) for request in chosen]
        known = {key for r in chosen for key in r.keys if self.oracle.is_known(key)}
        listings = [listing for watcher in self.watchers for listing in watcher.found]
        plan = self.scheduler.build_plan(shares, is_idle=not shares)
        assert set(plan.cancelled) == self.cancels
        assert len(plan.cancelled) == len(self.cancels)
        self.cancels = set()
        for store in plan.stores:
            self.oracle.assign(store.key, store.slot, is_filling=False)
            if store.to_disk:
                assert store.key not in self.oracle.writing
                self.oracle.writing[store.key] = store.slot
                self.oracle.writes_left[store.key] = len(self.workers)
            else:
                self.oracle.pins[store.slot] = 0
            assert store.to_disk == self.has_disk
        for touched in plan.touched:
            assert any(list(touched) == keys[: len(touched)] for keys in self.touchable)
        self.touchable = []
        self.assert_stores(plan.stores, shares, known)
        self.assert_prefetches(plan.prefetches)
        for listing in listings:
            self.oracle.list_bucket(listing)
        self.planned_loads += len(plan.loads)
        for worker in self.workers:
            worker.take(plan)
        if fails_store and plan.stores:
            self.workers[-1].fail_store(plan.stores[-1])
        for request in chosen:
            request.computed_tokens = min(request.computed_tokens + chunk, request.num_tokens)
            if request.computed_tokens == request.num_tokens and request.num_tokens < 30:
                request.all_token_ids.append(len(request.all_token_ids) % 2)  # decoded

    def share(self, request: Request, chunk: int) -> ScheduledRequest:
        count = min(chunk, request.num_tokens - request.computed_tokens)
        needed = -(-(request.computed_tokens + count) // BLOCK_TOKENS)
        request.block_ids += self.new_blocks(max(0, needed - len(request.block_ids)))
        is_new = request.told_blocks == 0
        blocks = request.block_ids[request.told_blocks :]
        request.told_blocks = len(request.block_ids)
        return ScheduledRequest(
            request.request_id, request.computed_tokens, count, blocks, replaces_blocks=is_new
        )

    def assert_stores(
        self, stores: Sequence[Any], shares: list[ScheduledRequest], known: set[bytes]
    ) -> None:
        """Every block that the step completes is stored, is known, or is counted as dropped."""
        completed = {}
        for share in shares:
            request = self.requests[share.request_id]
            end = (share.computed_tokens + share.scheduled_tokens) // BLOCK_TOKENS
            for index in range(share.computed_tokens // BLOCK_TOKENS, end):
                completed.setdefault(request.keys[index], set()).add(request.block_ids[index])
        for store in stores:
            assert store.block_id in completed[store.key]
        missing = set(completed) - {store.key for store in stores} - known
        dropped = self.scheduler.take_counts().get("dropped_store_blocks.no_slot", 0)
        assert len(missing) <= dropped
        if dropped:  # without a directory, stores are pinned while they are planned only
            used = {slot for slot, pins in self.oracle.pins.items() if pins}
            assert len(used | {store.slot for store in stores}) == self.slot_count

    def assert_prefetches(self, blocks: Sequence[Any]) -> None:
        unscheduled = [r for r in self.requests.values() if not r.told_blocks]
        wanted = {key for request in unscheduled for key in request.keys}
        assert len(blocks) <= self.slot_count // 4
        for block in blocks:
            assert block.key in wanted
            assert self.oracle.has_files(block.key)
            self.oracle.assign(block.key, block.slot, is_filling=True)

    @precondition(lambda self: self.open_work())
    @rule(work=st.lists(st.tuples(_PICK, st.sampled_from(_OUTCOMES)), min_size=1, max_size=6))
    def work_ends(self, work: list[tuple[int, str]]) -> None:
        """Copies, reads, writes and deadlines, in any order."""
        for pick, outcome in work:
            if actions := self.open_work():
                _nth(actions, pick)(outcome)

    def open_work(self) -> list[Callable[[str], None]]:
        """Everything a worker could end now."""
        actions: list[Callable[[str], None]] = []
        for worker in self.workers:
            for index in range(len(worker.copies)):
                actions.append(lambda _, w=worker, i=index: w.copy(i))
            for key in sorted(worker.reads):
                actions.append(lambda how, w=worker, k=key: _end_read(w, k, how))
            for index in range(len(worker.writes)):
                actions.append(lambda how, w=worker, i=index: w.write(i, is_fine=how != "damaged"))
        return actions

    @rule()
    def report(self) -> None:
        """vLLM hands over the reports of all ranks together, once a step."""
        self.now_s += 1e-3
        for worker in self.workers:
            report, ended = worker.take_report()
            self.scheduler.apply_report(report)
            self.oracle.apply(report, self.now_s)
            assert sorted(report.finished) == sorted(ended)
            for request_id, failed in ended.items():
                self.failed_blocks.setdefault(request_id, set()).update(failed)
                self.ranks_ended[request_id] += 1
        for request_id in [r for r, n in self.ranks_ended.items() if n == len(self.workers)]:
            del self.ranks_ended[request_id]
            self.load_ended(request_id, self.failed_blocks.pop(request_id))

    def load_ended(self, request_id: str, failed: set[int]) -> None:
        self.ended_loads += 1
        if (load := self.loads.pop(request_id, None)) is not None:
            self.oracle.end_load(load)
        if request_id in self.leaving:
            self.leaving.remove(request_id)
            return
        request = self.requests[request_id]
        assert request.phase == "loading"
        request.phase = "running"
        if failed:
            request.has_failed = True
            valid = min(request.block_ids.index(block) for block in failed)
            request.computed_tokens = valid * BLOCK_TOKENS
            if not valid:  # vLLM puts it back and asks again
                request.phase, request.block_ids = "waiting", []

    # The directory.

    @precondition(lambda self: self.has_disk)
    @rule(rank=_PICK, pick=_PICK, is_noticed=st.booleans())
    def file_goes(self, rank: int, pick: int, is_noticed: bool) -> None:
        worker = _nth(self.workers, rank)
        if worker.files:
            worker.lose_file(_nth(sorted(worker.files), pick), is_noticed=is_noticed)

    @precondition(lambda self: self.has_disk)
    @rule(tokens=_TOKENS, by=st.sampled_from([slice(None), slice(None), slice(1), slice(1, None)]))
    def another_server_writes(self, tokens: list[int], by: slice) -> None:
        """All its ranks, or one that was faster; the directories are listed at once."""
        for worker in self.workers[by]:
            worker.files.update(chain(tuple(tokens)))
        self.directories_are_listed()

    @precondition(lambda self: self.has_disk)
    @rule()
    def directories_are_listed(self) -> None:
        for worker in self.workers:
            known = self.oracle.on_disk[worker.rank]
            for bucket in sorted({key[0] for key in (*worker.files, *known)}):
                keys = frozenset(key for key in worker.files if key[0] == bucket)
                listing = Listing(worker.rank, bucket, self.now_s, keys)
                self.watchers[worker.rank].found.append(listing)

    @precondition(lambda self: self.has_disk)
    @rule(rank=_PICK, state=st.sampled_from([BreakerState.CLOSED] * 3 + [*BreakerState]))
    def breaker_turns(self, rank: int, state: BreakerState) -> None:
        _nth(self.workers, rank).set_breaker(state)

    @rule(random=st.randoms(use_true_random=False), count=st.integers(1, 6))
    def turns(self, random: Random, count: int) -> None:
        """Whole turns of a server: requests arrive, others are served, most things work."""
        for _ in range(count):
            if self.has_disk and random.random() < 0.4:
                self.directory_changes(random)
            if random.random() < 0.8:
                tokens = _tokens(random.choice(_PROMPTS), random.randrange(BLOCK_TOKENS))
                self.arrive(tokens, is_announced=random.random() < 0.8)
            if random.random() < 0.6:
                self.schedule(0, room=random.randint(1, 3), is_planned=True)
            self.step(0, 16, fails_store=random.random() < 0.15)
            for _ in range(random.randint(0, 12)):
                if actions := self.open_work():
                    how = "ok" if random.random() < 0.8 else random.choice(_OUTCOMES)
                    random.choice(actions)(how)
            self.report()
            if random.random() < 0.5 and self.requests:
                self.finish(random.randrange(100))
            if random.random() < 0.05:
                self.reset()

    def directory_changes(self, random: Random) -> None:
        what, rank = random.randrange(5), random.randrange(2)
        if what < 2:
            self.file_goes(rank, random.randrange(100), is_noticed=what == 0)
        elif what == 2:
            self.another_server_writes(_tokens(random.choice(_PROMPTS), 0), slice(None))
        elif what == 3:
            self.directories_are_listed()
        else:
            self.breaker_turns(rank, random.choice(list(BreakerState)))

    @rule()
    def reset(self) -> None:
        is_busy = bool(+self.oracle.pins) or bool(self.oracle.writing) or self.is_loading
        assert self.scheduler.reset() == (not is_busy)
        if not is_busy:
            for key in list(self.oracle.slot_of):
                self.oracle.forget(key)
            if self.scope is ResetScope.ALL and self.has_disk:
                for files in self.oracle.on_disk:
                    files.clear()
                self.oracle.cleared_s = self.now_s
                self.now_s += 1e-3

    @property
    def is_loading(self) -> bool:
        return bool(self.of("loading")) or bool(self.leaving)

    # What must hold at any time.

    @invariant()
    def index_agrees_with_the_oracle(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        pool = self.scheduler._pool
        assert pool is not None
        assert pool.pinned_count == len(+self.oracle.pins)
        assert len(pool) == len(self.oracle.slot_of)
        assert all(pool.slot_of(key) == slot for key, slot in self.oracle.slot_of.items())
        gauges = self.scheduler.gauges()
        assert gauges["store_backlog_blocks"] == len(self.oracle.writing)
        assert gauges["host_used_bytes"] <= self.slot_count * SLOT_BYTES
        waiting_for = {r.request_id for r in self.of("loading")} | self.leaving
        assert set(self.scheduler._loading) == waiting_for

    def teardown(self) -> None:
        """Everything is answered and finished: nobody is stranded, and nothing is held."""
        if not hasattr(self, "scheduler"):
            return
        try:
            self.end()
        finally:
            for each in self.patches:
                each.stop()

    def end(self) -> None:
        self.step(100, 1, fails_store=False)
        for _ in range(2):
            for worker in self.workers:
                while worker.copies:
                    worker.copy(0)
                for key in list(worker.reads):
                    worker.read(key, "ok")
                while worker.writes:
                    worker.write(0, is_fine=True)
            self.report()
            self.step(100, 1, fails_store=False)
        assert not self.of("loading"), "a request is stranded"
        assert not self.leaving, "the end of an aborted request's load was never told"
        for request_id in list(self.requests):
            del self.requests[request_id]
            self.scheduler.finish(request_id)
        self.report()
        assert not +self.oracle.pins
        assert self.ended_loads == self.planned_loads
        assert not self.scheduler._streaming
        assert not self.scheduler._requests
        assert not self.scheduler._waiting
        assert not self.scheduler._prefetched
        assert not self.scheduler._writing
        self.reset()

    def of(self, phase: str) -> list[Request]:
        return [r for r in self.requests.values() if r.phase == phase]

    def new_blocks(self, count: int) -> list[int]:
        self.next_block += count
        return list(range(self.next_block - count, self.next_block))


class HostOnlyMachine(SchedulerMachine):
    """Without a directory."""

    has_disk = False


_SETTINGS = settings(deadline=None, max_examples=150, stateful_step_count=50)
TestWithDisk = SchedulerMachine.TestCase
TestWithDisk.settings = _SETTINGS
TestHostOnly = HostOnlyMachine.TestCase
TestHostOnly.settings = _SETTINGS
