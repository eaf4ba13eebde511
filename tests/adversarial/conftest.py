"""One clean run for all faults; with KVGATE_WRITE_FAULTS=PATH the table of what was seen."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.adversarial.cases import CASES
from tests.adversarial.rehearsal import Finished, execute
from tests.adversarial.table import Row, markdown


@pytest.fixture(scope="session")
def model_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the generated model lies."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def clean(tmp_path_factory: pytest.TempPathFactory, model_root: Path) -> Finished:
    """A run of all arms without a fault."""
    return execute(tmp_path_factory.mktemp("clean"), model_root=model_root)


@pytest.fixture(scope="session")
def seen() -> Iterator[list[Row]]:
    """Rows of the table, written at the end when asked for and complete."""
    rows: list[Row] = []
    yield rows
    if (path := os.environ.get("KVGATE_WRITE_FAULTS")) and len(rows) == len(CASES) + 1:
        Path(path).write_text(markdown(rows), encoding="utf-8")
