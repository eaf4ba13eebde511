"""A connector that restores another session's KV; output oracles must notice.

Load it as ``"kv_connector": "WrongSessionConnector"`` with ``"kv_connector_module_path":
"tests.doubles.wrong_session"`` and the repository on PYTHONPATH. Counters look perfectly healthy.
"""

from __future__ import annotations

from harness.connector.connector import KvgateTierConnector
from harness.connector.layout import ByteArray
from harness.connector.meta import LoadBlock, StoreBlock
from harness.connector.worker import TierWorker, _Load

_REMEMBERED_BLOCKS = 64


class WrongSessionWorker(TierWorker):
    """Remembers some payloads and restores one that does not belong to the request."""

    _seen: dict[bytes, ByteArray]

    def _gather(self, store: StoreBlock) -> None:
        super()._gather(store)
        self._remember(store.key, store.slot)

    def _scatter(self, load: _Load, block: LoadBlock, buffer: int) -> None:
        self._remember(block.key, buffer)
        others = [payload for key, payload in self._seen.items() if key not in load.keys]
        if others:
            self._layout.scatter(others[block.block_id % len(others)], block.block_id)
        else:
            super()._scatter(load, block, buffer)

    def _remember(self, key: bytes, slot: int) -> None:
        seen = self.__dict__.setdefault("_seen", {})
        if key not in seen and len(seen) < _REMEMBERED_BLOCKS:
            seen[key] = self._payload(slot).copy()


class WrongSessionConnector(KvgateTierConnector):
    """``KvgateTierConnector`` with the wrong worker."""

    worker_class = WrongSessionWorker
