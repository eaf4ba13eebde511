"""The peer to compare with: vLLM's own ``OffloadingConnector`` and its tiers, on CPU memory.

vLLM 0.32 refuses its multi-tier offloading outside GPUs in one method, the one that makes the
worker of device copies. This spec replaces that worker by plain copies between two arrays in CPU
memory; scheduler, host tier, file tier and metrics stay upstream code. Launch: docs/peer.md.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from harness.connector.device import cache_tensors
from harness.connector.layout import ByteArray
from harness.connector.peer_copy import RowCopies


class CpuTieringOffloadingSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """vLLM's multi-tier spec with a worker for device caches in CPU memory."""

    _worker: OffloadingWorker | None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Upstream's without its refusal of CPUs. Raises ValueError, LayoutError."""
        if self._worker is None:
            self._worker = self.create_worker(kv_caches)
        return self._worker

    def create_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Maps the host tier, which the scheduler's side maps as well."""
        self._check()
        region = SharedOffloadRegion(
            engine_id=self.config.engine_id,
            num_chunks=self.num_chunks,
            rank=0,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        try:
            return MemcpyOffloadingWorker(kv_caches, region)
        except Exception:
            region.cleanup()
            raise

    def _check(self) -> None:
        problems = [
            f"{name} is {value}; this spec supports {wanted} only"
            for name, value, wanted in (
                ("the number of workers", self.config.parallel.world_size, 1),
                ("blocks_per_chunk", self.blocks_per_chunk, 1),
                ("canonical_layout", self.config.canonical_layout, False),
            )
            if value != wanted
        ]
        if problems:
            raise ValueError("; ".join(problems) + "; see docs/peer.md")


class MemcpyOffloadingWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies at once, on the caller's thread, as the bundled connector does.

    A transfer is finished when its submission returns, and is reported in the same engine step. A
    thread of its own would compete with the forward pass for the same cores.
    """

    def __init__(self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion) -> None:
        """Owns ``region`` from here on."""
        named = {str(index): cache.tensor for index, cache in enumerate(kv_caches.tensors)}
        rows: ByteArray = np.asarray(region.create_kv_memoryview()).view(np.uint8)
        self._region = region
        self._copies: RowCopies | None = RowCopies(
            cache_tensors(named, list(named)), kv_caches.tensors[0].tensor.shape[0], rows
        )
        self._finished: list[TransferResult] = []

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Copies device blocks to the host tier."""
        started_s = time.perf_counter()
        assert self._copies is not None
        size_bytes = self._copies.store(_ids(src_spec), _ids(dst_spec))
        self._note(job_id, size_bytes, started_s)
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Copies blocks of the host tier to the device."""
        started_s = time.perf_counter()
        assert self._copies is not None
        size_bytes = self._copies.load(_ids(src_spec), _ids(dst_spec))
        self._note(job_id, size_bytes, started_s)
        return True

    def get_finished(self) -> list[TransferResult]:
        """Transfers not reported yet."""
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing: a submitted transfer has finished."""

    def shutdown(self) -> None:
        """Unmaps the host tier. vLLM may kill the process first; then its file stays behind."""
        self._copies = None  # its views would keep the mapping open
        self._region.cleanup()

    def _note(self, job_id: int, size_bytes: int, started_s: float) -> None:
        self._finished.append(
            TransferResult(
                job_id=job_id,
                success=True,
                transfer_size=size_bytes,
                transfer_time=time.perf_counter() - started_s,
            )
        )


def _ids(spec: LoadStoreSpec) -> Sequence[int]:
    ids: Sequence[int] = spec.block_ids.tolist()
    return ids
