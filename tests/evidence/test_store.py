"""The run directory: what is sealed can be read, and whatever happens to it afterwards is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from harness.errors import DigestMismatch, EvidenceError, Unsealed
from harness.evidence.results import read_provenance, read_verdict, write_report, write_verdict
from harness.evidence.store import RunWriter, TrialWriter, open_run, read_records, write_atomic
from harness.records import (
    Event,
    MetricSample,
    Outcome,
    PlannedRequest,
    PromptRecipe,
    RequestRecord,
    Schedule,
    ServerFacts,
    TrialFacts,
    canonical_json,
)
from harness.run.judging import judge_directory
from harness.verdicts import JUDGE_VERSION, ReasonCode, Verdict

STARTED = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)
FACTS = TrialFacts(0, "g3", "tiered", "cold_recovery", 1, 1)
SCHEDULE = Schedule(
    "cold_recovery",
    "wave",
    (PlannedRequest(0, 0, 3, 0, PromptRecipe(7, 3, 40, 512), 4, planned_offset_ns=0),),
)
SERVER = ServerFacts("tiered", "vllm", ("python",), {}, {"block_tokens": 16})


def request(seq: int, phase: str = "wave") -> RequestRecord:
    return RequestRecord(seq, 0, 3, phase, 40, 4, 1000 + seq, Outcome.OK)


def fill(writer: TrialWriter) -> None:
    """What a trial writes, requests of two phases out of order."""
    writer.add_schedule(SCHEDULE)
    for phase, seqs in (("wave", (1, 0)), ("reask", (0,))):
        lines = [canonical_json(request(seq, phase)) + "\n" for seq in seqs]
        writer.requests_path(phase).write_text("".join(lines))
    writer.add_samples([MetricSample(5, "cold", "prometheus", "x", None, error="absent")])
    writer.add_event(Event(6, "cold", {"ok": True}))
    writer.add_text("server.log", "started\n")
    writer.set_server(SERVER)
    writer.set_figures({"role": "tiered"})


def plan_run(root: Path) -> RunWriter:
    writer = RunWriter(root, "small", STARTED)
    writer.write_plan(
        campaign="format = 1\n",
        criteria="format = 1\n",
        plan={"gates": ["g3"]},
        provenance={"harness": "0"},
    )
    return writer


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A sealed run of one trial."""
    writer = plan_run(tmp_path)
    trial = writer.start_trial(FACTS)
    fill(trial)
    trial.seal()
    writer.seal(ended="2026-11-30T12:05:00+00:00", stopped=None)
    return writer.path


TRIAL = f"trials/{FACTS.id}"


# --- seal and open ----------------------------------------------------------


def test_a_sealed_run_is_read_back_as_it_was_written(run: Path) -> None:
    evidence = open_run(run)
    assert evidence.campaign_text == "format = 1\n"
    assert evidence.plan == {"gates": ["g3"]}
    assert evidence.stopped is None
    (trial,) = evidence.trials
    assert trial.id == FACTS.id
    assert trial.facts.figures == {"role": "tiered"}
    assert trial.schedules == (SCHEDULE,)
    assert trial.requests == (request(0, "reask"), request(0), request(1))
    assert trial.samples == (MetricSample(5, "cold", "prometheus", "x", None, error="absent"),)
    assert trial.events == (Event(6, "cold", {"ok": True}),)
    assert trial.server == SERVER


def test_a_run_is_named_by_campaign_and_time(run: Path, tmp_path: Path) -> None:
    assert run == tmp_path / "small" / "20261130T120000Z"


def test_two_runs_of_one_second_do_not_meet(tmp_path: Path) -> None:
    names = [RunWriter(tmp_path, "small", STARTED).path.name for _ in range(3)]
    assert names == ["20261130T120000Z", "20261130T120000Z-2", "20261130T120000Z-3"]


def test_a_trial_of_a_server_that_never_started_has_no_facts_of_it(tmp_path: Path) -> None:
    writer = plan_run(tmp_path)
    writer.start_trial(FACTS).seal()
    writer.seal(ended="", stopped="arm tiered: StartTimeout")
    evidence = open_run(writer.path)
    assert evidence.stopped == "arm tiered: StartTimeout"
    assert evidence.trials[0].server is None
    assert evidence.trials[0].requests == ()


def test_the_same_content_has_the_same_digest_anywhere(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    shutil.copytree(run, copy)
    assert open_run(copy).digest == open_run(run).digest


# --- tampering --------------------------------------------------------------


def flip_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def add_trial(run: Path) -> None:
    shutil.copytree(run / TRIAL, run / "trials" / "01-better")


TAMPERING: list[tuple[str, Callable[[Path], object], str]] = [
    (
        "one bit of a recorded request",
        lambda run: flip_byte(run / TRIAL / "requests.jsonl"),
        f"{TRIAL}/requests.jsonl: altered",
    ),
    (
        "one bit of the log",
        lambda run: flip_byte(run / TRIAL / "server.log"),
        f"{TRIAL}/server.log: altered",
    ),
    (
        "file cut short",
        lambda run: (run / TRIAL / "samples.jsonl").write_bytes(b""),
        f"{TRIAL}/samples.jsonl: altered",
    ),
    (
        "file removed",
        lambda run: (run / TRIAL / "events.jsonl").unlink(),
        f"{TRIAL}/events.jsonl: removed",
    ),
    (
        "file added to a trial",
        lambda run: (run / TRIAL / "requests-2.jsonl").write_text(""),
        f"{TRIAL}/requests-2.jsonl: added after sealing",
    ),
    (
        "file added to the run",
        lambda run: (run / "notes.txt").write_text(""),
        "notes.txt: added after sealing",
    ),
    ("trial added", add_trial, "trials/01-better: added after sealing"),
    (
        "file added beside the trials",
        lambda run: (run / "trials" / "x").write_text(""),
        "trials/x: added after sealing",
    ),
    (
        "trial removed",
        lambda run: shutil.rmtree(run / TRIAL),
        f"{TRIAL}/manifest.json: removed",
    ),
    (
        "manifest removed",
        lambda run: (run / TRIAL / "manifest.json").unlink(),
        f"{TRIAL}/manifest.json: removed",
    ),
    (
        "manifest altered",
        lambda run: flip_byte(run / TRIAL / "manifest.json"),
        f"{TRIAL}/manifest.json: altered",
    ),
    (
        "campaign altered",
        lambda run: (run / "campaign.toml").write_text("format = 1 \n"),
        "campaign.toml: altered",
    ),
    (
        "criteria altered",
        lambda run: (run / "criteria.toml").write_text("format = 1 \n"),
        "criteria.toml: altered",
    ),
    ("plan removed", lambda run: (run / "plan.json").unlink(), "plan.json: removed"),
    (
        "file replaced by a directory",
        lambda run: [(run / "plan.json").unlink(), (run / "plan.json").mkdir()],
        "plan.json: removed",
    ),
]


@pytest.mark.parametrize(
    ("tamper", "named"), [pytest.param(row[1], row[2], id=row[0]) for row in TAMPERING]
)
def test_tampering_is_named(tamper: Callable[[Path], object], named: str, run: Path) -> None:
    tamper(run)
    with pytest.raises(DigestMismatch) as error:
        open_run(run)
    assert error.value.problems == [named]


def test_a_manifest_rewritten_to_match_is_still_found(run: Path) -> None:
    log = run / TRIAL / "server.log"
    log.write_text("stopped\n")
    manifest = run / TRIAL / "manifest.json"
    content = json.loads(manifest.read_text())
    content["files"]["server.log"] = {"sha256": "0" * 64, "bytes": 8}
    manifest.write_text(canonical_json(content))
    with pytest.raises(DigestMismatch, match=r"manifest\.json: altered"):
        open_run(run)


def test_every_alteration_is_named_at_once(run: Path) -> None:
    flip_byte(run / TRIAL / "requests.jsonl")
    (run / TRIAL / "events.jsonl").unlink()
    (run / "notes.txt").write_text("")
    with pytest.raises(DigestMismatch) as error:
        open_run(run)
    assert sorted(error.value.problems) == [
        "notes.txt: added after sealing",
        f"{TRIAL}/events.jsonl: removed",
        f"{TRIAL}/requests.jsonl: altered",
    ]


def test_altered_evidence_is_inconclusive_naming_the_file(run: Path) -> None:
    flip_byte(run / TRIAL / "requests.jsonl")
    signoff = judge_directory(run)
    (reason,) = signoff.gates[0].reasons
    assert signoff.verdict is Verdict.INCONCLUSIVE
    assert reason.code is ReasonCode.EVIDENCE_ALTERED
    assert reason.text == f"{TRIAL}/requests.jsonl: altered"


# --- never finished ---------------------------------------------------------


def test_a_run_that_was_never_sealed(tmp_path: Path) -> None:
    writer = plan_run(tmp_path)
    writer.start_trial(FACTS).seal()
    with pytest.raises(Unsealed, match=r"no seal\.json"):
        open_run(writer.path)
    assert judge_directory(writer.path).gates[0].reasons[0].code is ReasonCode.EVIDENCE_UNSEALED


def test_a_trial_that_was_never_sealed(tmp_path: Path) -> None:
    writer = plan_run(tmp_path)
    fill(writer.start_trial(FACTS))
    writer.seal(ended="", stopped=None)
    with pytest.raises(DigestMismatch, match=f"{TRIAL}: was never sealed"):
        open_run(writer.path)


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(EvidenceError, match="no such run directory"):
        open_run(tmp_path / "none")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        pytest.param("{", "seal.json: ", id="not JSON"),
        pytest.param("[]", "format is not 1", id="not an object"),
        pytest.param('{"format":2}', "format is not 1; judge with its own version", id="newer"),
        pytest.param('{"format":1}', "not a seal: a key is missing", id="empty"),
        pytest.param(
            canonical_json(
                {
                    "format": 1,
                    "plan": dict.fromkeys(
                        ("campaign.toml", "criteria.toml", "plan.json", "provenance.json")
                    ),
                    "trials": None,
                    "ended": "",
                    "stopped": None,
                }
            ),
            "not a seal: TypeError",
            id="no trials",
        ),
    ],
)
def test_a_seal_that_is_none(text: str, reason: str, run: Path) -> None:
    (run / "seal.json").write_text(text)
    with pytest.raises(EvidenceError) as error:
        open_run(run)
    assert reason in str(error.value)
    assert judge_directory(run).gates[0].reasons[0].code is ReasonCode.EVIDENCE_MALFORMED


# --- malformed content ------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        pytest.param(b"{", "Expecting property name", id="cut off"),
        pytest.param(b"", "Expecting value", id="empty line"),
        pytest.param(b'{"t_ns": 1}', "Event: missing key 'kind'", id="key missing"),
        pytest.param(b'{"t_ns": 1, "kind": "a", "x": 1}', "unknown key 'x'", id="key unknown"),
        pytest.param(b'{"t_ns": NaN, "kind": "a"}', "NaN is not JSON", id="not a number"),
        pytest.param(b'{"t_ns": 1, "t_ns": 2, "kind": "a"}', "appears twice", id="key twice"),
        pytest.param(b'{"t_ns": 1, "kind": "\xff"}', "can't decode byte", id="not UTF-8"),
    ],
)
def test_a_malformed_line_is_named_with_its_number(
    line: bytes, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(canonical_json(Event(1, "a")).encode() + b"\n" + line + b"\n")
    with pytest.raises(EvidenceError) as error:
        list(read_records(path, Event))
    assert str(error.value).startswith(f"{path}:2: ")
    assert reason in str(error.value)


# --- after sealing ----------------------------------------------------------


def test_verdict_and_report_may_be_added_and_evidence_stays_good(run: Path) -> None:
    before = open_run(run).digest
    signoff = judge_directory(run)
    path = write_verdict(run, signoff)
    assert path == run / "verdicts" / f"{JUDGE_VERSION}.json"
    assert read_verdict(run) == signoff
    assert write_report(run, "<html>").read_text() == "<html>"
    assert open_run(run).digest == before


def test_a_verdict_is_the_same_bytes_each_time(run: Path) -> None:
    first = write_verdict(run, judge_directory(run)).read_bytes()
    assert write_verdict(run, judge_directory(run)).read_bytes() == first


def test_a_run_without_a_verdict_says_how_to_get_one(run: Path) -> None:
    with pytest.raises(EvidenceError, match=r"not judged yet; run `kvgate judge "):
        read_verdict(run)


def test_provenance_names_the_run_and_its_end(run: Path) -> None:
    assert read_provenance(run) == {
        "run": "not named in the evidence",
        "harness": "0",
        "ended": "2026-11-30T12:05:00+00:00",
    }


def test_a_renamed_directory_is_the_same_run(tmp_path: Path) -> None:
    """The run's name comes from what was sealed, never from where a copy lies."""
    (tmp_path / "plan.json").write_text('{"campaign": "site-a"}')
    (tmp_path / "provenance.json").write_text('{"started": "2026-11-30T12:00:07+00:00"}')
    renamed = tmp_path.rename(tmp_path.with_name("copy of something"))
    assert read_provenance(renamed)["run"] == "site-a/20261130T120007Z"


# --- atomic writes ----------------------------------------------------------


def test_an_atomic_write_replaces_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_atomic(path, "first, and longer")
    write_atomic(path, "second\r\n")
    assert path.read_bytes() == b"second\r\n"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_failed_write_keeps_the_old_file_and_leaves_no_partial(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_atomic(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomic(path, "new \ud800")  # half a character: fails in the middle of writing
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_write_onto_a_directory_leaves_no_partial(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_atomic(tmp_path / "a", "text")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
