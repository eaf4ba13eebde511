"""How often a plan decides, and how often it is wrong: simulated on the judge's own rule.

    python -m harness.judge.power > docs/power.md

Each simulated repetition has one wave per arm. All requests of a wave share one fate, so a wave is
one draw: its statistic is the true one times exp(N(0, noise)). Seeded: the same arguments give the
same rates. Knows no evidence; `measured_noise` reads a sign-off.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from harness.campaign.criteria import CriterionSpec
from harness.campaign.plan import Plan
from harness.campaign.reading import load_criteria
from harness.judge.decide import Looks, decide
from harness.verdicts import Bound, Cell, Measurement, Unit, Verdict, merge

REDUCTIONS = (0.20, 0.22, 0.25, 0.26, 0.30)
NOISES = (0.03, 0.05, 0.10)
# A plan below this chance of the right verdict, at the reductions below, cannot decide.
POWER_MIN = 0.8
CLEARLY_BAD, CLEARLY_GOOD = REDUCTIONS[0], REDUCTIONS[-1]
ASSUMED_NOISE = 0.05
_PAGE_TRIALS = 4000
_PLAN_TRIALS = 1000


@dataclass(frozen=True)
class Rates:
    """Shares of simulated campaigns by verdict; ``repetitions``: mean number that was looked at."""

    passed: float
    stopped: float
    inconclusive: float
    repetitions: float


def simulate(
    spec: CriterionSpec,
    bound: Bound,
    looks: Looks,
    *,
    reduction: float,
    noise: float,
    trials: int,
    seed: int = 1,
) -> Rates:
    """Verdicts of one criterion over all its levels, every level with the same true reduction.

    ``noise``: standard deviation of ln of a wave's statistic, alike and independent in both arms.
    """
    rng = random.Random(f"{seed} {reduction} {noise} {looks} {bound.target} {bound.floor}")
    centre, spread = math.log(1 - reduction), noise * math.sqrt(2)
    count = looks.repetitions[-1]
    verdicts: Counter[Verdict] = Counter()
    looked = 0
    for _ in range(trials):
        decisions = []
        for _level in range(looks.levels):
            ratios = [math.exp(rng.gauss(centre, spread)) for _ in range(count)]
            decisions.append(decide(spec, bound, _measurement(spec, ratios), looks))
        verdicts[merge(decision.verdict for decision in decisions)] += 1
        looked += max(decision.measurement.n for decision in decisions)
    return Rates(
        passed=verdicts[Verdict.PASS] / trials,
        stopped=verdicts[Verdict.STOP] / trials,
        inconclusive=verdicts[Verdict.INCONCLUSIVE] / trials,
        repetitions=looked / trials,
    )


def _measurement(spec: CriterionSpec, ratios: list[float]) -> Measurement:
    """What analysis would hand to the judge; value and interval are made anew at each look."""
    return Measurement(
        name=spec.measure,
        unit=Unit.RATIO,
        value=0.0,
        n=len(ratios),
        estimator="simulated",
        detail={"ratios": ratios},
    )


def measured_noise(cells: Sequence[Cell]) -> float | None:
    """Noise of a run: within-cell standard deviation of ln of the wave statistic, over all cells.

    None where no cell has two finite repetitions. It includes drift between the repetitions.
    """
    squares, degrees = 0.0, 0
    for cell in cells:
        values = [v for v in cell.ttft_wave_s if isinstance(v, float) and 0 < v < math.inf]
        if cell.workload == "cold_recovery" and len(values) > 1:
            logs = [math.log(value) for value in values]
            centre = math.fsum(logs) / len(logs)
            squares += math.fsum((value - centre) ** 2 for value in logs)
            degrees += len(logs) - 1
    return math.sqrt(squares / degrees) if degrees else None


@dataclass(frozen=True)
class PlanPower:
    """Power of one criterion of a plan. ``rows``: true reduction and its rates, ascending."""

    criterion: str
    looks: Looks
    noise: float
    rows: tuple[tuple[float, Rates], ...]

    @property
    def stop_power(self) -> float:
        """Chance of STOP where the deployment is clearly bad."""
        return self.rows[0][1].stopped

    @property
    def pass_power(self) -> float:
        """Chance of PASS where it is clearly good."""
        return self.rows[-1][1].passed

    @property
    def can_decide(self) -> bool:
        """True when both are at least POWER_MIN."""
        return min(self.stop_power, self.pass_power) >= POWER_MIN


def plan_power(plan: Plan, noise: float, *, trials: int = _PLAN_TRIALS) -> PlanPower | None:
    """Power of a plan's TTFT criterion; None where the profile decides by another rule."""
    for spec in plan.profile.criteria.values():
        if spec.decide == "interval" and spec.measure == "ttft_reduction":
            work = plan.campaign.cold_recovery
            override = plan.campaign.criteria.get(spec.id)
            bound = Bound(spec.comparison, override.target if override else spec.target, spec.floor)
            levels = len(work.levels) if spec.per_level else 1
            looks = Looks(plan.looks or (work.repetitions,), levels)
            rows = [
                (
                    reduction,
                    simulate(spec, bound, looks, reduction=reduction, noise=noise, trials=trials),
                )
                for reduction in _reductions(bound)
            ]
            return PlanPower(spec.id, looks, noise, tuple(rows))
    return None


def _reductions(bound: Bound) -> tuple[float, ...]:
    """True reductions to simulate: where floor and target were agreed for, else a factor around."""
    if bound.floor is not None:
        return REDUCTIONS
    return tuple(1 - (1 - bound.target) * factor for factor in (2.0, 1.5, 1.0, 0.75, 0.5))


def power_lines(plan: Plan, noise: float = ASSUMED_NOISE, *, origin: str = "assumed") -> list[str]:
    """What `kvgate plan` prints of a plan's power; nothing where no criterion uses intervals."""
    power = plan_power(plan, noise)
    if power is None:
        return []
    looks = ", ".join(map(str, power.looks.repetitions))
    lines = [
        f"power of {power.criterion}, {power.looks.levels} level(s), looks at {looks} repetitions,",
        f"noise of a wave {noise:.1%} ({origin}); simulated, {_PLAN_TRIALS} campaigns each:",
        "  true reduction    PASS    STOP    neither",
    ]
    lines += [
        f"  {reduction:14.0%}  {rates.passed:6.1%}  {rates.stopped:6.1%}  {rates.inconclusive:9.1%}"
        for reduction, rates in power.rows
    ]
    if not power.can_decide:
        lines.append(
            f"this plan cannot decide: P(STOP) at {power.rows[0][0]:.0%} is {power.stop_power:.0%} "
            f"and P(PASS) at {power.rows[-1][0]:.0%} is {power.pass_power:.0%}; needed: "
            f"{POWER_MIN:.0%} each. Plan more repetitions, or reduce the noise."
        )
    return lines


# --- docs/power.md ------------------------------------------------------------

_OPENING = """\
# Statistical power

How often the rule of `decide = "interval"` gives PASS, STOP or neither, by simulation on the
judge's own `decide` function. Made by `python -m harness.judge.power`; do not edit. {trials:,}
simulated campaigns per row, seeded.

**Model.** Three levels, all with the same true TTFT reduction. Per repetition, level and arm one
wave; its statistic is the true one times exp(N(0, noise)), independent between arms, so the effect
of one repetition has a standard deviation of √2 × noise. Profile `production`: target {target:.0%},
floor {floor:.0%}, looks at {looks}. A plan of 6 repetitions has the first look only, one of 12 the
first two; the looks of a plan share the 5 %.

**What the rule promises**, whatever the noise:

- *False STOP*: at a true reduction of at least the target, at most 2.5 % over all looks and levels
  together.
- *False PASS*: at a true reduction of at most the floor, at most 2.5 % over all looks, at one level
  already; a gate needs every level.
- Between floor and target neither verdict is an error: both bounds were agreed for that.

Rows show the rates found; with {trials:,} campaigns a rate of 2.5 % has a standard error of 0.25 %.

**What it costs.** A true value at the target seldom passes: the estimate must reach the target at
every level. A plan decides when P(STOP) at {bad:.0%} and P(PASS) at {good:.0%} are both at least
{power:.0%}; `kvgate plan` says so of a plan of yours. Every look spends error rate: the interval at
6 repetitions is wider in a plan of 24 than in a plan of 6.
"""


def _production(repetitions: int, levels: int) -> tuple[CriterionSpec, Bound, Looks]:
    profile, _text = load_criteria("production")
    spec = profile.criteria["ttft_reduction_vs_recompute"]
    looks = Looks(tuple(n for n in profile.looks if n <= repetitions), levels)
    return spec, Bound(spec.comparison, spec.target, spec.floor), looks


def page_rows(repetitions: int, noise: float, *, trials: int = _PAGE_TRIALS) -> list[str]:
    """Rows of the main table of docs/power.md, for one plan and one noise."""
    spec, bound, looks = _production(repetitions, levels=3)
    lines = []
    for reduction in REDUCTIONS:
        rates = simulate(spec, bound, looks, reduction=reduction, noise=noise, trials=trials)
        error = ""
        if reduction >= spec.target:
            error = f"false STOP {rates.stopped:.2%}"
        elif spec.floor is not None and reduction <= spec.floor:
            error = f"false PASS {rates.passed:.2%}"
        lines.append(
            f"| {repetitions} | {noise:.0%} | {reduction:.0%} | {rates.passed:.1%} | "
            f"{rates.stopped:.1%} | {rates.inconclusive:.1%} | {rates.repetitions:.1f} | {error} |"
        )
    return lines


def floor_row(repetitions: int, noise: float, *, trials: int = _PAGE_TRIALS) -> str:
    """Row of the table of false PASS at one level, at a true reduction equal to the floor."""
    spec, bound, looks = _production(repetitions, levels=1)
    assert spec.floor is not None
    rates = simulate(spec, bound, looks, reduction=spec.floor, noise=noise, trials=trials)
    return f"| {repetitions} | {noise:.0%} | {rates.passed:.2%} |"


def power_markdown() -> str:
    """docs/power.md."""
    profile, _text = load_criteria("production")
    spec = profile.criteria["ttft_reduction_vs_recompute"]
    lines = [
        _OPENING.format(
            trials=_PAGE_TRIALS,
            target=spec.target,
            floor=spec.floor,
            looks=" and ".join(f"{n}" for n in profile.looks) + " repetitions",
            bad=CLEARLY_BAD,
            good=CLEARLY_GOOD,
            power=POWER_MIN,
        ),
        "| repetitions | noise | true | PASS | STOP | neither | looked at, mean | error |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for repetitions in profile.looks:
        for noise in NOISES:
            lines += page_rows(repetitions, noise)
    lines += [
        "",
        "False PASS of one level alone, at a true reduction equal to the floor:",
        "",
        "| repetitions | noise | false PASS |",
        "| --- | --- | --- |",
    ]
    lines += [floor_row(n, noise) for n in profile.looks for noise in NOISES]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    print(power_markdown(), end="")
