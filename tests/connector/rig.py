"""Scheduler side and worker side joined without vLLM: a tiny device cache, real files.

``Rig.serve`` plays one request as vLLM would: look up, allocate device blocks, load, compute the
rest, and returns the KV the request ended up with. ``kv_of`` says what that KV must be.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from harness.connector.blockfile import file_bytes
from harness.connector.config import ResetScope, TierConfig
from harness.connector.file_store import FileStore
from harness.connector.layout import BlockLayout, CacheTensor
from harness.connector.meta import StepPlan, WorkerFacts
from harness.connector.quota import USAGE_NAME, DirectoryQuota
from harness.connector.scheduler import ScheduledRequest, TierScheduler
from harness.connector.worker import HostMemory, TierWorker

NAMESPACE = "cd" * 16
BLOCK_TOKENS = 4
LAYERS, RUN_BYTES = 2, 24
DEVICE_BLOCKS = 64


@dataclass
class FakeRequest:
    """What the scheduler side looks at."""

    request_id: str
    all_token_ids: list[int]

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


@dataclass
class Served:
    """How a request ended: its KV by block, hit tokens, and whether a load failed."""

    blocks: list[bytes]
    external_tokens: int
    has_failed: bool
    hits: tuple[int, int] = (0, 0)
    statistics: dict[str, Any] = field(default_factory=dict)


def kv_of(tokens: Sequence[int]) -> list[bytes]:
    """The KV of each full block: a function of all tokens up to its end, as in a real model."""
    blocks = []
    for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
        seed = hashlib.sha256(repr(list(tokens[:end])).encode()).digest()
        blocks.append((seed * 2)[: LAYERS * RUN_BYTES])
    return blocks


def used_bytes(directory: Path) -> int:
    """What the shared count says is in use."""
    return int.from_bytes((directory / USAGE_NAME).read_bytes()[:8], "little")


class Rig:
    """One tier of one or more ranks. A new rig on the same directory is a restarted server.

    A rank's KV is rank 0's with every byte XORed by the rank; ``_get`` checks that they agree.
    """

    def __init__(
        self,
        directory: Path | None,
        *,
        pool_slots: int,
        staging: int = 2,
        deadline_s: float = 20.0,
        reset_scope: ResetScope = ResetScope.ALL,
        wrap_store: Callable[[FileStore], FileStore] = lambda store: store,
        are_loads_allowed: bool = True,
        ranks: int = 1,
        steps_copy: bool = False,
        **settings: Any,
    ) -> None:
        self.devices = [
            np.zeros((LAYERS, DEVICE_BLOCKS, RUN_BYTES), dtype=np.uint8) for _ in range(ranks)
        ]
        self.device = self.devices[0]
        layouts = [_layout(device.reshape(-1)) for device in self.devices]
        payload_bytes = layouts[0].payload_bytes
        config = TierConfig(
            host_pool_bytes=1,
            directory=directory,
            load_deadline_s=deadline_s,
            reset_scope=reset_scope,
            **{"rescan_interval_s": 0.01, "disk_reserve_bytes": 0} | settings,
        )
        slot_bytes = file_bytes(payload_bytes)
        self.stores: list[FileStore] = []
        index_store = None
        if directory is not None:
            quota = DirectoryQuota(
                directory,
                capacity_bytes=config.disk_capacity_bytes,
                reserve_bytes=config.disk_reserve_bytes,
            )
            index_store = FileStore(directory, NAMESPACE, payload_bytes, quota=quota)
            for rank in range(ranks):
                self.stores.append(wrap_store(index_store.of_rank(rank)))
                self.stores[rank].open({})
        else:
            staging = 0
        self.workers = [
            TierWorker(
                config,
                layout,
                HostMemory(pool_slots + staging, slot_bytes),
                pool_slots=pool_slots,
                store=self.stores[rank] if self.stores else None,
                rank=rank,
            )
            for rank, layout in enumerate(layouts)
        ]
        self.worker = self.workers[0]
        self.scheduler = TierScheduler(
            config,
            block_tokens=BLOCK_TOKENS,
            extra_keys=lambda request, start, end, index: (None, index),
            are_loads_allowed=are_loads_allowed,
        )
        facts = WorkerFacts(
            namespace=NAMESPACE,
            payload_bytes=payload_bytes,
            slot_bytes=slot_bytes,
            slot_count=pool_slots,
            has_disk=bool(self.stores),
            rank_count=ranks,
        )
        self.scheduler.attach(facts, index_store)
        self.steps_copy = steps_copy
        self.invalid: set[int] = set()
        self.restored_in_step: set[int] = set()
        self.finished: set[str] = set()
        self._endings: Counter[str] = Counter()  # by how many ranks a load's end was reported
        self._ids = itertools.count()
        self._next_block = 0

    def request(self, tokens: Sequence[int]) -> FakeRequest:
        """A new request."""
        return FakeRequest(f"r{next(self._ids)}", list(tokens))

    def blocks(self, count: int) -> list[int]:
        """Device blocks for a request, full of garbage."""
        ids = [(self._next_block + i) % DEVICE_BLOCKS for i in range(count)]
        self._next_block += count
        for device in self.devices:
            device[:, ids] = 0xEE
        return ids

    def step(
        self,
        shares: Sequence[ScheduledRequest] = (),
        compute: Callable[[], None] = lambda: None,
    ) -> StepPlan:
        """One engine step: plan, start, copy for its own requests, compute, store, report."""
        plan = self.scheduler.build_plan(shares, is_idle=not shares)
        for worker in self.workers:
            worker.begin_step(plan)
            if any(load.in_step for load in plan.loads):
                worker.copy_ready()
        compute()
        for worker in self.workers:
            worker.copy_ready()
            worker.save(plan)
            self._endings.update(worker.poll(is_idle=plan.is_idle))
            self.invalid |= worker.take_failed_blocks()
            self.restored_in_step |= worker.take_restored_in_step()
        for worker in self.workers:
            self.scheduler.apply_report(worker.take_report())
        assert max(self._endings.values(), default=0) <= len(self.workers), "an end reported twice"
        self.finished |= {
            name for name, count in self._endings.items() if count == len(self.workers)
        }
        return plan

    def start(self, request: FakeRequest, device_blocks: int = 0) -> tuple[list[int], int]:
        """Looks up and plans the load of a request of which ``device_blocks`` are on the device."""
        external = self.scheduler.lookup(request, device_blocks * BLOCK_TOKENS)
        ids = self.blocks(-(-request.num_tokens // BLOCK_TOKENS))
        for index in range(device_blocks):
            self._put(ids[index], kv_of(request.all_token_ids)[index])
        in_step = min(external, request.num_tokens - 1 - device_blocks * BLOCK_TOKENS)
        if self.steps_copy and in_step > 0 and self.scheduler.can_copy_in_step(request, in_step):
            external = in_step
        self.scheduler.plan_load(request, ids, external)
        return ids, external

    def wait(self, request: FakeRequest) -> None:
        """Steps until the request's load has ended."""
        limit = time.monotonic() + 30
        while request.request_id not in self.finished:
            assert time.monotonic() < limit, "the load never ended"
            self.step()

    def compute(self, request: FakeRequest, ids: list[int], computed_tokens: int) -> None:
        """Runs the rest of the prompt in one step."""
        wanted = kv_of(request.all_token_ids)

        def forward() -> None:
            for index in range(computed_tokens // BLOCK_TOKENS, len(wanted)):
                self._put(ids[index], wanted[index])

        share = ScheduledRequest(
            request.request_id,
            computed_tokens,
            request.num_tokens - computed_tokens,
            ids,
            replaces_blocks=True,
        )
        self.step([share], forward)

    def serve(self, tokens: Sequence[int], device_blocks: int = 0) -> Served:
        """One request from arrival to end."""
        request = self.request(tokens)
        ids, external = self.start(request, device_blocks)
        hits = self.scheduler.hit_tokens(request.request_id)
        valid = device_blocks * BLOCK_TOKENS + external
        has_failed = False
        load = self.scheduler._loading.get(request.request_id)
        if load is not None and load.in_step:
            has_failed, valid = self._run_at_once(request, ids, device_blocks, valid)
        elif external:
            self.wait(request)
            bad = [i for i, block in enumerate(ids) if block in self.invalid]
            self.invalid.clear()
            has_failed = bool(bad)
            if bad:
                valid = bad[0] * BLOCK_TOKENS
        if load is None or not load.in_step or has_failed:
            self.compute(request, ids, valid)
        blocks = [self._get(block) for block in ids[: len(tokens) // BLOCK_TOKENS]]
        self.scheduler.finish(request.request_id)
        return Served(blocks, external, has_failed, hits)

    def _run_at_once(
        self, request: FakeRequest, ids: list[int], device_blocks: int, valid: int
    ) -> tuple[bool, int]:
        """The step that copies and computes. (whether a block was not restored, tokens that hold).

        A load that is not proved makes vLLM compute from that block on, in a later step.
        """
        self.restored_in_step.clear()
        self.compute(request, ids, valid)
        assert request.request_id not in self.finished, "nobody waited for this load"
        owed = ids[device_blocks : -(-valid // BLOCK_TOKENS)]
        bad = [i for i, block in enumerate(ids) if block in set(owed) - self.restored_in_step]
        self.invalid.clear()
        return bool(bad), bad[0] * BLOCK_TOKENS if bad else valid

    def drain(self) -> None:
        """Steps until everything is durable."""
        limit = time.monotonic() + 30
        while self.scheduler.gauges()["store_backlog_blocks"]:
            assert time.monotonic() < limit, "the backlog never drained"
            self.step()
            time.sleep(0.001)

    def close(self) -> None:
        """Ends the threads."""
        for worker in self.workers:
            worker.stop()
        self.scheduler.stop()

    def _put(self, block: int, kv: bytes) -> None:
        part = np.frombuffer(kv, dtype=np.uint8).reshape(LAYERS, RUN_BYTES)
        for rank, device in enumerate(self.devices):
            device[:, block] = part ^ rank

    def _get(self, block: int) -> bytes:
        for rank, device in enumerate(self.devices):
            assert (device[:, block] == self.device[:, block] ^ rank).all(), "ranks disagree"
        return self.device[:, block].tobytes()


def _layout(flat: Any) -> BlockLayout:
    layer_bytes = DEVICE_BLOCKS * RUN_BYTES
    shape, strides = (DEVICE_BLOCKS, RUN_BYTES), (RUN_BYTES, 1)
    return BlockLayout(
        [
            CacheTensor(f"l{i}", flat, i * layer_bytes, shape, strides, 1, "u8")
            for i in range(LAYERS)
        ],
        DEVICE_BLOCKS,
    )


Make = Callable[..., Rig]  # the fixture of conftest.py
