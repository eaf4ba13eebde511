"""The published table: its arithmetic comes out as published, and it proves no more than that."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from harness.campaign.generated_model import ModelArchitecture, model_config
from harness.campaign.plan import make_plan
from harness.campaign.reading import load_campaign
from harness.cli.main import main
from harness.errors import PlanError
from harness.evidence.published import import_published, load_table
from harness.evidence.results import read_provenance, read_verdict, write_verdict
from harness.evidence.store import open_run
from harness.records import canonical_json
from harness.run.judging import judge_directory
from harness.verdicts import CriterionResult, ReasonCode, SignOff, Verdict
from reports.signoff import render_html
from reports.terminal import print_signoff
from reports.texts import load
from tests.campaign_text import edited

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "harness" / "evidence" / "data" / "published_results.json"
WHEN = datetime(2026, 7, 20, tzinfo=UTC)
LABEL = "arithmetic of the published table"


def table() -> Any:
    return json.loads(TABLE.read_text(encoding="utf-8"))


def judged(tmp_path: Path, content: Any = None) -> list[SignOff]:
    """Sign-offs of R2 and R3, of the bundled table or of another one."""
    source = None
    if content is not None:
        source = tmp_path / "table.json"
        source.write_text(json.dumps(content), encoding="utf-8")
    paths = import_published(source, runs_root=tmp_path / "runs", started=WHEN)
    return [judge_directory(path) for path in paths]


@pytest.fixture(scope="module")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> list[SignOff]:
    """Sign-offs of R2 and R3 of the bundled table, judged once."""
    return judged(tmp_path_factory.mktemp("bundled"))


def results(signoff: SignOff, criterion: str) -> dict[int | None, CriterionResult]:
    return {c.level: c for gate in signoff.gates for c in gate.criteria if c.criterion == criterion}


def percents(signoff: SignOff, criterion: str) -> dict[int | None, int]:
    """Values in whole percent, rounded as the publisher rounds them."""
    values = {level: c.measurement.value for level, c in results(signoff, criterion).items()}
    return {level: round(float(value or 0) * 100) for level, value in values.items()}


# --- the arithmetic -----------------------------------------------------------


def test_the_first_table_gives_the_published_figures_and_passes(bundled: list[SignOff]) -> None:
    r2, _r3 = bundled
    assert percents(r2, "ttft_reduction_vs_reference") == {8: 26, 16: 32, 32: 26}
    assert percents(r2, "throughput_gain_low_edge") == {8: 29, 16: 40, 32: 33}
    assert percents(r2, "throughput_gain_high_edge") == {8: 29, 16: 40, 32: 33}
    assert r2.verdict is Verdict.PASS


def test_the_second_table_gives_the_published_figures_and_passes(bundled: list[SignOff]) -> None:
    _r2, r3 = bundled
    assert percents(r3, "ttft_reduction_vs_reference") == {16: 30, 32: 26}
    assert percents(r3, "throughput_gain_low_edge") == {16: 35, 32: 36}
    assert r3.verdict is Verdict.PASS


def test_the_headline_of_the_publisher_is_met_to_the_percent(bundled: list[SignOff]) -> None:
    r2, _r3 = bundled
    headline = table()["r2_headline"]
    for key, criterion in (
        ("ttft_p50_reduction", "ttft_reduction_vs_reference"),
        ("throughput_gain", "throughput_gain_low_edge"),
    ):
        expected = {int(level): round(value * 100) for level, value in headline[key].items()}
        assert percents(r2, criterion) == expected


def test_a_candidate_ten_percent_slower_is_stopped(tmp_path: Path) -> None:
    content = table()
    for key in ("r2_tp8", "r3_tp4x2_whole_machine"):
        for row in content[key]:
            if row["arm"] == "fx100":
                row["ttft_p50_s"] *= 1.1
                row["throughput_tok_s"] /= 1.1
    r2, r3 = judged(tmp_path, content)
    assert (r2.verdict, r3.verdict) == (Verdict.STOP, Verdict.STOP)
    # 1 - 1.1 x 7.53 / 10.17
    value = results(r2, "ttft_reduction_vs_reference")[8].measurement.value
    assert value == pytest.approx(1 - 1.1 * 7.53 / 10.17, rel=1e-8)


# (candidate TTFT, reference TTFT, candidate rate, reference rate), verdicts of the three criteria
EDGES = [
    pytest.param((7.5, 10.0, 12.85, 10.0), "PASS PASS PASS", id="exactly 25 % and the low edge"),
    pytest.param((7.50001, 10.0, 13.0, 10.0), "STOP PASS PASS", id="24.9999 % is not 25 %"),
    pytest.param((7.0, 10.0, 12.8499, 10.0), "PASS STOP PASS", id="28.499 % rounds to 28"),
    pytest.param((7.0, 10.0, 14.05, 10.0), "PASS PASS PASS", id="exactly the high edge"),
    pytest.param((7.0, 10.0, 14.0501, 10.0), "PASS PASS STOP", id="40.501 % rounds to 41"),
]


@pytest.mark.parametrize(("figures", "verdicts"), EDGES)
def test_ratios_are_compared_unrounded(
    tmp_path: Path, figures: tuple[float, float, float, float], verdicts: str
) -> None:
    content = table()
    for row in content["r2_tp8"]:
        if row["concurrency"] == 8:
            which = 0 if row["arm"] == "fx100" else 1
            row["ttft_p50_s"], row["throughput_tok_s"] = figures[which], figures[which + 2]
    r2, _r3 = judged(tmp_path, content)
    names = ("ttft_reduction_vs_reference", "throughput_gain_low_edge", "throughput_gain_high_edge")
    assert " ".join(results(r2, name)[8].verdict.value for name in names) == verdicts


# --- no more than arithmetic --------------------------------------------------


def test_it_is_labelled_unsignable_and_no_check_is_applicable(
    bundled: list[SignOff],
) -> None:
    for signoff in bundled:
        assert (signoff.label, signoff.signable, signoff.profile) == (LABEL, False, "published")
        assert signoff.checks
        assert {(c.applicable, c.passed, c.failed) for c in signoff.checks} == {
            (False, False, False)
        }
        for gate in signoff.gates:
            for criterion in gate.criteria:
                measurement = criterion.measurement
                assert criterion.decide == "point"
                assert (measurement.n, measurement.low, measurement.high) == (1, None, None)
                assert "published" in measurement.estimator


@pytest.mark.parametrize("locale", ["en", "zh"])
def test_page_and_terminal_show_the_label(tmp_path: Path, locale: str) -> None:
    paths = import_published(None, runs_root=tmp_path, started=WHEN)
    signoff = judge_directory(paths[0])
    label = load(locale)(f"label.{LABEL}")
    page = render_html(signoff, read_provenance(paths[0]), locale=locale)
    assert label in page
    assert load(locale)("signature.refused") in page
    assert "CC-BY-4.0" in page  # whose figures they are
    print_signoff(signoff, Console(width=300, file=(shown := io.StringIO())), locale)
    assert label in shown.getvalue()


def test_a_point_that_was_not_published_is_no_measurement(tmp_path: Path) -> None:
    content = table()
    content["r2_tp8"] = [
        row for row in content["r2_tp8"] if (row["arm"], row["concurrency"]) != ("local_nvme", 16)
    ]
    r2, _r3 = judged(tmp_path, content)
    assert r2.verdict is Verdict.INCONCLUSIVE
    reasons = results(r2, "ttft_reduction_vs_reference")[16].reasons
    assert [reason.code for reason in reasons] == [ReasonCode.NO_MEASUREMENT]


def test_a_blank_figure_is_no_measurement_and_not_zero(tmp_path: Path) -> None:
    content = table()
    content["r2_tp8"][0]["throughput_tok_s"] = None
    r2, _r3 = judged(tmp_path, content)
    result = results(r2, "throughput_gain_high_edge")[8]
    assert result.measurement.value is None
    assert result.verdict is Verdict.INCONCLUSIVE
    assert results(r2, "ttft_reduction_vs_reference")[8].verdict is Verdict.PASS


def reseal(path: Path, changes: dict[str, Callable[[str], str]]) -> None:
    """Changes files of a run and makes every digest fit again, as a forger would."""
    for name, change in changes.items():
        file = path / name
        file.write_text(change(file.read_text(encoding="utf-8")), encoding="utf-8")

    def facts(file: Path) -> dict[str, Any]:
        content = file.read_bytes()
        return {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}

    seal = json.loads((path / "seal.json").read_text())
    for trial in (path / "trials").iterdir():
        manifest = json.loads((trial / "manifest.json").read_text())
        manifest["files"] = {name: facts(trial / name) for name in manifest["files"]}
        (trial / "manifest.json").write_text(canonical_json(manifest))
        seal["trials"][trial.name] = facts(trial / "manifest.json")["sha256"]
    seal["plan"] = {name: facts(path / name) for name in seal["plan"]}
    (path / "seal.json").write_text(canonical_json(seal))


def test_a_forged_profile_can_neither_sign_it_nor_judge_it_otherwise(tmp_path: Path) -> None:
    path = import_published(None, runs_root=tmp_path, started=WHEN)[0]
    reseal(
        path,
        {
            "criteria.toml": lambda text: (
                text.replace("signable = false", "signable = true")
                .replace(f'label = "{LABEL}"', 'label = "acceptance test"')
                .replace('decide = "point"', 'decide = "exact"')
            )
        },
    )
    signoff = judge_directory(path)
    assert (signoff.signable, signoff.label) == (False, LABEL)
    assert signoff.verdict is Verdict.INCONCLUSIVE
    codes = {r.code for g in signoff.gates for c in g.criteria for r in c.reasons}
    assert codes == {ReasonCode.EVIDENCE_IMPORTED}


def test_measured_and_imported_trials_do_not_mix(tmp_path: Path) -> None:
    path = import_published(None, runs_root=tmp_path, started=WHEN)[0]
    reseal(path, {"campaign.toml": lambda text: text.replace('kind = "imported"\n', "")})
    signoff = judge_directory(path)
    assert signoff.verdict is Verdict.INCONCLUSIVE
    assert [r.code for r in signoff.gates[0].reasons] == [ReasonCode.EVIDENCE_MALFORMED]
    assert "imported and measured trials" in signoff.gates[0].reasons[0].text


def test_imported_arms_cannot_be_run(tmp_path: Path) -> None:
    path = import_published(None, runs_root=tmp_path, started=WHEN)[0]
    campaign, text = load_campaign(path / "campaign.toml")
    with pytest.raises(PlanError, match="allowed only in what `kvgate import` writes"):
        make_plan(campaign, text, model_config=model_config(ModelArchitecture()))


def test_an_arm_beside_measured_ones_cannot_be_imported(tmp_path: Path) -> None:
    text = edited(
        (
            '[arms.hbm_only]\nrole = "hbm_only"',
            '[arms.hbm_only]\nkind = "imported"\nrole = "hbm_only"',
        )
    )
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(PlanError, match="found kind = 'imported' beside others"):
        load_campaign(tmp_path / "c.toml")


# --- evidence -----------------------------------------------------------------


def test_judging_again_gives_the_same_bytes(tmp_path: Path) -> None:
    for path in import_published(None, runs_root=tmp_path, started=WHEN):
        first = write_verdict(path, judge_directory(path)).read_bytes()
        assert write_verdict(path, judge_directory(path)).read_bytes() == first
        assert read_verdict(path) == judge_directory(path)
        assert str(tmp_path).encode() not in first


def test_a_trial_holds_the_row_and_no_request(tmp_path: Path) -> None:
    path = import_published(None, runs_root=tmp_path, started=WHEN)[0]
    run = open_run(path)
    assert len(run.trials) == len(table()["r2_tp8"])
    trial = run.trials[-1]
    assert trial.id == "06-recompute-published_table-c16-r1"
    assert (trial.requests, trial.schedules, trial.server) == ((), (), None)
    assert trial.facts.figures == {"kind": "imported", "role": "recompute", "medium": None}
    readings = {s.name: s.value for s in trial.samples}
    assert readings["ttft_s_p50"] == 149.48
    assert readings["disk_read_bytes_per_s_max"] == 0.0
    assert readings["disk_read_bytes_per_s_busy_mean"] is None  # blank is not zero
    assert readings["ttft_s_p99"] is None
    (event,) = trial.events
    assert event.detail["row"]["cold_hits"] == "0"
    assert run.plan["import"]["table_sha256"] == hashlib.sha256(TABLE.read_bytes()).hexdigest()
    # 10.26 of the publisher's GB/s are 10.26e6 iostat kB of 1024 bytes.
    first = {s.name: s.value for s in run.trials[0].samples}
    assert first["disk_read_bytes_per_s_max"] == pytest.approx(10.26 * 1.024e9)


def test_an_edited_figure_is_named(tmp_path: Path) -> None:
    path = import_published(None, runs_root=tmp_path, started=WHEN)[0]
    file = path / "trials" / "00-fx100-published_table-c8-r1" / "samples.jsonl"
    file.write_text(file.read_text().replace("7.53", "7.03"))
    signoff = judge_directory(path)
    assert signoff.verdict is Verdict.INCONCLUSIVE
    assert [r.code for r in signoff.gates[0].reasons] == [ReasonCode.EVIDENCE_ALTERED]


def test_the_bundled_table_is_named_with_its_licence() -> None:
    content, _bytes = load_table()
    assert "CC-BY-4.0" in content.source
    for name in ("NOTICE", "harness/evidence/data/README.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert "published_results.json" in text
        assert "CC-BY-4.0" in text
        assert "Mingxin Technology" in text


# --- wrong input --------------------------------------------------------------


def without(*path: Any) -> Callable[[Any], None]:
    def change(content: Any) -> None:
        for key in path[:-1]:
            content = content[key]
        del content[path[-1]]

    return change


def setting(value: Any, *path: Any) -> Callable[[Any], None]:
    def change(content: Any) -> None:
        for key in path[:-1]:
            content = content[key]
        content[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("source"), "source: found"),
        (without("r2_tp8"), "r2_tp8: found"),
        (setting([], "r2_tp8"), "r2_tp8: found []"),
        (setting("7.53", "r2_tp8", 0, "ttft_p50_s"), "r2_tp8.0.ttft_p50_s: found '7.53'"),
        (setting(0, "r2_tp8", 0, "ttft_p50_s"), "r2_tp8.0.ttft_p50_s: found 0.0"),
        (setting(-1.0, "r2_tp8", 0, "throughput_tok_s"), "throughput_tok_s: found -1.0"),
        (setting(True, "r2_tp8", 0, "ttft_p50_s"), "ttft_p50_s: found True"),
        (setting(8.0, "r2_tp8", 0, "concurrency"), "concurrency: found 8.0"),
        (setting("../x", "r2_tp8", 0, "arm"), "arm: found '../x'"),
        (setting(1.0, "r2_tp8", 0, "speed"), "r2_tp8.0.speed: found 1.0"),
        (setting(16, "r2_tp8", 0, "concurrency"), "found fx100 at concurrency 16 more than once"),
    ],
)
def test_a_wrong_table_is_refused_naming_the_place(
    tmp_path: Path, change: Callable[[Any], None], message: str
) -> None:
    content = table()
    change(content)
    path = tmp_path / "table.json"
    path.write_text(json.dumps(content))
    with pytest.raises(PlanError) as error:
        import_published(path, runs_root=tmp_path / "runs", started=WHEN)
    assert message in str(error.value)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "text", ["", "[]", "NaN", '{"source": 1e999}', "\x00", "[" * 100_000, '{"a":1,"a":2}']
)
def test_what_is_no_table_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(PlanError, match=r"table\.json"):
        load_table(path)


# --- command line -------------------------------------------------------------


def test_the_command_line_imports_judges_and_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["import", "published", "--runs", str(tmp_path / "runs")])
    shown = capsys.readouterr().out
    assert code == 0
    assert shown.replace("\n", " ").count("not signable]") == 2
    assert len(list((tmp_path / "runs").glob("published-r[23]/*/report/signoff.html"))) == 2


def test_the_worst_of_both_tables_is_the_exit_code(tmp_path: Path) -> None:
    content = table()
    for row in content["r3_tp4x2_whole_machine"]:
        if row["arm"] == "fx100":
            row["ttft_p50_s"] *= 1.1
    path = tmp_path / "table.json"
    path.write_text(json.dumps(content))
    code = main(["import", "published", "--file", str(path), "--runs", str(tmp_path / "runs")])
    assert code == 1


def test_a_file_that_is_not_there_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["import", "published", "--file", str(tmp_path / "none.json")])
    assert code == 64
    assert "cannot read a published table" in capsys.readouterr().err
