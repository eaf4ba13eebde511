"""Every fault in every phase, on a server that speaks vLLM's API: see docs/failures.md.

All cells share a runs directory, so that each run proves that the one after the broken one starts.
By default a choice of cells runs; ``KVGATE_DRILLS=all`` runs the whole table (minutes).
"""

from __future__ import annotations

import json
import os
import pty
import select
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.run.judging import judge_directory
from harness.verdicts import Verdict
from tests.drills import table
from tests.drills.drill import SIGNALS, Drill, last_trial, wait_until
from tests.drills.fake import LIMIT_S, PHASES, FakeSite, environment, make_site

# One cell per fault and per phase at least.
CHOICE = [
    ("install check", "SIGTERM"),
    ("server start", "SIGINT"),
    ("server start", "kill -9 harness"),
    ("warm-up", "SIGHUP"),
    ("populate", "kill -9 harness"),
    ("populate", "kill -9 API server"),
    ("populate", "SIGSTOP API server"),
    ("measure", "kill -9 EngineCore"),
    ("measure", "kill -9 supervisor"),
    ("between trials", "SIGINT"),
]
CELLS = table.CELLS if os.environ.get("KVGATE_DRILLS") == "all" else CHOICE


@dataclass
class Predecessor:
    """The broken run before, whose dead remains the next one has to clean up."""

    path: Path | None = None
    result: table.Result | None = None

    def check(self, output: str) -> None:
        """The run that just started did for it what it could not do any more."""
        if self.result is None:
            return
        if self.path is not None and self.result.reason == "not sealed":
            assert f"dead run {self.path.parent.name}/{self.path.name}" in output
            assert not (self.path / "scratch").exists()
            assert json.loads((self.path / "seal.json").read_text())["stopped"] == "harness died"
            assert judge_directory(self.path).verdict is Verdict.INCONCLUSIVE
        table.record(self.result)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> FakeSite:
    return make_site(tmp_path_factory.mktemp("drills"))


@pytest.fixture(scope="module")
def predecessor() -> Predecessor:
    return Predecessor()


@pytest.mark.parametrize(("phase", "fault"), CELLS)
def test_a_broken_run_leaves_its_evidence_and_nothing_else(
    phase: str, fault: str, site: FakeSite, predecessor: Predecessor
) -> None:
    with site.drill(PHASES[phase]) as drill:
        site.wait_held()
        predecessor.check(drill.text())
        if phase == "server start":
            # What was mapped for less than a poll of 0.25 s is not known yet (docs/adr/0011).
            wait_until(lambda: drill.is_there(drill.noted_memory), LIMIT_S, "the engine is noted")
        drill.inject(fault)
        outcome = drill.outcome(LIMIT_S)
        text = drill.text()
    table.assert_as_expected(phase, fault, outcome)
    path = drill.path if drill.has_run() else None
    if path is not None and outcome.exit_code != -9:
        assert_sealed(phase, fault, path)
        assert sorted(entry.name for entry in site.tier_root.iterdir()) == ["theirs"]
    if fault in SIGNALS:
        assert "kvgate: interrupted; servers are stopped" in text
    assert "Traceback" not in text
    predecessor.path = path
    predecessor.result = table.result_of(phase, fault, outcome, where=table.FAKE)


def assert_sealed(phase: str, fault: str, path: Path) -> None:
    """What was recorded is there, the trial is marked, and it judges INCONCLUSIVE."""
    assert judge_directory(path).verdict is Verdict.INCONCLUSIVE
    if phase == "server start" and fault in SIGNALS:
        return  # no trial had begun
    requests, events = last_trial(path)
    if phase == "server start":
        assert [event["kind"] for event in events] == ["server_failed"]
        return
    assert events[-1]["kind"] == "trial_ended"
    assert events[-1]["detail"]["ok"] is False
    if phase in ("warm-up", "populate"):
        kept = {"warm-up": 1, "populate": 4}[phase]
        assert sum(request["outcome"] == "ok" for request in requests) == kept
        lost = {request["outcome"] for request in requests} - {"ok"}
        assert lost <= {"unknown", "failed"}


def test_the_run_after_all_of_them_ends_by_itself(site: FakeSite, predecessor: Predecessor) -> None:
    with site.drill(None) as drill:
        outcome = drill.outcome(LIMIT_S)
        predecessor.check(drill.text())
    assert (outcome.exit_code, outcome.reason, outcome.left) == (2, "None", ())
    assert sorted(entry.name for entry in site.tier_root.iterdir()) == ["theirs"]
    assert (site.tier_root / "theirs" / "block").read_text() == "somebody else's"
    assert list(site.runs_left()) == []


def test_a_second_ctrl_c_changes_nothing(site: FakeSite) -> None:
    with site.drill(PHASES["populate"]) as drill:
        site.wait_held()
        drill.inject("SIGINT")
        wait_until(lambda: "interrupted" in drill.text(), LIMIT_S, "it begins to stop")
        for fault in ("SIGINT", "SIGTERM", "SIGHUP", "SIGINT"):
            if drill.process is not None and drill.process.poll() is None:
                drill.inject(fault)
        outcome = drill.outcome(LIMIT_S)
    table.assert_as_expected("populate", "SIGINT", outcome)
    assert_sealed("populate", "SIGINT", drill.path)


def test_a_live_run_is_never_touched_by_another(site: FakeSite, tmp_path: Path) -> None:
    with site.drill(PHASES["populate"]) as first:
        site.wait_held()
        path = first.path
        undisturbed = {**environment(site.root), "KVGATE_FAKE_DIR": str(tmp_path)}
        with Drill(site.root, site.campaign, undisturbed) as second:
            assert second.outcome(LIMIT_S).exit_code == 2
            assert "dead run" not in second.text()
        assert first.process is not None
        assert first.process.poll() is None
        assert (path / "scratch" / "owner.json").is_file()
        assert not (path / "seal.json").exists()
        assert first.server_pid() in [p.pid for p in first.processes()]
        first.inject("SIGINT")
        table.assert_as_expected("populate", "SIGINT", first.outcome(LIMIT_S))


def test_what_outlives_harness_and_supervisor_is_ended_by_the_next_run(site: FakeSite) -> None:
    """Both killed at once: nothing of ours is left to stop the engine, but it is on record."""
    with site.drill(PHASES["populate"]) as dead:
        site.wait_held()
        engine = dead.engine_pid()
        assert dead.process is not None
        dead.process.send_signal(signal.SIGSTOP)  # or it would see the supervisor die, and stop
        dead.inject("kill -9 supervisor")
        dead.inject("kill -9 harness")
        dead.process.wait(LIMIT_S)
        wait_until(lambda: [p.pid for p in dead.processes()] == [engine], LIMIT_S, "one is left")
        assert len(dead.left()) == 2  # the engine and its file in /dev/shm
        with site.drill(PHASES["server start"]) as run:
            site.wait_held()
            output = " ".join(run.text().split())
            run.inject("SIGINT")
            table.assert_as_expected("server start", "SIGINT", run.outcome(LIMIT_S))
        assert f"ended its processes {engine}" in output
        assert f"removed /dev/shm/kvgate-drill-{dead.token}" in output
        assert dead.left() == []
        assert dead.reason() == "harness died"


def test_a_terminal_that_is_gone_does_not_break_the_stop(site: FakeSite) -> None:
    """Closing the window: the kernel sends SIGHUP, and every write fails from then on."""
    window, terminal = pty.openpty()
    site.hold(PHASES["populate"])
    with Drill(site.root, site.campaign, environment(site.root), terminal=terminal) as drill:
        os.close(terminal)
        shown = b""
        while not site.is_held():
            if select.select([window], [], [], 0.05)[0]:
                shown += os.read(window, 65536)  # unread, it would block the harness
        os.close(window)
        outcome = drill.outcome(LIMIT_S)
    assert b"tiered_disk" in shown
    table.assert_as_expected("populate", "SIGHUP", outcome)
    assert_sealed("populate", "SIGHUP", drill.path)
