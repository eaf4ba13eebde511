"""The last lines of a run say that it is over and what it found, also under tox."""

from __future__ import annotations

import pytest

from harness.cli.run_verbs import closing_lines
from harness.verdicts import Verdict


@pytest.mark.parametrize(
    ("verdict", "code"), [(Verdict.PASS, 0), (Verdict.STOP, 1), (Verdict.INCONCLUSIVE, 2)]
)
def test_the_verdict_and_its_exit_code_are_said(verdict: Verdict, code: int) -> None:
    assert list(closing_lines(verdict, {})) == [
        f"The run is finished, sealed and judged. Verdict: {verdict.value} (exit code {code})."
    ]


def test_under_tox_its_own_last_words_are_explained() -> None:
    lines = list(closing_lines(Verdict.INCONCLUSIVE, {"TOX_ENV_NAME": "demo"}))
    assert lines[1:] == [
        "Nothing went wrong with the command: exit code 2 is the verdict. tox calls it "
        '"evaluation failed" below.'
    ]
    assert len(list(closing_lines(Verdict.PASS, {"TOX_ENV_NAME": "demo"}))) == 1
