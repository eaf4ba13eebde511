"""One root cause: what merely follows from it stands under it, and nothing is lost."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from harness.analysis.measures import MEASURES
from harness.evidence.results import write_verdict
from harness.judge.causes import DRAWS, ENDINGS, FOLLOWS, ORDER, Scopes, causes
from harness.records import (
    ENVIRONMENT,
    ErrorKind,
    Event,
    Outcome,
    RequestRecord,
    StopCause,
    TrialFacts,
)
from harness.run.judging import judge_directory
from harness.verdicts import (
    Cause,
    Check,
    GateVerdict,
    Reason,
    ReasonCode,
    SignOff,
    Verdict,
)
from tests.judge.test_judge import counter, effective, failing
from tests.sealed_runs import Doctor, build_run

C = ReasonCode
INCONCLUSIVE, STOP = Verdict.INCONCLUSIVE, Verdict.STOP


def judge(tmp_path: Path, doctor: Doctor) -> SignOff:
    return judge_directory(build_run(tmp_path, doctor))


def roots(signoff: SignOff) -> list[ReasonCode]:
    return [cause.code for cause in signoff.causes]


def under(cause: Cause) -> set[ReasonCode]:
    return {effect.code for effect in cause.consequences}


# --- the rules themselves -----------------------------------------------------


def test_every_reason_has_its_place_in_the_order_once() -> None:
    assert sorted(ORDER, key=lambda code: code.value) == sorted(C, key=lambda code: code.value)


def test_no_reason_follows_from_itself() -> None:
    assert [code for code, effects in FOLLOWS.items() if code in effects] == []


def test_every_cause_of_an_early_end_has_its_reason() -> None:
    assert set(ENDINGS) == set(StopCause)
    assert {c for c in StopCause if c not in ENVIRONMENT} == {
        StopCause.STOP_LOSS,
        StopCause.SERVER_NOT_READY,
        StopCause.SERVER_ENDED,
        StopCause.SERVER_SILENT,
    }


def test_every_measure_says_what_it_draws_on() -> None:
    assert set(DRAWS) == set(MEASURES)


@pytest.mark.parametrize("code", [C.OUTPUT_DIFFERS, C.KV_SIZE_DIFFERS, C.UNEXPECTED_HITS])
def test_what_proves_a_fault_of_its_own_follows_from_nothing(code: ReasonCode) -> None:
    assert [cause for cause, effects in FOLLOWS.items() if code in effects] == []


# --- one run, one cause ---------------------------------------------------------


def ending(cause: StopCause, why: str, *, arm: str) -> Doctor:
    """The run ends in the arrival trial of an arm; all of that arm and the later ones is missing.

    The order of arms is that of the demo: tiered_disk, tiered_dram, hbm_only, recompute.
    """

    def end(facts: TrialFacts, event: Event) -> Event:
        if (facts.arm, facts.workload, event.kind) != (arm, "arrival", "trial_ended"):
            return event
        detail = {"ok": False, "error": why, "cause": cause.value}
        return dataclasses.replace(event, detail=detail)

    seen: list[str] = []

    def skip(facts: TrialFacts) -> bool:
        if facts.arm == arm and facts.workload == "arrival":
            seen.append(facts.arm)
            return False
        return bool(seen)

    return Doctor(event=end, skip=skip, stopped=why, cause=cause)


UNREACHABLE = "arm tiered_disk: http://127.0.0.1:9 does not answer: ConnectError: refused"


@pytest.mark.parametrize("cause", sorted(ENVIRONMENT - {StopCause.SUSPENDED}, key=str))
def test_what_lies_outside_the_deployment_is_the_root_and_never_stop(
    cause: StopCause, tmp_path: Path
) -> None:
    signoff = judge(tmp_path, ending(cause, UNREACHABLE, arm="tiered_disk"))
    assert signoff.verdict is INCONCLUSIVE
    assert [gate.verdict for gate in signoff.gates] == [INCONCLUSIVE, INCONCLUSIVE]
    assert roots(signoff) == [ENDINGS[cause]]
    (root,) = signoff.causes
    assert root.findings[0].text == UNREACHABLE
    assert root.findings[0].evidence == "seal.json"
    # All that was shown above "connection refused" before there was a tree.
    assert under(root) >= {C.NO_MEASUREMENT, C.CONTROL_MISSED, C.NOT_FROM_TIER, C.GATE_NOT_REACHED}


def test_a_server_of_ours_that_dies_in_the_arrival_gate_is_stop_for_that_reason(
    tmp_path: Path,
) -> None:
    why = "arm tiered_disk: the server ended by itself with code -9"
    signoff = judge(tmp_path, ending(StopCause.SERVER_ENDED, why, arm="tiered_disk"))
    assert signoff.verdict is STOP
    assert roots(signoff) == [C.SERVER_ENDED]
    assert signoff.causes[0].verdict is STOP
    assert C.SERVER_NOT_READY in under(signoff.causes[0])


def test_what_happened_before_the_end_in_another_arm_is_a_cause_of_its_own(tmp_path: Path) -> None:
    doctor = ending(StopCause.DISK_FULL, "disk full", arm="recompute")
    doctor.counter = counter(
        "device_hit_tokens", lambda value: value + 4096, arm="tiered_dram"
    ).counter
    signoff = judge(tmp_path, doctor)
    assert roots(signoff) == [C.DISK_FULL, C.NOT_COLD]
    assert all("tiered_dram" in finding.text for finding in signoff.causes[1].findings)


def test_wrong_kv_comes_before_the_interrupt_that_ended_the_run(tmp_path: Path) -> None:
    doctor = Doctor(stopped="interrupted by the operator", cause=StopCause.INTERRUPTED)
    doctor.record = lambda facts, record: (
        dataclasses.replace(record, token_ids=tuple(range(200, 216)))
        if (facts.arm, record.phase, record.session) == ("tiered_disk", "wave", 1)
        and facts.concurrency == 1
        else record
    )
    signoff = judge(tmp_path, doctor)
    assert signoff.verdict is STOP
    assert roots(signoff) == [C.OUTPUT_DIFFERS, C.INTERRUPTED]


def test_stop_loss_follows_from_the_criterion_that_was_not_met(tmp_path: Path) -> None:
    doctor = counter("tier_read_bytes/disk", lambda _value: 0.0, mark="loaded")
    doctor.skip = lambda facts: facts.arm == "tiered_disk" and facts.workload != "arrival"
    doctor.stopped = "stop-loss: g1 not met: connector_effective[tiered_disk]"
    doctor.cause = StopCause.STOP_LOSS
    signoff = judge(tmp_path, doctor)
    assert roots(signoff) == [C.CONNECTOR_INEFFECTIVE]
    assert under(signoff.causes[0]) >= {C.STOP_LOSS}


def test_requests_that_failed_explain_what_they_did_not_do(tmp_path: Path) -> None:
    signoff = judge(tmp_path, failing(ErrorKind.TRUNCATED))
    assert roots(signoff) == [C.REQUESTS_FAILED]


def test_requests_that_failed_while_populating_explain_missing_hits(tmp_path: Path) -> None:
    """No check looks at that phase; the waves that restore nothing would be all there is."""
    doctor = counter("external_hit_tokens", lambda _value: 0.0)
    doctor.record = failing_populate
    signoff = judge(tmp_path, doctor)
    assert roots(signoff)[0] is C.REQUESTS_FAILED
    assert "populate" in signoff.causes[0].findings[0].text
    assert C.NO_TIER_HITS in under(signoff.causes[0])


def failing_populate(facts: TrialFacts, record: RequestRecord) -> RequestRecord:
    if (facts.arm, record.phase) != ("tiered_disk", "populate"):
        return record
    return dataclasses.replace(record, outcome=Outcome.FAILED, error_kind=ErrorKind.HTTP_STATUS)


def test_a_difference_between_two_arms_explains_their_comparison_only(tmp_path: Path) -> None:
    signoff = judge(tmp_path, effective("recompute", compute_threads=4))
    assert roots(signoff) == [C.UNEQUAL_COMPUTE]


def test_two_faults_in_two_trials_are_two_causes(tmp_path: Path) -> None:
    doctor = counter("preemptions", lambda _value: 1.0, arm="recompute")
    doctor.process = lambda facts, name, value: (
        99.0 if facts.arm == "tiered_disk" and name == "wave_end/start_time_s" else value
    )
    assert set(roots(judge(tmp_path, doctor))) == {C.SERVER_CHANGED, C.PREEMPTED}


def test_no_reason_of_the_verdict_is_left_out(tmp_path: Path) -> None:
    signoff = judge(tmp_path, ending(StopCause.DISK_FULL, "disk full", arm="tiered_dram"))
    named = {(gate.gate, reason.code) for gate in signoff.gates for reason in gate.reasons}
    named |= {(c.id, r.code) for g in signoff.gates for c in g.criteria for r in c.reasons}
    shown = {
        (place, reason.code)
        for cause in signoff.causes
        for reason in (cause, *cause.consequences)
        for finding in reason.findings
        for place in finding.places
    }
    assert named - shown == set()


def test_the_tree_is_the_same_bytes_each_time(tmp_path: Path) -> None:
    path = build_run(tmp_path, ending(StopCause.DISK_FULL, "disk full", arm="tiered_dram"))
    first = write_verdict(path, judge_directory(path)).read_bytes()
    assert write_verdict(path, judge_directory(path)).read_bytes() == first


def test_a_seal_without_a_cause_still_gives_its_words_as_the_root(tmp_path: Path) -> None:
    """Sealed before causes had names."""
    doctor = ending(StopCause.SERVER_SILENT, "the server stopped answering", arm="tiered_dram")
    doctor.cause = None
    doctor.event = lambda _facts, event: event
    signoff = judge(tmp_path, doctor)
    assert roots(signoff) == [C.GATE_NOT_REACHED]
    assert signoff.causes[0].findings[0].text == (
        "the run ended early: the server stopped answering"
    )


# --- by hand --------------------------------------------------------------------

TRIALS = tuple(
    TrialFacts(index, "g3", arm, "cold_recovery", 1, repetition)
    for index, (arm, repetition) in enumerate((("a", 1), ("a", 2), ("b", 1)))
)
SCOPES = Scopes(trials=TRIALS, recorded={"a1": 0, "a2": 1, "b1": 2})


def check(subject: str, code: ReasonCode, text: str = "x") -> Check:
    return Check("c", subject, False, "f", "a", (Reason(code, text),))


@pytest.mark.parametrize(
    ("subjects", "expected", "why"),
    [
        (("a1", "a1"), [C.NOT_COLD], "the same trial"),
        (("a1", "a2"), [C.NOT_COLD, C.WITNESSES_DISAGREE], "another trial of the arm"),
        (("a1", "b1"), [C.NOT_COLD, C.WITNESSES_DISAGREE], "another arm"),
    ],
)
def test_a_reason_follows_within_one_trial(
    subjects: tuple[str, str], expected: list[ReasonCode], why: str
) -> None:
    found = causes(
        (), [check(subjects[0], C.NOT_COLD), check(subjects[1], C.WITNESSES_DISAGREE)], SCOPES
    )
    assert [cause.code for cause in found] == expected, why


def test_a_chain_hangs_from_its_beginning() -> None:
    checks = [
        check("a1", C.NOT_FROM_DISK, "third"),
        check("a1", C.NO_TIER_HITS, "second"),
        check("a1", C.REQUESTS_FAILED, "first"),
    ]
    gate = GateVerdict("g3", INCONCLUSIVE, (), (Reason(C.TOO_MANY_INVALID, "last"),))
    (cause,) = causes([gate], checks, SCOPES)
    assert cause.code is C.REQUESTS_FAILED
    assert [effect.code for effect in cause.consequences] == [
        C.NO_TIER_HITS,
        C.NOT_FROM_DISK,
        C.TOO_MANY_INVALID,
    ]
