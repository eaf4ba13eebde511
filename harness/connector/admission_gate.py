"""Keeps vLLM 0.20 from deadlocking on asynchronous loads. Standard library only.

There a request that waits for its load holds device blocks, yet nothing reserves the blocks that
the rest of its prompt will need. When a new request takes those, the loaded ones can never run, and
the new one never finishes: all wait (vllm issues 45387 and 45388). vLLM 0.32 reserves by itself.
"""

from __future__ import annotations

from collections.abc import Callable


class AdmissionGate:
    """Lets a request in only when every parked one could still finish its prompt afterwards."""

    def __init__(self, free_blocks: Callable[[], int]) -> None:
        """``free_blocks``: device blocks free now, cached ones that may be evicted included."""
        self._free_blocks = free_blocks
        self._owed: dict[str, int] = {}  # blocks that parked requests do not hold yet

    def admits(self, request_id: str, needed_blocks: int) -> bool:
        """Whether a request that needs ``needed_blocks`` in all may be scheduled now."""
        owed = sum(count for parked, count in self._owed.items() if parked != request_id)
        # With nothing parked vLLM decides alone: refusing here could strand a large request.
        return not self._owed or needed_blocks <= self._free_blocks() - owed

    def park(self, request_id: str, owed_blocks: int) -> None:
        """A request waits for its load and will need ``owed_blocks`` more."""
        self._owed[request_id] = owed_blocks

    def unpark(self, request_id: str) -> None:
        """A request runs, or is gone; harmless when it was not parked."""
        self._owed.pop(request_id, None)
