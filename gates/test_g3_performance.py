"""G3 main performance gate: long-context cold recovery at rising concurrency.

Claim: TTFT and throughput of the tiered arms against recompute and HBM only, from waves that are
proved cold, with outputs that are proved right. Statistic: one wave per repetition, paired over
repetitions (docs/protocol.md, sections 5 and 6). Not shown: single-request tails, decode no-harm,
reuse patterns other than cyclic re-reads.
"""

from __future__ import annotations

import pytest

from gates.conftest import JudgeCriterion

pytestmark = pytest.mark.g3


def test_criterion(criterion_id: str, judge_criterion: JudgeCriterion) -> None:
    """One criterion of the profile, as gates/criteria.toml states and explains it."""
    judge_criterion(criterion_id)


def test_gate(judge_criterion: JudgeCriterion) -> None:
    """The gate as a whole: also covers invalid trials and a run that ended early."""
    judge_criterion.gate("g3")
