"""Did the machine compute alike while two arms ran? Pure.

The arms of a round run one after the other, so work of somebody else can fall on one of them and
look like an effect. Each arm computes the same prompts one by one when it populates, tier or not:
a clock of the machine that knows nothing of the candidate's restores.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from harness import stats
from harness.analysis.numbers import TrialNumbers, select
from harness.judge.validity.pairs import pair_name
from harness.records import Outcome
from harness.verdicts import Check, Reason, ReasonCode


def speed_checks(
    trials: Sequence[TrialNumbers], pairs: Iterable[tuple[str, str]], ratio_max: float | None
) -> list[Check]:
    """One check per pair of arms and round. None when the profile bounds nothing."""
    if ratio_max is None:
        return []
    return [check for pair in pairs for check in _checks(trials, pair, ratio_max)]


def _checks(
    trials: Sequence[TrialNumbers], pair: tuple[str, str], ratio_max: float
) -> Iterator[Check]:
    candidate, baseline = (
        {n.facts.repetition: n for n in select(trials, arm=arm, workload="populate")}
        for arm in pair
    )
    for number in sorted(candidate.keys() & baseline.keys()):
        one, other = (prefill_ttft_s(arm[number]) for arm in (candidate, baseline))
        if one is None or other is None:
            found, fault = "a prefill was not measured", ReasonCode.METRIC_ABSENT
            fine = False
        else:
            ratio = max(one, other) / min(one, other)
            found = f"prefill {one:.3g} s vs {other:.3g} s, a factor of {ratio:.3g}"
            fine, fault = ratio <= ratio_max, ReasonCode.UNEQUAL_SPEED
        allowed = f"<= {ratio_max:g}"
        text = f"round {number}: {found}; allowed: {allowed}"
        evidence = f"trials/{candidate[number].id}/requests.jsonl"
        yield Check(
            "equal_speed",
            pair_name(*pair),
            fine,
            f"round {number}: {found}",
            allowed,
            () if fine else (Reason(fault, text, evidence),),
        )


def prefill_ttft_s(populate: TrialNumbers) -> float | None:
    """Median TTFT of the first request of each session; None when one failed or none was sent."""
    first: dict[int, float | None] = {}
    for record in sorted(populate.phase("populate"), key=lambda r: r.seq):
        first.setdefault(record.session, record.ttft_s if record.outcome is Outcome.OK else None)
    values = [value for value in first.values() if value is not None]
    return stats.percentile(values, 0.5) if values and len(values) == len(first) else None
