"""The event parser: thirteen dialects at every chunk boundary, and bytes of any kind."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.load.sse import ErrorEvent, SseError, SseParser

A, B = '{"text":"hello world é漢😀"}', '{"usage":{"prompt_tokens":3}}'
SEPARATORS = '{"text":"a\u2028b\u2029c\u0085d"}'

DIALECTS: dict[str, tuple[str, list[str]]] = {
    "lf": (f"data: {A}\n\ndata: {B}\n\ndata: [DONE]\n\n", [A, B, "[DONE]"]),
    "crlf": (f"data: {A}\r\n\r\ndata: {B}\r\n\r\ndata: [DONE]\r\n\r\n", [A, B, "[DONE]"]),
    "cr": (f"data: {A}\r\rdata: {B}\r\rdata: [DONE]\r\r", [A, B, "[DONE]"]),
    "mixed line ends": (f"data: {A}\r\n\ndata: {B}\n\r\ndata: [DONE]\r\r\n", [A, B, "[DONE]"]),
    "comments": (f": ping\n\n:\n\ndata: {A}\n: ping\n\n: ping\n\ndata: [DONE]\n\n", [A, "[DONE]"]),
    "no space": (f"data:{A}\n\ndata:{B}\n\ndata:[DONE]\n\n", [A, B, "[DONE]"]),
    "second space is data": ("data:  x\n\n", [" x"]),
    "event id retry": (
        f"event: token\nid: 7\nretry: 10\ndata: {A}\n\nid\ndata: [DONE]\n\n",
        [A, "[DONE]"],
    ),
    "event without data": (f"event: ping\n\ndata: {A}\n\n", [A]),
    "multi-line data": (
        'data: {"text":\ndata: "x"}\n\ndata: [DONE]\n\n',
        ['{"text":\n"x"}', "[DONE]"],
    ),
    "unicode separators": (f"data: {SEPARATORS}\n\ndata: [DONE]\n\n", [SEPARATORS, "[DONE]"]),
    "byte order mark": (f"\ufeffdata: {A}\n\n", [A]),
    "done without blank line": (f"data: {A}\n\ndata: [DONE]\n", [A]),
    "empty data": ("data\n\ndata:\n\ndata: \n\n", ["", "", ""]),
}


def parse(*chunks: bytes) -> tuple[list[str], str | None]:
    parser = SseParser()
    events = [event for chunk in chunks for event in parser.feed(chunk)]
    return events, parser.close()


@pytest.mark.parametrize("name", DIALECTS)
def test_every_dialect_cut_at_every_byte_gives_the_same_events(name: str) -> None:
    text, events = DIALECTS[name]
    raw = text.encode()
    begun = "[DONE]" if name == "done without blank line" else None
    assert parse(raw) == (events, begun)
    for offset in range(len(raw) + 1):
        assert parse(raw[:offset], raw[offset:]) == (events, begun), offset
    assert parse(*(raw[i : i + 1] for i in range(len(raw)))) == (events, begun)


def test_an_event_is_given_out_with_the_chunk_that_ends_it() -> None:
    parser = SseParser()
    assert parser.feed(b"data: a\r\n\r") == ["a"]
    assert parser.feed(b"\ndata: b\n") == []
    assert parser.feed(b"\n") == ["b"]


@pytest.mark.parametrize(
    ("raw", "begun"),
    [
        (b"", None),
        (b"data: a\n\n", None),
        (b"data: a\n\n: pi", None),
        (b"data: a\n", "a"),
        (b"data: a", "a"),
        (b"dat", ""),
        (b"data: a\ndata: b", "a\nb"),
        (b"data: \xe6\xbc", "\ufffd"),
    ],
)
def test_close_tells_whether_the_stream_ended_inside_an_event(
    raw: bytes, begun: str | None
) -> None:
    assert parse(raw)[1] == begun


@pytest.mark.parametrize(
    "raw", [b"data: 12345678901\n\n", b"x" * 17, b"data:\n" * 17, b"data: 1\n" * 9]
)
def test_an_event_above_the_bound_is_an_error(raw: bytes) -> None:
    parser = SseParser(max_event_bytes=16)
    with pytest.raises(SseError):
        parser.feed(raw)


def test_the_bound_is_per_event() -> None:
    assert SseParser(max_event_bytes=16).feed(b"data: 12345\n\n" * 100) == ["12345"] * 100


def test_bytes_that_are_not_utf8_are_an_error() -> None:
    with pytest.raises(SseError, match="UTF-8"):
        SseParser().feed(b"data: \xff\n\n")


FRAGMENTS = st.sampled_from(
    [
        b"data",
        b":",
        b" ",
        b"\r",
        b"\n",
        b"\r\n",
        b"x",
        b"[DONE]",
        b"\xef\xbb\xbf",
        "é".encode(),
        b"\xff",
    ]
)


def outcome_of(chunks: list[bytes]) -> tuple[list[str], str | None]:
    parser = SseParser(max_event_bytes=64)
    events: list[str] = []
    try:
        for chunk in chunks:
            for event in parser.feed(chunk):
                events.append(event)
        return events, parser.close()
    except SseError:
        return [], "error"


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(FRAGMENTS, st.binary(max_size=8)), max_size=60), st.data())
def test_any_bytes_in_any_chunks_give_the_same_and_no_foreign_error(
    pieces: list[bytes], data: st.DataObject
) -> None:
    raw = b"".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=10)))
    edges = [0, *cuts, len(raw)]
    chunks = [raw[a:b] for a, b in itertools.pairwise(edges)]
    assert outcome_of(chunks) == outcome_of([raw])


ERRORS: dict[str, tuple[str, list[str]]] = {
    "with text": ("event: error\ndata: overloaded\n\n", ["overloaded"]),
    "with JSON that looks like a token": (f"event:error\ndata: {A}\n\n", [A]),
    "after its data": (f"data: {A}\nevent: error\n\n", [A]),
    "with the terminator as data": ("event: error\ndata: [DONE]\n\n", ["[DONE]"]),
    "without data": ("event: error\n\n", [""]),
    "carriage returns": ("event: error\r\rdata: x\r\r", ["", "x"]),
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_event_is_told_apart_whatever_its_data(name: str) -> None:
    text, events = ERRORS[name]
    raw = text.encode()
    for chunks in ([raw], [raw[i : i + 1] for i in range(len(raw))], [raw[:9], raw[9:]]):
        found, begun = parse(*chunks)
        assert found == events
        assert isinstance(found[0], ErrorEvent)
        assert begun is None


def test_the_type_of_one_event_is_not_that_of_the_next() -> None:
    found, _ = parse(b"event: error\ndata: a\n\n", b"data: b\n\n")
    assert [isinstance(event, ErrorEvent) for event in found] == [True, False]
    # The usual case is told apart by its bytes alone: a type that came before must not get lost.
    found, _ = parse(b"data: a\n\n", b"event: error\n", b"data: b\n\n")
    assert [isinstance(event, ErrorEvent) for event in found] == [False, True]
    # The last type line of an event counts, and an event without data ends the type as well.
    found, _ = parse(b"event: error\nevent: token\ndata: a\n\nevent: x\n\ndata: b\n\n")
    assert found == ["a", "b"]
    assert not any(isinstance(event, ErrorEvent) for event in found)


@pytest.mark.parametrize("raw", [b"event: error\n", b"event: error\ndata: half", b"event: error"])
def test_a_stream_that_ends_inside_an_error_event_tells_the_error(raw: bytes) -> None:
    assert isinstance(parse(b"data: a\n\n", raw)[1], ErrorEvent)
