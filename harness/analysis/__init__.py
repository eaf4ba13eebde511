"""Evidence to numbers. Pure: no path, clock, environment or network; judges nothing.

`numbers` reads one trial, `oracles` compares outputs, `measures` computes what criteria ask for,
`cells` what charts show. `measure_run` is the entry.
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.analysis.numbers import TrialNumbers, trial_numbers
from harness.plan import Plan
from harness.store import TrialEvidence

__all__ = ["TrialNumbers", "measure_run", "trial_numbers"]


def measure_run(plan: Plan, trials: Sequence[TrialEvidence]) -> tuple[TrialNumbers, ...]:
    """The numbers of every trial, in order. Raises EvidenceError on malformed evidence."""
    del plan  # every figure a trial is checked against was sealed with it
    return tuple(trial_numbers(trial) for trial in trials)
