"""Looks with a round each: what is undecided, what may be missing, and drift between arms."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from harness.records import RequestRecord, TrialFacts
from harness.run.judging import judge_directory, still_undecided
from harness.verdicts import CriterionResult, ReasonCode, SignOff, Verdict
from tests.sealed_runs import Doctor, build_run, demo_plan

PASS, STOP, INCONCLUSIVE = Verdict.PASS, Verdict.STOP, Verdict.INCONCLUSIVE
CANDIDATE = "tiered_disk"


def slowed(factors: dict[int, float], arm: str = CANDIDATE, phase: str = "wave") -> Doctor:
    """TTFT of an arm's first tokens times a factor, by repetition; level 1 where it is a wave."""

    def hook(facts: TrialFacts, record: RequestRecord) -> RequestRecord:
        factor = factors.get(facts.repetition)
        other = (facts.arm, record.phase) != (arm, phase) or facts.concurrency != 1
        if factor is None or other or record.first_token_ns is None or record.sent_ns is None:
            return record
        shift = int((record.first_token_ns - record.sent_ns) * (factor - 1))
        assert record.last_token_ns is not None
        assert record.done_ns is not None
        return dataclasses.replace(
            record,
            first_token_ns=record.first_token_ns + shift,
            last_token_ns=record.last_token_ns + shift,
            done_ns=record.done_ns + shift,
            token_ns=tuple(t + shift for t in record.token_ns),
        )

    return Doctor(record=hook)


def criterion(signoff: SignOff, name: str) -> CriterionResult:
    return next(c for gate in signoff.gates for c in gate.criteria if c.id == name)


def codes(result: Any) -> set[ReasonCode]:
    return {reason.code for reason in result.reasons}


RECOMPUTE, HBM, GAIN = (
    f"{name}[tiered_disk-c1]"
    for name in (
        "ttft_reduction_vs_recompute",
        "ttft_reduction_vs_hbm_only",
        "throughput_gain_vs_recompute",
    )
)


def test_a_clear_first_look_leaves_nothing_undecided_and_needs_no_second(tmp_path: Path) -> None:
    path = build_run(tmp_path)
    assert still_undecided(demo_plan(), path) == []
    signoff = judge_directory(path)
    assert signoff.verdict is PASS
    assert criterion(signoff, RECOMPUTE).measurement.confidence == 0.975


# 0.08 s against 2.0 s: ratios 0.04. One repetition six times as slow: 0.04, 0.04, 0.24. Logarithms
# -3.219, -3.219, -1.427: mean -2.622, standard deviation 1.034; t of 2 degrees at 97.5 % two-sided
# is 6.205: half width 3.705, upper limit exp(1.083) = 2.95.
NOISY = {3: 6.0}


def test_noise_is_undecided_at_the_first_look_and_is_named(tmp_path: Path) -> None:
    path = build_run(tmp_path, slowed(NOISY))
    assert still_undecided(demo_plan(), path) == [RECOMPUTE, HBM, GAIN]
    signoff = judge_directory(path)
    assert signoff.verdict is INCONCLUSIVE
    result = criterion(signoff, RECOMPUTE)
    assert codes(result) == {ReasonCode.UNDECIDED, ReasonCode.TOO_FEW_REPETITIONS}
    text = " ".join(reason.text for reason in result.reasons)
    assert "over 3 repetitions, which vary by a factor of 6" in text
    assert "look at 6 repetitions not reached" in text


def test_more_repetitions_decide_at_the_second_look(tmp_path: Path) -> None:
    path = build_run(tmp_path, slowed(NOISY), rounds=2)
    assert still_undecided(demo_plan(), path) == []
    signoff = judge_directory(path)
    assert signoff.verdict is PASS
    looks = criterion(signoff, RECOMPUTE).measurement.detail["looks"]
    assert [(look["repetitions"], look["verdict"]) for look in looks] == [
        (3, "INCONCLUSIVE"),
        (6, "PASS"),
    ]
    # What the first look decided stays as it was there.
    assert criterion(signoff, RECOMPUTE.replace("c1", "c2")).measurement.n == 3


def test_the_first_look_that_decides_is_the_verdict_whatever_follows(tmp_path: Path) -> None:
    slow_later = slowed({4: 40.0, 5: 40.0, 6: 40.0})
    signoff = judge_directory(build_run(tmp_path, slow_later, rounds=2))
    assert criterion(signoff, RECOMPUTE).verdict is PASS
    assert criterion(signoff, RECOMPUTE).measurement.n == 3


def test_a_restore_as_slow_as_a_prefill_is_stop_at_the_first_look(tmp_path: Path) -> None:
    doctor = slowed({1: 25.0, 2: 25.0, 3: 25.0})
    path = build_run(tmp_path, doctor)
    assert still_undecided(demo_plan(), path) == []
    assert criterion(judge_directory(path), RECOMPUTE).verdict is STOP


def test_what_a_failed_check_blocks_is_not_worth_another_round(tmp_path: Path) -> None:
    doctor = dataclasses.replace(slowed(NOISY), client={"loop_lag_s_max": 9.0})
    path = build_run(tmp_path, doctor)
    assert still_undecided(demo_plan(), path) == []
    result = criterion(judge_directory(path), RECOMPUTE)
    assert result.verdict is INCONCLUSIVE
    assert ReasonCode.CLIENT_SATURATED in codes(result)


def test_a_round_that_was_begun_and_not_finished_is_missing(tmp_path: Path) -> None:
    doctor = Doctor(skip=lambda facts: facts.arm == "hbm_only" and facts.repetition == 6)
    gate = judge_directory(build_run(tmp_path, doctor, rounds=2)).gates[1]
    assert gate.verdict is INCONCLUSIVE
    assert "3 planned trials are missing" in gate.reasons[0].text


def test_the_first_round_is_missing_when_nothing_of_it_is_there(tmp_path: Path) -> None:
    doctor = Doctor(skip=lambda facts: facts.gate == "g3")
    gate = judge_directory(build_run(tmp_path, doctor)).gates[1]
    assert gate.verdict is INCONCLUSIVE
    assert gate.reasons[0].code is ReasonCode.GATE_NOT_REACHED


@pytest.mark.parametrize(("factor", "verdict"), [(2.0, PASS), (2.001, INCONCLUSIVE)])
def test_a_machine_that_computes_faster_under_one_arm_is_named(
    tmp_path: Path, factor: float, verdict: Verdict
) -> None:
    own = demo_plan().profile.validity.speed_ratio_max
    assert own == 2.0
    # Populating takes 2.0 s on recompute and on the disk arm; 2.0 s / factor is the faster machine.
    signoff = judge_directory(build_run(tmp_path, slowed({1: factor}, "recompute", "populate")))
    result = criterion(signoff, RECOMPUTE)
    found = [
        check
        for check in signoff.checks
        if (check.name, check.subject) == ("equal_speed", "tiered_disk vs recompute")
    ]
    assert [check.passed for check in found] == [verdict is PASS]
    assert result.verdict is verdict
    assert codes(result) == (set() if verdict is PASS else {ReasonCode.UNEQUAL_SPEED})


def test_each_round_has_its_own_check_of_speed(tmp_path: Path) -> None:
    doctor = slowed({2: 3.0}, "recompute", "populate")
    signoff = judge_directory(build_run(tmp_path, doctor, rounds=2))
    found = {
        check.found.partition(":")[0]: check.passed
        for check in signoff.checks
        if (check.name, check.subject) == ("equal_speed", "tiered_disk vs recompute")
    }
    assert found == {"round 1": True, "round 2": False}


def test_a_prefill_that_failed_is_no_clock(tmp_path: Path) -> None:
    def hook(facts: TrialFacts, record: RequestRecord) -> RequestRecord:
        if (facts.arm, record.phase, record.session) != ("recompute", "populate", 3):
            return record
        return dataclasses.replace(record, first_token_ns=None)

    result = criterion(judge_directory(build_run(tmp_path, Doctor(record=hook))), RECOMPUTE)
    assert result.verdict is INCONCLUSIVE
    assert ReasonCode.METRIC_ABSENT in codes(result)


def test_a_profile_without_a_bound_asks_nothing_of_speed(tmp_path: Path) -> None:
    plan = demo_plan()
    text = plan.criteria_text.replace("speed_ratio_max = 2.0\n", "")
    assert text != plan.criteria_text
    profile = plan.profile.model_copy(
        update={"validity": plan.profile.validity.model_copy(update={"speed_ratio_max": None})}
    )
    plan = dataclasses.replace(plan, profile=profile, criteria_text=text)
    signoff = judge_directory(build_run(tmp_path, plan=plan))
    assert signoff.verdict is PASS
    assert "equal_speed" not in {check.name for check in signoff.checks}
