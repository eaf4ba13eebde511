"""The gates as pytest suites on saved evidence: one test per criterion, only PASS passes."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.evidence.results import write_verdict
from harness.records import RequestRecord, TrialFacts
from harness.run.judging import judge_directory
from harness.verdicts import JUDGE_VERSION
from tests.campaign_text import SMALL_CAMPAIGN
from tests.sealed_runs import Doctor, build_run, demo_plan, replace_record

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Session:
    """What one pytest process did."""

    code: int
    output: str
    cases: dict[str, dict[str, str]]
    failed: frozenset[str]


def run_gates(run: Path, marker: str, tmp_path: Path) -> Session:
    """Judges saved evidence in a pytest of its own, as a user would."""
    xml = tmp_path / "junit.xml"
    process = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "gates",
            "-m",
            marker,
            "--evidence",
            str(run),
            f"--junitxml={xml}",
            "-p",
            "no:cacheprovider",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    cases: dict[str, dict[str, str]] = {}
    failed = set()
    for case in ElementTree.parse(xml).getroot().iter("testcase"):
        found = re.search(r"\[(.*)\]$", case.get("name", ""))
        gate = str(case.get("classname")).split("_")[1]  # gates.test_g3_performance
        name = found.group(1) if found else f"{case.get('name')} of {gate}"
        cases[name] = {str(p.get("name")): str(p.get("value")) for p in case.iter("property")}
        if case.find("failure") is not None or case.find("error") is not None:
            failed.add(name)
        assert case.find("skipped") is None
    return Session(process.returncode, process.stdout, cases, frozenset(failed))


def build(tmp_path: Path, doctor: Doctor | None = None) -> Path:
    return build_run(tmp_path / "runs", doctor, demo_plan(SMALL_CAMPAIGN))


def slow_candidate(facts: TrialFacts, record: RequestRecord) -> RequestRecord:
    """At concurrency 2 the tiered arm answers no sooner than recompute would."""
    if facts.arm == "tiered_disk" and facts.concurrency == 2 and record.phase == "wave":
        late = 100_000_000_000
        assert record.first_token_ns is not None
        assert record.done_ns is not None
        return replace_record(
            record, first_token_ns=record.first_token_ns + late, done_ns=record.done_ns + late
        )
    return record


G3_IDS = [
    "ttft_reduction_vs_recompute[tiered_disk-c1]",
    "ttft_reduction_vs_recompute[tiered_disk-c2]",
    "ttft_reduction_vs_hbm_only[tiered_disk-c1]",
    "ttft_reduction_vs_hbm_only[tiered_disk-c2]",
    "throughput_gain_vs_recompute[tiered_disk-c1]",
    "throughput_gain_vs_recompute[tiered_disk-c2]",
    "oracle_exact[tiered_disk]",
    "oracle_after_load[tiered_disk-c1]",
    "oracle_after_load[tiered_disk-c2]",
    "oracle_bounded[tiered_disk]",
    "negative_controls[tiered_disk]",
    "fits_in_hbm[hbm_only]",
]


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Session]:
    """A clean run and what the g3 suite says of it."""
    path = tmp_path_factory.mktemp("clean")
    run = build(path)
    return run, run_gates(run, "g3", path)


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Session:
    """What both suites say of a run whose candidate is slow at concurrency 2."""
    path = tmp_path_factory.mktemp("slow")
    return run_gates(build(path, Doctor(record=slow_candidate)), "g1 or g3", path)


def test_a_clean_run_passes_with_one_readable_test_per_criterion(
    clean: tuple[Path, Session],
) -> None:
    _run, session = clean
    assert session.code == 0, session.output
    assert list(session.cases) == [*G3_IDS, "test_gate of g3"]
    assert "kvgate: PASS, run " in session.output


def test_the_junit_file_tells_value_and_bound(clean: tuple[Path, Session]) -> None:
    _run, session = clean
    for name in G3_IDS:
        assert set(session.cases[name]) == {"verdict", "value", "unit", "n", "bound"}
    # Recompute 2.0 s, restore 0.08 s: 1 - 0.04.
    assert session.cases["ttft_reduction_vs_recompute[tiered_disk-c1]"] == {
        "verdict": "PASS",
        "value": "0.96",
        "unit": "ratio",
        "n": "3",
        "bound": ">= 0.75, lower limit >= 0.75",
    }


def test_pytest_and_the_command_line_write_the_same_verdict(clean: tuple[Path, Session]) -> None:
    run, _session = clean
    by_pytest = (run / "verdicts" / f"{JUDGE_VERSION}.json").read_bytes()
    assert write_verdict(run, judge_directory(run)).read_bytes() == by_pytest


def test_a_slow_candidate_fails_its_own_tests_only(slow: Session) -> None:
    assert slow.code == 1
    assert slow.failed == {
        "ttft_reduction_vs_recompute[tiered_disk-c2]",
        "ttft_reduction_vs_hbm_only[tiered_disk-c2]",
        "throughput_gain_vs_recompute[tiered_disk-c2]",
        "test_gate of g3",
    }
    assert slow.cases["ttft_reduction_vs_recompute[tiered_disk-c2]"]["verdict"] == "STOP"
    assert "criterion.below_target: estimate " in slow.output


def test_the_other_gate_is_not_touched_by_it(slow: Session) -> None:
    assert [name for name in slow.cases if name not in G3_IDS] == [
        "server_ready[tiered_disk]",
        "server_ready[hbm_only]",
        "server_ready[recompute]",
        "connector_effective[tiered_disk]",
        "kv_size[tiered_disk]",
        "test_gate of g1",
        "test_gate of g3",
    ]
    assert slow.cases["test_gate of g1"] == {"verdict": "PASS"}
    assert slow.cases["test_gate of g3"] == {"verdict": "STOP"}


def test_altered_evidence_fails_every_test(tmp_path: Path) -> None:
    run = build(tmp_path)
    path = next((run / "trials").glob("*-steady-*")) / "samples.jsonl"
    path.write_text(path.read_text() + path.read_text().splitlines()[0] + "\n")
    session = run_gates(run, "g3", tmp_path)
    assert session.code == 1
    assert session.failed == {*G3_IDS, "test_gate of g3"}
    assert "evidence.altered: trials/" in session.output


def test_evidence_that_is_no_run_passes_nothing(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    session = run_gates(tmp_path / "x", "g3", tmp_path)
    assert session.code == 1
    assert session.failed == {"no_criterion", "test_gate of g3"}
    assert "x: not a run directory" in session.output


@pytest.mark.parametrize("option", ["--campaign=none.toml", "--campaign=cpu-dmeo"])
def test_a_campaign_that_is_not_there_is_a_usage_error(option: str) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "gates", option, "-p", "no:cacheprovider"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 4
    assert "campaign file" in process.stderr
