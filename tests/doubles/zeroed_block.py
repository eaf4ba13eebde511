"""A connector that restores one block of each session as zeros; output oracles must notice.

Load it as ``"kv_connector": "ZeroedBlockConnector"`` with ``"kv_connector_module_path":
"tests.doubles.zeroed_block"`` and the repository on PYTHONPATH. Counters look perfectly healthy.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from harness.connector.connector import KvgateTierConnector
from harness.connector.meta import LoadBlock, LoadRequest
from harness.connector.worker import TierWorker


class ZeroedBlockWorker(TierWorker):
    """Restores one block of each load as zeros: the one with the smallest key."""

    _victims: dict[str, bytes]

    def _accept(self, request: LoadRequest) -> None:
        victims = self.__dict__.setdefault("_victims", {})
        victims[request.request_id] = min(block.key for block in request.blocks)
        super()._accept(request)

    def _restore(self, load: Any, block: LoadBlock, buffer: int, tier: str) -> None:
        super()._restore(load, block, buffer, tier)
        if block.key == self._victims[load.request_id]:
            self._layout.scatter(np.zeros_like(self._payload(buffer)), block.block_id)


class ZeroedBlockConnector(KvgateTierConnector):
    """``KvgateTierConnector`` with the zeroing worker."""

    worker_class = ZeroedBlockWorker
