"""The judge on hand-made evidence: a clean run passes, each way of being fooled has its verdict."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.campaign.reading import load_campaign
from harness.evidence.results import write_verdict
from harness.records import ErrorKind, Event, Outcome, RequestRecord, TrialFacts
from harness.run.judging import judge_directory
from harness.verdicts import ReasonCode, SignOff, Verdict
from tests.sealed_runs import TTFT_S, Doctor, build_run, demo_plan, replace_record

INCONCLUSIVE, STOP, PASS = Verdict.INCONCLUSIVE, Verdict.STOP, Verdict.PASS


def reason_codes(signoff: SignOff) -> set[ReasonCode]:
    """Every reason named anywhere in the gates."""
    found = {r.code for gate in signoff.gates for r in gate.reasons}
    return found | {r.code for g in signoff.gates for c in g.criteria for r in c.reasons}


def verdict_of(signoff: SignOff, gate: str) -> Verdict:
    return next(g.verdict for g in signoff.gates if g.gate == gate)


def judge(tmp_path: Path, doctor: Doctor | None = None) -> SignOff:
    return judge_directory(build_run(tmp_path, doctor))


# --- what a doctor changes ----------------------------------------------------


def records(
    change: dict[str, Any],
    *,
    arm: str = "tiered_disk",
    phase: str = "wave",
    session: int | None = None,
) -> Doctor:
    """Changes fields of the matching records."""

    def hook(facts: TrialFacts, record: RequestRecord) -> RequestRecord:
        if facts.arm != arm or record.phase != phase or session not in (None, record.session):
            return record
        return replace_record(record, **change)

    return Doctor(record=hook)


def counter(
    name: str,
    new: Callable[[float], float | None],
    *,
    arm: str = "tiered_disk",
    mark: str = "wave_end",
) -> Doctor:
    """Changes one counter's reading at one mark."""

    def hook(facts: TrialFacts, at: str, key: str, value: float) -> float | None:
        return new(value) if (facts.arm, at, key) == (arm, mark, name) else value

    return Doctor(counter=hook)


def effective(arm: str, **changes: Any) -> Doctor:
    """Changes what a server says of itself; None removes the key."""

    def hook(name: str, found: dict[str, Any]) -> dict[str, Any]:
        merged = found | changes if name == arm else found
        return {key: value for key, value in merged.items() if value is not None}

    return Doctor(effective=hook)


def slower(arm: str, factor: float) -> Doctor:
    """Every measured request of an arm takes longer to its first token."""

    def hook(facts: TrialFacts, record: RequestRecord) -> RequestRecord:
        if facts.arm != arm or record.phase != "wave":
            return record
        late = int((factor - 1) * TTFT_S[arm] * 1e9)
        assert record.first_token_ns is not None
        assert record.done_ns is not None
        return replace_record(
            record, first_token_ns=record.first_token_ns + late, done_ns=record.done_ns + late
        )

    return Doctor(record=hook)


def failing(kind: ErrorKind, *, arm: str = "tiered_disk") -> Doctor:
    """The first request of each wave of an arm fails."""

    def hook(facts: TrialFacts, record: RequestRecord) -> RequestRecord:
        if facts.arm != arm or record.phase != "wave" or record.seq != 0:
            return record
        return replace_record(
            record,
            outcome=Outcome.FAILED,
            error_kind=kind,
            first_token_ns=None,
            completion_tokens=None,
            token_ids=(),
            logprobs=(),
        )

    return Doctor(record=hook)


def event(kind: str, **detail: Any) -> Doctor:
    """Changes the detail of one kind of event of the candidate's measured trials."""

    def hook(facts: TrialFacts, found: Event) -> Event:
        if found.kind != kind or (facts.arm, facts.workload) != ("tiered_disk", "cold_recovery"):
            return found
        return dataclasses.replace(found, detail=detail)

    return Doctor(event=hook)


# --- the clean control --------------------------------------------------------


def test_clean_run_passes_every_criterion_and_check(tmp_path: Path) -> None:
    signoff = judge(tmp_path)
    assert signoff.verdict is PASS
    assert [g.verdict for g in signoff.gates] == [PASS, PASS]
    assert all(check.passed for check in signoff.checks)
    assert reason_codes(signoff) == set()
    assert not signoff.signable


def test_value_of_a_reduction_is_worked_by_hand(tmp_path: Path) -> None:
    signoff = judge(tmp_path)
    result = next(
        c
        for c in signoff.gates[1].criteria
        if c.id == "ttft_reduction_vs_recompute[tiered_disk-c1]"
    )
    # 0.08 s against 2.0 s in each of three repetitions: 1 - 0.04.
    assert result.measurement.value == 0.96
    assert result.measurement.repetitions == (0.96, 0.96, 0.96)
    assert result.measurement.n == 3


# --- each way of being fooled -------------------------------------------------


def unsteady(arm: str, factors: tuple[float, ...]) -> Doctor:
    """As `slower`, by another factor in each repetition."""
    hooks = [slower(arm, factor).record for factor in factors]
    return Doctor(record=lambda facts, found: hooks[facts.repetition - 1](facts, found))


CASES: list[tuple[str, Doctor, Verdict, ReasonCode]] = [
    (
        "another session's KV: fluent output of a different session",
        records({"token_ids": tuple(range(100, 116))}, session=1),
        STOP,
        ReasonCode.OUTPUT_DIFFERS,
    ),
    (
        "one zeroed block: same tokens, one log probability moved in its last digits",
        records({"logprobs": (-0.5000001,) * 16}, session=0),
        STOP,
        ReasonCode.OUTPUT_DIFFERS,
    ),
    (
        "wrong KV after a loaded restore only",
        records({"token_ids": tuple(range(200, 216))}, phase="reask", session=10),
        STOP,
        ReasonCode.OUTPUT_DIFFERS,
    ),
    (
        "an oracle check that cannot be counted is not a check passed",
        records({"logprobs": ()}, phase="reask", session=10),
        INCONCLUSIVE,
        ReasonCode.NOT_FROM_TIER,
    ),
    (
        "a planted fault that the oracle does not see",
        Doctor(
            record=lambda f, r: (
                replace_record(r, token_ids=tuple((r.session + i) % 512 for i in range(16)))
                if r.phase == "control_zeroed_layer"
                else r
            )
        ),
        INCONCLUSIVE,
        ReasonCode.CONTROL_MISSED,
    ),
    (
        "a reference that differs from its own repeat",
        Doctor(
            record=lambda f, r: (
                replace_record(r, logprobs=(-9.0,) * 16)
                if f.arm == "hbm_only" and r.phase == "populate" and r.seq == 2
                else r
            )
        ),
        INCONCLUSIVE,
        ReasonCode.REFERENCE_UNSTABLE,
    ),
    (
        "requests that error",
        failing(ErrorKind.SERVER_ERROR),
        INCONCLUSIVE,
        ReasonCode.REQUESTS_FAILED,
    ),
    ("requests cut short", failing(ErrorKind.TRUNCATED), INCONCLUSIVE, ReasonCode.REQUESTS_FAILED),
    (
        "baseline requests that error",
        failing(ErrorKind.TIMEOUT, arm="recompute"),
        INCONCLUSIVE,
        ReasonCode.REQUESTS_FAILED,
    ),
    (
        "half the output: less work looks like speed",
        records({"completion_tokens": 4, "prompt_tokens": 2080}),
        INCONCLUSIVE,
        ReasonCode.UNEQUAL_WORK,
    ),
    (
        "connector switched off: no hits, no tier counters",
        counter("external_hit_tokens", lambda v: 0.0),
        INCONCLUSIVE,
        ReasonCode.NO_TIER_HITS,
    ),
    (
        "tier counters absent",
        counter("tier_hit_tokens/disk", lambda v: None),
        INCONCLUSIVE,
        ReasonCode.METRIC_ABSENT,
    ),
    (
        "warm device cache",
        counter("device_hit_tokens", lambda v: v + 4096),
        INCONCLUSIVE,
        ReasonCode.NOT_COLD,
    ),
    ("reset refused", event("cold", ok=False), INCONCLUSIVE, ReasonCode.NOT_COLD),
    (
        "hits without bytes",
        counter("tier_read_bytes/disk", lambda v: 0.0),
        INCONCLUSIVE,
        ReasonCode.TIER_BYTES_MISMATCH,
    ),
    (
        "bytes without hits",
        counter("tier_hit_tokens/disk", lambda v: 0.0),
        INCONCLUSIVE,
        ReasonCode.NO_TIER_HITS,
    ),
    (
        "page cache answered",
        Doctor(process=lambda f, name, v: 0.0 if name == "wave_end/disk_read_bytes" else v),
        INCONCLUSIVE,
        ReasonCode.NOT_FROM_DISK,
    ),
    (
        "server and usage disagree",
        records({"cached_tokens": 640}),
        INCONCLUSIVE,
        ReasonCode.WITNESSES_DISAGREE,
    ),
    (
        "cached tokens unknown",
        records({"cached_tokens": None}),
        INCONCLUSIVE,
        ReasonCode.METRIC_ABSENT,
    ),
    (
        "load failures hidden by recompute",
        counter("tier_load_failed_blocks", lambda v: 3.0),
        INCONCLUSIVE,
        ReasonCode.LOAD_FAILURES,
    ),
    (
        "preempted requests",
        counter("preemptions", lambda v: 1.0),
        INCONCLUSIVE,
        ReasonCode.PREEMPTED,
    ),
    (
        "recompute arm with hits",
        counter("device_hit_tokens", lambda v: 4096.0, arm="recompute"),
        INCONCLUSIVE,
        ReasonCode.UNEXPECTED_HITS,
    ),
    (
        "server restarted in the window",
        Doctor(process=lambda f, name, v: 99.0 if name == "wave_end/start_time_s" else v),
        INCONCLUSIVE,
        ReasonCode.SERVER_CHANGED,
    ),
    (
        "counters went down",
        counter("external_hit_tokens", lambda v: -1.0),
        INCONCLUSIVE,
        ReasonCode.SERVER_CHANGED,
    ),
    (
        "client too busy",
        Doctor(client={"loop_lag_s_max": 2.0}),
        INCONCLUSIVE,
        ReasonCode.CLIENT_SATURATED,
    ),
    (
        "a proxy holds whole answers back",
        Doctor(
            record=lambda f, r: (
                replace_record(r, first_token_ns=r.last_token_ns)
                if (f.arm, r.phase) == ("tiered_disk", "wave")
                else r
            )
        ),
        INCONCLUSIVE,
        ReasonCode.NOT_STREAMED,
    ),
    (
        "fewer requests in flight than planned",
        Doctor(client={"in_flight_max": 1.0}),
        INCONCLUSIVE,
        ReasonCode.CLIENT_SATURATED,
    ),
    (
        "requests in flight unknown",
        Doctor(client={"in_flight_max": None}),
        INCONCLUSIVE,
        ReasonCode.METRIC_ABSENT,
    ),
    (
        "no process of the server was read",
        Doctor(process=lambda f, name, v: None if name.endswith("start_time_s") else v),
        INCONCLUSIVE,
        ReasonCode.METRIC_ABSENT,
    ),
    (
        "more OpenMP threads than the baseline",
        effective("tiered_disk", compute_threads=4),
        INCONCLUSIVE,
        ReasonCode.UNEQUAL_COMPUTE,
    ),
    (
        "OpenMP threads unknown",
        effective("recompute", compute_threads=None),
        INCONCLUSIVE,
        ReasonCode.EFFECTIVE_UNKNOWN,
    ),
    (
        "other dtype than the baseline",
        effective("tiered_disk", dtype="torch.bfloat16"),
        INCONCLUSIVE,
        ReasonCode.UNDECLARED_DIFFERENCE,
    ),
    (
        "larger device cache than the baseline",
        effective("tiered_disk", kv_capacity_tokens=19000),
        INCONCLUSIVE,
        ReasonCode.UNEQUAL_CAPACITY,
    ),
    (
        "candidate as slow as recompute",
        slower("tiered_disk", 25.0),
        STOP,
        ReasonCode.BELOW_TARGET,
    ),
    (
        "candidate near the target",
        unsteady("tiered_disk", (5.0, 6.25, 7.0)),
        INCONCLUSIVE,
        ReasonCode.UNDECIDED,
    ),
    (
        "missing repetition",
        Doctor(skip=lambda f: f.workload == "cold_recovery" and f.repetition == 3),
        INCONCLUSIVE,
        ReasonCode.TOO_FEW_REPETITIONS,
    ),
    (
        "missing baseline arm",
        Doctor(skip=lambda f: f.arm == "recompute" and f.gate == "g3"),
        INCONCLUSIVE,
        ReasonCode.NO_MEASUREMENT,
    ),
]


@pytest.mark.parametrize(
    ("doctor", "verdict", "code"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_known_way_of_being_fooled_is_caught(
    tmp_path: Path, doctor: Doctor, verdict: Verdict, code: ReasonCode
) -> None:
    signoff = judge(tmp_path, doctor)
    assert verdict_of(signoff, "g3") is verdict
    assert code in reason_codes(signoff)


# --- arrival ------------------------------------------------------------------


def test_connector_that_is_not_loaded_stops_the_arrival_gate(tmp_path: Path) -> None:
    doctor = effective("tiered_disk", connector="none", connector_config=None)
    doctor.counter = lambda f, m, n, v: None if f.arm == "tiered_disk" and "tier" in n else v
    signoff = judge(tmp_path, doctor)
    assert verdict_of(signoff, "g1") is STOP
    assert ReasonCode.CONNECTOR_INEFFECTIVE in reason_codes(signoff)


def test_round_trip_without_bytes_stops_the_arrival_gate(tmp_path: Path) -> None:
    doctor = counter("tier_read_bytes/disk", lambda v: 0.0, mark="loaded")
    signoff = judge(tmp_path, doctor)
    assert verdict_of(signoff, "g1") is STOP
    assert ReasonCode.CONNECTOR_INEFFECTIVE in reason_codes(signoff)


def test_wrong_kv_size_stops_the_arrival_gate(tmp_path: Path) -> None:
    doctor = effective("tiered_dram", connector_config={"kv_bytes_per_token": 4096})
    signoff = judge(tmp_path, doctor)
    assert verdict_of(signoff, "g1") is STOP
    assert ReasonCode.KV_SIZE_DIFFERS in reason_codes(signoff)


def test_stop_loss_keeps_the_performance_gate_not_run(tmp_path: Path) -> None:
    doctor = counter("tier_read_bytes/disk", lambda v: 0.0, mark="loaded")
    doctor.skip = lambda f: f.index > 0
    doctor.stopped = "stop-loss: g1 not met: connector_effective[tiered_disk]"
    signoff = judge(tmp_path, doctor)
    assert verdict_of(signoff, "g3") is Verdict.NOT_RUN
    assert signoff.verdict is STOP


def test_interrupted_run_never_passes(tmp_path: Path) -> None:
    doctor = Doctor(skip=lambda f: f.arm == "recompute", stopped="interrupted by the operator")
    signoff = judge(tmp_path, doctor)
    assert signoff.verdict is INCONCLUSIVE
    assert ReasonCode.GATE_NOT_REACHED in reason_codes(signoff)


@pytest.mark.parametrize("stopped", [None, "interrupted by the operator"])
def test_run_without_its_last_trial_never_passes(tmp_path: Path, stopped: str | None) -> None:
    last = len(demo_plan().trials_by_round[1]) - 1
    signoff = judge(tmp_path, Doctor(skip=lambda f: f.index == last, stopped=stopped))
    assert verdict_of(signoff, "g3") is INCONCLUSIVE
    assert ReasonCode.GATE_NOT_REACHED in reason_codes(signoff)


def test_run_interrupted_after_its_last_trial_never_passes(tmp_path: Path) -> None:
    signoff = judge(tmp_path, Doctor(stopped="interrupted by the operator"))
    assert signoff.verdict is INCONCLUSIVE


# --- evidence -----------------------------------------------------------------


def test_edited_evidence_is_named_and_never_judged(tmp_path: Path) -> None:
    path = build_run(tmp_path)
    target = next((path / "trials").glob("*tiered_disk-cold_recovery-c4-r1")) / "requests.jsonl"
    target.write_text(target.read_text().replace('"http_status":200', '"http_status":201', 1))
    signoff = judge_directory(path)
    assert signoff.verdict is INCONCLUSIVE
    assert reason_codes(signoff) == {ReasonCode.EVIDENCE_ALTERED}
    assert [r.text for r in signoff.gates[0].reasons] == [f"{target.relative_to(path)}: altered"]


def test_same_evidence_gives_the_same_bytes(tmp_path: Path) -> None:
    path = build_run(tmp_path)
    first = write_verdict(path, judge_directory(path)).read_bytes()
    second = write_verdict(path, judge_directory(path)).read_bytes()
    assert first == second
    assert str(tmp_path).encode() not in first


# --- overrides ----------------------------------------------------------------


def test_overridden_target_is_used_and_shown(tmp_path: Path) -> None:
    _campaign, text = load_campaign("cpu-demo")
    text += "\n[criteria.ttft_reduction_vs_recompute]\ntarget = 0.999\n"
    signoff = judge_directory(build_run(tmp_path, plan=demo_plan(text)))
    result = next(
        c for c in signoff.gates[1].criteria if c.criterion == "ttft_reduction_vs_recompute"
    )
    assert (result.bound.target, result.bound.default_target) == (0.999, 0.75)
    assert result.verdict is STOP
    assert signoff.overrides == ("ttft_reduction_vs_recompute: target 0.75 overridden by 0.999",)


def test_verdict_file_holds_no_nan_and_no_negative_zero(tmp_path: Path) -> None:
    path = build_run(tmp_path, failing(ErrorKind.RESET))
    text = write_verdict(path, judge_directory(path)).read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"found {name}"))
    assert '"inf"' in text
