"""One small campaign end to end on real CPU vLLM: the live smoke of CI.

Shown: every arm starts and stops without a rest, every wave is proved cold, restored output is
exact, planted faults are seen, and the evidence judges to the same bytes without vLLM. Not shown:
speed.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness.evidence.results import read_verdict
from harness.verdicts import JUDGE_VERSION, SignOff, Verdict
from tests.live import campaigns

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def run_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of three arms."""
    root = tmp_path_factory.mktemp("smoke")
    text = campaigns.campaign(
        "smoke",
        campaigns.tiered("tiered_disk")
        + campaigns.baseline("hbm_only")
        + campaigns.baseline("recompute"),
    )
    (root / "smoke.toml").write_text(text)
    command = [sys.executable, "-m", "harness", "run", str(root / "smoke.toml")]
    result = subprocess.run([*command, "--runs", str(root / "runs")])
    assert result.returncode in (0, 1, 2), "the harness itself failed"
    (path,) = (root / "runs" / "smoke").iterdir()
    return path


@pytest.fixture(scope="module")
def signoff(run_path: Path) -> SignOff:
    """What the run was judged."""
    return read_verdict(run_path)


def test_arrival_gate_passes(signoff: SignOff) -> None:
    assert next(g.verdict for g in signoff.gates if g.gate == "g1") is Verdict.PASS


def test_every_trial_is_valid(signoff: SignOff) -> None:
    assert [(c.name, c.subject, c.found) for c in signoff.checks if not c.passed] == []


@pytest.mark.parametrize(
    "name", ["oracle_exact", "oracle_after_load", "negative_controls", "fits_in_hbm"]
)
def test_oracles_and_controls_pass(signoff: SignOff, name: str) -> None:
    results = [c for g in signoff.gates for c in g.criteria if c.criterion == name]
    assert results
    assert all(c.verdict is Verdict.PASS for c in results), results


def test_every_criterion_has_a_measurement(signoff: SignOff) -> None:
    values = {c.id: c.measurement.value for g in signoff.gates for c in g.criteria}
    assert all(value is not None for value in values.values()), values


def test_report_is_written(run_path: Path) -> None:
    page = (run_path / "report" / "signoff.html").read_text(encoding="utf-8")
    assert "not signable" in page


def test_judging_again_without_vllm_gives_the_same_bytes(run_path: Path) -> None:
    verdict = run_path / "verdicts" / f"{JUDGE_VERSION}.json"
    before = verdict.read_bytes()
    subprocess.run(
        [sys.executable, "-m", "harness", "judge", str(run_path)],
        env={"LANG": "C", "PATH": "", "KVGATE_HOME": str(run_path)},
        stdout=subprocess.DEVNULL,
        timeout=120,
    )
    assert verdict.read_bytes() == before
