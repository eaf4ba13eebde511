"""Exports: the identities of a `vllm bench serve` result, blank cells, readable JUnit."""

from __future__ import annotations

import csv
import io
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from harness.cli.main import main
from harness.errors import EvidenceError, PlanError
from harness.evidence.exports import _result, export_junit, export_requests, junit_xml
from harness.records import ErrorKind, Outcome, RequestRecord, TrialFacts
from harness.run.judging import judge_directory
from harness.verdicts import GateVerdict, Reason, ReasonCode, SignOff, Verdict
from tests.campaign_text import SMALL_CAMPAIGN
from tests.sealed_runs import Doctor, build_run, demo_plan, replace_record

S = 1_000_000_000


def request(
    seq: int, sent_s: float, ttft_s: float, gaps: int = 10, **changes: Any
) -> RequestRecord:
    """A request of 1,000 prompt tokens whose tokens come 20 ms apart, two in each chunk."""
    sent = int(sent_s * S)
    stamps = tuple(sent + int(ttft_s * S) + i * 20_000_000 for i in range(gaps + 1))
    record = RequestRecord(
        seq=seq,
        user=seq,
        session=seq,
        phase="wave",
        prompt_tokens_planned=1000,
        output_tokens_planned=2 * (gaps + 1),
        planned_ns=sent,
        outcome=Outcome.OK,
        sent_ns=sent,
        first_token_ns=stamps[0],
        last_token_ns=stamps[-1],
        done_ns=stamps[-1],
        prompt_tokens=1000,
        completion_tokens=2 * (gaps + 1),
        token_ns=stamps,
        token_counts=(2,) * len(stamps),
    )
    return replace_record(record, **changes)


def failed(seq: int, sent_s: float) -> RequestRecord:
    """As the sample of the format shows one: refused by the server."""
    return request(
        seq,
        sent_s,
        0.0,
        outcome=Outcome.FAILED,
        error_kind=ErrorKind.HTTP_STATUS,
        error_detail="Service Unavailable",
        first_token_ns=None,
        last_token_ns=None,
        completion_tokens=None,
        prompt_tokens=None,
        token_ns=(),
        token_counts=(),
        done_ns=int(sent_s * S) + S,
    )


# --- vllm bench serve ---------------------------------------------------------


def test_means_are_over_completed_requests_only() -> None:
    # 500 and 700 ms and one failure: 600 ms of two, not 400 ms of three.
    found = _result([[request(0, 100.0, 0.5), request(1, 100.0, 0.7), failed(2, 105.0)]])
    assert (found["completed"], found["failed"]) == (2, 1)
    assert found["mean_ttft_ms"] == pytest.approx(600.0)
    assert found["median_ttft_ms"] == pytest.approx(600.0)
    assert found["std_ttft_ms"] == pytest.approx(100.0)
    assert found["p99_ttft_ms"] == pytest.approx(698.0)  # linear: 500 + 0.99 x 200


def test_a_failed_request_is_zero_empty_and_named_in_the_lists() -> None:
    found = _result([[request(0, 100.0, 0.5), failed(1, 105.0)]])
    assert found["ttfts"] == [0.5, 0.0]
    assert found["output_lens"] == [22, 0]
    assert found["itls"][1] == []
    assert found["latencies"][1] == 0.0
    assert found["input_lens"] == [1000, 1000]
    assert found["errors"] == ["", "http_status: Service Unavailable"]
    assert found["start_times"] == [0.0, 5.0]
    assert found["total_input_tokens"] == 1000  # the failed one's are not counted


def test_lists_are_seconds_and_summaries_milliseconds() -> None:
    found = _result([[request(0, 100.0, 0.5)]])
    assert found["itls"] == [pytest.approx([0.02] * 10)]
    assert found["mean_itl_ms"] == pytest.approx(20.0)
    # 10 gaps of 20 ms over 21 tokens after the first: chunks are not tokens.
    assert found["mean_tpot_ms"] == pytest.approx(200 / 21)
    assert len(found["itls"][0]) + 1 != found["output_lens"][0]
    assert found["mean_e2el_ms"] == pytest.approx(700.0)
    assert found["duration"] == pytest.approx(0.7)
    assert found["output_throughput"] == pytest.approx(22 / 0.7)
    assert found["total_token_throughput"] == pytest.approx(1022 / 0.7)


def test_the_busiest_second_counts_chunks_and_requests() -> None:
    # Starts 100.0 and 100.5; both answer from 0.5 s on for 0.2 s: chunks at 0.5..0.7 and 1.0..1.2.
    found = _result([[request(0, 100.0, 0.5), request(1, 100.5, 0.5)]])
    assert found["max_output_tokens_per_s"] == 11.0
    assert found["max_concurrent_requests"] == 2


def test_waves_add_up_without_the_time_between_them() -> None:
    found = _result([[request(0, 100.0, 0.5)], [request(0, 900.0, 0.5)]])
    assert found["duration"] == pytest.approx(1.4)
    assert found["max_concurrent_requests"] == 1


def test_without_a_completed_request_there_is_no_mean_of_zero() -> None:
    found = _result([[failed(0, 1.0)]])
    assert found["mean_ttft_ms"] is None
    assert found["p99_tpot_ms"] is None
    assert (found["completed"], found["failed"]) == (0, 1)


def first_fails(facts: TrialFacts, record: RequestRecord) -> RequestRecord:
    """The first request of each wave of the tiered arm fails."""
    if facts.arm != "tiered_disk" or record.phase != "wave" or record.seq:
        return record
    return replace_record(
        record,
        outcome=Outcome.FAILED,
        error_kind=ErrorKind.TRUNCATED,
        error_detail="=HYPERLINK(1)\x01",
        first_token_ns=None,
        last_token_ns=None,
        completion_tokens=None,
        token_ids=(),
        logprobs=(),
        token_ns=(),
        token_counts=(),
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run in which some requests fail."""
    root = tmp_path_factory.mktemp("run")
    return build_run(root, Doctor(record=first_fails), demo_plan(SMALL_CAMPAIGN))


def test_one_file_per_arm_and_level_keeps_the_identities(run: Path, tmp_path: Path) -> None:
    paths = export_requests(run, "vllm-bench", tmp_path)
    assert sorted(path.name for path in paths) == sorted(
        f"{arm}-c{level}.json"
        for arm in ("tiered_disk", "hbm_only", "recompute")
        for level in (1, 2)
    )
    for path in paths:
        found = json.loads(path.read_text())
        assert found["completed"] + found["failed"] == found["num_prompts"]
        assert found["num_prompts"] == 3 * found["max_concurrency"]  # three waves
        lists = ("input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times")
        for name in (*lists, "generated_texts", "errors"):
            assert len(found[name]) == found["num_prompts"], name
        good = [t for t, error in zip(found["ttfts"], found["errors"], strict=True) if not error]
        assert len(good) == found["completed"]
        if good:
            assert found["mean_ttft_ms"] == pytest.approx(sum(good) / len(good) * 1000)
        assert found["request_rate"] == "inf"
    one = json.loads((tmp_path / "vllm-bench" / "tiered_disk-c1.json").read_text())
    assert (one["completed"], one["failed"], one["mean_ttft_ms"]) == (0, 3, None)
    assert one["date"] == "20261130-120000"


# --- CSV ----------------------------------------------------------------------


def test_every_request_is_a_row_and_absent_is_blank(run: Path, tmp_path: Path) -> None:
    (path,) = export_requests(run, "csv", tmp_path)
    rows = list(csv.DictReader(io.StringIO(path.read_text())))
    lines = sum(len(file.read_text().splitlines()) for file in run.glob("trials/*/requests.jsonl"))
    assert len(rows) == lines
    bad = [row for row in rows if row["outcome"] == "failed"]
    assert len(bad) == 6
    assert {row["ttft_s"] for row in bad} == {""}
    assert {row["error_kind"] for row in bad} == {"truncated"}
    assert "HYPERLINK" not in path.read_text()
    wave = next(r for r in rows if r["phase"] == "wave" and r["arm"] == "recompute")
    assert (wave["ttft_s"], wave["level"], wave["completion_tokens"]) == ("2.0", "1", "4")


# --- JUnit --------------------------------------------------------------------


def test_junit_has_a_case_per_criterion_with_value_and_bound(run: Path, tmp_path: Path) -> None:
    signoff = judge_directory(run)
    (path,) = export_junit(run, signoff, tmp_path)
    suites = ElementTree.parse(path).getroot().findall("testsuite")
    assert [suite.get("name") for suite in suites] == ["g1", "g3"]
    for suite, gate in zip(suites, signoff.gates, strict=True):
        cases = {case.get("name"): case for case in suite.findall("testcase")}
        assert list(cases) == [*(c.id for c in gate.criteria), "gate"]
        assert suite.get("tests") == str(len(cases))
        for criterion in gate.criteria:
            case = cases[criterion.id]
            found = {p.get("name"): p.get("value") for p in case.iter("property")}
            bound = criterion.bound
            assert found["bound"] == str(bound)
            assert found["verdict"] == criterion.verdict.value
            assert (case.find("failure") is None) == (criterion.verdict is Verdict.PASS)
        assert not list(suite.iter("skipped"))
    assert main(["export", str(run), "--format", "junit", "--out", str(tmp_path)]) == 0


def test_evidence_that_was_not_judged_is_a_failure_in_junit() -> None:
    text = junit_xml(
        SignOff(
            judge_version="1",
            campaign="c",
            profile="unknown",
            signable=False,
            label="l",
            verdict=Verdict.INCONCLUSIVE,
            causes=(),
            gates=(
                GateVerdict(
                    "evidence",
                    Verdict.INCONCLUSIVE,
                    (),
                    (Reason(ReasonCode.EVIDENCE_ALTERED, "a\x00b\ud800: altered"),),
                ),
            ),
            checks=(),
            cells=(),
            arms=(),
            differences=(),
            plan={},
            overrides=(),
            not_tested=(),
            evidence_digest=None,
            criteria_digest="",
        )
    )
    root = ElementTree.fromstring(text.encode())
    assert [f.text for f in root.iter("failure")] == ["evidence.altered: a\ufffdb\ufffd: altered"]


# --- where to -----------------------------------------------------------------


def test_exports_go_beside_the_report_and_leave_the_evidence_judgeable(tmp_path: Path) -> None:
    run = build_run(tmp_path, plan=demo_plan(SMALL_CAMPAIGN))
    before = judge_directory(run)
    for kind in ("csv", "vllm-bench", "junit"):
        assert main(["export", str(run), "--format", kind]) == 0
    assert (run / "report" / "junit.xml").is_file()
    assert judge_directory(run) == before


@pytest.mark.parametrize("inside", [".", "trials", "verdicts", "x"])
def test_a_sealed_run_is_not_written_into(run: Path, inside: str) -> None:
    with pytest.raises(PlanError, match="inside the sealed run"):
        export_requests(run, "csv", run / inside)


def test_altered_evidence_is_not_exported(tmp_path: Path) -> None:
    run = build_run(tmp_path, plan=demo_plan(SMALL_CAMPAIGN))
    (run / "plan.json").write_text("{}")
    with pytest.raises(EvidenceError, match=r"plan\.json: altered"):
        export_requests(run, "csv", tmp_path / "out")
    assert main(["export", str(run), "--format", "csv"]) == 64
