"""A connector that restores another session's KV; output oracles must notice.

Load it as ``"kv_connector": "WrongSessionConnector"`` with ``"kv_connector_module_path":
"tests.doubles.wrong_session"`` and the repository on PYTHONPATH. Counters look perfectly healthy.
"""

from __future__ import annotations

from typing import Any

from harness.connector.connector import KvgateTierConnector
from harness.connector.layout import ByteArray
from harness.connector.meta import LoadBlock, LoadRequest, StepPlan
from harness.connector.worker import TierWorker

_REMEMBERED_BLOCKS = 64


class WrongSessionWorker(TierWorker):
    """Remembers some payloads and restores one that does not belong to the request."""

    _seen: dict[bytes, ByteArray]
    _wanted: dict[str, frozenset[bytes]]

    def save(self, plan: StepPlan) -> None:
        super().save(plan)
        for store in plan.stores:
            self._remember(store.key, store.slot)

    def _accept(self, request: LoadRequest) -> None:
        wanted = self.__dict__.setdefault("_wanted", {})
        wanted[request.request_id] = frozenset(block.key for block in request.blocks)
        super()._accept(request)

    def _restore(self, load: Any, block: LoadBlock, buffer: int, tier: str) -> None:
        self._remember(block.key, buffer)
        super()._restore(load, block, buffer, tier)
        own = self._wanted[load.request_id]
        others = [payload for key, payload in self._seen.items() if key not in own]
        if others:
            self._layout.scatter(others[block.block_id % len(others)], block.block_id)

    def _remember(self, key: bytes, slot: int) -> None:
        seen = self.__dict__.setdefault("_seen", {})
        if key not in seen and len(seen) < _REMEMBERED_BLOCKS:
            seen[key] = self._payload(slot).copy()


class WrongSessionConnector(KvgateTierConnector):
    """``KvgateTierConnector`` with the wrong worker."""

    worker_class = WrongSessionWorker
