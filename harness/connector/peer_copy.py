"""Copies blocks between the device cache and the rows of vLLM's own host tier. Needs numpy only.

The part of the peer (`peer.py`) that can be tested without vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.connector.layout import BlockLayout, ByteArray, CacheTensor, LayoutError


class RowCopies:
    """Copies whole blocks; one row of the host tier holds one block's bytes, tensor after tensor.

    That is the order of vLLM's own worker (``vllm/v1/kv_offload/cpu/shared_offload_region.py``,
    0.32.0), so files of its secondary tiers keep their meaning.
    """

    def __init__(self, tensors: Sequence[CacheTensor], block_count: int, rows: ByteArray) -> None:
        """``rows``: ``(row_count, row_bytes) uint8``, padding at the end of a row is left alone.

        Raises:
            LayoutError: the tensors cannot be copied block by block, or a row is too short.
        """
        self._layout = BlockLayout(tensors, block_count)
        self.block_bytes = self._layout.payload_bytes
        if rows.shape[1] < self.block_bytes:
            raise LayoutError(
                f"a row of the host tier has {rows.shape[1]} bytes, a block {self.block_bytes}"
            )
        self._images = rows[:, : self.block_bytes]

    def store(self, block_ids: Sequence[int], row_ids: Sequence[int]) -> int:
        """Copies device blocks to rows, pair by pair; returns the bytes copied."""
        for block_id, row_id in zip(block_ids, row_ids, strict=True):
            self._layout.gather(int(block_id), self._row(row_id))
        return len(block_ids) * self.block_bytes

    def load(self, row_ids: Sequence[int], block_ids: Sequence[int]) -> int:
        """Copies rows to device blocks, pair by pair; returns the bytes copied."""
        for row_id, block_id in zip(row_ids, block_ids, strict=True):
            self._layout.scatter(self._row(row_id), int(block_id))
        return len(block_ids) * self.block_bytes

    def _row(self, row_id: int) -> ByteArray:
        # A negative index would silently address the tier's end.
        if not 0 <= row_id < len(self._images):
            raise IndexError(f"row {row_id}; the host tier has {len(self._images)}")
        row: ByteArray = self._images[row_id]
        return row
