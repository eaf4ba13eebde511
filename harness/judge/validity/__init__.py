"""Is a trial's evidence good enough to count? Named checks, none of which looks at the candidate's
latency (docs/protocol.md, section 4). Pure.

`requests`: every measured trial; `cold`: by the arm's role; `pairs`: two arms; `speed`: the machine
under two arms.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from harness.analysis.numbers import TrialNumbers
from harness.campaign.criteria import ValidityBounds
from harness.judge.validity.cold import CHECKS_BY_ROLE
from harness.judge.validity.pairs import (
    arm_checks,
    differing_keys,
    effective_value,
    is_declared,
    pair_name,
)
from harness.judge.validity.requests import REQUEST_CHECKS, warmth
from harness.judge.validity.speed import speed_checks
from harness.verdicts import Check

__all__ = [
    "COUNTED",
    "arm_checks",
    "differing_keys",
    "effective_value",
    "imported_checks",
    "invalid_trials",
    "is_declared",
    "pair_name",
    "speed_checks",
    "trial_checks",
]

# Workloads whose trials are checked.
COUNTED = ("cold_recovery", "steady", "oracle", "fits_in_hbm")


def trial_checks(trials: Sequence[TrialNumbers], bounds: ValidityBounds) -> list[Check]:
    """All checks of all measured trials."""
    checks = []
    for trial in trials:
        if trial.facts.workload in COUNTED:
            checks += [check(trial, bounds) for check in REQUEST_CHECKS]
            checks += [check(trial, bounds) for check in CHECKS_BY_ROLE.get(trial.role, ())]
    return checks + list(warmth(trials, bounds))


def invalid_trials(checks: Iterable[Check]) -> frozenset[str]:
    """Ids of trials with a failed check."""
    return frozenset(check.subject for check in checks if check.failed)


def imported_checks() -> list[Check]:
    """Every check by name, not applicable: a table of figures holds nothing to check."""
    names = [check.__name__ for check in REQUEST_CHECKS]
    names += [check.__name__ for checks in CHECKS_BY_ROLE.values() for check in checks]
    names += ["warm", "declared_differences", "equal_compute", "equal_capacity", "equal_speed"]
    return [
        Check(
            name=name,
            subject="published table",
            passed=False,
            found="no requests, counters or server facts",
            allowed="not applicable",
            applicable=False,
        )
        for name in names
    ]
