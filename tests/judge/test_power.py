"""Looks, and the error rates that the protocol promises, on the judge's own decide function."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from harness import stats
from harness.campaign.criteria import CriterionSpec
from harness.campaign.plan import make_plan
from harness.campaign.reading import load_criteria, parse_campaign
from harness.errors import PlanError
from harness.judge.decide import Looks, decide
from harness.judge.power import (
    NOISES,
    floor_row,
    measured_noise,
    page_rows,
    plan_power,
    power_lines,
    simulate,
)
from harness.run.judging import judge_directory
from harness.verdicts import Bound, Cell, Measurement, ReasonCode, Unit, Verdict
from tests.campaign_text import SMALL_CAMPAIGN, edited
from tests.sealed_runs import build_run, demo_plan

ROOT = Path(__file__).resolve().parents[2]
PROFILE, _TEXT = load_criteria("production")
SPEC = PROFILE.criteria["ttft_reduction_vs_recompute"]
GAIN = PROFILE.criteria["throughput_gain_vs_recompute"]
BOUND = Bound(">=", 0.25, 0.22)
PASS, STOP, INCONCLUSIVE = Verdict.PASS, Verdict.STOP, Verdict.INCONCLUSIVE


def measured(ratios: list[float | str], spec: CriterionSpec = SPEC) -> Measurement:
    """What analysis hands over; value and interval are made anew at each look."""
    return Measurement(
        spec.measure, Unit.RATIO, 0.5, len(ratios), "by hand", detail={"ratios": list(ratios)}
    )


def around(centre: float, spread: float, count: int) -> list[float | str]:
    """Ratios centre x exp(+-spread), alternating: mean ln is ln centre, every even n."""
    return [centre * math.exp(spread if i % 2 else -spread) for i in range(count)]


# --- looks, worked by hand ----------------------------------------------------


def test_confidence_is_shared_over_looks_and_a_stop_over_levels_too() -> None:
    looks = Looks((6, 12, 24), levels=3)
    assert looks.confidence == pytest.approx(1 - 0.05 / 3)
    assert looks.stop_confidence == pytest.approx(1 - 0.05 / 9)
    assert Looks((6,)).confidence == Looks((6,)).stop_confidence == 0.95


def test_interval_of_a_look_is_worked_by_hand() -> None:
    # Six ratios 0.7 x exp(+-0.01): s = 0.01 x sqrt(6/5), standard error s / sqrt 6 = 0.01 / sqrt 5.
    # Three looks: t quantile at 1 - 0.05/6 with 5 degrees is 3.5341 (table of Student's t).
    decision = decide(SPEC, BOUND, measured(around(0.7, 0.01, 24)), Looks((6, 12, 24), levels=3))
    half = 3.5341 * 0.01 / math.sqrt(5)
    found = decision.measurement
    assert decision.verdict is PASS
    assert (found.n, len(found.repetitions)) == (6, 6)
    assert found.value == pytest.approx(0.3)
    assert found.low == pytest.approx(1 - 0.7 * math.exp(half), abs=1e-5)
    assert found.high == pytest.approx(1 - 0.7 * math.exp(-half), abs=1e-5)
    assert found.confidence == pytest.approx(1 - 0.05 / 3)
    (look,) = found.detail["looks"]
    assert (look["repetitions"], look["verdict"]) == (6, "PASS")
    # The STOP limit at 1 - 0.05/9: quantile at 1 - 0.05/18 with 5 degrees.
    stop_half = stats.t_quantile(1 - 0.05 / 18, 5) * 0.01 / math.sqrt(5)
    assert look["stop_high"] == pytest.approx(1 - 0.7 * math.exp(-stop_half), abs=1e-8)


@pytest.mark.parametrize(
    ("ratios", "verdict", "looked"),
    [
        pytest.param(around(0.60, 0.01, 24), PASS, [6], id="clearly good at the first look"),
        pytest.param(around(0.90, 0.01, 24), STOP, [6], id="clearly bad at the first look"),
        # Half widths in ln, spread 0.1: 0.158, 0.085, 0.054; to the floor: ln(0.78 / 0.72), 0.080.
        pytest.param(around(0.72, 0.10, 24), PASS, [6, 12, 24], id="good at the last look"),
        pytest.param(around(0.83, 0.10, 24), STOP, [6, 12, 24], id="bad at the last look"),
        pytest.param(around(0.745, 0.10, 24), INCONCLUSIVE, [6, 12, 24], id="never decided"),
        pytest.param(
            [*around(0.90, 0.01, 6), *around(0.50, 0.01, 18)],
            STOP,
            [6],
            id="what comes after a deciding look is not read",
        ),
        pytest.param(
            [*around(0.745, 0.05, 6), *around(0.60, 0.05, 6)], PASS, [6, 12], id="second look"
        ),
        pytest.param(
            [*around(0.60, 0.01, 5), "inf", *around(0.60, 0.01, 18)],
            STOP,
            [6],
            id="a failed wave inside a look",
        ),
        pytest.param(
            [*around(0.60, 0.01, 6), "inf", *around(0.60, 0.01, 17)],
            PASS,
            [6],
            id="a failed wave after the deciding look",
        ),
    ],
)
def test_the_first_look_that_decides_is_the_verdict(
    ratios: list[float | str], verdict: Verdict, looked: list[int]
) -> None:
    decision = decide(SPEC, BOUND, measured(ratios), Looks((6, 12, 24), levels=3))
    assert decision.verdict is verdict
    assert [look["repetitions"] for look in decision.measurement.detail["looks"]] == looked
    assert decision.measurement.n == looked[-1]


def test_nothing_is_decided_between_looks() -> None:
    # Clear at 11 repetitions, but the second look is at 12.
    ratios = [*around(0.745, 0.05, 6), *around(0.50, 0.01, 5)]
    decision = decide(SPEC, BOUND, measured(ratios), Looks((6, 12)))
    assert decision.verdict is INCONCLUSIVE
    assert [r.code for r in decision.reasons] == [
        ReasonCode.UNDECIDED,
        ReasonCode.TOO_FEW_REPETITIONS,
    ]
    assert "look at 12 repetitions not reached: 11 valid ones" in decision.reasons[1].text


def test_before_the_first_look_there_are_too_few_repetitions() -> None:
    decision = decide(SPEC, BOUND, measured(around(0.5, 0.01, 7)), Looks((8, 16)))
    assert decision.verdict is INCONCLUSIVE
    assert [r.code for r in decision.reasons] == [ReasonCode.TOO_FEW_REPETITIONS]


@pytest.mark.parametrize(
    ("centre", "verdict"),
    [
        pytest.param(0.75, PASS, id="estimate on the target, lower limit above the floor"),
        pytest.param(0.7501, INCONCLUSIVE, id="a hair below the target is no PASS"),
    ],
)
def test_a_pass_needs_the_estimate_at_the_target(centre: float, verdict: Verdict) -> None:
    decision = decide(SPEC, BOUND, measured(around(centre, 0.001, 6)), Looks((6,)))
    assert decision.verdict is verdict


def test_a_pass_needs_the_lower_limit_at_the_floor() -> None:
    # One look, 5 degrees, 0.95: half width 2.5706 x spread / sqrt 5. It may be ln(0.78 / 0.70).
    edge = math.log(0.78 / 0.70) * math.sqrt(5) / stats.t_quantile(0.975, 5)
    verdicts = [
        decide(SPEC, BOUND, measured(around(0.70, spread, 6)), Looks((6,))).verdict
        for spread in (edge * 0.999, edge * 1.001)
    ]
    assert verdicts == [PASS, INCONCLUSIVE]


def test_a_stop_needs_a_wider_interval_the_more_levels_can_stop() -> None:
    # One look: limits at 0.95 for one level, at 1 - 0.05/3 for three.
    edge = math.log(0.80 / 0.75) * math.sqrt(5)
    for levels in (1, 3):
        quantile = stats.t_quantile(1 - 0.05 / levels / 2, 5)
        verdicts = [
            decide(SPEC, BOUND, measured(around(0.80, s, 6)), Looks((6,), levels)).verdict
            for s in (edge / quantile * 0.999, edge / quantile * 1.001)
        ]
        assert verdicts == [STOP, INCONCLUSIVE], levels


def test_a_gain_reads_upwards() -> None:
    bound = Bound(">=", 0.29, 0.26)
    decisions = [
        decide(GAIN, bound, measured(around(ratio, 0.01, 6), GAIN), Looks((6, 12), levels=2))
        for ratio in (1.4, 1.1)
    ]
    assert [d.verdict for d in decisions] == [PASS, STOP]
    assert decisions[0].measurement.value == pytest.approx(0.4)
    low, high = decisions[0].measurement.low, decisions[0].measurement.high
    assert low is not None
    assert high is not None
    assert low < 0.4 < high


def test_a_measure_without_repetitions_decides_nothing_by_intervals() -> None:
    measurement = Measurement(SPEC.measure, Unit.COUNT, 1.0, 9, "a count")
    decision = decide(SPEC, BOUND, measurement, Looks((6,)))
    assert decision.verdict is INCONCLUSIVE
    assert [r.code for r in decision.reasons] == [ReasonCode.NO_MEASUREMENT]


# --- looks in plan and run ----------------------------------------------------

PRODUCTION = edited(
    ('profile = "cpu-demo"', 'profile = "production"'),
    ("repetitions = 3", "repetitions = 6"),
    ("sessions = 9\n", "sessions = 12\n"),
)


def test_the_looks_of_a_plan_are_those_it_reaches() -> None:
    plan = demo_plan(PRODUCTION)
    assert plan.looks == (6,)
    more = PRODUCTION.replace("repetitions = 6", "repetitions = 12")
    assert demo_plan(more.replace("\nsessions = 12\n", "\nsessions = 24\n")).looks == (6, 12)
    assert demo_plan(SMALL_CAMPAIGN).looks == (3,)


def test_a_plan_that_ends_between_looks_is_refused() -> None:
    text = PRODUCTION.replace("repetitions = 6", "repetitions = 8")
    with pytest.raises(PlanError, match="found 8; allowed: a look of profile production: 6, 12"):
        demo_plan(text.replace("\nsessions = 12\n", "\nsessions = 16\n"))


def test_a_production_run_is_judged_at_its_look(tmp_path: Path) -> None:
    signoff = judge_directory(build_run(tmp_path, plan=demo_plan(PRODUCTION)))
    found = [c.measurement for c in signoff.gates[1].criteria if c.criterion == SPEC.id]
    assert [m.detail["looks"][0]["repetitions"] for m in found] == [6, 6]
    assert [m.detail["looks"][0]["stop_confidence"] for m in found] == [0.975, 0.975]
    assert {m.confidence for m in found} == {0.95}


# --- error rates --------------------------------------------------------------

TRIALS = 1500
# Three standard errors of a rate of 2.5 % over so many campaigns.
SLACK = 3 * math.sqrt(0.025 * 0.975 / TRIALS)


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("repetitions", [6, 24])
def test_a_deployment_on_target_is_stopped_in_no_more_than_2_5_percent(
    noise: float, repetitions: int
) -> None:
    looks = Looks(tuple(n for n in PROFILE.looks if n <= repetitions), levels=3)
    rates = simulate(SPEC, BOUND, looks, reduction=0.25, noise=noise, trials=TRIALS, seed=11)
    assert rates.stopped <= 0.025 + SLACK
    better = simulate(SPEC, BOUND, looks, reduction=0.30, noise=noise, trials=300, seed=11)
    assert better.stopped <= 0.01


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("repetitions", [6, 24])
def test_a_deployment_at_the_floor_passes_in_no_more_than_2_5_percent(
    noise: float, repetitions: int
) -> None:
    looks = Looks(tuple(n for n in PROFILE.looks if n <= repetitions), levels=1)
    rates = simulate(SPEC, BOUND, looks, reduction=0.22, noise=noise, trials=TRIALS, seed=12)
    assert rates.passed <= 0.025 + SLACK


def test_deciding_after_every_repetition_would_break_the_promise() -> None:
    # What looks are for: the same 95 % interval tried at each of 6..24 repetitions.
    often = Looks(tuple(range(6, 25)))
    honest = simulate(SPEC, BOUND, often, reduction=0.25, noise=0.05, trials=400, seed=3)

    class Greedy(Looks):
        confidence = 0.95  # type: ignore[assignment]
        stop_confidence = 0.95  # type: ignore[assignment]

    greedy = simulate(
        SPEC, BOUND, Greedy(often.repetitions), reduction=0.25, noise=0.05, trials=400, seed=3
    )
    assert honest.stopped <= 0.025 + 3 * math.sqrt(0.025 * 0.975 / 400)
    assert greedy.stopped > 0.06


def test_the_same_seed_gives_the_same_rates() -> None:
    arguments = {"reduction": 0.26, "noise": 0.05, "trials": 50}
    one, other = (simulate(SPEC, BOUND, Looks((6,)), **arguments) for _ in range(2))  # type: ignore[arg-type]
    assert one == other


# --- what is printed ----------------------------------------------------------


def test_the_page_is_what_the_generator_prints() -> None:
    page = (ROOT / "docs" / "power.md").read_text(encoding="utf-8").splitlines()
    expected = [*page_rows(6, 0.03), floor_row(6, 0.03)]
    assert [row for row in expected if row not in page] == [], (
        "run: python -m harness.judge.power > docs/power.md"
    )
    rows = [line for line in page if line.startswith("| ")]
    assert len(rows) == 2 * 2 + 3 * 3 * 5 + 3 * 3


def test_a_plan_says_whether_it_can_decide() -> None:
    campaign = parse_campaign(PRODUCTION)
    plan = make_plan(campaign, PRODUCTION, model_config=demo_plan(PRODUCTION).model_config)
    quiet, noisy = power_lines(plan, 0.01), power_lines(plan, 0.1)
    assert not any("cannot decide" in line for line in quiet)
    assert noisy[-1].startswith("this plan cannot decide: P(STOP) at 20% is ")
    assert [line.split()[0] for line in noisy if line.strip()[:1].isdigit()] == [
        "20%",
        "22%",
        "25%",
        "26%",
        "30%",
    ]


def test_a_profile_that_decides_otherwise_has_no_power_of_this_kind() -> None:
    plan = demo_plan()
    other = {
        name: spec.model_copy(update={"decide": "large_effect"})
        for name, spec in plan.profile.criteria.items()
    }
    profile = plan.profile.model_copy(update={"criteria": other})
    plan = dataclasses.replace(plan, profile=profile)
    assert plan_power(plan, 0.05) is None
    assert power_lines(plan) == []


@pytest.mark.parametrize("noise", [0.05, 0.15])
def test_the_demo_decides_an_effect_of_a_factor_around_its_target(noise: float) -> None:
    # Target 75 %, a ratio of 0.25: twice, one and a half times, once, 3/4 and half of it.
    power = plan_power(demo_plan(), noise, trials=300)
    assert power is not None
    assert [reduction for reduction, _rates in power.rows] == [0.5, 0.625, 0.75, 0.8125, 0.875]
    assert power.can_decide


def cell(*values: float | str, workload: str = "cold_recovery") -> Cell:
    return Cell(
        arm="a",
        workload=workload,
        level=8,
        repetitions=len(values),
        ttft_s=(),
        ttft_wave_s=values,
        ttft_estimator="p50",
        throughput_tokens_per_s=(),
        prompt_tokens=0,
        tokens_by_source={},
        tier_read_bytes=None,
        disk_read_bytes=None,
        requests_ok=0,
        requests=0,
        valid=True,
    )


def test_noise_of_a_run_is_pooled_over_its_cells() -> None:
    # ln values 0, 1, 2 (squares 2, two degrees) and 5, 6 (squares 0.5, one degree).
    first = cell(1.0, math.e, math.e**2)
    second = cell(math.e**5, math.e**6, "inf")
    assert measured_noise([first, second]) == pytest.approx(math.sqrt(2.5 / 3))
    assert measured_noise([cell(1.0), cell(1.0, 2.0, workload="steady")]) is None
