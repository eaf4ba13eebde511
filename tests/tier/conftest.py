"""A directory to put blocks into, and one beside it that must never be touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.connector.blockfile import PAGE_BYTES
from tests.tier.directory import DAY_S, add_block, add_namespace, aged, flip


@pytest.fixture(autouse=True)
def wide_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "kv"
    path.mkdir()
    return path


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A tier of somebody else, with one damaged and old block; nothing here may be touched."""
    path = tmp_path / "outside"
    path.mkdir()
    name = add_namespace(path)
    flip(block := add_block(path, name, 1), PAGE_BYTES)
    aged(block, 99 * DAY_S)
    return path
