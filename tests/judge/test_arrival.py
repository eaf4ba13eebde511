"""What an arrival that failed proves: against a server that the harness started, else nothing."""

from __future__ import annotations

import dataclasses

import pytest

from harness.analysis.numbers import TrialNumbers, measure_run
from harness.evidence.store import open_run
from harness.judge.signoff import judge_arrival
from harness.records import ErrorKind, Outcome, StopCause
from harness.verdicts import ReasonCode, Verdict
from tests.sealed_runs import build_run, demo_plan

STOP, INCONCLUSIVE, PASS = Verdict.STOP, Verdict.INCONCLUSIVE, Verdict.PASS
C = StopCause
NOT_READY, UNREACHABLE = ReasonCode.SERVER_NOT_READY, ReasonCode.SERVER_UNREACHABLE


@pytest.fixture(scope="module")
def arrival(tmp_path_factory: pytest.TempPathFactory) -> TrialNumbers:
    """The arrival of recompute, as it should be."""
    run = open_run(build_run(tmp_path_factory.mktemp("arrival")))
    numbers = measure_run([t for t in run.trials if t.facts.workload == "arrival"])
    return next(n for n in numbers if n.facts.arm == "recompute")


def verdict(trial: TrialNumbers) -> tuple[Verdict, ReasonCode | None]:
    """Verdict and reason of server_ready."""
    results = judge_arrival(demo_plan(), [trial])
    (result,) = (r for r in results if r.criterion == "server_ready")
    return result.verdict, result.reasons[0].code if result.reasons else None


def of_kind(trial: TrialNumbers, kind: str) -> TrialNumbers:
    assert trial.server is not None
    return dataclasses.replace(trial, server=dataclasses.replace(trial.server, kind=kind))


def with_requests(trial: TrialNumbers, kind: ErrorKind, status: int | None = None) -> TrialNumbers:
    lost = tuple(
        dataclasses.replace(r, outcome=Outcome.FAILED, error_kind=kind, http_status=status)
        for r in trial.all_requests
    )
    return dataclasses.replace(trial, all_requests=lost, requests=lost)


def ended(trial: TrialNumbers, cause: StopCause | None) -> TrialNumbers:
    return dataclasses.replace(trial, complete=False, failure="it ended", cause=cause)


def test_an_answer_passes(arrival: TrialNumbers) -> None:
    assert verdict(arrival) == (PASS, None)
    assert verdict(of_kind(arrival, "url")) == (PASS, None)


@pytest.mark.parametrize("kind", [C.SERVER_ENDED, C.SERVER_NOT_READY, C.SERVER_SILENT, None])
def test_a_server_of_ours_that_ends_is_stop(arrival: TrialNumbers, kind: StopCause | None) -> None:
    assert verdict(ended(arrival, kind)) == (STOP, NOT_READY)


@pytest.mark.parametrize("kind", [C.SERVER_UNREACHABLE, C.SERVER_SILENT, None])
def test_a_server_of_somebody_else_that_ends_proves_nothing(
    arrival: TrialNumbers, kind: StopCause | None
) -> None:
    assert verdict(ended(of_kind(arrival, "url"), kind)) == (INCONCLUSIVE, UNREACHABLE)


def test_one_that_was_never_reached_has_no_facts(arrival: TrialNumbers) -> None:
    trial = ended(dataclasses.replace(arrival, server=None), C.SERVER_UNREACHABLE)
    assert verdict(trial) == (INCONCLUSIVE, UNREACHABLE)


def test_a_port_of_somebody_else_proves_nothing(arrival: TrialNumbers) -> None:
    expected = (INCONCLUSIVE, ReasonCode.PORT_TAKEN)
    assert verdict(ended(arrival, C.PORT_TAKEN)) == expected
    assert verdict(ended(dataclasses.replace(arrival, server=None), C.PORT_TAKEN)) == expected


@pytest.mark.parametrize(
    ("kind", "status", "theirs"),
    [
        (ErrorKind.CONNECT, None, (INCONCLUSIVE, UNREACHABLE)),
        (ErrorKind.RESET, None, (INCONCLUSIVE, UNREACHABLE)),
        (ErrorKind.TRUNCATED, 200, (INCONCLUSIVE, UNREACHABLE)),
        (ErrorKind.TIMEOUT, None, (INCONCLUSIVE, UNREACHABLE)),
        (ErrorKind.HTTP_STATUS, 502, (INCONCLUSIVE, UNREACHABLE)),
        (ErrorKind.HTTP_STATUS, 400, (STOP, NOT_READY)),  # it was reached, and refuses the request
        (ErrorKind.SHORT, 200, (STOP, NOT_READY)),
    ],
)
def test_lost_requests(
    arrival: TrialNumbers,
    kind: ErrorKind,
    status: int | None,
    theirs: tuple[Verdict, ReasonCode],
) -> None:
    trial = with_requests(arrival, kind, status)
    assert verdict(trial) == (STOP, NOT_READY)
    assert verdict(of_kind(trial, "url")) == theirs
