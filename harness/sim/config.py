"""What a simulated server is made of, as it stands in a campaign and on the command line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from harness.records import Record, RecordError
from harness.sim.faults import Fault

DIALECTS = ("0.20.1", "0.32.0")


@dataclass(frozen=True)
class SimConfig(Record):
    """Times are simulated seconds: ``time_scale`` of them pass in one real second.

    ``*_curve``: bytes per second in all at so many concurrent loads, as ascending pairs (loads,
    bytes per second), straight between them. ``disk_bytes`` None: unbounded. ``medium`` None: no
    connector. ``device_blocks`` includes the one block that vLLM never hands out. ``engines``: so
    many count, each the requests of its turn; cache, tiers and time they share. ``front_s``:
    median of the log-normal time that a request spends before the engine gets it, 0 is none;
    ``front_sigma``: standard deviation of its logarithm.
    """

    seed: int = 0
    dialect: str = "0.32.0"
    time_scale: float = 1.0
    block_tokens: int = 16
    device_blocks: int = 1024
    engines: int = 1
    prefix_caching: bool = True
    compute_threads: int = 1
    chunk_tokens: int = 2048
    prefill_tokens_per_s: float = 2500.0
    step_s: float = 0.001
    decode_s: float = 0.02
    front_s: float = 0.0
    front_sigma: float = 0.0
    medium: str | None = None
    host_pool_bytes: int = 2**30
    disk_bytes: int | None = None
    load_latency_s: float = 0.0005
    host_curve: tuple[tuple[float, ...], ...] = ((1.0, 2e10), (8.0, 5e10))
    disk_curve: tuple[tuple[float, ...], ...] = ((1.0, 2e9), (8.0, 6e9), (32.0, 7e9))
    disk_write_bytes_per_s: float = 2e9
    truth_path: str | None = None
    faults: tuple[Fault, ...] = ()

    def problems(self) -> Iterator[str]:
        """One sentence per value that cannot be."""
        if self.dialect not in DIALECTS:
            yield f"dialect: found {self.dialect!r}; allowed: {', '.join(DIALECTS)}"
        if self.medium not in (None, "host", "disk"):
            yield f"medium: found {self.medium!r}; allowed: host, disk"
        for name in _POSITIVE:
            if not getattr(self, name) > 0:
                yield f"{name}: found {getattr(self, name)!r}; allowed: above 0"
        for name in ("front_s", "front_sigma"):
            if not getattr(self, name) >= 0:
                yield f"{name}: found {getattr(self, name)!r}; allowed: 0 or above"
        for name in ("host_curve", "disk_curve"):
            curve = getattr(self, name)
            loads = [point[0] for point in curve if len(point) == 2]
            if not curve or len(loads) != len(curve) or loads != sorted(set(loads)):
                yield f"{name}: found {curve!r}; allowed: pairs [loads, bytes/s], loads ascending"
            elif not all(value > 0 for point in curve for value in point):
                yield f"{name}: found {curve!r}; allowed: numbers above 0"
        for fault in self.faults:
            if fault.every < 1 or not 0 <= fault.share <= 1:
                yield f"faults.{fault.name.value}: allowed: every from 1 on, share of 0 to 1"


_POSITIVE = (
    "time_scale",
    "block_tokens",
    "device_blocks",
    "engines",
    "compute_threads",
    "chunk_tokens",
    "prefill_tokens_per_s",
    "step_s",
    "decode_s",
    "host_pool_bytes",
    "disk_write_bytes_per_s",
)
# What the campaign says elsewhere, for every kind of arm.
SET_BY_CAMPAIGN = frozenset(
    {"block_tokens", "device_blocks", "prefix_caching", "compute_threads", "medium"}
)


_DEFAULTS = SimConfig().to_json()
# All but the name.
_FAULT_DEFAULTS = {f.name: f.default for f in fields(Fault) if f.default is not MISSING}


def parse_config(content: Mapping[str, Any]) -> SimConfig:
    """Raises RecordError naming the key."""
    complete = {**_DEFAULTS, **content}
    faults = complete["faults"]
    if isinstance(faults, list):
        complete["faults"] = [_FAULT_DEFAULTS | f if isinstance(f, dict) else f for f in faults]
    config = SimConfig.from_json(complete)
    if found := list(config.problems()):
        raise RecordError("; ".join(found))
    return config


def campaign_problem(content: Mapping[str, Any]) -> str | None:
    """What is wrong with the ``sim`` table of a campaign; None when nothing is."""
    if ours := sorted(set(content) & SET_BY_CAMPAIGN):
        return f"found {ours}; allowed: {', '.join(campaign_keys())}"
    try:
        parse_config(content)
    except RecordError as error:
        return f"{error}; allowed keys: {', '.join(campaign_keys())}"
    return None


def campaign_keys() -> list[str]:
    """Keys that a campaign may set."""
    return [f.name for f in fields(SimConfig) if f.name not in SET_BY_CAMPAIGN]
