"""The connector's settings, ``kv_connector_extra_config``. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Any


class ResetScope(Enum):
    """What a reset of the external cache drops."""

    HOST = "host"
    ALL = "all"


class ConfigError(ValueError):
    """The settings cannot be used; the message lists every problem found."""


@dataclass(frozen=True)
class TierConfig:
    """Validated settings of one connector."""

    host_pool_bytes: int  # size of the host DRAM pool, header pages and padding included
    directory: Path | None = None  # root of the block files; None: no disk tier
    reader_threads: int = 4  # concurrent file reads
    writer_threads: int = 1  # concurrent file writes
    load_deadline_s: float = 30.0  # after this, the missing blocks of a load are recomputed
    reset_scope: ResetScope = ResetScope.ALL
    disk_capacity_bytes: int | None = None  # bound on all block files; None: free space alone
    disk_reserve_bytes: int | None = None  # free space to leave; None: see quota.py
    disk_high_watermark: float = 0.95  # share of the capacity at which eviction starts
    disk_low_watermark: float = 0.90  # and ends
    probe_interval_s: float = 30.0  # a sick directory rests this long before it is tried again
    rescan_interval_s: float = 5.0  # how often other servers' files are looked for
    prefetch: bool = True  # read the files of requests that wait to be scheduled


_DISK_ONLY = (
    "disk_capacity_bytes",
    "disk_reserve_bytes",
    "disk_high_watermark",
    "disk_low_watermark",
)
_KNOWN = tuple(sorted(field.name for field in fields(TierConfig)))


def parse_config(extra: Mapping[str, Any]) -> TierConfig:
    """Reads ``kv_connector_extra_config``. Pure.

    Raises:
        ConfigError: lists every unknown, missing or wrong key.
    """
    problems = [
        f"unknown key {key!r}; known keys: {', '.join(_KNOWN)}"
        for key in sorted(extra, key=str)
        if key not in _KNOWN
    ]
    if "host_pool_bytes" not in extra:
        problems.append("host_pool_bytes is required: the size of the host DRAM pool in bytes")
    pool = _integer(extra, "host_pool_bytes", 1, minimum=1, problems=problems)
    readers = _integer(extra, "reader_threads", 4, minimum=1, problems=problems)
    writers = _integer(extra, "writer_threads", 1, minimum=1, problems=problems)
    deadline = _seconds(extra, "load_deadline_s", 30.0, problems)
    probe = _seconds(extra, "probe_interval_s", 30.0, problems)
    rescan = _seconds(extra, "rescan_interval_s", 5.0, problems)
    capacity = _bytes_or_none(extra, "disk_capacity_bytes", 1, problems)
    reserve = _bytes_or_none(extra, "disk_reserve_bytes", 0, problems)
    high = _share(extra, "disk_high_watermark", 0.95, problems)
    low = _share(extra, "disk_low_watermark", 0.90, problems)
    if low > high:
        problems.append(
            f"disk_low_watermark is {low}; it must not be above disk_high_watermark, {high}"
        )
    prefetch = extra.get("prefetch", True)
    if not isinstance(prefetch, bool):
        problems.append(f"prefetch is {prefetch!r}; it must be true or false")
        prefetch = True
    directory = extra.get("directory")
    if directory is not None and (
        not isinstance(directory, str) or not Path(directory).is_absolute()
    ):
        problems.append(f"directory is {directory!r}; it must be an absolute path or absent")
        directory = None
    if directory is None:
        problems += [
            f"{key} is set without directory" for key in sorted(extra, key=str) if key in _DISK_ONLY
        ]
    scope = extra.get("reset_scope", ResetScope.ALL.value)
    if scope not in (known := [member.value for member in ResetScope]):
        problems.append(f"reset_scope is {scope!r}; it must be one of {', '.join(known)}")
        scope = ResetScope.ALL.value
    if problems:
        raise ConfigError(
            "kv_connector_extra_config of the kvgate tier cannot be used:\n- "
            + "\n- ".join(problems)
            + "\nsee docs/connector.md"
        )
    return TierConfig(
        host_pool_bytes=pool,
        directory=None if directory is None else Path(directory),
        reader_threads=readers,
        writer_threads=writers,
        load_deadline_s=deadline,
        reset_scope=ResetScope(scope),
        disk_capacity_bytes=capacity,
        disk_reserve_bytes=reserve,
        disk_high_watermark=high,
        disk_low_watermark=low,
        probe_interval_s=probe,
        rescan_interval_s=rescan,
        prefetch=prefetch,
    )


def _integer(
    extra: Mapping[str, Any], key: str, default: int, *, minimum: int, problems: list[str]
) -> int:
    value = extra.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        problems.append(f"{key} is {value!r}; it must be an integer of at least {minimum}")
        return default
    return value


def _bytes_or_none(
    extra: Mapping[str, Any], key: str, minimum: int, problems: list[str]
) -> int | None:
    if extra.get(key) is None:
        return None
    return _integer(extra, key, minimum, minimum=minimum, problems=problems)


def _seconds(extra: Mapping[str, Any], key: str, default: float, problems: list[str]) -> float:
    value = extra.get(key, default)
    if not _is_number(value) or not 0 < value < float("inf"):
        problems.append(f"{key} is {value!r}; it must be a number of seconds above 0")
        return default
    return float(value)


def _share(extra: Mapping[str, Any], key: str, default: float, problems: list[str]) -> float:
    value = extra.get(key, default)
    if not _is_number(value) or not 0 < value <= 1:
        problems.append(f"{key} is {value!r}; it must be a share above 0 and up to 1")
        return default
    return float(value)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
