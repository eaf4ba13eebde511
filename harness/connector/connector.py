"""The vLLM KV connector: a thin shell around ``TierScheduler`` and ``TierWorker``.

vLLM makes one object per role, in two processes or in one, so there is no state at module level.
Loads are asynchronous only: a request waits in the scheduler's queue while its blocks arrive and
decoding goes on. Whatever fails in here costs a recomputation or a store, never the engine: no hook
raises. Settings that cannot be used are the exception; they stop the start.

Written against vLLM 0.32 and the interface it shares with 0.20.1; differences are probed, not
versioned.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.core.sched.output import SchedulerOutput

from harness.connector.admission_gate import AdmissionGate
from harness.connector.blockfile import CHECKSUM, FORMAT_VERSION, file_bytes
from harness.connector.budget import pool_problem
from harness.connector.config import ConfigError, TierConfig, parse_config
from harness.connector.device import (
    allowed_cpus,
    cache_tensors,
    platform_facts,
)
from harness.connector.engine_view import (
    code_in_use,
    computing_versions,
    extra_keys,
    kv_cache_spec,
    local_rank_count,
    reads_tier,
    refusal,
    scheduled_requests,
    tensor_parallel_rank,
    weights_path,
)
from harness.connector.file_store import FileStore, StoreUnavailable
from harness.connector.fingerprint import FingerprintError, fingerprint
from harness.connector.keys import namespace_of
from harness.connector.layout import BlockLayout, LayoutError
from harness.connector.meta import StepPlan, WorkerFacts, WorkerReport, combined
from harness.connector.metrics import TierMetricSet, merge, summarise
from harness.connector.quota import DirectoryQuota
from harness.connector.scheduler import TierScheduler
from harness.connector.worker import HostMemory, TierWorker

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # vLLM 0.20 has no hit sources and never asks for them
    CacheHitSource = None

# Below "vllm", whose handler prints INFO; a name of our own would be silent in `vllm serve`.
logger = logging.getLogger("vllm.kvgate.connector")

CONNECTOR_VERSION = 2
# vLLM 0.32 says when a step's own loads must precede its forward pass, and recomputes what they
# failed to fill. Older ones were not tried: there a request always waits.
_STEPS_COPY = "has_sync_kv_loads" in SchedulerOutput.__dataclass_fields__
# Reads in flight need a buffer each, and as many again wait for the worker's thread to empty them.
_STAGING_PER_READER = 2

Hook = TypeVar("Hook", bound=Callable[..., Any])


def _contained(fallback: Callable[[], Any]) -> Callable[[Hook], Hook]:
    """Makes a hook log instead of raise; it then answers ``fallback()``."""

    def decorate(hook: Hook) -> Hook:
        @functools.wraps(hook)
        def contained(*args: Any, **kwargs: Any) -> Any:
            try:
                return hook(*args, **kwargs)
            except Exception:
                logger.exception("event=hook_failed hook=%s", hook.__name__)
                return fallback()

        return cast(Hook, contained)

    return decorate


def _none() -> None:
    return None


class TierPlanMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Carries a step's plan to the worker."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan


class TierWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Carries a worker's report to the scheduler side."""

    def __init__(self, reports: list[WorkerReport]) -> None:
        self.reports = reports

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Keeps both; reports are applied in order."""
        assert isinstance(other, TierWorkerMetadata)
        return TierWorkerMetadata([*self.reports, *other.reports])


class TierHandshakeMetadata(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Carries what the worker learnt at registration, before the first request."""

    def __init__(self, facts: WorkerFacts) -> None:
        self.facts = facts


class TierStats(KVConnectorStats):  # type: ignore[misc]
    """One step's statistics; ``data`` as in metrics.py."""

    def reset(self) -> None:
        """Forgets everything."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Takes in a later step's statistics."""
        self.data = merge(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """The values of vLLM's log line."""
        return summarise(self.data)

    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        return not any(self.data.values())


class TierPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Exports the statistics on /metrics."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = TierMetricSet(
            self._counter_cls,
            self._gauge_cls,
            self._histogram_cls,
            labelnames,
            per_engine_labelvalues,
        )

    @_contained(_none)
    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Takes in one step's statistics."""
        self._metrics.observe(transfer_stats_data, engine_idx)


class KvgateTierConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Keeps KV blocks in host memory and, with a directory configured, in files."""

    worker_class: type[TierWorker] = TierWorker
    store_class: type[FileStore] = FileStore

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raises ConfigError when ``kv_connector_extra_config`` cannot be used."""
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._config: TierConfig = parse_config(transfer.kv_connector_extra_config or {})
        self._refusal = refusal(vllm_config, kv_cache_config)
        if self._refusal and role is KVConnectorRole.SCHEDULER:  # once, not once per process
            logger.error(
                'event=tier_off effect="served without the tier" reason="%s"', self._refusal
            )
        self._facts = WorkerFacts(problem=self._refusal or "no device cache was registered")
        # Looked at before any rank of this machine has taken its pool: each wants as much.
        self._pool_problem = ""
        if role is KVConnectorRole.WORKER and not self._refusal:
            ranks = local_rank_count(vllm_config)
            self._pool_problem = pool_problem(self._config.host_pool_bytes, ranks)
        self._worker: TierWorker | None = None
        self._scheduler: TierScheduler | None = None
        self._gate: AdmissionGate | None = None
        self._plan = StepPlan()
        self._owed: set[int] = set()  # device blocks that this step's own loads must fill
        self._block_tokens = 0 if self._refusal else kv_cache_spec(kv_cache_config).block_size
        if role is KVConnectorRole.SCHEDULER and not self._refusal:
            policy = getattr(transfer, "kv_load_failure_policy", "fail")
            if policy != "recompute":
                logger.error(
                    'event=loads_disabled kv_load_failure_policy=%s remedy="set '
                    'kv_load_failure_policy to recompute in --kv-transfer-config"',
                    policy,
                )
            self._scheduler = TierScheduler(
                self._config,
                block_tokens=self._block_tokens,
                extra_keys=extra_keys,
                are_loads_allowed=policy == "recompute",
            )

    # Worker side, in the order of a step.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Learns the device cache's layout, opens the directory, takes the host memory."""
        if self._refusal:
            return
        try:
            self._facts = self._start_worker(kv_caches)
        except (ConfigError, LayoutError) as error:
            self._facts = WorkerFacts(problem=str(error))
        except Exception as error:
            logger.exception("event=tier_off")
            self._facts = WorkerFacts(problem=f"{type(error).__name__}: {error}")

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """What the scheduler side needs before the first request."""
        return TierHandshakeMetadata(self._facts)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Starts a step; before the forward pass, so that reads overlap with it."""
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, TierPlanMetadata):
            self._owed = {
                block.block_id
                for load in connector_metadata.plan.loads
                if load.in_step
                for block in load.blocks
            }
        self._begin_step(connector_metadata)

    @_contained(_none)
    def _begin_step(self, connector_metadata: KVConnectorMetadata) -> None:
        if self._worker is not None and isinstance(connector_metadata, TierPlanMetadata):
            self._plan = connector_metadata.plan
            self._worker.begin_step(self._plan)

    @_contained(_none)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Copies blocks that are in host memory to the device."""
        if self._worker is not None:
            self._worker.copy_ready()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request runs only when all its layers are loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: blocks are stored whole, after the forward pass."""

    @_contained(_none)
    def wait_for_save(self) -> None:
        """Copies the blocks that this step completed to host memory."""
        plan, self._plan = self._plan, StepPlan(is_idle=self._plan.is_idle)
        if self._worker is not None:
            self._worker.save(plan)

    @_contained(lambda: (None, None))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose load ended. Sends do not exist: stores hold no device blocks."""
        if self._worker is None:
            return None, None
        return None, self._worker.poll(is_idle=self._plan.is_idle) or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Device blocks to recompute: of the requests just returned, and of this step's own loads.

        A request runs in the step of such a load, so what is not proved restored is an error.
        """
        owed, self._owed = self._owed, set()
        if self._worker is None:
            return owed
        return self._worker.take_failed_blocks() | (owed - self._worker.take_restored_in_step())

    @_contained(_none)
    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Counters of the worker, or counters and gauges of the scheduler side."""
        if self._worker is not None:
            return TierStats(data=self._worker.take_statistics(self._block_tokens))
        if self._scheduler is None:
            return None
        counters, gauges = self._scheduler.take_counts(), self._scheduler.gauges()
        return TierStats(data={"counters": counters, "gauges": gauges, "load_seconds": []})

    @_contained(_none)
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """The worker's report, when there is something in it."""
        if self._worker is None:
            return None
        report = self._worker.take_report()
        return TierWorkerMetadata([report]) if report else None

    @_contained(_none)
    def shutdown(self) -> None:
        """Ends the threads. vLLM may kill the process first; files survive that by design."""
        if self._worker is not None:
            self._worker.stop()
        if self._scheduler is not None:
            self._scheduler.stop()

    # Scheduler side.

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a lost store is a later miss, nothing more."""
        return False

    @_contained(_none)
    def set_xfer_handshake_metadata(
        self, metadata: Mapping[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """Starts serving with what the worker reported; prints the one line that says so."""
        if self._scheduler is None:
            return
        wanted = self._vllm_config.parallel_config.tensor_parallel_size
        facts = combined(
            [each.facts for each in metadata.values() if isinstance(each, TierHandshakeMetadata)],
            wanted,
        )
        if facts.problem:
            logger.error(
                'event=tier_off effect="served without the tier" reason="%s"', facts.problem
            )
            return
        store: FileStore | None = None
        if facts.has_disk and self._config.directory is not None:
            store = self._file_store(self._config.directory, facts.namespace, facts.payload_bytes)
        self._scheduler.attach(facts, store)
        self._log_ready(facts)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Keeps the device's block pool, for the versions that need the admission gate."""
        # The hook for arrivals came after the scheduler's own reservation.
        if not hasattr(KVConnectorBase_V1, "on_new_request"):
            self._gate = AdmissionGate(gpu_block_pool.get_num_free_blocks)

    @_contained(_none)
    def on_new_request(self, request: Any) -> None:
        """Notes an arrival, so that files are read while the request waits (vLLM 0.32)."""
        if self._scheduler is not None and reads_tier(request):
            self._scheduler.arrive(request)

    @_contained(lambda: (0, False))
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens the tier can load, and whether the request waits for them.

        It does not wait for blocks that all lie in host memory: they are copied in the step that
        runs it, just before its forward pass, which saves a whole step. Then its last token is
        left to compute, as that step needs one.
        """
        if self._scheduler is None:
            return 0, False
        needed = -(-request.num_tokens // self._block_tokens) + 1
        if self._gate is not None and not self._gate.admits(request.request_id, needed):
            return None, False
        # A streaming session replaces tokens it had already; its key chain would be stale.
        if getattr(request, "resumable", False):
            return 0, False
        count = self._scheduler.lookup(request, num_computed_tokens)
        if not reads_tier(request):
            return 0, False
        in_step = min(count, request.num_tokens - 1 - num_computed_tokens)
        if _STEPS_COPY and in_step > 0 and self._scheduler.can_copy_in_step(request, in_step):
            return in_step, False
        return count, count > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plans the load into the blocks that the request was given."""
        if self._scheduler is None:
            return
        if num_external_tokens <= 0:
            self._unpark(request.request_id)
            return
        block_ids: list[int] = []
        try:
            block_ids = list(blocks.get_block_ids()[0])
            if self._gate is not None:
                whole = -(-request.num_tokens // self._block_tokens) + 1
                self._gate.park(request.request_id, max(0, whole - len(block_ids)))
            self._scheduler.plan_load(request, block_ids, num_external_tokens)
        except Exception:
            logger.exception("event=plan_load_failed request=%s", request.request_id)
            # Its tokens count as there already; a load that fails at once has them recomputed.
            self._scheduler.plan_failed_load(request, block_ids, num_external_tokens)

    @_contained(dict)
    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[Any, int]:
        """The load's tokens by tier, for vLLM's own metrics."""
        if self._scheduler is None or CacheHitSource is None:
            return {}
        host, disk = self._scheduler.hit_tokens(request.request_id)
        sources = {CacheHitSource.HOST: host, CacheHitSource.DISK: disk}
        return {source: count for source, count in sources.items() if count}

    @_contained(lambda: TierPlanMetadata(StepPlan()))
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """This step's plan for the worker."""
        if self._scheduler is None:
            return TierPlanMetadata(StepPlan())
        is_idle = scheduler_output.total_num_scheduled_tokens == 0
        shares = scheduled_requests(scheduler_output)
        return TierPlanMetadata(self._scheduler.build_plan(shares, is_idle=is_idle))

    @_contained(_none)
    def update_connector_output(self, connector_output: Any) -> None:
        """Takes in the worker's report."""
        metadata = connector_output.kv_connector_worker_meta
        if self._scheduler is not None and isinstance(metadata, TierWorkerMetadata):
            for report in metadata.reports:
                self._scheduler.apply_report(report)

    @_contained(lambda: (False, None))
    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forgets the request. Its blocks may be freed at once: nothing reads them any more."""
        self._unpark(request.request_id)
        if self._scheduler is not None:
            self._scheduler.finish(request.request_id)
        return False, None

    def _unpark(self, request_id: str) -> None:
        if self._gate is not None:
            self._gate.unpark(request_id)

    @_contained(lambda: False)
    def reset_cache(self) -> bool | None:
        """Drops what ``reset_scope`` says; False while blocks are being written or loaded."""
        return True if self._scheduler is None else self._scheduler.reset()

    # Class methods, called in the API server too: no side effects.

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        """Statistics from their mapping, as sent between processes."""
        return TierStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        """The exporter of this connector's metrics."""
        return TierPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def _start_worker(self, kv_caches: dict[str, Any]) -> WorkerFacts:
        if self._worker is not None:
            self._worker.stop()
        spec = kv_cache_spec(self._kv_cache_config)
        names = self._kv_cache_config.kv_cache_groups[0].layer_names
        layout = BlockLayout(cache_tensors(kv_caches, names), self._kv_cache_config.num_blocks)
        rank = tensor_parallel_rank(self._vllm_config)
        slot_bytes = file_bytes(layout.payload_bytes)
        total = self._config.host_pool_bytes // slot_bytes
        namespace, store = self._open_store(layout, spec, rank)
        staging = 0
        if store is not None:
            staging = max(1, min(_STAGING_PER_READER * self._config.reader_threads, total // 2))
        if total - staging < 1:
            raise ConfigError(
                f"host_pool_bytes is {self._config.host_pool_bytes}; one block needs {slot_bytes} "
                f"bytes and this configuration at least {1 + staging} blocks"
            )
        # The pool's pages are touched now; asking for too much would call the OOM killer.
        if problem := self._pool_problem or pool_problem(total * slot_bytes):
            raise ConfigError(problem)
        self._worker = self.worker_class(
            self._config,
            layout,
            HostMemory(total, slot_bytes),
            pool_slots=total - staging,
            store=store,
            rank=rank,
            cpus=allowed_cpus(),
        )
        return WorkerFacts(
            namespace=namespace,
            payload_bytes=layout.payload_bytes,
            slot_bytes=slot_bytes,
            slot_count=total - staging,
            has_disk=store is not None,
            direct_io=store is not None and store.direct_io,
        )

    def _open_store(
        self, layout: BlockLayout, spec: Any, rank: int
    ) -> tuple[str, FileStore | None]:
        """The namespace, and the opened directory unless there is none or it cannot be used."""
        try:
            facts = fingerprint(
                vllm_config=self._vllm_config,
                spec=spec,
                layers=layout.layers,
                versions={
                    **computing_versions(),
                    "vllm": vllm.__version__,
                    "format": str(FORMAT_VERSION),
                    "checksum": CHECKSUM.name,
                },
                platform=platform_facts(self._vllm_config, self._kv_cache_config),
                model=weights_path(self._vllm_config.model_config),
                code=code_in_use(self._vllm_config),
                environment=os.environ,
            )
        except (FingerprintError, OSError, ValueError) as error:
            if self._config.directory is not None:
                logger.error(
                    'event=disk_tier_off effect="served from host memory only" reason="%s"', error
                )
            # A name that no other process can have: host memory does not outlive this one.
            return os.urandom(16).hex(), None
        namespace = namespace_of(facts)
        if self._config.directory is None:
            return namespace, None
        store = self._file_store(self._config.directory, namespace, layout.payload_bytes).of_rank(
            rank
        )
        try:
            store.open(
                {
                    "format_version": FORMAT_VERSION,
                    "namespace": namespace,
                    "block_tokens": spec.block_size,
                    "payload_bytes": layout.payload_bytes,
                    "run_bytes": layout.run_bytes,
                    "layers": layout.layers,
                    "fingerprint": facts,
                }
            )
        except StoreUnavailable as error:
            logger.error(
                'event=disk_tier_off effect="served from host memory only" reason="%s"', error
            )
            return namespace, None
        return namespace, store

    def _file_store(self, directory: Path, namespace: str, payload_bytes: int) -> FileStore:
        quota = DirectoryQuota(
            directory,
            capacity_bytes=self._config.disk_capacity_bytes,
            reserve_bytes=self._config.disk_reserve_bytes,
        )
        return self.store_class(directory, namespace, payload_bytes, quota=quota)

    def _log_ready(self, facts: WorkerFacts) -> None:
        assert self._scheduler is not None
        line = {
            "host_pool_bytes": self._config.host_pool_bytes,
            "host_pool_blocks": facts.slot_count,
            "slot_bytes": facts.slot_bytes,
            "block_bytes": facts.payload_bytes,
            "block_tokens": self._block_tokens,
            "kv_bytes_per_token": facts.payload_bytes // self._block_tokens,
            "directory": None if self._config.directory is None else str(self._config.directory),
            "disk_enabled": facts.has_disk,
            "disk_blocks_found": self._scheduler.disk_block_count,
            "namespace": facts.namespace,
            "direct_io": facts.direct_io,
            "format_version": FORMAT_VERSION,
            "checksum": CHECKSUM.name,
            "connector_version": CONNECTOR_VERSION,
            "reset_scope": self._config.reset_scope.value,
            "disk_capacity_bytes": self._config.disk_capacity_bytes,
            "rank_count": facts.rank_count,
        }
        logger.info("kvgate tier ready: %s", json.dumps(line))
