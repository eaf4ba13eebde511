"""The figures of a plan: KV bytes, blocks and working set, derived from the model and the file."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Figures of a plan, all derived. Tokens and bytes; ``None``: not fixed by the campaign.

    Bytes are those of the candidate's ranks together (docs/placement.md).
    """

    kv_bytes_per_token: int
    block_tokens: int
    session_blocks: int
    session_kv_bytes: int
    working_set_bytes: int
    device_kv_bytes: int | None
    cached_tokens_per_session: int

    @property
    def working_set_ratio(self) -> float | None:
        """Working set over device KV capacity."""
        if self.device_kv_bytes is None:
            return None
        return self.working_set_bytes / self.device_kv_bytes
