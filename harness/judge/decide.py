"""One measurement against one bound. Pure; the only place where a number becomes a verdict."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from harness import stats
from harness.analysis.measures import compared
from harness.campaign.criteria import CriterionSpec
from harness.verdicts import (
    Bound,
    Compared,
    Measurement,
    Reason,
    ReasonCode,
    Verdict,
    finite_or_inf,
)

# Large-effect rule of cpu-demo: every repetition clears (or misses) the target by this factor.
LARGE_EFFECT_FACTOR = 2.0

# Kind of ratio behind a measure: a reduction is 1 - ratio (small is good), a gain is ratio - 1.
_REDUCTIONS = frozenset({"ttft_reduction"})

# Chance of a wrong STOP, and of a wrong PASS, that a plan spends over all its looks (two-sided).
ERROR_RATE = 0.05


@dataclass(frozen=True)
class Looks:
    """When a plan decides, fixed before the first trial (docs/protocol.md, section 6).

    ``repetitions``: of each look, ascending. ``levels``: at how many the criterion is judged; any
    one of them can stop the gate, so a STOP shares its error rate among them.
    """

    repetitions: tuple[int, ...]
    levels: int = 1

    @property
    def confidence(self) -> float:
        """Of the interval at each look, two-sided."""
        return 1 - ERROR_RATE / len(self.repetitions)

    @property
    def stop_confidence(self) -> float:
        """Of the upper limit that a STOP rests on, two-sided."""
        return 1 - ERROR_RATE / (len(self.repetitions) * self.levels)


@dataclass(frozen=True)
class Decision:
    """Verdict and reasons; ``measurement``: as it was at the look that decided.

    ``missed``: numbers of the repetitions that fell short of what the rule asks of each.
    """

    verdict: Verdict
    reasons: tuple[Reason, ...]
    measurement: Measurement
    missed: tuple[int, ...] = ()


def applied(spec: CriterionSpec, bound: Bound) -> Bound:
    """The bound with what the rule makes of it, which is what reports have to show."""
    each = each_stop = low = None
    if spec.decide == "large_effect":
        if spec.measure in _REDUCTIONS:
            each = 1 - (1 - bound.target) / LARGE_EFFECT_FACTOR
            each_stop = 1 - (1 - bound.target) * LARGE_EFFECT_FACTOR
        else:
            each = (1 + bound.target) * LARGE_EFFECT_FACTOR - 1
            each_stop = (1 + bound.target) / LARGE_EFFECT_FACTOR - 1
        each, each_stop = stats.round9(each), stats.round9(each_stop)
    elif spec.decide == "interval":
        low = bound.target if bound.floor is None else bound.floor
    least_n = spec.min_n if spec.decide != "point" and spec.min_n > 1 else None
    return dataclasses.replace(bound, each=each, each_stop=each_stop, low=low, least_n=least_n)


def with_required(spec: CriterionSpec, bound: Bound, measurement: Measurement) -> Measurement:
    """The measurement with the candidate's value at the bound of a PASS, in its own unit."""
    if measurement.compared is None:
        return measurement
    rule = applied(spec, bound)
    edge = rule.target if rule.each is None else rule.each
    ratio = 1 - edge if spec.measure in _REDUCTIONS else 1 + edge
    required = stats.round9(measurement.compared.baseline * ratio)
    return dataclasses.replace(
        measurement, compared=dataclasses.replace(measurement.compared, required=required)
    )


def decide(
    spec: CriterionSpec, bound: Bound, measurement: Measurement, looks: Looks | None = None
) -> Decision:
    """Verdict of one criterion. A measurement that is absent or too small never passes.

    ``looks`` matter to ``decide = "interval"`` only; without them it decides once, over all
    repetitions.
    """
    if measurement.value is None:
        why = str(measurement.detail.get("absent", "no measurement"))
        code = ReasonCode(measurement.detail.get("code", ReasonCode.NO_MEASUREMENT.value))
        return _decision(Verdict.INCONCLUSIVE, code, why, measurement)
    if spec.decide != "point" and measurement.n < spec.min_n:
        text = f"n = {measurement.n}; needed: {spec.min_n}"
        return _decision(Verdict.INCONCLUSIVE, ReasonCode.TOO_FEW_REPETITIONS, text, measurement)
    if spec.decide in ("large_effect", "interval") and "ratios" not in measurement.detail:
        text = f"measure {spec.measure} has no repetitions, which decide = {spec.decide!r} needs"
        return _decision(Verdict.INCONCLUSIVE, ReasonCode.NO_MEASUREMENT, text, measurement)
    value = math.inf if measurement.value == "inf" else float(measurement.value)
    if spec.decide in ("exact", "point"):
        verdict, reasons = _exact(spec, bound, measurement, value)
    elif spec.decide == "large_effect":
        return _large_effect(spec, bound, measurement)
    elif looks is not None and looks.repetitions:
        return _by_looks(spec, bound, measurement, looks)
    else:
        verdict, reasons = _interval(bound, measurement, value, measurement.high)
    return Decision(verdict, reasons, measurement)


def _decision(verdict: Verdict, code: ReasonCode, text: str, measurement: Measurement) -> Decision:
    return Decision(verdict, (_reason(code, text, measurement),), measurement)


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


def _large_effect(spec: CriterionSpec, bound: Bound, measurement: Measurement) -> Decision:
    reduction = spec.measure in _REDUCTIONS
    ratios = [
        math.inf if ratio == "inf" else float(ratio) for ratio in measurement.detail["ratios"]
    ]
    # As a cost ratio (candidate / baseline, small is good) both kinds read the same way.
    costs = ratios if reduction else [1 / ratio if ratio > 0 else math.inf for ratio in ratios]
    target = 1 - bound.target if reduction else 1 / (1 + bound.target)
    short = [k for k, cost in enumerate(costs) if cost > target / LARGE_EFFECT_FACTOR]
    if not short:
        return Decision(Verdict.PASS, (), measurement)
    numbers = measurement.detail.get("repetitions") or list(range(1, len(ratios) + 1))
    missed = tuple(numbers[k] for k in short)
    text = _missed_text(short, numbers, applied(spec, bound), measurement)
    if all(cost >= target * LARGE_EFFECT_FACTOR for cost in costs):
        reason = _reason(ReasonCode.BELOW_TARGET, text, measurement, short[0])
        return Decision(Verdict.STOP, (reason,), measurement, missed)
    reason = _reason(ReasonCode.REPETITION_MISSED, text, measurement, short[0])
    return Decision(Verdict.INCONCLUSIVE, (reason,), measurement, missed)


def _missed_text(
    short: list[int], numbers: list[int], bound: Bound, measurement: Measurement
) -> str:
    values = measurement.repetitions
    found = ", ".join(f"repetition {numbers[k]}: {_percent(values[k])}" for k in short)
    assert bound.each is not None
    return f"{found}; needed in every repetition: >= {_percent(bound.each)}"


def _percent(value: float | str) -> str:
    return value if isinstance(value, str) else f"{100 * value:.6g} %"


def _interval(
    bound: Bound, measurement: Measurement, value: float, stop_high: float | None
) -> tuple[Verdict, tuple[Reason, ...]]:
    """``stop_high``: the upper limit that a STOP rests on."""
    text = (
        f"estimate {value:.4g}, interval {measurement.low} to {measurement.high} over "
        f"{measurement.n} repetitions, which vary by {_spread(measurement)}; "
        f"target {bound.target:g}, floor {bound.floor}"
    )
    if math.isinf(value):
        return Verdict.STOP, (_reason(ReasonCode.BELOW_TARGET, text, measurement),)
    if measurement.low is None or stop_high is None:
        return Verdict.INCONCLUSIVE, (_reason(ReasonCode.UNDECIDED, text, measurement),)
    floor = bound.target if bound.floor is None else bound.floor
    if value >= bound.target and measurement.low >= floor:
        return Verdict.PASS, ()
    if stop_high < bound.target:
        return Verdict.STOP, (_reason(ReasonCode.BELOW_TARGET, text, measurement),)
    return Verdict.INCONCLUSIVE, (_reason(ReasonCode.UNDECIDED, text, measurement),)


def _spread(measurement: Measurement) -> str:
    """How far the repetitions lie apart: largest over smallest ratio."""
    recorded = measurement.detail["ratios"][: measurement.n]
    ratios = [math.inf if ratio == "inf" else float(ratio) for ratio in recorded]
    spread = math.inf if math.inf in ratios else max(ratios) / min(ratios)
    return f"a factor of {spread:.3g}"


def _by_looks(
    spec: CriterionSpec, bound: Bound, measurement: Measurement, looks: Looks
) -> Decision:
    """The first look that says PASS or STOP decides; what was recorded after it is not read."""
    recorded = [float(ratio) for ratio in measurement.detail["ratios"]]
    reached = [count for count in looks.repetitions if count <= len(recorded)]
    if not reached:
        text = f"n = {len(recorded)}; the first look needs {looks.repetitions[0]}"
        return _decision(Verdict.INCONCLUSIVE, ReasonCode.TOO_FEW_REPETITIONS, text, measurement)
    tried: list[dict[str, object]] = []
    verdict, seen = Verdict.INCONCLUSIVE, measurement
    reasons: tuple[Reason, ...] = ()
    for count in reached:
        seen, stop_high = _at_look(spec, measurement, recorded[:count], looks)
        value = math.inf if seen.value == "inf" else float(seen.value or 0.0)
        verdict, reasons = _interval(bound, seen, value, stop_high)
        tried.append(
            {
                "repetitions": count,
                "estimate": seen.value,
                "low": seen.low,
                "high": seen.high,
                "confidence": stats.round9(looks.confidence),
                "stop_high": stop_high,
                "stop_confidence": stats.round9(looks.stop_confidence),
                "verdict": verdict.value,
            }
        )
        if verdict is not Verdict.INCONCLUSIVE:
            break
    left = [count for count in looks.repetitions if count > len(recorded)]
    if verdict is Verdict.INCONCLUSIVE and left:
        missing = f"look at {left[0]} repetitions not reached: {len(recorded)} valid ones"
        reasons += (_reason(ReasonCode.TOO_FEW_REPETITIONS, missing, measurement),)
    detail = {**measurement.detail, "looks": tried}
    return Decision(verdict, reasons, dataclasses.replace(seen, detail=detail))


def _at_look(
    spec: CriterionSpec, measurement: Measurement, ratios: list[float], looks: Looks
) -> tuple[Measurement, float | None]:
    """The measurement over these ratios alone, and the upper limit for a STOP."""
    reduction = spec.measure in _REDUCTIONS

    def convert(ratio: float) -> float:
        return stats.round9(1 - ratio if reduction else ratio - 1)

    effect = stats.ratio_effect(ratios, confidence=looks.confidence)
    stop = stats.ratio_effect(ratios, confidence=looks.stop_confidence)
    edges = [convert(edge) for edge in (effect.low, effect.high) if edge is not None]
    # The limit on the side of "more": of a reduction, the lower end of its ratio.
    stop_edge = stop.low if reduction else stop.high
    seen = dataclasses.replace(
        measurement,
        value=finite_or_inf(convert(effect.ratio)),
        n=len(ratios),
        low=min(edges) if edges else None,
        high=max(edges) if edges else None,
        confidence=stats.round9(looks.confidence) if edges else None,
        repetitions=tuple(finite_or_inf(convert(ratio)) for ratio in ratios),
        compared=_compared(measurement, len(ratios)),
    )
    return seen, None if stop_edge is None else convert(stop_edge)


def _compared(measurement: Measurement, count: int) -> Compared | None:
    """Both sides over the first repetitions, which are all that a look has seen."""
    if measurement.compared is None:
        return None
    sides = [
        [math.inf if value == "inf" else float(value) for value in measurement.detail[side][:count]]
        for side in ("candidate", "baseline")
    ]
    return compared(sides[0], sides[1], measurement.compared.unit)


def _holds(value: float, comparison: str, target: float) -> bool:
    if comparison == ">=":
        return value >= target
    if comparison == "<=":
        return value <= target
    return value == target


def _reason(code: ReasonCode, text: str, measurement: Measurement, repetition: int = 0) -> Reason:
    """``repetition``: which of the measurement's paired repetitions to look at, from 0."""
    trials = measurement.trials
    index = 2 * repetition if len(trials) == 2 * len(measurement.repetitions) else 0
    return Reason(code, text, f"trials/{trials[index]}" if trials else "")
