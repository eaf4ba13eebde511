"""The command line: help with examples, exit codes, and re-judging saved runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.cli.main import main
from harness.records import RequestRecord, TrialFacts
from harness.verdicts import JUDGE_VERSION
from tests.campaign_text import SMALL_CAMPAIGN
from tests.sealed_runs import Doctor, build_run, demo_plan, replace_record

VERBS = ("plan", "run", "doctor", "judge", "report", "setup")


def fails_all(facts: TrialFacts, record: RequestRecord) -> RequestRecord:
    """The exact oracle's outputs come back wrong."""
    if facts.workload == "oracle" and record.phase == "oracle":
        return replace_record(record, token_ids=(1,) * len(record.token_ids))
    return record


@pytest.fixture(autouse=True)
def away_from_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGATE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def clean(tmp_path: Path) -> Path:
    return build_run(tmp_path / "runs", plan=demo_plan(SMALL_CAMPAIGN))


# --- usage ------------------------------------------------------------------


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_every_verb_shows_an_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([verb, "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert f"example:\n  kvgate {verb}" in text


def test_help_names_every_verb_and_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert all(f"kvgate {verb}" in text or f"    {verb} " in text for verb in VERBS)
    assert "0 PASS, 1 STOP, 2 INCONCLUSIVE or NOT RUN, 64 usage" in text


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        pytest.param([], "COMMAND", id="no verb"),
        pytest.param(["jugde"], "'jugde'", id="unknown verb"),
        pytest.param(["judge"], "RUN", id="no run"),
        pytest.param(["judge", "x", "--force"], "--force", id="unknown flag"),
        pytest.param(["run", "--gates", "g1,g9"], "unknown gate 'g9'; allowed: g1, g3", id="gate"),
        pytest.param(["run", "--locale", "xx"], "'xx'", id="unknown language"),
    ],
)
def test_wrong_usage_exits_64_naming_it(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 64
    captured = capsys.readouterr()
    assert captured.out == ""
    assert named in captured.err.splitlines()[-1]


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith("kvgate ")


def test_plan_shows_sizes_and_trials_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "small.toml"
    path.write_text(SMALL_CAMPAIGN)
    assert main(["plan", str(path)]) == 0
    text = capsys.readouterr().out
    assert "9 x 328 tokens, 4 out" in text
    assert "2.88 x the device cache" in text
    assert "tiered_disk" in text
    assert not (tmp_path / "runs").exists()


# --- judge ------------------------------------------------------------------


def test_judging_what_is_no_run_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x").mkdir()
    for name in ("x", "none"):
        assert main(["judge", str(tmp_path / name)]) == 64
        error = capsys.readouterr().err
        assert f"{name}: not a run directory" in error
        assert "give runs/<campaign>/<time>" in error
    assert list((tmp_path / "x").iterdir()) == []


def test_a_clean_run_passes_with_no_other_flag(
    clean: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["judge", str(clean)]) == 0
    verdict = json.loads((clean / "verdicts" / f"{JUDGE_VERSION}.json").read_text())
    assert verdict["verdict"] == "PASS"
    assert [gate["gate"] for gate in verdict["gates"]] == ["g1", "g3"]
    assert "PASS" in capsys.readouterr().out


def test_judging_again_writes_the_same_bytes(clean: Path) -> None:
    main(["judge", str(clean)])
    first = (clean / "verdicts" / f"{JUDGE_VERSION}.json").read_bytes()
    main(["judge", str(clean)])
    assert (clean / "verdicts" / f"{JUDGE_VERSION}.json").read_bytes() == first


def test_wrong_output_stops_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = build_run(tmp_path / "runs", Doctor(record=fails_all), demo_plan(SMALL_CAMPAIGN))
    assert main(["judge", str(run)]) == 1
    assert json.loads((run / "verdicts" / f"{JUDGE_VERSION}.json").read_text())["verdict"] == "STOP"
    assert "STOP" in capsys.readouterr().out


def test_an_altered_run_is_inconclusive_with_2(
    clean: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = next((clean / "trials").glob("*-populate-*")) / "requests.jsonl"
    path.write_text(path.read_text().replace('"outcome":"ok"', '"outcome":"failed"', 1))
    assert main(["judge", str(clean)]) == 2
    verdict = json.loads((clean / "verdicts" / f"{JUDGE_VERSION}.json").read_text())
    assert verdict["verdict"] == "INCONCLUSIVE"
    (reason,) = verdict["gates"][0]["reasons"]
    assert reason["code"] == "evidence.altered"
    assert reason["text"].endswith("/requests.jsonl: altered")
    assert "INCONCLUSIVE" in capsys.readouterr().out


def test_an_unsealed_run_is_inconclusive_with_2(clean: Path) -> None:
    (clean / "seal.json").unlink()
    assert main(["judge", str(clean)]) == 2


# --- report -----------------------------------------------------------------


def test_a_report_needs_a_verdict_first(clean: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(clean)]) == 64
    assert "not judged yet; run `kvgate judge" in capsys.readouterr().err


@pytest.mark.parametrize("locale", ["en", "zh"])
def test_a_report_of_a_judged_run_is_one_page(
    locale: str, clean: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["judge", str(clean)])
    capsys.readouterr()
    assert main(["report", str(clean), "--locale", locale]) == 0
    page = clean / "report" / "signoff.html"
    assert capsys.readouterr().out == f"{page}\n"
    assert page.read_text(encoding="utf-8").lstrip().lower().startswith("<!doctype html>")
    assert main(["judge", str(clean)]) == 0  # a report does not disturb the evidence
