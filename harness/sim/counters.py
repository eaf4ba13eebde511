"""Counters of the engine and the connector, published with engine steps as vLLM does.

Between steps the page shows what the last step left: an idle server's page is stale.
"""

from __future__ import annotations

from collections import defaultdict

# (series, part): the part is the value of the series' own label, "" where it has none.
Key = tuple[str, str]

ENGINE: dict[str, tuple[str, ...]] = {
    "vllm:prefix_cache_queries": ("",),
    "vllm:prefix_cache_hits": ("",),
    "vllm:external_prefix_cache_queries": ("",),
    "vllm:external_prefix_cache_hits": ("",),
    "vllm:prompt_tokens": ("",),
    "vllm:generation_tokens": ("",),
    "vllm:num_preemptions": ("",),
    "vllm:prompt_tokens_by_source": ("local_compute", "local_cache_hit", "external_kv_transfer"),
    "vllm:prompt_tokens_cached_by_source": ("device", "host", "disk"),
}
TIER: dict[str, tuple[str, ...]] = {
    "kvgate:tier_hit_tokens": ("host", "disk"),
    "kvgate:tier_read_bytes": ("host", "disk"),
    "kvgate:tier_write_bytes": ("host", "disk"),
    "kvgate:tier_file_read_bytes": ("",),
    "kvgate:tier_load_failed_blocks": ("",),
    "kvgate:tier_verify_failed_blocks": ("",),
    "kvgate:tier_dropped_store_blocks": ("",),
}
# Of these the first engine has it all, so that the sum over engines is right; the others are
# switches, which every engine shows.
SUMMED_GAUGES = (
    "kvgate:tier_store_backlog_blocks",
    "kvgate:tier_host_used_bytes",
    "kvgate:tier_host_capacity_bytes",
)
SWITCHES = (
    "kvgate:tier_disk_enabled",
    "kvgate:tier_direct_io",
)


class Counters:
    """``live`` counts, each engine for itself; ``published`` is what the page shows."""

    def __init__(self) -> None:
        self._live: dict[int, dict[Key, int]] = {}
        self.published: dict[int, dict[Key, int]] = {}
        self.gauges: dict[str, int] = {}

    def add(self, series: str, amount: int, part: str = "", *, engine: int = 0) -> None:
        """Counts."""
        self._live.setdefault(engine, defaultdict(int))[series, part] += amount

    def publish(self, gauges: dict[str, int]) -> None:
        """The end of a step."""
        self.published = {engine: dict(counts) for engine, counts in self._live.items()}
        self.gauges = gauges

    def reset(self, engine: int | None = None) -> None:
        """Counters at zero, as after a restart; None: of every engine."""
        for counts in (self._live, self.published):
            if engine is None:
                counts.clear()
            else:
                counts.pop(engine, None)
