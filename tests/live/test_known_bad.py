"""It can fail: known-bad arms on real CPU vLLM, each with its verdict, and a clean control.

All bad arms share one run and its baselines. Only G3 is selected, so that no arm's arrival stops
the others; the arrival gate is shown on its own.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.evidence.results import read_verdict
from harness.run.judging import judge_directory
from harness.verdicts import CriterionResult, ReasonCode, SignOff, Verdict
from tests.live import campaigns
from tests.live.campaigns import BUNDLED, TIERED_DISK, tiered

pytestmark = pytest.mark.live

UNUSABLE = {**TIERED_DISK, "directory": "/proc/kvgate-unusable"}
ARMS = {
    "clean": tiered("clean"),
    "switched_off": tiered("switched_off", connector=None),
    "unusable_directory": tiered("unusable_directory", config=UNUSABLE),
    "wrong_session": tiered(
        "wrong_session", connector=("WrongSessionConnector", "tests.doubles.wrong_session")
    ),
    "zeroed_block": tiered(
        "zeroed_block", connector=("ZeroedBlockConnector", "tests.doubles.zeroed_block")
    ),
    "requests_fail": tiered("requests_fail", extra='args = ["--max-model-len", "1024"]\n'),
    "more_threads": tiered("more_threads", extra="cpu_cores = 2\n"),
}


def _run(root: Path, name: str, text: str) -> Path:
    (root / f"{name}.toml").write_text(text)
    command = [sys.executable, "-m", "harness", "run", str(root / f"{name}.toml")]
    result = subprocess.run([*command, "--runs", str(root / "runs")])
    assert result.returncode in (0, 1, 2), "the harness itself failed"
    (path,) = (root / "runs" / name).iterdir()
    return path


@pytest.fixture(scope="module")
def run_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run of all bad arms, the clean control and both baselines."""
    arms = "".join(ARMS.values()) + campaigns.baseline("hbm_only") + campaigns.baseline("recompute")
    text = campaigns.campaign("known-bad", arms, gates=("g3",), cores=1, steady_cycles=0)
    return _run(tmp_path_factory.mktemp("known_bad"), "known-bad", text)


@pytest.fixture(scope="module")
def signoff(run_path: Path) -> SignOff:
    """What the run was judged."""
    return read_verdict(run_path)


def criteria(signoff: SignOff, arm: str, *names: str) -> list[CriterionResult]:
    """Criteria of an arm, all or by name."""
    found = [c for g in signoff.gates for c in g.criteria if c.arm == arm]
    return [c for c in found if not names or c.criterion in names]


def codes(results: list[CriterionResult]) -> set[ReasonCode]:
    return {reason.code for result in results for reason in result.reasons}


ORACLES = ("oracle_exact", "oracle_after_load")
COMPARISONS = (
    "ttft_reduction_vs_recompute",
    "ttft_reduction_vs_hbm_only",
    "throughput_gain_vs_recompute",
)


def test_clean_control_is_valid_and_exact(signoff: SignOff) -> None:
    failed = [c for c in signoff.checks if c.subject.find("clean") >= 0 and not c.passed]
    assert failed == []
    results = criteria(signoff, "clean", *ORACLES, "negative_controls")
    assert {c.verdict for c in results} == {Verdict.PASS}


@pytest.mark.parametrize(
    ("arm", "names", "verdict", "code"),
    [
        ("switched_off", COMPARISONS, Verdict.INCONCLUSIVE, ReasonCode.NO_TIER_HITS),
        ("unusable_directory", COMPARISONS, Verdict.INCONCLUSIVE, ReasonCode.NO_TIER_HITS),
        ("wrong_session", ORACLES, Verdict.STOP, ReasonCode.OUTPUT_DIFFERS),
        ("zeroed_block", ORACLES, Verdict.STOP, ReasonCode.OUTPUT_DIFFERS),
        ("requests_fail", COMPARISONS, Verdict.INCONCLUSIVE, ReasonCode.REQUESTS_FAILED),
        ("more_threads", COMPARISONS, Verdict.INCONCLUSIVE, ReasonCode.UNEQUAL_COMPUTE),
    ],
)
def test_known_bad_arm_gets_its_verdict_and_reason(
    signoff: SignOff, arm: str, names: tuple[str, ...], verdict: Verdict, code: ReasonCode
) -> None:
    results = criteria(signoff, arm, *names)
    assert {c.verdict for c in results} == {verdict}
    assert all(code in codes([result]) for result in results)


def test_edited_evidence_is_inconclusive_and_names_the_file(run_path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy" / "run"
    shutil.copytree(run_path, copy)
    target = next((copy / "trials").glob("*-clean-cold_recovery-c1-r1")) / "requests.jsonl"
    target.write_text(target.read_text().replace('"seq":0', '"seq":1', 1))
    signoff = judge_directory(copy)
    assert signoff.verdict is Verdict.INCONCLUSIVE
    (reason,) = signoff.gates[0].reasons
    assert reason.code is ReasonCode.EVIDENCE_ALTERED
    assert reason.text == f"{target.relative_to(copy)}: altered"


@pytest.mark.parametrize(
    ("name", "arm"),
    [
        ("off", tiered("bad", connector=None)),
        ("unusable", tiered("bad", connector=BUNDLED, config=UNUSABLE)),
    ],
)
def test_ineffective_connector_stops_the_arrival_gate_and_the_run(
    tmp_path: Path, name: str, arm: str
) -> None:
    arms = arm + campaigns.baseline("hbm_only") + campaigns.baseline("recompute")
    path = _run(tmp_path, name, campaigns.campaign(name, arms))
    signoff = read_verdict(path)
    assert [(g.gate, g.verdict) for g in signoff.gates] == [
        ("g1", Verdict.STOP),
        ("g3", Verdict.NOT_RUN),
    ]
    assert ReasonCode.CONNECTOR_INEFFECTIVE in codes(criteria(signoff, "bad"))
