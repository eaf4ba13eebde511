"""Bytes kept for later give what they would have given at once, with the stamps they came with."""

from __future__ import annotations

import json

from harness.load.reading import MAX_KEPT_BYTES, Backlog, Reading


def event(text: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "text": text, "token_ids": [len(text)], "finish_reason": finish}
    return f"data: {json.dumps({'choices': [choice]})}\n\n".encode()


def test_what_is_kept_has_the_stamps_of_its_arrival() -> None:
    backlog = Backlog()
    reading = Reading(backlog)
    # The second event comes in two pieces; it is there when its end is.
    whole = event("bb")
    for t_ns, chunk in ((10, event("a")), (20, whole[:9]), (30, whole[9:])):
        reading.take(t_ns, chunk)
    assert (reading.stream.event_count, len(backlog)) == (0, 1)
    backlog.work_off(1)
    assert (reading.stream.token_ns, reading.stream.token_ids) == ([10, 30], [1, 2])
    assert len(backlog) == 0
    reading.take(40, event("ccc", "stop") + b"data: [DONE]")
    reading.end(is_whole=True)
    assert (reading.stream.last_token_ns, reading.stream.finish_reason) == (40, "stop")
    # Without its blank line, and still the server's last word.
    assert reading.stream.is_done
    assert len(backlog) == 0


def test_the_end_of_a_cut_body_is_not_made_up() -> None:
    reading = Reading(Backlog())
    reading.take(10, event("a") + b"data: [DONE]")
    reading.end(is_whole=False)
    assert reading.stream.token_ids == [1]
    assert not reading.stream.is_done


def test_the_longest_waiting_are_read_first() -> None:
    backlog = Backlog()
    readings = [Reading(backlog) for _ in range(3)]
    for reading in (readings[2], readings[0], readings[1], readings[2]):
        reading.take(10, event("a"))
    backlog.work_off(2)
    assert [reading.stream.event_count for reading in readings] == [1, 0, 2]
    backlog.work_off(2)
    backlog.work_off(2)
    assert [reading.stream.event_count for reading in readings] == [1, 1, 2]


def test_what_is_no_event_stream_ends_the_reading() -> None:
    reading = Reading(Backlog())
    reading.take(10, event("a") + b"data: \xff\n\n" + event("bb"))
    reading.take(20, event("ccc"))
    reading.work_off()
    assert reading.is_broken
    assert reading.stream.token_ids == []
    assert "not UTF-8" in str(reading.stream.malformed)
    reading.take(30, event("dddd"))
    reading.end(is_whole=True)
    assert reading.stream.event_count == 0


def test_a_flood_is_read_as_it_comes() -> None:
    reading = Reading(Backlog())
    reading.take(10, event("a"))
    reading.take(20, b":" * MAX_KEPT_BYTES + b"\n")
    assert reading.stream.token_ns == [10]
