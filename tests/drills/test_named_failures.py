"""Each phase that fails says what, found, allowed, where and what next; exit codes are fixed."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.cli.main import main
from harness.evidence.results import read_verdict
from harness.evidence.store import open_run
from harness.run import doctor, trial
from harness.run.judging import judge_directory
from harness.verdicts import ReasonCode, Verdict
from tests.campaign_text import SMALL_CAMPAIGN
from tests.drills import fake
from tests.drills.fake import CAMPAIGN, FakeSite, make_site
from tests.sealed_runs import build_run, demo_plan

MakeSite = Callable[..., FakeSite]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeSite]:
    for name, text in fake.environment(tmp_path).items():
        monkeypatch.setenv(name, text)
    monkeypatch.setenv("KVGATE_DRILL", "named-failures")
    monkeypatch.chdir(tmp_path)

    def site(*changes: tuple[str, str], ready_s: float = 6.0) -> FakeSite:
        text = CAMPAIGN
        for old, new in changes:
            assert text.count(old) == 1
            text = text.replace(old, new)
        return make_site(tmp_path, ready_s=ready_s, text=text)

    yield site
    (tmp_path / "hold").unlink(missing_ok=True)


def run(site: FakeSite, hold: dict[str, object] | None = None, *arguments: str) -> int:
    if hold is not None:
        (site.root / "hold").write_text(json.dumps(hold))
    return main(["run", str(site.campaign), "--runs", "runs", *arguments])


def the_run(site: FakeSite) -> Path:
    (path,) = (site.root / "runs" / "drill").iterdir()
    return path


# --- before anything is started ---------------------------------------------


def assert_refused(site: FakeSite, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(site) == 64
    assert message in capsys.readouterr().err
    assert not (site.root / "runs").is_dir() or list((site.root / "runs").iterdir()) == []


def test_a_fixed_port_that_is_taken(make: MakeSite, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        site = make(("cpu_cores = 1\n", f"cpu_cores = 1\nport = {port}\n"))
        message = (
            f"server.port: taken: Address already in use; needed: port {port} free. stop what "
            "uses it, or leave server.port out"
        )
        assert_refused(site, message, capsys)


def test_a_tier_root_that_is_not_there(make: MakeSite, capsys: pytest.CaptureFixture[str]) -> None:
    site = make(('"{tier_root}"', '"/nonexistent/tier"'))
    message = "tier root: no such directory; needed: a directory at tier_root /nonexistent/tier"
    assert_refused(site, message, capsys)


def test_a_runs_directory_that_is_a_file(
    make: MakeSite, capsys: pytest.CaptureFixture[str]
) -> None:
    site = make()
    (site.root / "runs").write_text("not a directory")
    assert_refused(site, "runs directory: ", capsys)


def test_an_interpreter_that_hangs(
    make: MakeSite, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "CHECK_DEADLINE_S", 0.5)
    site = make()
    (site.root / "hold").write_text(json.dumps(fake.PHASES["install check"]))
    assert_refused(site, "vllm: the interpreter gave no answer in 0.5 s", capsys)


# --- the server -------------------------------------------------------------


def test_a_server_that_is_never_ready_stops_the_arrival_gate(make: MakeSite) -> None:
    site = make(ready_s=1.5)
    assert run(site, fake.PHASES["server start"], "--gates", "g1,g3") == 1
    signoff = read_verdict(the_run(site))
    assert [(gate.gate, gate.verdict) for gate in signoff.gates] == [
        ("g1", Verdict.STOP),
        ("g3", Verdict.INCONCLUSIVE),
    ]
    stopped = [c for c in signoff.gates[0].criteria if c.verdict is Verdict.STOP]
    assert {c.arm for c in stopped} == {"tiered_disk"}
    codes = {reason.code for c in stopped for reason in c.reasons}
    assert ReasonCode.SERVER_NOT_READY in codes
    assert [cause.code for cause in signoff.causes] == [ReasonCode.SERVER_NOT_READY]


def test_a_server_that_is_never_ready_decides_nothing_elsewhere(make: MakeSite) -> None:
    site = make(ready_s=1.5)
    assert run(site, fake.PHASES["server start"]) == 2
    sealed = open_run(the_run(site))
    assert sealed.stopped == (
        "arm tiered_disk: not ready after 2 s (allowed: server.ready_deadline_s): ConnectError: "
        "[Errno 111] Connection refused"
    )


def test_an_engine_that_hangs_while_health_answers_ends_the_arm(make: MakeSite) -> None:
    """No token comes any more: one request deadline, one answer deadline, and no more waiting."""
    site = make(
        ("request_deadline_s = 120.0", "request_deadline_s = 2.0"),
        ("answer_deadline_s = 2.0", "answer_deadline_s = 1.0"),
    )
    assert run(site, {"event": "any_completion", "count": 4}) == 2
    sealed = open_run(the_run(site))
    assert sealed.stopped == (
        "arm tiered_disk: the server stopped answering: no token in 1 s (allowed: "
        "server.answer_deadline_s); see server.log"
    )
    (trial_evidence,) = sealed.trials
    outcomes = [record.outcome.value for record in trial_evidence.requests]
    assert outcomes.count("ok") == 4
    assert sum(e.detail.get("ok") is False for e in trial_evidence.events) == 1


def test_a_machine_that_slept_marks_the_trial_and_goes_on(
    make: MakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = make()
    readings = iter([0, 3_000_000_000])  # of the first trial; later ones slept no more
    monkeypatch.setattr(trial, "_suspended_ns", lambda: next(readings, 3_000_000_000))
    assert run(site) == 2
    sealed = open_run(the_run(site))
    assert sealed.stopped is None
    ends = [evidence.events[-1].detail for evidence in sealed.trials]
    assert [end["ok"] for end in ends] == [False] + [True] * (len(ends) - 1)
    assert ends[0]["error"] == "the machine was suspended for 3.0 s; its times mean nothing"


# --- after the run ----------------------------------------------------------


@pytest.mark.parametrize(("verb", "what"), [("judge", "verdict"), ("report", "report")])
def test_a_verdict_or_report_that_cannot_be_written(
    verb: str, what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = build_run(tmp_path / "runs", plan=demo_plan(SMALL_CAMPAIGN))
    if verb == "report":
        assert main(["judge", str(path)]) == 0
    (path / {"judge": "verdicts", "report": "report"}[verb]).write_text("in the way")
    capsys.readouterr()
    assert main([verb, str(path)]) == 70
    error = capsys.readouterr().err
    assert f"{path}: the {what} cannot be written: " in error
    assert "the evidence is sealed and untouched" in error
    assert f"kvgate judge {path}" in error
    assert "Traceback" not in error


def test_a_harness_killed_between_seal_and_end_is_judged_all_the_same(tmp_path: Path) -> None:
    path = build_run(tmp_path / "runs", plan=demo_plan(SMALL_CAMPAIGN))
    (path / "scratch").mkdir()
    assert judge_directory(path).verdict is Verdict.PASS
