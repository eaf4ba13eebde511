"""One measurement against one bound. Pure; the only place where a number becomes a verdict."""

from __future__ import annotations

import math

from harness.plan import CriterionSpec
from harness.verdicts import Bound, Measurement, Reason, ReasonCode, Verdict

# Large-effect rule of cpu-demo: every repetition clears (or misses) the target by this factor.
LARGE_EFFECT_FACTOR = 2.0

# Kind of ratio behind a measure: a reduction is 1 - ratio (small is good), a gain is ratio - 1.
_REDUCTIONS = frozenset({"ttft_reduction"})


def decide(
    spec: CriterionSpec, bound: Bound, measurement: Measurement
) -> tuple[Verdict, tuple[Reason, ...]]:
    """Verdict and reasons. A measurement that is absent or too small never passes."""
    if measurement.value is None:
        why = str(measurement.detail.get("absent", "no measurement"))
        code = ReasonCode(measurement.detail.get("code", ReasonCode.NO_MEASUREMENT.value))
        return Verdict.INCONCLUSIVE, (_reason(code, why, measurement),)
    if spec.decide != "point" and measurement.n < spec.min_n:
        text = f"n = {measurement.n}; needed: {spec.min_n}"
        return Verdict.INCONCLUSIVE, (_reason(ReasonCode.TOO_FEW_REPETITIONS, text, measurement),)
    value = math.inf if measurement.value == "inf" else float(measurement.value)
    if spec.decide in ("exact", "point"):
        return _exact(spec, bound, measurement, value)
    if spec.decide == "large_effect":
        return _large_effect(spec, bound, measurement)
    return _interval(spec, bound, measurement, value)


def _exact(
    spec: CriterionSpec, bound: Bound, measurement: Measurement, value: float
) -> tuple[Verdict, tuple[Reason, ...]]:
    if _holds(value, bound.comparison, bound.target):
        return Verdict.PASS, ()
    named = measurement.detail.get("differing") or measurement.detail.get("missed") or []
    text = f"found {value:.9g}; allowed: {bound.comparison} {bound.target:.9g}"
    if named:
        text += f"; {', '.join(str(item) for item in named[:5])}"
    return Verdict(spec.on_miss), (_reason(ReasonCode(spec.reason), text, measurement),)


def _large_effect(
    spec: CriterionSpec, bound: Bound, measurement: Measurement
) -> tuple[Verdict, tuple[Reason, ...]]:
    reduction = spec.measure in _REDUCTIONS
    ratios = [
        math.inf if ratio == "inf" else float(ratio) for ratio in measurement.detail["ratios"]
    ]
    # As a cost ratio (candidate / baseline, small is good) both kinds read the same way.
    costs = ratios if reduction else [1 / ratio if ratio > 0 else math.inf for ratio in ratios]
    target = 1 - bound.target if reduction else 1 / (1 + bound.target)
    if all(cost <= target / LARGE_EFFECT_FACTOR for cost in costs):
        return Verdict.PASS, ()
    shown = ", ".join(f"{ratio:.3g}" for ratio in ratios)
    text = (
        f"ratios {shown}; target ratio {target if reduction else 1 / target:.3g}, factor 2 beyond"
    )
    if all(cost >= target * LARGE_EFFECT_FACTOR for cost in costs):
        return Verdict.STOP, (_reason(ReasonCode.BELOW_TARGET, text, measurement),)
    return Verdict.INCONCLUSIVE, (_reason(ReasonCode.UNDECIDED, text, measurement),)


def _interval(
    spec: CriterionSpec, bound: Bound, measurement: Measurement, value: float
) -> tuple[Verdict, tuple[Reason, ...]]:
    text = (
        f"estimate {value:.4g}, interval {measurement.low} to {measurement.high}; "
        f"target {bound.target:g}, floor {bound.floor}"
    )
    if value == -math.inf or math.isinf(value):
        return Verdict.STOP, (_reason(ReasonCode.BELOW_TARGET, text, measurement),)
    if measurement.low is None or measurement.high is None:
        return Verdict.INCONCLUSIVE, (_reason(ReasonCode.UNDECIDED, text, measurement),)
    floor = bound.target if bound.floor is None else bound.floor
    if value >= bound.target and measurement.low >= floor:
        return Verdict.PASS, ()
    if measurement.high < bound.target:
        return Verdict.STOP, (_reason(ReasonCode.BELOW_TARGET, text, measurement),)
    return Verdict.INCONCLUSIVE, (_reason(ReasonCode.UNDECIDED, text, measurement),)


def _holds(value: float, comparison: str, target: float) -> bool:
    if comparison == ">=":
        return value >= target
    if comparison == "<=":
        return value <= target
    return value == target


def _reason(code: ReasonCode, text: str, measurement: Measurement) -> Reason:
    evidence = f"trials/{measurement.trials[0]}" if measurement.trials else ""
    return Reason(code, text, evidence)
