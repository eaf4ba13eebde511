"""Hand-written streams with answers worked out by hand, replayed through parser and interpreter."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.load.completion import CompletionStream
from harness.load.outcome import End, Exchange, classify, record_of
from harness.load.sse import SseParser
from harness.records import ErrorKind, Outcome, PlannedRequest, PromptRecipe, RequestRecord

MS = 1_000_000
PLANNED = PlannedRequest(3, 1, 9, 0, PromptRecipe(1, 9, 16, 512), output_tokens=4)
DONE = b"data: [DONE]\n\n"


def event(message: Any) -> bytes:
    return b"data: " + json.dumps(message).encode() + b"\n\n"


def text(piece: str, finish: str | None = None, **fields: Any) -> bytes:
    return event({"choices": [{"index": 0, "text": piece, "finish_reason": finish, **fields}]})


def delta(finish: str | None = None, **fields: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]})


def usage(prompt: int | None = 16, completion: int | None = 4, **fields: Any) -> bytes:
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, **fields}
    return event({"choices": [], "usage": counts})


GOOD = [text("a"), text("b"), text("c"), text("d", "length"), usage(), DONE]


def replay(*timed: tuple[int, bytes]) -> CompletionStream:
    parser, stream = SseParser(), CompletionStream()
    for t_ms, chunk in timed:
        for item in parser.feed(chunk):
            stream.fold(t_ms * MS, item)
    stream.end(parser.close())
    return stream


def replay_all(chunks: list[bytes]) -> CompletionStream:
    return replay(*((10 * i, chunk) for i, chunk in enumerate(chunks)))


def verdict(
    chunks: list[bytes], *, end: End = End.COMPLETE, status: int | None = 200, logprobs: bool = True
) -> tuple[Outcome, ErrorKind | None]:
    exchange = Exchange(0, sent_ns=0, http_status=status, end=end, end_detail="lost")
    return classify(PLANNED, exchange, replay_all(chunks), logprobs=logprobs)[:2]


def failed(kind: ErrorKind) -> tuple[Outcome, ErrorKind]:
    return Outcome.FAILED, kind


def test_a_good_stream_is_ok() -> None:
    assert verdict(GOOD) == (Outcome.OK, None)


def test_the_role_chunk_is_not_the_first_token() -> None:
    stream = replay(
        (0, delta(role="assistant", content="")),
        (500, delta(content="hello")),
        (520, delta("stop")),
        (521, usage()),
        (521, DONE),
    )
    assert (stream.first_event_ns, stream.first_token_ns, stream.last_token_ns) == (
        0,
        500 * MS,
        500 * MS,
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"content": "x"},
        {"reasoning_content": "x"},
        {"reasoning": "x"},
        {"reasoning_details": [{"text": "x"}]},
        {"reasoning_details": [{"type": "summary", "summary": "x"}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "x"}}]},
    ],
)
def test_the_first_token_may_come_on_any_channel(fields: dict[str, Any]) -> None:
    stream = replay((0, delta(role="assistant", content=None)), (100, delta(**fields)))
    assert stream.first_token_ns == 100 * MS
    assert stream.text == "x"


@pytest.mark.parametrize(
    "fields",
    [
        {"content": ""},
        {"content": None, "reasoning": None},
        {"reasoning_details": []},
        {"tool_calls": [{"index": 0, "function": {"arguments": ""}}]},
        {},
    ],
)
def test_an_empty_delta_is_no_token(fields: dict[str, Any]) -> None:
    assert replay((5, delta(**fields))).first_token_ns is None


def test_several_tokens_in_a_chunk_are_counted_from_their_ids() -> None:
    stream = replay(
        (0, text("", token_ids=[])),
        (10, text("ab", token_ids=[5, 6])),
        (20, text("", token_ids=[7])),
        (30, text("cd", "length", token_ids=[])),
    )
    assert (stream.token_ns, stream.token_counts) == ([10 * MS, 20 * MS], [2, 1])
    assert stream.token_ids == [5, 6, 7]
    assert stream.output_digest == hashlib.sha256(b"[5,6,7]").hexdigest()


def test_without_ids_each_chunk_with_text_counts_one_and_the_text_is_digested() -> None:
    stream = replay_all(GOOD)
    assert stream.token_counts == [1, 1, 1, 1]
    assert stream.completion_tokens == 4
    assert stream.output_digest == hashlib.sha256(b"abcd").hexdigest()


def test_chunks_without_usage_give_no_token_count() -> None:
    assert replay_all(GOOD[:4]).completion_tokens is None


@pytest.mark.parametrize(
    ("details", "cached"),
    [
        ({}, None),
        ({"prompt_tokens_details": None}, None),
        ({"prompt_tokens_details": {}}, None),
        ({"prompt_tokens_details": {"cached_tokens": None}}, None),
        ({"prompt_tokens_details": {"cached_tokens": 0}}, 0),
        ({"prompt_tokens_details": {"cached_tokens": 12}}, 12),
    ],
)
def test_absent_cached_tokens_are_not_zero(details: dict[str, Any], cached: int | None) -> None:
    assert replay_all([usage(**details)]).cached_tokens == cached


def test_usage_in_every_chunk_ends_with_the_last() -> None:
    chunks = [
        event({"choices": [{"text": "a"}], "usage": {"prompt_tokens": 16, "completion_tokens": n}})
        for n in (1, 2)
    ]
    assert replay_all(chunks).completion_tokens == 2


def test_log_probabilities_of_both_endpoints() -> None:
    completions = text("a", logprobs={"token_logprobs": [-0.25], "tokens": ["a"]})
    chat = event(
        {"choices": [{"delta": {"content": "a"}, "logprobs": {"content": [{"logprob": -1}]}}]}
    )
    assert replay_all([completions, chat]).logprobs == [-0.25, -1.0]


CASES: dict[str, tuple[list[bytes], tuple[Outcome, ErrorKind]]] = {
    "error first": ([event({"error": {"message": "x"}}), DONE], failed(ErrorKind.SERVER_ERROR)),
    "error mid": (
        [*GOOD[:2], event({"error": "x"}), *GOOD[2:]],
        failed(ErrorKind.SERVER_ERROR),
    ),
    "old vLLM error object": (
        [event({"object": "error", "message": "x"}), DONE],
        failed(ErrorKind.SERVER_ERROR),
    ),
    "error after done": ([*GOOD, event({"error": "x"})], failed(ErrorKind.SERVER_ERROR)),
    "finish reason error": (
        [*GOOD[:3], text("d", "error"), usage(), DONE],
        failed(ErrorKind.SERVER_ERROR),
    ),
    "finish reason abort": (
        [*GOOD[:3], text("d", "abort"), usage(), DONE],
        failed(ErrorKind.SERVER_ERROR),
    ),
    "truncated after three chunks": (GOOD[:3], failed(ErrorKind.TRUNCATED)),
    "truncated before done": (GOOD[:5], failed(ErrorKind.TRUNCATED)),
    "cut inside done": ([*GOOD[:5], b"data: [DON"], failed(ErrorKind.TRUNCATED)),
    "no finish reason": ([*GOOD[:3], text("d"), usage(), DONE], failed(ErrorKind.TRUNCATED)),
    "empty stream": ([], failed(ErrorKind.EMPTY)),
    "comments only": ([b": ping\n\n"], failed(ErrorKind.EMPTY)),
    "done only": ([DONE], failed(ErrorKind.EMPTY)),
    "finish reason but no token": (
        [text("", "length"), usage(completion=0), DONE],
        failed(ErrorKind.EMPTY),
    ),
    "usage missing": ([*GOOD[:4], DONE], failed(ErrorKind.MALFORMED)),
    "usage incomplete": (
        [*GOOD[:4], usage(completion=None), DONE],
        failed(ErrorKind.MALFORMED),
    ),
    "one token short": ([*GOOD[:4], usage(completion=3), DONE], failed(ErrorKind.SHORT)),
    "one token too many": ([*GOOD[:4], usage(completion=5), DONE], failed(ErrorKind.MALFORMED)),
    "prompt one longer": (
        [*GOOD[:4], usage(prompt=17), DONE],
        failed(ErrorKind.WRONG_PROMPT_LENGTH),
    ),
    "not JSON": ([b"data: {oops\n\n", *GOOD], failed(ErrorKind.MALFORMED)),
    "NaN": ([b'data: {"x": NaN}\n\n', *GOOD], failed(ErrorKind.MALFORMED)),
    "not an object": ([b"data: 7\n\n", *GOOD], failed(ErrorKind.MALFORMED)),
    "token after done": ([*GOOD, text("e")], failed(ErrorKind.MALFORMED)),
    "null log probability": (
        [text("a", logprobs={"token_logprobs": [None]}), *GOOD[1:]],
        failed(ErrorKind.MALFORMED),
    ),
    "ids disagree with usage": (
        [text("a", token_ids=[1, 2]), *GOOD[1:]],
        failed(ErrorKind.MALFORMED),
    ),
    "fewer log probabilities than tokens": (
        [text("a", logprobs={"token_logprobs": [-1.0]}), *GOOD[1:]],
        failed(ErrorKind.MALFORMED),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_not_a_complete_answer_is_a_failure(name: str) -> None:
    chunks, expected = CASES[name]
    assert verdict(chunks) == expected


@pytest.mark.parametrize(
    "last",
    [DONE, b"data:[DONE]\r\n\r\n", b"data: [DONE]\n", b"data: [DONE]", b"data:  [DONE] \n\n"],
)
def test_every_form_of_the_terminator_counts(last: bytes) -> None:
    assert verdict([*GOOD[:5], last]) == (Outcome.OK, None)


def test_usage_may_ride_on_the_last_choice() -> None:
    counts = {"prompt_tokens": 16, "completion_tokens": 4}
    last = event({"choices": [{"text": "d", "finish_reason": "length"}], "usage": counts})
    assert verdict([*GOOD[:3], last, DONE]) == (Outcome.OK, None)


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (End.RESET, failed(ErrorKind.RESET)),
        (End.CUT, failed(ErrorKind.TRUNCATED)),
        (End.NO_CONNECTION, failed(ErrorKind.CONNECT)),
        (End.TIMEOUT, (Outcome.UNKNOWN, ErrorKind.TIMEOUT)),
        (End.CANCELLED, (Outcome.UNKNOWN, ErrorKind.CANCELLED)),
    ],
)
def test_the_wire_decides_even_when_the_stream_looks_whole(
    end: End, expected: tuple[Outcome, ErrorKind]
) -> None:
    assert verdict(GOOD, end=end) == expected


@pytest.mark.parametrize("end", [End.COMPLETE, End.CUT, End.TIMEOUT])
def test_a_server_that_said_so_has_failed_whatever_the_wire_did(end: End) -> None:
    assert verdict([event({"error": "x"})], end=end) == failed(ErrorKind.SERVER_ERROR)
    assert verdict([], end=end, status=500) == failed(ErrorKind.HTTP_STATUS)


def test_what_was_never_sent_is_failed_not_unknown() -> None:
    result = classify(PLANNED, Exchange(0), CompletionStream(), logprobs=True)
    assert result == (Outcome.FAILED, ErrorKind.CANCELLED, "never sent")


def test_the_whole_record() -> None:
    ids = [text(c, token_ids=[i], logprobs={"token_logprobs": [-i]}) for i, c in enumerate("abc")]
    last = text("d", "length", token_ids=[3], logprobs={"token_logprobs": [-3]})
    stream = replay_all([*ids, last, usage(prompt_tokens_details={"cached_tokens": 8}), DONE])
    exchange = Exchange(1, 2, 3, 99, 200, "", End.COMPLETE, "")
    assert record_of(PLANNED, "wave", exchange, stream, logprobs=True) == RequestRecord(
        seq=3,
        user=1,
        session=9,
        phase="wave",
        prompt_tokens_planned=16,
        output_tokens_planned=4,
        planned_ns=1,
        outcome=Outcome.OK,
        sent_ns=2,
        headers_ns=3,
        first_event_ns=0,
        first_token_ns=0,
        last_token_ns=30 * MS,
        done_ns=99,
        http_status=200,
        finish_reason="length",
        prompt_tokens=16,
        completion_tokens=4,
        cached_tokens=8,
        output_digest=hashlib.sha256(b"[0,1,2,3]").hexdigest(),
        token_ids=(0, 1, 2, 3),
        logprobs=(-0.0, -1.0, -2.0, -3.0),
        token_ns=(0, 10 * MS, 20 * MS, 30 * MS),
        token_counts=(1, 1, 1, 1),
    )


def test_the_detail_is_cut_and_does_not_show_the_secret() -> None:
    exchange = Exchange(0, 0, 0, 0, 401, "bad key s3cret " * 100, End.COMPLETE, "")
    record = record_of(PLANNED, "w", exchange, CompletionStream(), logprobs=True, secret="s3cret")
    assert record.error_detail is not None
    assert len(record.error_detail) == 500
    assert "s3cret" not in record.error_detail


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "choices",
                    "usage",
                    "delta",
                    "text",
                    "token_ids",
                    "logprobs",
                    "tool_calls",
                    "error",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(st.lists(st.one_of(JSON_VALUES.map(json.dumps), st.text(max_size=20)), max_size=6))
def test_no_event_makes_the_interpreter_raise(events: list[str]) -> None:
    stream = CompletionStream()
    for t_ns, item in enumerate(events):
        stream.fold(t_ns, item)
    stream.end(None)
    assert verdict([])[0] is Outcome.FAILED
    assert stream.output_digest is None or len(stream.output_digest) == 64


# --- what is absent -------------------------------------------------------------------

ERROR_EVENTS = {
    "text": b"event: error\ndata: overloaded\n\n",
    "a token": b"event: error\n" + text("e"),
    "null": b"event: error\ndata: null\n\n",
    "the terminator": b"event: error\n" + DONE,
    "no data": b"event: error\n\n",
    "cut off": b"event: error\n",
    "an empty error object": event({"error": {}}),
    "an empty error text": event({"error": ""}),
}


@pytest.mark.parametrize("name", ERROR_EVENTS)
def test_an_error_event_is_an_error_whatever_its_data(name: str) -> None:
    assert verdict([*GOOD, ERROR_EVENTS[name]]) == failed(ErrorKind.SERVER_ERROR)


@pytest.mark.parametrize("said", [None, False])
def test_no_error_is_no_error(said: Any) -> None:
    assert verdict([event({"error": said, "choices": []}), *GOOD]) == (Outcome.OK, None)


@pytest.mark.parametrize(
    "later",
    [
        {"prompt_tokens": 16, "completion_tokens": 4},
        {"prompt_tokens": 16, "completion_tokens": 4, "prompt_tokens_details": None},
        {"prompt_tokens": 16, "completion_tokens": 4, "prompt_tokens_details": {}},
        {"prompt_tokens_details": {"cached_tokens": None}},
        {"prompt_tokens": None, "completion_tokens": None},
        {},
    ],
)
def test_a_later_usage_takes_nothing_back(later: dict[str, Any]) -> None:
    told = usage(prompt_tokens_details={"cached_tokens": 8})
    stream = replay_all([*GOOD[:4], told, event({"choices": [], "usage": later}), DONE])
    counts = (stream.prompt_tokens, stream.completion_tokens, stream.cached_tokens)
    assert counts == (16, 4, 8)


def test_a_later_count_replaces_an_earlier_one() -> None:
    first, last = (usage(prompt_tokens_details={"cached_tokens": n}) for n in (8, 0))
    assert replay_all([*GOOD[:4], first, last, DONE]).cached_tokens == 0


@pytest.mark.parametrize("details", [[], 0, False, "", True])
def test_details_that_are_no_object_are_malformed(details: Any) -> None:
    stream = replay_all([usage(prompt_tokens_details=details)])
    assert stream.malformed is not None
    assert stream.cached_tokens is None
