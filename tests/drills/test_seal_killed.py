"""kill -9 at each step of sealing: the next attempt seals all that was recorded, once."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.evidence.store import RunWriter, TrialWriter, open_run
from harness.records import Event, StopCause
from tests.campaign_text import SMALL_CAMPAIGN
from tests.drills.drill import REPOSITORY
from tests.drills.seal_script import seal
from tests.sealed_runs import build_run, demo_plan

SCRIPT = Path(__file__).with_name("seal_script.py")


@pytest.fixture(scope="module")
def half_done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose last trial has two phases recorded and was never sealed."""
    root = tmp_path_factory.mktemp("half")
    path = build_run(root / "runs", plan=demo_plan(SMALL_CAMPAIGN))
    (path / "seal.json").unlink()
    for trial in sorted((path / "trials").iterdir())[3:]:
        shutil.rmtree(trial)
    last = max((path / "trials").iterdir())
    (last / "manifest.json").unlink()
    lines = (last / "requests.jsonl").read_text().splitlines(keepends=True)
    (last / "requests.jsonl").unlink()
    (last / "requests-a.part").write_text("".join(lines[:1]))
    # The writer died inside a line: what was cut is no record.
    (last / "requests-b.part").write_text("".join(lines[1:]) + lines[0][:40])
    with (last / "events.jsonl").open("a") as file:
        file.write('{"t_ns":1,"kin')
    (path / "trials" / "99-never-begun-c1-r1").mkdir()
    (path / "trials" / "99-never-begun-c1-r1" / ".trial.json.1234").write_text("{")
    return path


def killed_at(step: int, run: Path) -> bool:
    command = [sys.executable, str(SCRIPT), str(run), str(step)]
    code = subprocess.run(command, env={"PYTHONPATH": str(REPOSITORY)}).returncode
    assert code in (0, 9)
    return code == 9


def test_sealing_can_be_killed_anywhere(half_done: Path, tmp_path: Path) -> None:
    steps = 0
    while True:
        run = tmp_path / str(steps) / "run"
        shutil.copytree(half_done, run)
        was_killed = killed_at(steps, run)
        if was_killed:
            seal(run)
        sealed = open_run(run)
        assert sealed.stopped == "harness died"
        assert len(sealed.trials) == 3
        last = sealed.trials[-1]
        expected = (half_done / "trials" / last.id / "requests-b.part").read_text().count("\n") + 1
        assert len(last.requests) == expected, f"step {steps}"
        assert last.events[-1].kind == "trial_ended"
        assert last.events[-1].detail == {
            "ok": False,
            "error": "harness died",
            "cause": "harness_died",
        }
        if not was_killed:
            break
        steps += 1
    assert steps > 10


def test_a_sealed_trial_is_never_written_again(half_done: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(half_done, run)
    sealed = sorted(run.glob("trials/*/manifest.json"))
    before = {path: path.read_bytes() for path in sealed}
    RunWriter.resume(run).seal_open_trials("harness died", StopCause.HARNESS_DIED, lambda _arm: "")
    assert {path: path.read_bytes() for path in sealed} == before


def test_a_trial_sealed_twice_is_the_same(half_done: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(half_done, run)
    writer = TrialWriter.resume(max(p for p in (run / "trials").iterdir() if "99" not in p.name))
    writer.add_event(Event(2, "trial_ended", {"ok": False, "error": "x"}))
    first = writer.seal()
    (writer.path / "manifest.json").unlink()
    assert writer.seal() == first
