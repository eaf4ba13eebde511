"""Settings are checked all at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.connector.config import ConfigError, ResetScope, TierConfig, parse_config


def test_defaults() -> None:
    assert parse_config({"host_pool_bytes": 1}) == TierConfig(
        host_pool_bytes=1,
        directory=None,
        reader_threads=4,
        writer_threads=1,
        load_deadline_s=30.0,
        reset_scope=ResetScope.ALL,
    )


def test_all_keys() -> None:
    extra = {
        "host_pool_bytes": 5,
        "directory": "/d",
        "reader_threads": 2,
        "writer_threads": 3,
        "load_deadline_s": 1,
        "reset_scope": "host",
    }
    assert parse_config(extra) == TierConfig(5, Path("/d"), 2, 3, 1.0, ResetScope.HOST)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("host_pool_bytes", 0),
        ("host_pool_bytes", "1"),
        ("host_pool_bytes", True),
        ("host_pool_bytes", 1.5),
        ("directory", "relative"),
        ("directory", 3),
        ("reader_threads", 0),
        ("writer_threads", -1),
        ("load_deadline_s", 0),
        ("load_deadline_s", "30"),
        ("load_deadline_s", float("nan")),
        ("reset_scope", "disk"),
        ("host_pool", 1),
    ],
)
def test_wrong_value_names_its_key(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=key):
        parse_config({"host_pool_bytes": 1, key: value})


def test_every_problem_is_listed() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"nonsense": 1, "reader_threads": 0, "reset_scope": "x"})
    for part in ("nonsense", "host_pool_bytes is required", "reader_threads is 0", "reset_scope"):
        assert part in str(caught.value)
