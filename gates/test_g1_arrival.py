"""G1 arrival check, first part: the delivery is what was ordered and can work at all.

Claim: each server starts, loads and answers; the connector brings KV back in a forced store,
evict, load round trip, by bytes; KV bytes per token are what the model's config says. Not shown
here yet: inventory, raw bandwidth of the media, placement.
"""

from __future__ import annotations

import pytest

from gates.conftest import JudgeCriterion

pytestmark = pytest.mark.g1


def test_criterion(criterion_id: str, judge_criterion: JudgeCriterion) -> None:
    """One criterion of the profile, as gates/criteria.toml states and explains it."""
    judge_criterion(criterion_id)


def test_gate(judge_criterion: JudgeCriterion) -> None:
    """The gate as a whole."""
    judge_criterion.gate("g1")
