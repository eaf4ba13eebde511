"""Records on disk, request bodies and the witness's arithmetic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.errors import EvidenceError, LoadError
from harness.load.recorder import RecordWriter, read_records
from harness.load.target import Target, build_bodies, check_size
from harness.load.witness import nearest_rank, released_together, send_lag_s_max, send_spread_s
from harness.records import Outcome, PlannedRequest, PromptRecipe, RequestRecord, Schedule
from workloads.prompts import token_ids


def record(seq: int, planned_ns: int = 0, sent_ns: int | None = None) -> RequestRecord:
    return RequestRecord(
        seq, 0, seq, "wave", 16, 4, planned_ns, Outcome.OK, sent_ns=sent_ns, token_ids=(1, 2)
    )


def request(seq: int, user: int, offset_ns: int | None = None, tokens: int = 16) -> PlannedRequest:
    recipe = PromptRecipe(1, seq, tokens, 512)
    return PlannedRequest(seq, user, seq, 0, recipe, 4, planned_offset_ns=offset_ns)


def test_records_are_appended_and_read_back_from_an_offset(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    with RecordWriter(path) as writer:
        writer.write(record(0))
    offset_bytes = path.stat().st_size
    with RecordWriter(path) as writer:
        writer.write(record(2))
        writer.write(record(1))
        assert read_records(path, offset_bytes=offset_bytes) == (record(2), record(1))
    assert read_records(path) == (record(0), record(2), record(1))


def test_a_torn_last_line_is_tolerated_only_in_an_unsealed_file(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    with RecordWriter(path) as writer:
        writer.write(record(0))
    whole = path.read_bytes()
    for kept in range(1, len(whole)):
        path.write_bytes(whole + whole[:kept])
        assert read_records(path, is_sealed=False) == (record(0),)
        with pytest.raises(EvidenceError, match="torn"):
            read_records(path)


def test_a_bad_line_is_an_error_even_in_an_unsealed_file(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_bytes(b'{"seq": 1}\n')
    with pytest.raises(EvidenceError, match="record 1"):
        read_records(path, is_sealed=False)


def test_the_body_forces_the_output_and_asks_for_everything_needed() -> None:
    schedule = Schedule("w", "wave", (request(5, 0),))
    assert json.loads(build_bodies(schedule, "m")[5]) == {
        "model": "m",
        "prompt": token_ids(schedule.requests[0].prompt),
        "max_tokens": 4,
        "min_tokens": 4,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "logprobs": 0,
    }
    plain = Schedule("w", "wave", (request(5, 0),), logprobs=False)
    assert "logprobs" not in json.loads(build_bodies(plain, "m")[5])


def test_equal_requests_share_one_body() -> None:
    twin = PlannedRequest(7, 1, 5, 1, request(5, 0).prompt, 4)
    bodies = build_bodies(Schedule("w", "wave", (request(5, 0), twin)), "m")
    assert bodies[5] is bodies[7]


def test_a_schedule_too_large_to_prepare_is_refused() -> None:
    with pytest.raises(LoadError, match="split the schedule"):
        check_size(Schedule("w", "wave", (request(0, 0, tokens=2**29),)))


@pytest.mark.parametrize(
    ("base_url", "completion", "probe"),
    [
        ("http://h:1", "http://h:1/v1/completions", "http://h:1/health"),
        ("http://h:1/v1/", "http://h:1/v1/completions", "http://h:1/health"),
        ("https://h/a/b", "https://h/a/b/v1/completions", "https://h/a/b/health"),
        ("https://h/a/v1", "https://h/a/v1/completions", "https://h/a/health"),
    ],
)
def test_base_paths(base_url: str, completion: str, probe: str) -> None:
    target = Target(base_url, "m")
    target.check()
    assert (target.completion_url, target.probe_url) == (completion, probe)


@pytest.mark.parametrize(
    ("base_url", "endpoint"),
    [
        ("127.0.0.1:8000", "completions"),
        ("ftp://h", "completions"),
        ("http://", "completions"),
        ("http://user:pass@h", "completions"),
        ("http://h?key=1", "completions"),
        ("http://h", "chat"),
    ],
)
def test_targets_that_cannot_be_used_are_refused(base_url: str, endpoint: str) -> None:
    with pytest.raises(LoadError):
        Target(base_url, "m", endpoint).check()


@pytest.mark.parametrize(
    ("values", "ratio", "expected"),
    [
        ([], 0.99, None),
        ([3.0], 0.99, 3.0),
        ([1.0, 2.0], 0.5, 1.0),
        ([float(i) for i in range(1, 17)], 0.9, 15.0),
    ],
)
def test_nearest_rank(values: list[float], ratio: float, expected: float | None) -> None:
    assert nearest_rank(values, ratio) == expected


def test_send_lag_and_spread() -> None:
    schedule = Schedule(
        "w", "wave", (request(0, 0), request(1, 1, 0), request(2, 0), request(3, 2, 5))
    )
    records = [record(0, 0, 10**9), record(1, 0, 3 * 10**9), record(2, 0, 9 * 10**9), record(3)]
    assert released_together(schedule.requests) == {0, 1}
    assert send_spread_s(schedule, records) == 2.0
    assert send_lag_s_max(records) == 9.0
    assert send_lag_s_max([record(0)]) is None
    assert send_spread_s(schedule, [record(0)]) is None
