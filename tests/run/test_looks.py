"""When a run with a round per look goes on, and what a calibration reads."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from harness.analysis.numbers import measure_run
from harness.campaign.generated_model import model_config
from harness.campaign.plan import Plan
from harness.campaign.reading import load_campaign, parse_campaign
from harness.campaign.sections import Arm
from harness.campaign.sizing import Calibration, calibration_text
from harness.errors import HarnessError
from harness.evidence.store import RunWriter, open_run
from harness.records import TrialFacts
from harness.run.calibration import read_calibration
from harness.run.campaign_run import CampaignRun
from tests.judge.test_rounds import NOISY, slowed
from tests.sealed_runs import Doctor, build_run, demo_plan

UNDECIDED = [
    f"{name}[tiered_disk-c1]"
    for name in (
        "ttft_reduction_vs_recompute",
        "ttft_reduction_vs_hbm_only",
        "throughput_gain_vs_recompute",
    )
]


class Notes:
    """An observer that keeps what an operator would read."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def run_started(self, path: Path, trials: Sequence[TrialFacts]) -> None: ...

    def arm_started(self, arm: Arm) -> None: ...

    def trial_started(self, facts: TrialFacts) -> None: ...

    def progress(self, text: str) -> None: ...

    def trial_ended(self, facts: TrialFacts, duration_s: float) -> None: ...

    def note(self, text: str) -> None:
        self.notes.append(text)


def after_round(path: Path, plan: Plan, number: int) -> tuple[bool, CampaignRun, Notes]:
    """What a run decides whose round has just ended with the trials at ``path``."""
    notes = Notes()
    empty = path.parent.parent / "other"
    run = CampaignRun(plan, runs_root=empty, home=empty, model_dir=empty, observer=notes)
    run.writer = RunWriter.resume(path)
    return run._goes_on(plan.rounds[number - 1], time.monotonic()), run, notes


def test_a_run_ends_at_the_look_that_leaves_nothing_undecided(tmp_path: Path) -> None:
    goes_on, run, _notes = after_round(build_run(tmp_path), demo_plan(), 1)
    assert not goes_on
    (look,) = run.looks
    assert (look["repetitions"], look["undecided"]) == (3, [])
    assert look["then"] == "ended: nothing is left that more repetitions could decide"


def test_a_run_goes_on_for_what_is_undecided_and_says_so(tmp_path: Path) -> None:
    path = build_run(tmp_path, slowed(NOISY))
    goes_on, run, notes = after_round(path, demo_plan(), 1)
    assert goes_on
    assert run.looks[0]["undecided"] == UNDECIDED
    assert notes.notes[-1] == (
        f"look at 3 repetitions; undecided: {', '.join(UNDECIDED)}; went on to the look at 6 "
        "repetitions"
    )


def test_a_round_that_does_not_fit_the_time_is_not_begun(tmp_path: Path) -> None:
    text = load_campaign("cpu-demo")[1].replace("time_budget_s = 720.0", "time_budget_s = 1e-9")
    plan = demo_plan(text)
    goes_on, run, _notes = after_round(build_run(tmp_path, slowed(NOISY), plan), plan, 1)
    assert not goes_on
    assert run.looks[0]["undecided"] == UNDECIDED
    assert "does not fit the time budget of 1e-09 s" in run.looks[0]["then"]


def test_the_last_look_is_the_last(tmp_path: Path) -> None:
    doctor = slowed({1: 1.0, 2: 2.5, 3: 6.0, 4: 10.0, 5: 16.0, 6: 20.0})
    goes_on, run, _notes = after_round(build_run(tmp_path, doctor, rounds=2), demo_plan(), 2)
    assert not goes_on
    assert run.looks[0]["undecided"]
    assert run.looks[0]["then"] == "ended: this was the last look"


# --- calibration ------------------------------------------------------------------


@pytest.fixture
def calibration() -> Plan:
    intended = demo_plan()
    text = calibration_text(intended.campaign_text, intended.campaign)
    campaign = parse_campaign(text)
    config = model_config(campaign.model.generated)
    return Plan(campaign, text, intended.profile, intended.criteria_text, config, ("g3",))


def test_a_calibration_is_the_medians_of_its_run(tmp_path: Path, calibration: Plan) -> None:
    # Made-up evidence: a prefill 2.0 s, a restore 0.08 s, from the device 0.06 s.
    run = open_run(build_run(tmp_path, plan=calibration))
    assert [trial.facts.workload for trial in run.trials] == ["populate", *["cold_recovery"] * 3]
    found = read_calibration(measure_run(run.trials), 25.0)
    assert found == Calibration(2.0, 0.08, 0.06, 25.0)


def test_a_calibration_that_restored_nothing_says_so(tmp_path: Path, calibration: Plan) -> None:
    run = open_run(build_run(tmp_path, Doctor(skip=lambda f: f.repetition > 1), calibration))
    numbers = [n for n in measure_run(run.trials) if n.facts.workload == "populate"]
    with pytest.raises(HarnessError, match="a restore was not measured"):
        read_calibration(numbers, 25.0)
    with pytest.raises(HarnessError, match="the server was never ready"):
        read_calibration(numbers, None)
