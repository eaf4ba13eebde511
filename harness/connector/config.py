"""The connector's settings, ``kv_connector_extra_config``. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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


_KNOWN = (
    "directory",
    "host_pool_bytes",
    "load_deadline_s",
    "reader_threads",
    "reset_scope",
    "writer_threads",
)


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
    deadline = extra.get("load_deadline_s", 30.0)
    if isinstance(deadline, bool) or not isinstance(deadline, (int, float)) or not deadline > 0:
        problems.append(f"load_deadline_s is {deadline!r}; it must be a number of seconds above 0")
        deadline = 30.0
    directory = extra.get("directory")
    if directory is not None and (
        not isinstance(directory, str) or not Path(directory).is_absolute()
    ):
        problems.append(f"directory is {directory!r}; it must be an absolute path or absent")
        directory = None
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
        load_deadline_s=float(deadline),
        reset_scope=ResetScope(scope),
    )


def _integer(
    extra: Mapping[str, Any], key: str, default: int, *, minimum: int, problems: list[str]
) -> int:
    value = extra.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        problems.append(f"{key} is {value!r}; it must be an integer of at least {minimum}")
        return default
    return value
