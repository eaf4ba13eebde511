"""A connector some of whose copies out of host memory fail; answers must be right all the same.

Load it as ``"kv_connector": "TornCopyConnector"`` with ``"kv_connector_module_path":
"tests.doubles.torn_copy"`` and the repository on PYTHONPATH.
"""

from __future__ import annotations

from harness.connector.connector import KvgateTierConnector
from harness.connector.meta import LoadBlock
from harness.connector.worker import TierWorker

# Of 16 blocks: every load of the live tests meets it, some at their first block.
_EVERY = 11


class TornCopyWorker(TierWorker):
    """Every eleventh copy writes half a block, garbage for the rest, and raises."""

    _calls = 0

    def _scatter(self, buffer: int, block: LoadBlock) -> None:
        self._calls += 1
        if self._calls % _EVERY:
            super()._scatter(buffer, block)
            return
        half = self._payload(buffer).copy()
        half[len(half) // 2 :] = 0x7F
        self._layout.scatter(half, block.block_id)
        raise RuntimeError("torn")


class TornCopyConnector(KvgateTierConnector):
    """``KvgateTierConnector`` with the tearing worker."""

    worker_class = TornCopyWorker
