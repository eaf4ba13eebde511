"""Damaged input of every kind: a clear error or INCONCLUSIVE with a reason, never a traceback.

Nothing malformed passes. What a flipped byte or a forged but well-formed value may still do is said
at each test.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from harness.campaign.plan import make_plan
from harness.campaign.reading import load_campaign, load_criteria, parse_campaign, parse_criteria
from harness.cli.main import main
from harness.errors import HarnessError, PlanError
from harness.evidence.exports import junit_xml
from harness.evidence.lines import LineReader
from harness.evidence.published import import_published
from harness.evidence.results import read_provenance, write_verdict
from harness.records import (
    ErrorKind,
    MetricSample,
    Outcome,
    Record,
    RequestRecord,
    Schedule,
    canonical_json,
    parse_json,
)
from harness.run.judging import judge_directory
from harness.verdicts import ReasonCode, SignOff, Verdict
from reports.signoff import render_html
from reports.terminal import print_signoff
from tests.campaign_text import SMALL_CAMPAIGN
from tests.sealed_runs import build_run, demo_plan

FUZZ = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,  # the same examples everywhere: a failure here is a failure there
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
MODEL_CONFIG = demo_plan(SMALL_CAMPAIGN).model_config
ROOT = Path(__file__).resolve().parents[2]
TABLE = (ROOT / "harness" / "evidence" / "data" / "published_results.json").read_text(
    encoding="utf-8"
)
CRITERIA = load_criteria("cpu-demo")[1]

# Values of a wrong type or size for every field there is.
JUNK: list[Any] = [
    None,
    True,
    -1,
    2**70,
    10**400,
    1.5,
    1e308,
    "",
    "x",
    "\ud800",
    "\x00=1+1",
    [],
    [[]],
    {},
    {"a": {"b": [None]}},
]


class Altered:
    """A sealed run whose files a test may change; put back on leaving."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._saved: dict[Path, bytes] = {}

    def __enter__(self) -> Altered:
        return self

    def __exit__(self, *_: object) -> None:
        for file, content in self._saved.items():
            file.write_bytes(content)
        for folder in ("verdicts", "report"):
            shutil.rmtree(self.path / folder, ignore_errors=True)

    def write(self, file: Path, content: bytes) -> None:
        self._saved.setdefault(file, file.read_bytes())
        file.write_bytes(content)

    def reseal(self, file: Path) -> None:
        """Makes all digests fit again, so that the content itself must be refused."""
        seal = json.loads((self.path / "seal.json").read_text())
        if file.parent == self.path:
            seal["plan"][file.name] = _facts(file)
        else:
            manifest = file.parent / "manifest.json"
            content = json.loads(manifest.read_text())
            content["files"][file.name] = _facts(file)
            self.write(manifest, canonical_json(content).encode())
            seal["trials"][file.parent.name] = _facts(manifest)["sha256"]
        self.write(self.path / "seal.json", canonical_json(seal).encode())


def _facts(file: Path) -> dict[str, Any]:
    content = file.read_bytes()
    return {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}


def judged(path: Path, *, page: bool = False) -> SignOff:
    """Judges and writes what follows: all of it must survive what the evidence holds.

    ``page``: the HTML page too, whose charts take a second.
    """
    signoff = judge_directory(path)
    write_verdict(path, signoff)
    junit_xml(signoff)
    print_signoff(signoff, Console(file=io.StringIO()))
    if page:
        with contextlib.suppress(HarnessError):  # an unreadable provenance has its own error
            render_html(signoff, read_provenance(path)).encode("utf-8")
    codes = {r.code for g in signoff.gates for r in g.reasons}
    codes |= {r.code for g in signoff.gates for c in g.criteria for r in c.reasons}
    assert ReasonCode.JUDGE_FAILED not in codes, signoff.gates[0].reasons
    if signoff.verdict is not Verdict.PASS:
        assert codes
    return signoff


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small clean run."""
    return build_run(tmp_path_factory.mktemp("fuzz"), plan=demo_plan(SMALL_CAMPAIGN))


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first published table as imported evidence."""
    root = tmp_path_factory.mktemp("imported")
    return import_published(None, runs_root=root, started=datetime(2026, 7, 20, tzinfo=UTC))[0]


def files_of(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file())


# --- bytes --------------------------------------------------------------------


@FUZZ
@given(data=st.data())
def test_any_flipped_byte_of_any_file_is_found(sealed: Path, data: st.DataObject) -> None:
    files = [file for file in files_of(sealed) if file.stat().st_size]
    file = data.draw(st.sampled_from(files), label="file")
    content = bytearray(file.read_bytes())
    offset = data.draw(st.integers(0, len(content) - 1), label="offset")
    content[offset] ^= data.draw(st.integers(1, 255), label="bits")
    before = judge_directory(sealed).evidence_digest
    with Altered(sealed) as altered:
        altered.write(file, bytes(content))
        signoff = judged(sealed)
    if file.name == "seal.json" and signoff.verdict is Verdict.PASS:
        # Nothing seals the seal: its end time may change, and its digest, on the page, with it.
        assert signoff.evidence_digest != before
    else:
        assert signoff.verdict is Verdict.INCONCLUSIVE
        assert signoff.gates[0].gate == "evidence"


@FUZZ
@given(data=st.data())
def test_any_truncated_file_is_found(sealed: Path, data: st.DataObject) -> None:
    files = [file for file in files_of(sealed) if file.stat().st_size]
    file = data.draw(st.sampled_from(files), label="file")
    content = file.read_bytes()
    with Altered(sealed) as altered:
        altered.write(file, content[: data.draw(st.integers(0, len(content) - 1), label="size")])
        assert judged(sealed).verdict is Verdict.INCONCLUSIVE


def test_any_missing_or_added_file_is_named(sealed: Path) -> None:
    for file in files_of(sealed):
        content = file.read_bytes()
        file.unlink()
        try:
            signoff = judge_directory(sealed)
        finally:
            file.write_bytes(content)
        assert signoff.verdict is Verdict.INCONCLUSIVE, file
        if file.name != "seal.json":
            name = str(file.relative_to(sealed))
            assert name in signoff.gates[0].reasons[0].text
    for folder in (sealed, sealed / "trials", sorted((sealed / "trials").iterdir())[0]):
        (folder / "more.jsonl").write_text("{}\n")
        try:
            signoff = judge_directory(sealed)
        finally:
            (folder / "more.jsonl").unlink()
        assert "more.jsonl: added after sealing" in signoff.gates[0].reasons[0].text


# --- content, with digests that fit -------------------------------------------

RECORD_FILES = ("requests.jsonl", "samples.jsonl", "events.jsonl", "schedule.jsonl", "trial.json")


def places(value: Any, prefix: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value, by keys and indices; not below the first items of long lists."""
    yield prefix
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*prefix, key))
    elif isinstance(value, list):
        for index in range(min(len(value), 2)):
            yield from places(value[index], (*prefix, index))


def changed(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    """A copy with one place replaced; ``new`` is ... to remove it."""
    if not place:
        return None if new is ... else new
    copy = dict(value) if isinstance(value, dict) else list(value)
    if len(place) == 1 and new is ...:
        del copy[place[0]]
    else:
        copy[place[0]] = changed(value[place[0]], place[1:], new)
    return copy


def dumped(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def damage(data: st.DataObject, line: bytes) -> bytes:
    """A line that is surely no record: cut, not JSON, a key too many or too few, a wrong kind."""
    value = json.loads(line)
    kind = data.draw(
        st.sampled_from(["cut", "unknown", "missing", "type", "twice", "nan", "deep", "binary"]),
        label="damage",
    )
    key = data.draw(st.sampled_from(sorted(value)), label="key")
    if kind == "cut":
        return line[: data.draw(st.integers(1, len(line) - 2), label="cut")]
    if kind == "unknown":
        return dumped({**value, "surprise": 1})
    if kind == "missing":
        return dumped(changed(value, (key,), ...))
    if kind == "type":
        return dumped({**value, key: 5 if key in ("detail", "figures") else {"surprise": [1]}})
    if kind == "twice":
        return b"{" + dumped(key) + b":" + dumped(value[key]) + b"," + line.strip()[1:]
    if kind == "nan":
        return dumped({**value, key: 0.5}).replace(b"0.5", b"NaN", 1)
    if kind == "deep":
        return b"[" * 100_000
    return b"\xff\xfe" + line


@settings(FUZZ, max_examples=120)
@given(data=st.data())
def test_a_malformed_record_is_named_and_never_passes(sealed: Path, data: st.DataObject) -> None:
    names = [f for f in files_of(sealed) if f.name in RECORD_FILES and f.stat().st_size]
    file = data.draw(st.sampled_from(names), label="file")
    lines = file.read_bytes().splitlines()
    index = data.draw(st.integers(0, len(lines) - 1), label="line")
    lines[index] = damage(data, lines[index])
    with Altered(sealed) as altered:
        altered.write(file, b"\n".join(lines) + b"\n")
        altered.reseal(file)
        signoff = judged(sealed)
    assert signoff.verdict is Verdict.INCONCLUSIVE
    assert [r.code for r in signoff.gates[0].reasons] == [ReasonCode.EVIDENCE_MALFORMED]
    where = f"{file.parent.name}/{file.name}"
    assert where in signoff.gates[0].reasons[0].text
    assert str(sealed) not in signoff.gates[0].reasons[0].text


@settings(FUZZ, max_examples=120)
@given(data=st.data())
def test_any_value_anywhere_gives_a_verdict_with_reasons(
    sealed: Path, imported: Path, data: st.DataObject
) -> None:
    """Well-formed junk may be judged (a free-form note has no wrong value); it may not crash."""
    page = data.draw(st.sampled_from([False, False, False, True]), label="page")
    root = data.draw(st.sampled_from([sealed, imported]), label="run")
    names = [f for f in files_of(root) if f.suffix in (".json", ".jsonl") and f.stat().st_size]
    names = [f for f in names if f.name not in ("seal.json", "manifest.json")]
    file = data.draw(st.sampled_from(names), label="file")
    lines = file.read_bytes().splitlines()
    index = data.draw(st.integers(0, len(lines) - 1), label="line")
    value = json.loads(lines[index])
    place = data.draw(st.sampled_from(list(places(value))), label="place")
    junk = data.draw(st.sampled_from([..., *JUNK]), label="junk")
    lines[index] = dumped(changed(value, place, junk))
    with Altered(root) as altered:
        altered.write(file, b"\n".join(lines) + (b"\n" if file.suffix == ".jsonl" else b""))
        altered.reseal(file)
        judged(root, page=page)


FORGED: list[tuple[str, str, dict[str, Any], str]] = [
    (
        "no role, so no cold proof is asked",
        "*-tiered_disk-steady-*",
        {"role": None},
        "figures.role",
    ),
    ("another arm's role", "*-tiered_disk-steady-*", {"role": "hbm_only"}, "figures.role"),
    ("fewer bytes per token", "*-tiered_disk-*-c2-r1", {"kv_bytes_per_token": 1}, "kv_bytes"),
    (
        "fewer tokens to restore",
        "*-tiered_disk-*-c2-r1",
        {"cached_tokens_per_session": 0},
        "cached",
    ),
]


@pytest.mark.parametrize(
    ("pattern", "figures", "where"), [case[1:] for case in FORGED], ids=[case[0] for case in FORGED]
)
def test_a_trial_is_checked_against_the_plan_and_not_against_its_own_copy(
    sealed: Path, pattern: str, figures: dict[str, Any], where: str
) -> None:
    file = sorted(sealed.glob(f"trials/{pattern}"))[0] / "trial.json"
    facts = json.loads(file.read_text())
    facts["figures"].update(figures)
    with Altered(sealed) as altered:
        altered.write(file, dumped(facts))
        altered.reseal(file)
        signoff = judged(sealed)
    assert signoff.verdict is Verdict.INCONCLUSIVE
    assert where in signoff.gates[0].reasons[0].text


def test_a_trial_under_another_name_is_refused(sealed: Path) -> None:
    # A slow repetition that calls itself another one would be left out of the pairs.
    file = next(sealed.glob("trials/*-recompute-cold_recovery-c2-r2")) / "trial.json"
    with Altered(sealed) as altered:
        altered.write(file, dumped({**json.loads(file.read_text()), "repetition": 1}))
        altered.reseal(file)
        signoff = judged(sealed)
    assert "describes another trial" in signoff.gates[0].reasons[0].text


def test_requests_left_out_of_the_record_make_the_trial_incomplete(sealed: Path) -> None:
    # The slowest request of a wave dropped, with all counters as they were.
    file = next(sealed.glob("trials/*-tiered_disk-cold_recovery-c2-r2")) / "requests.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    wave = [line for line in lines if b'"phase":"wave"' in line]
    with Altered(sealed) as altered:
        altered.write(file, b"".join(line for line in lines if line != wave[-1]))
        altered.reseal(file)
        signoff = judged(sealed)
    (check,) = [c for c in signoff.checks if c.name == "complete" and not c.passed]
    assert check.found == "1 of 2 planned requests recorded"
    assert signoff.verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('baseline = "recompute"\n', "", "baseline: found none; measure ttft_reduction compares"),
        ("per_level = true\n", "", "per_level: found false; waves of several levels do not mix"),
        ('"ttft_reduction"', '"speed"', "measure: found 'speed'; allowed: "),
    ],
)
def test_criteria_that_nobody_can_compute_are_refused(
    sealed: Path, old: str, new: str, problem: str
) -> None:
    file = sealed / "criteria.toml"
    head, table, rest = file.read_text().partition(
        "[profiles.cpu-demo.criteria.ttft_reduction_vs_recompute]"
    )
    with Altered(sealed) as altered:
        altered.write(file, (head + table + rest.replace(old, new, 1)).encode())
        altered.reseal(file)
        signoff = judged(sealed)
    assert problem in signoff.gates[0].reasons[0].text
    assert [r.code for r in signoff.gates[0].reasons] == [ReasonCode.EVIDENCE_MALFORMED]


@settings(FUZZ, max_examples=80)
@given(data=st.data())
def test_any_value_in_seal_or_manifest_never_passes(sealed: Path, data: st.DataObject) -> None:
    names = [f for f in files_of(sealed) if f.name in ("seal.json", "manifest.json")]
    file = data.draw(st.sampled_from(names), label="file")
    value = json.loads(file.read_text())
    place = data.draw(st.sampled_from(list(places(value))), label="place")
    junk = data.draw(st.sampled_from([..., *JUNK]), label="junk")
    with Altered(sealed) as altered:
        altered.write(file, dumped(changed(value, place, junk)))
        if file.name == "manifest.json":
            seal = json.loads((sealed / "seal.json").read_text())
            seal["trials"][file.parent.name] = _facts(file)["sha256"]
            altered.write(sealed / "seal.json", canonical_json(seal).encode())
        signoff = judged(sealed)
    told = place in (("ended",), ("stopped",), ("format",)) or not place
    if not told:
        assert signoff.verdict is Verdict.INCONCLUSIVE


# --- campaign and criteria ----------------------------------------------------

LITERALS = (
    "true",
    "-1",
    "0",
    "1.5",
    "1e999",
    "nan",
    '"x"',
    '""',
    "[]",
    "[[]]",
    "{}",
    '{ a = { b = "c" } }',
    "2026-01-01",
    "9" * 5000,
    "9223372036854775807",
    "[" * 2000,
    '"\\ud800"',
    "",
)


def damaged_toml(data: st.DataObject, text: str) -> str:
    """Some lines removed, doubled, given another value, or with a character changed."""
    lines = text.splitlines()
    for _ in range(data.draw(st.integers(1, 3), label="changes")):
        index = data.draw(st.integers(0, len(lines) - 1), label="line")
        kind = data.draw(st.sampled_from(["drop", "double", "value", "value", "char"]), label="how")
        if kind == "drop":
            lines[index] = ""
        elif kind == "double":
            lines.insert(index, lines[index])
        elif kind == "value" and " = " in lines[index]:
            key = lines[index].split(" = ")[0]
            lines[index] = f"{key} = {data.draw(st.sampled_from(LITERALS), label='literal')}"
        elif lines[index]:
            at = data.draw(st.integers(0, len(lines[index]) - 1), label="at")
            char = data.draw(st.characters(codec="utf-8"), label="char")
            lines[index] = lines[index][:at] + char + lines[index][at + 1 :]
    return "\n".join([*lines, ""])


@settings(FUZZ, max_examples=200)
@given(data=st.data())
def test_a_damaged_campaign_is_planned_or_refused(data: st.DataObject, tmp_path: Path) -> None:
    text = damaged_toml(data, SMALL_CAMPAIGN)
    path = tmp_path / "campaign.toml"
    path.write_text(text, encoding="utf-8", newline="")
    with contextlib.suppress(PlanError):
        campaign, text = load_campaign(path)
        make_plan(campaign, text, model_config=MODEL_CONFIG)


@settings(FUZZ, max_examples=200)
@given(data=st.data())
def test_a_damaged_criteria_file_is_read_or_refused(data: st.DataObject) -> None:
    with contextlib.suppress(PlanError):
        parse_criteria(damaged_toml(data, CRITERIA), "cpu-demo")


@given(content=st.binary(max_size=200))
def test_bytes_are_no_campaign(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("bytes") / "campaign.toml"
    path.write_bytes(content)
    with pytest.raises(PlanError, match=r"campaign\.toml"):
        load_campaign(path)


@settings(FUZZ, max_examples=100)
@given(data=st.data())
def test_evidence_with_damaged_campaign_or_criteria_is_judged_or_refused(
    sealed: Path, data: st.DataObject
) -> None:
    """A looser bound is a bound like any other; what cannot be read is INCONCLUSIVE."""
    name = data.draw(st.sampled_from(["campaign.toml", "criteria.toml"]), label="file")
    text = damaged_toml(data, (sealed / name).read_text(encoding="utf-8"))
    readable = True
    try:
        if name == "campaign.toml":
            parse_campaign(text)
        else:
            parse_criteria(text, "cpu-demo")
    except PlanError:
        readable = False
    with Altered(sealed) as altered:
        altered.write(sealed / name, text.encode("utf-8"))
        altered.reseal(sealed / name)
        signoff = judged(sealed)
    if not readable:
        assert signoff.verdict is Verdict.INCONCLUSIVE


# --- imports ------------------------------------------------------------------


@settings(FUZZ, max_examples=100)
@given(data=st.data())
def test_a_damaged_table_is_imported_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    table = json.loads(TABLE)
    place = data.draw(st.sampled_from(list(places(table))), label="place")
    junk = data.draw(st.sampled_from([..., *JUNK]), label="junk")
    root = tmp_path_factory.mktemp("table")
    path = root / "table.json"
    path.write_bytes(dumped(changed(table, place, junk)))
    try:
        runs = import_published(path, runs_root=root, started=datetime(2026, 7, 20, tzinfo=UTC))
    except PlanError as error:
        found = str(error)
    else:
        found = ""
    if found:
        assert "table.json" in found
        return
    for run in runs:
        signoff = judged(run)
        assert (signoff.signable, signoff.label) == (False, "arithmetic of the published table")


@settings(FUZZ, max_examples=30)
@given(data=st.data())
def test_a_cut_table_is_refused(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "table.json"
    path.write_text(TABLE[: data.draw(st.integers(0, len(TABLE.rstrip()) - 1), label="size")])
    code, shown = told("import", "published", "--file", str(path), "--runs", str(tmp_path / "r"))
    assert code == 64
    assert "cannot read a published table" in shown


# --- command line -------------------------------------------------------------


def told(*arguments: str) -> tuple[int, str]:
    """Exit code and what was said."""
    text = io.StringIO()
    with contextlib.redirect_stderr(text), contextlib.redirect_stdout(text):
        code = main(arguments)
    return code, text.getvalue()


@settings(FUZZ, max_examples=40)
@given(data=st.data())
def test_no_verb_shows_a_traceback(sealed: Path, data: st.DataObject) -> None:
    files = [f for f in files_of(sealed) if f.stat().st_size]
    file = data.draw(st.sampled_from(files), label="file")
    lines = file.read_bytes().splitlines() or [b""]
    index = data.draw(st.integers(0, len(lines) - 1), label="line")
    junk = data.draw(st.sampled_from([b"", b"[]", b"null", b"\xff", b"{}", b'"x"']), label="junk")
    reseal = data.draw(st.booleans(), label="reseal")
    with Altered(sealed) as altered:
        lines[index] = junk
        altered.write(file, b"\n".join(lines))
        if reseal and file.name not in ("seal.json", "manifest.json"):
            altered.reseal(file)
        for verb in (
            ("judge", str(sealed)),
            ("report", str(sealed)),
            ("export", str(sealed), "--format", "junit"),
            ("export", str(sealed), "--format", "csv"),
            ("export", str(sealed), "--format", "vllm-bench"),
        ):
            code, shown = told(*verb)
            assert "Traceback" not in shown, shown
            assert code in (0, 1, 2, 64)


# --- the fast way to read lines -----------------------------------------------

_INTEGERS = st.integers(-(2**63) + 1, 2**63 - 1)
_FLOATS = st.floats(allow_nan=False, allow_infinity=False)
_TEXTS = st.text(max_size=12)
REQUESTS = st.builds(
    RequestRecord,
    seq=_INTEGERS,
    user=_INTEGERS,
    session=_INTEGERS,
    phase=_TEXTS,
    prompt_tokens_planned=_INTEGERS,
    output_tokens_planned=_INTEGERS,
    planned_ns=_INTEGERS,
    outcome=st.sampled_from(Outcome),
    sent_ns=st.none() | _INTEGERS,
    error_kind=st.none() | st.sampled_from(ErrorKind),
    error_detail=st.none() | _TEXTS,
    token_ids=st.lists(_INTEGERS, max_size=3).map(tuple),
    logprobs=st.lists(_FLOATS, max_size=3).map(tuple),
)
SAMPLES = st.builds(
    MetricSample,
    t_ns=_INTEGERS,
    mark=_TEXTS,
    source=_TEXTS,
    name=_TEXTS,
    value=st.none() | _FLOATS,
    labels=st.dictionaries(_TEXTS, _TEXTS, max_size=2),
    error=st.none() | _TEXTS,
)


@given(record=REQUESTS | SAMPLES)
def test_a_line_read_fast_is_the_record(record: Record) -> None:
    line = canonical_json(record).encode() + b"\n"
    assert LineReader(type(record))(line) == record


@given(
    record=REQUESTS | SAMPLES,
    cut=st.integers(0, 400),
    insert=st.binary(max_size=2) | st.sampled_from([b"0", b"-", b".", b"e9", b",", b"}", b" "]),
    drop=st.integers(0, 2),
)
def test_the_fast_way_takes_nothing_that_the_strict_way_refuses(
    record: Record, cut: int, insert: bytes, drop: int
) -> None:
    line = canonical_json(record).encode()
    at = cut % len(line)
    line = line[:at] + insert + line[at + drop :]
    reader = LineReader(type(record))
    if reader.match(line) is not None:
        assert reader(line) == type(record).from_json(parse_json(line.decode()))


def test_lines_of_a_clean_run_are_read_the_fast_way(sealed: Path) -> None:
    for name, kind in (
        ("requests.jsonl", RequestRecord),
        ("samples.jsonl", MetricSample),
        ("schedule.jsonl", Schedule),
    ):
        lines = [x for f in sealed.glob(f"trials/*/{name}") for x in f.read_bytes().splitlines()]
        assert lines
        matched = sum(LineReader(kind).match(line) is not None for line in lines)  # type: ignore[type-var]
        assert matched == len(lines)


def test_a_field_without_a_default_cannot_be_left_out() -> None:
    with pytest.raises(TypeError, match="seq has no default"):
        LineReader(RequestRecord, without=frozenset({"seq"}))
    record = RequestRecord(1, 2, 3, "wave", 4, 5, 6, Outcome.OK, token_ids=(1,), http_status=200)
    lean = LineReader(RequestRecord, without=frozenset({"token_ids"}))
    assert lean(canonical_json(record).encode()) == dataclasses.replace(record, token_ids=())
