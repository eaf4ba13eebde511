"""A connector that restores one block of each session as zeros; output oracles must notice.

Load it as ``"kv_connector": "ZeroedBlockConnector"`` with ``"kv_connector_module_path":
"tests.doubles.zeroed_block"`` and the repository on PYTHONPATH. Counters look perfectly healthy.
"""

from __future__ import annotations

import numpy as np

from harness.connector.connector import KvgateTierConnector
from harness.connector.meta import LoadBlock
from harness.connector.worker import TierWorker, _Load


class ZeroedBlockWorker(TierWorker):
    """Restores one block of each load as zeros: the one with the smallest key."""

    def _scatter(self, load: _Load, block: LoadBlock, buffer: int) -> None:
        if block.key == min(load.keys):
            self._layout.scatter(np.zeros_like(self._payload(buffer)), block.block_id)
        else:
            super()._scatter(load, block, buffer)


class ZeroedBlockConnector(KvgateTierConnector):
    """``KvgateTierConnector`` with the zeroing worker."""

    worker_class = ZeroedBlockWorker
