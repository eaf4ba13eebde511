"""docs/failures.md is made of results, and every result is as it must be."""

from __future__ import annotations

import re

import pytest

from tests.drills import table
from tests.drills.drill import FAULTS, REPOSITORY
from tests.drills.table import FAKE, Result, expected, read_results

RESULTS = read_results()
LIVE_CELLS_PER_FAULT = 4
# SIGHUP and the death of the supervisor were not asked of real vLLM.
LIVE_FAULTS = [fault for fault in FAULTS if fault not in ("SIGHUP", "kill -9 supervisor")]


def test_the_page_is_made_of_the_results() -> None:
    page = (REPOSITORY / "docs" / "failures.md").read_text(encoding="utf-8")
    assert page == table.markdown(RESULTS), "run: python -m tests.drills.table > docs/failures.md"


@pytest.mark.parametrize("result", RESULTS, ids=lambda r: f"{r.phase}-{r.fault}-{r.where}")
def test_each_result_is_as_it_must_be(result: Result) -> None:
    rule = expected(result.phase, result.fault)
    assert result.exit_code == rule.exit_code
    assert re.search(rule.reason, result.reason)
    assert result.left == ()


def test_every_cell_was_run_on_the_fake_server() -> None:
    assert {(r.phase, r.fault) for r in RESULTS if r.where == FAKE} == set(table.CELLS)


@pytest.mark.parametrize("fault", LIVE_FAULTS)
def test_each_fault_was_asked_of_real_vllm(fault: str) -> None:
    live = {r.phase for r in RESULTS if r.fault == fault and r.where != FAKE}
    assert len(live) >= LIVE_CELLS_PER_FAULT
