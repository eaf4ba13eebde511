"""What every validity check is made of. Pure."""

from __future__ import annotations

from collections.abc import Callable

from harness.analysis.numbers import TrialNumbers
from harness.campaign.criteria import ValidityBounds
from harness.verdicts import Check, Reason, ReasonCode

TrialCheck = Callable[[TrialNumbers, ValidityBounds], Check]


def trial_check(
    trial: TrialNumbers,
    name: str,
    *,
    found: str,
    allowed: str,
    fault: ReasonCode | None,
    file: str = "samples.jsonl",
    text: str = "",
) -> Check:
    """A check of one trial; without a ``fault`` it passed."""
    evidence = f"trials/{trial.id}/{file}"
    reasons = (
        () if fault is None else (Reason(fault, text or f"{found}; allowed: {allowed}", evidence),)
    )
    return Check(name, trial.id, fault is None, found, allowed, reasons)


def shown(value: float | None, unit: str = "") -> str:
    """A count as a check shows it; "absent" for none."""
    return "absent" if value is None else f"{value:.10g}{unit}"


def absent_or(value: float | None, fault: ReasonCode | None) -> ReasonCode | None:
    """The fault of a value that is not there, else ``fault``."""
    return ReasonCode.METRIC_ABSENT if value is None else fault
