"""The engine: admits requests, loads and computes KV in steps, hands out tokens.

One step computes up to ``chunk_tokens``: a token of each decoding request first, then prompts in
the order of admission. Blocks for prompt and answer are taken at admission, so nothing is ever
preempted. No clock of its own: whoever drives it says what time it is, in simulated seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from harness.sim import content
from harness.sim.cache import DeviceCache
from harness.sim.config import SimConfig
from harness.sim.content import Token
from harness.sim.counters import Counters
from harness.sim.faults import Fault, FaultName, Faults
from harness.sim.tiers import Load, Tiers


@dataclass(frozen=True)
class SimModel:
    """What the model's config.json says. Bytes of KV per token over all layers."""

    layers: int
    vocab_size: int
    kv_bytes_per_token: int
    max_model_len: int
    dtype: str


@dataclass(eq=False)
class Request:
    """A prompt on its way. ``on_token`` None: the engine gave the request up."""

    prompt: Sequence[int]
    max_tokens: int
    on_token: Callable[[Token | None], None]
    number: int | None = None
    faults: Mapping[FaultName, Fault] = field(default_factory=dict)
    keys: list[bytes] = field(default_factory=list)
    load: Load | None = None
    computed_tokens: int = 0
    cached_tokens: int = 0
    tokens_by_source: dict[str, int] = field(default_factory=dict)
    produced: int = 0
    named: list[bytes] = field(default_factory=list)
    unnamed: int = 0
    used_blocks: int = 0
    state: bytes = b""
    submitted_s: float = 0.0


class Engine:
    """See the module. ``arrived_count``: numbered requests so far, kept by the caller."""

    def __init__(self, config: SimConfig, model: SimModel, faults: Faults) -> None:
        self.config, self.model, self.faults = config, model, faults
        self.counters = Counters()
        self.tiers: Tiers | None = None
        if config.medium is not None:
            self.tiers = Tiers(config, config.block_tokens * model.kv_bytes_per_token)
        self.device = self._empty_device()
        self.arrived_count = 0
        self._waiting: list[Request] = []
        self._loading: list[Request] = []
        # In the order of admission.
        self._running: dict[Request, None] = {}
        self._planned: list[tuple[Request, int]] = []
        self._held_until_s = math.inf

    def _empty_device(self) -> DeviceCache:
        return DeviceCache(self.config.device_blocks - 1)

    # -- from outside ---------------------------------------------------------

    def blocks_needed(self, prompt_tokens: int, output_tokens: int) -> int:
        """Blocks of a request from admission to its end."""
        return math.ceil((prompt_tokens + output_tokens) / self.config.block_tokens)

    def submit(self, request: Request, now_s: float) -> None:
        """Queues a request, in the order of arrival."""
        request.submitted_s = now_s
        request.keys = content.block_keys(request.prompt, self.config.block_tokens)
        self._waiting.append(request)

    def reset_prefix_cache(self, *, external: bool, now_s: float) -> bool:
        """Empties the device cache, and the host pool when asked; False while it cannot."""
        if self._fault(FaultName.WARM_BETWEEN_CELLS, now_s):
            return True
        if external and self.tiers is not None and not self.tiers.empty_host():
            return False
        return self.device.forget()

    def restart(self) -> None:
        """A new engine in the old one's place; what is on disk is found again."""
        for request in [*self._waiting, *self._loading, *self._running]:
            request.on_token(None)
        self._waiting, self._loading, self._running, self._planned = [], [], {}, []
        self.device = self._empty_device()
        self.counters.reset()
        if self.tiers is not None:
            self.tiers.empty_host()

    def abandon(self, request: Request) -> None:
        """The client is gone; a loading or computing request ends by itself."""
        if request in self._waiting:
            self._waiting.remove(request)

    # -- time -----------------------------------------------------------------

    def advance(self, now_s: float) -> None:
        """Takes in what loads and writes have brought by now."""
        if self.tiers is None:
            return
        self.tiers.advance(now_s)
        for request in list(self._loading):
            assert request.load is not None
            if self.tiers.is_done(request.load, now_s):
                self._loading.remove(request)
                self._install(request)
                self._running[request] = None

    def next_event(self, now_s: float) -> float:
        """When `advance` will next find something; infinity when only an arrival can change it."""
        if self.tiers is None:
            return self._held_until_s
        loads = [request.load for request in self._loading if request.load is not None]
        return min(self._held_until_s, self.tiers.next_event(loads, now_s))

    def begin_step(self, now_s: float) -> float | None:
        """Admits, and plans a step; its duration, or None when there is nothing to compute."""
        if self._fault(FaultName.STALL, now_s):
            return None
        self._set_faulty_stores(now_s)
        while self._waiting and self._admit(self._waiting[0], now_s):
            self._waiting.pop(0)
        self._planned, self._held_until_s = [], math.inf
        budget = self.config.chunk_tokens
        for request in [r for r in self._running if r.produced]:
            self._planned.append((request, 1))
            budget -= 1
        decodes = len(self._planned)
        prefilled = 0
        for request in [r for r in self._running if not r.produced]:
            left = len(request.prompt) - request.computed_tokens
            count = min(left, budget - prefilled)
            if count == left and self._is_held_back(request, now_s):
                count -= 1
            if count > 0:
                self._planned.append((request, count))
                prefilled += count
        if not self._planned:
            return None
        rate = self.config.prefill_tokens_per_s
        if self._fault(FaultName.MORE_COMPUTE, now_s):
            rate *= 2
        duration = self.config.step_s + prefilled / rate
        if decodes:
            duration += self.config.decode_s
        return duration * self._slowness(now_s)

    def end_step(self, now_s: float) -> None:
        """Applies the planned step: KV is there, tokens leave, statistics are published."""
        planned, self._planned = self._planned, []
        for request, count in planned:
            if request not in self._running:
                continue
            if not request.produced:
                self._compute(request, count, now_s)
            if request.computed_tokens >= len(request.prompt):
                self._produce(request)
        self.counters.publish(self._gauges())

    # -- one request ----------------------------------------------------------

    def _counting(self, request: Request) -> Callable[..., None]:
        """Counts for the engine whose turn the request was."""
        engine = (request.number or 0) % self.config.engines
        return partial(self.counters.add, engine=engine)

    def _admit(self, request: Request, now_s: float) -> bool:
        """Takes blocks, looks its KV up, begins to load. False when there is no room yet."""
        block = self.config.block_tokens
        reusable = request.keys[: (len(request.prompt) - 1) // block]
        caching = self.config.prefix_caching
        hits = self.device.match(reusable) if caching else 0
        needed = self.blocks_needed(len(request.prompt), request.max_tokens) - hits
        if needed + self.device.unused_among(reusable[:hits]) > self.device.available:
            return False
        rest = reusable[hits:]
        sources: list[str] = []
        if self.tiers is not None and not self._fault(FaultName.ZERO_HITS, now_s):
            sources = self.tiers.sources(rest)
        request.state = content.root_state(self.config.seed)
        for key in reusable[:hits]:
            request.state = content.next_state(request.state, self.device.take(key))
            request.named.append(key)
        self.device.allocate(needed)
        request.unnamed = needed
        request.used_blocks = hits
        request.computed_tokens = request.cached_tokens = hits * block
        self._count_lookup(request, hits * block, sources)
        if not sources:
            self._running[request] = None
            return True
        assert self.tiers is not None
        latency_s = self.config.load_latency_s * self._slowness(now_s)
        request.load = self.tiers.load(rest[: len(sources)], sources, now_s, latency_s=latency_s)
        self._loading.append(request)
        return True

    def _count_lookup(self, request: Request, device: int, sources: Sequence[str]) -> None:
        block, total, add = self.config.block_tokens, len(request.prompt), self._counting(request)
        external = len(sources) * block
        if self.config.prefix_caching:
            add("vllm:prefix_cache_queries", total)
            add("vllm:prefix_cache_hits", device)
        if self.tiers is not None:
            add("vllm:external_prefix_cache_queries", total - device)
            add("vllm:external_prefix_cache_hits", external)
        by_source = {
            "local_compute": total - device - external,
            "local_cache_hit": device,
            "external_kv_transfer": external,
        }
        for part, tokens in by_source.items():
            add("vllm:prompt_tokens_by_source", tokens, part)
        cached = {name: sources.count(name) * block for name in ("host", "disk")}
        for part, tokens in {"device": device, **cached}.items():
            add("vllm:prompt_tokens_cached_by_source", tokens, part)
        request.tokens_by_source = {
            "device": device,
            **cached,
            "computed": total - device - external,
        }

    def _install(self, request: Request) -> None:
        """Loaded blocks are on the device now; the connector counts them."""
        load, tiers, add = request.load, self.tiers, self._counting(request)
        assert load is not None
        assert tiers is not None
        payloads = list(load.payloads)
        if FaultName.WRONG_KV in request.faults:
            payloads[len(payloads) // 2] = self._another_sessions(load.keys)
        for key, payload in zip(load.keys, payloads, strict=True):
            self._use_block(request, key, payload)
        request.computed_tokens += len(load.keys) * self.config.block_tokens
        request.cached_tokens = request.computed_tokens
        for source in ("host", "disk"):
            blocks = load.sources.count(source)
            if not blocks:
                continue
            if FaultName.BYTES_WITHOUT_HITS not in request.faults:
                add("kvgate:tier_hit_tokens", blocks * self.config.block_tokens, source)
            if FaultName.HITS_WITHOUT_BYTES not in request.faults:
                add("kvgate:tier_read_bytes", blocks * tiers.block_bytes, source)
                if source == "disk":
                    add("kvgate:tier_file_read_bytes", blocks * tiers.block_bytes)
            unseen = (FaultName.HITS_WITHOUT_BYTES, FaultName.PAGE_CACHE)
            if source == "disk" and any(name in request.faults for name in unseen):
                tiers.media["disk"].read_bytes -= blocks * tiers.block_bytes

    def _another_sessions(self, own: Sequence[bytes]) -> bytes:
        assert self.tiers is not None
        store = self.tiers.disk if self.config.medium == "disk" else self.tiers.host
        return next(store.peek(key) for key in store if key not in own)

    def _use_block(self, request: Request, key: bytes, payload: bytes) -> None:
        """The next whole block of a request has its KV."""
        request.state = content.next_state(request.state, payload)
        request.used_blocks += 1
        if self.config.prefix_caching and self.device.name(key, payload):
            request.unnamed -= 1
            request.named.append(key)

    def _compute(self, request: Request, count: int, now_s: float) -> None:
        """Prefill of ``count`` more tokens."""
        request.computed_tokens += count
        block = self.config.block_tokens
        while (request.used_blocks + 1) * block <= request.computed_tokens:
            index = request.used_blocks
            tokens = request.prompt[index * block : (index + 1) * block]
            payload = content.computed_payload(request.state, tokens, layers=self.model.layers)
            self._use_block(request, request.keys[index], payload)
            self._store(request, request.keys[index], payload, now_s)

    def _store(self, request: Request, key: bytes, payload: bytes, now_s: float) -> None:
        add = self._counting(request)
        tiers, medium = self.tiers, self.config.medium
        if tiers is None or medium is None:
            return
        stored, dropped = tiers.stored_blocks, tiers.dropped_blocks
        tiers.store(key, payload, now_s)
        written_bytes = (tiers.stored_blocks - stored) * tiers.block_bytes
        add("kvgate:tier_write_bytes", written_bytes, medium)
        add("kvgate:tier_dropped_store_blocks", tiers.dropped_blocks - dropped)

    def _produce(self, request: Request) -> None:
        """One token leaves; the last one gives the blocks back."""
        add = self._counting(request)
        if not request.produced:
            add("vllm:prompt_tokens", len(request.prompt))
        rest = request.prompt[request.used_blocks * self.config.block_tokens :]
        token = content.output_token(
            request.state,
            rest,
            request.produced,
            vocab_size=self.model.vocab_size,
            cached_tokens=request.cached_tokens,
        )
        request.produced += 1
        add("vllm:generation_tokens", 1)
        if request.produced == request.max_tokens:
            del self._running[request]
            self.device.release(request.named, request.unnamed)
        request.on_token(token)

    # -- faults ---------------------------------------------------------------

    def _fault(self, name: FaultName, now_s: float) -> Fault | None:
        return self.faults.active(name, self.arrived_count, now_s)

    def _set_faulty_stores(self, now_s: float) -> None:
        self.device.keeps_all = self._fault(FaultName.WARM_BETWEEN_CELLS, now_s) is not None
        full = self._fault(FaultName.TIER_FILLS_UP, now_s)
        if self.tiers is not None:
            self.tiers.writes_stop_after = None if full is None else int(full.value or 0)

    def _is_held_back(self, request: Request, now_s: float) -> bool:
        """Convoy: the last token of a prompt waits until every request there is as far."""
        convoy = self._fault(FaultName.CONVOY, now_s)
        if convoy is None or request.number is None:
            return False
        end_s = request.submitted_s + (convoy.value or 0.3)
        if now_s < end_s:  # others may still come
            self._held_until_s = min(self._held_until_s, end_s)
            return True
        others = [r for r in self._running if not r.produced and r is not request]
        late = any(len(r.prompt) - r.computed_tokens > 1 for r in others)
        return late or bool(self._loading)

    def _slowness(self, now_s: float) -> float:
        drift = self._fault(FaultName.DRIFT, now_s)
        cold = self._fault(FaultName.COLD_ENGINE, now_s)
        slowness = 1.0
        if drift is not None:
            since = self.arrived_count - drift.from_request
            slowness += (0.5 if drift.value is None else drift.value) * since
        if cold is not None:
            slowness *= cold.value or 20.0
        return slowness

    def _gauges(self) -> dict[str, int]:
        if self.tiers is None:
            return {}
        pool = self.tiers.host
        return {
            "kvgate:tier_store_backlog_blocks": self.tiers.backlog_blocks,
            "kvgate:tier_host_used_bytes": len(pool) * self.tiers.block_bytes,
            "kvgate:tier_host_capacity_bytes": (pool.block_count or 0) * self.tiers.block_bytes,
            "kvgate:tier_disk_enabled": int(self.config.medium == "disk"),
            "kvgate:tier_direct_io": int(self.config.medium == "disk"),
        }
