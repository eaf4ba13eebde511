"""The bound that is shown is the bound that was applied, for every rule."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from harness.analysis.measures import compared
from harness.campaign.criteria import CriterionSpec
from harness.campaign.plan import Plan
from harness.campaign.reading import parse_criteria
from harness.evidence.exports import junit_xml
from harness.judge.decide import applied, decide, with_required
from harness.records import RequestRecord, TrialFacts
from harness.run.judging import judge_directory
from harness.verdicts import (
    Bound,
    CriterionResult,
    Measurement,
    Reason,
    ReasonCode,
    Unit,
    Verdict,
)
from tests.sealed_runs import Doctor, build_run, demo_plan, replace_record

CRITERION = "ttft_reduction_vs_recompute[tiered_disk-c1]"


def spec(measure: str = "ttft_reduction", **changes: object) -> CriterionSpec:
    values: dict[str, object] = {
        "id": "x",
        "gate": "g3",
        "title": "X",
        "measure": measure,
        "arms": ["tiered"],
        "baseline": "recompute",
        "per_level": True,
        "comparison": ">=",
        "target": 0.8,
        "decide": "large_effect",
        "min_n": 3,
        "rationale": "because",
    }
    return CriterionSpec.model_validate({**values, **changes})


def reductions(*ratios: float) -> Measurement:
    return Measurement(
        "ttft_reduction",
        Unit.RATIO,
        0.9,
        len(ratios),
        "e",
        repetitions=tuple(round(1 - ratio, 9) for ratio in ratios),
        trials=tuple(f"{arm}-r{k}" for k in range(1, len(ratios) + 1) for arm in ("tier", "base")),
        detail={"ratios": list(ratios), "repetitions": list(range(1, len(ratios) + 1))},
    )


@pytest.mark.parametrize(
    ("measure", "target", "each", "each_stop"),
    [
        # a reduction of 80 % leaves 0.2; half of it is 0.1, twice is 0.4
        ("ttft_reduction", 0.8, 0.9, 0.6),
        # 50 % leaves 0.5; half is 0.25, twice is all of it
        ("ttft_reduction", 0.5, 0.75, 0.0),
        # a gain of 29 % is 1.29; twice is 2.58, half is 0.645
        ("wave_throughput_gain", 0.29, 1.58, -0.355),
    ],
)
def test_large_effect_names_what_every_repetition_must_reach(
    measure: str, target: float, each: float, each_stop: float
) -> None:
    bound = applied(spec(measure), Bound(">=", target))
    assert (bound.each, bound.each_stop, bound.low) == (each, each_stop, None)
    assert str(bound) == f">= {each:g} in every repetition (target {target:g})"


@pytest.mark.parametrize(("floor", "low"), [(0.22, 0.22), (None, 0.25)])
def test_interval_names_what_its_lower_limit_must_reach(floor: float | None, low: float) -> None:
    bound = applied(spec(decide="interval", min_n=6), Bound(">=", 0.25, floor))
    assert (bound.each, bound.low, bound.least_n) == (None, low, 6)
    assert str(bound) == f">= 0.25, lower limit >= {low}"


def test_exact_is_its_own_bound() -> None:
    bound = Bound("==", 0.0)
    assert applied(spec(decide="exact", min_n=1, target=0.0), bound) == bound
    assert str(bound) == "== 0"


def test_the_shown_edge_is_the_edge_of_the_rule() -> None:
    """Exactly at the bound passes; a hair beyond misses and is named."""
    bound = Bound(">=", 0.5)
    assert decide(spec(target=0.5), bound, reductions(0.25, 0.25, 0.25)).verdict is Verdict.PASS
    missed = decide(spec(target=0.5), bound, reductions(0.25, 0.2500001, 0.25))
    assert (missed.verdict, missed.missed) == (Verdict.INCONCLUSIVE, (2,))


def test_the_repetition_that_missed_is_named_with_its_trial() -> None:
    found = decide(spec(), Bound(">=", 0.8), reductions(0.08, 0.107, 0.08))
    assert found.missed == (2,)
    assert found.reasons == (
        Reason(
            ReasonCode.REPETITION_MISSED,
            "repetition 2: 89.3 %; needed in every repetition: >= 90 %",
            "trials/tier-r2",
        ),
    )


def test_a_stop_names_every_repetition() -> None:
    found = decide(spec(), Bound(">=", 0.8), reductions(0.5, 0.6, 0.4))
    assert (found.verdict, found.missed) == (Verdict.STOP, (1, 2, 3))
    assert found.reasons[0].code is ReasonCode.BELOW_TARGET


def test_repetition_numbers_are_those_of_the_trials() -> None:
    """Repetition 1 was invalid, so the first pair is repetition 2."""
    measurement = reductions(0.08, 0.2, 0.08)
    detail = {**measurement.detail, "repetitions": [2, 3, 4]}
    found = decide(spec(), Bound(">=", 0.8), dataclasses.replace(measurement, detail=detail))
    assert found.missed == (3,)
    assert "repetition 3: 80 %" in found.reasons[0].text


def large_effect_plan() -> Plan:
    """The demo's plan with the rule and the target that its first criterion once had."""
    plan = demo_plan()
    before, name, after = plan.criteria_text.partition(
        "[profiles.cpu-demo.criteria.ttft_reduction_vs_recompute]"
    )
    after = after.replace(
        'target = 0.75\ndecide = "interval"', 'target = 0.80\ndecide = "large_effect"', 1
    )
    text = before + name + after
    return dataclasses.replace(plan, criteria_text=text, profile=parse_criteria(text, "cpu-demo"))


def test_value_above_the_target_but_one_repetition_short_shows_why(tmp_path: Path) -> None:
    """The example of issue 19: 91 % against a target of 80 % is INCONCLUSIVE, and says why."""
    doctor = _late(repetition=2, ttft_s=0.214)
    result = _result(build_run(tmp_path, doctor, large_effect_plan()))
    assert result.verdict is Verdict.INCONCLUSIVE
    assert isinstance(result.measurement.value, float)
    assert result.measurement.value > result.bound.target
    assert (result.bound.each, result.missed) == (0.9, (2,))
    (reason,) = [r for r in result.reasons if r.code is ReasonCode.REPETITION_MISSED]
    assert reason.text == "repetition 2: 89.3 %; needed in every repetition: >= 90 %"
    assert reason.evidence.endswith("-tiered_disk-cold_recovery-c1-r2")


def test_junit_holds_the_applied_bound_and_the_repetition(tmp_path: Path) -> None:
    doctor = _late(repetition=2, ttft_s=0.214)
    signoff = judge_directory(build_run(tmp_path, doctor, large_effect_plan()))
    xml = junit_xml(signoff)
    assert 'name="bound" value="&gt;= 0.9 in every repetition (target 0.8)"' in xml
    assert '<property name="missed" value="2" />' in xml


def test_both_sides_are_kept_for_the_reports_sentences(tmp_path: Path) -> None:
    """0.08 s against 2 s: 25 times sooner; 75 % of it must be gone, so 0.5 s is the edge."""
    both = _result(build_run(tmp_path)).measurement.compared
    assert both is not None
    assert (both.candidate, both.baseline, both.ratio, both.inverse) == (0.08, 2.0, 0.04, 25.0)
    assert (both.unit, both.required) == (Unit.SECONDS, 0.5)


def test_sides_are_geometric_means_so_that_their_ratio_is_the_effect() -> None:
    both = compared([1.0, 4.0], [10.0, 10.0], Unit.SECONDS)
    assert (both.candidate, both.baseline, both.ratio, both.inverse) == (2.0, 10.0, 0.2, 5.0)


def test_required_of_a_gain_is_in_tokens_per_second() -> None:
    measurement = dataclasses.replace(
        reductions(0.1), compared=compared([50.0], [10.0], Unit.TOKENS_PER_SECOND)
    )
    gain = spec("wave_throughput_gain", target=0.29)
    both = with_required(gain, Bound(">=", 0.29), measurement).compared
    assert both is not None
    assert both.required == 25.8


def test_below_six_requests_the_p50_is_described_beside_the_mean(tmp_path: Path) -> None:
    """Of two requests the nearest-rank p50 is the faster one; the mean sees both."""
    path = build_run(tmp_path, _late(repetition=0, ttft_s=0.32, only_seq=1))
    level_2 = "ttft_reduction_vs_recompute[tiered_disk-c2]"
    found = _result(path, level_2).measurement
    assert found.estimator == "1 - exp(mean ln ratio) of wave mean"
    # recompute takes 3 s at two requests; (0.08 + 0.32) / 2 = 0.2 s
    assert found.detail["p50_described"] == 0.973333333
    assert found.value == 0.933333333


def _result(path: Path, criterion: str = CRITERION) -> CriterionResult:
    signoff = judge_directory(path)
    return next(c for gate in signoff.gates for c in gate.criteria if c.id == criterion)


def _late(*, repetition: int, ttft_s: float, only_seq: int | None = None) -> Doctor:
    """Waves of the candidate's repetition (0: of all) get this TTFT."""

    def hook(facts: TrialFacts, record: RequestRecord) -> RequestRecord:
        if facts.arm != "tiered_disk" or record.phase != "wave":
            return record
        if repetition not in (0, facts.repetition) or only_seq not in (None, record.seq):
            return record
        assert record.sent_ns is not None
        assert record.first_token_ns is not None
        assert record.done_ns is not None
        late = record.sent_ns + round(ttft_s * 1e9) - record.first_token_ns
        return replace_record(
            record, first_token_ns=record.first_token_ns + late, done_ns=record.done_ns + late
        )

    return Doctor(record=hook)


def test_cells_hold_the_figure_that_charts_label(tmp_path: Path) -> None:
    cells = judge_directory(build_run(tmp_path, _late(repetition=2, ttft_s=0.32))).cells
    (cell,) = (c for c in cells if (c.arm, c.level) == ("tiered_disk", 1) and c.repetitions == 3)
    assert cell.ttft_wave_s == (0.08, 0.32, 0.08)
    assert cell.ttft_wave_s_mean == 0.126992084  # cube root of 0.08 x 0.32 x 0.08 = 0.002048
