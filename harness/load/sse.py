"""Server-sent events from bytes, one chunk at a time. Pure; knows neither JSON nor sockets.

Follows the event stream format of the HTML standard where measured clients went wrong
(docs/adr/0005): any of LF, CR and CRLF ends a line, also when a chunk boundary falls between CR and
LF; one space after the colon is optional; comments and the fields id and retry are ignored;
several data lines make one event. Of the event types only ``error`` matters here: such an event
says that the server failed, whatever its data and also without any. Bytes are decoded only once an
event is whole, so that neither a split character nor U+2028, U+2029 or U+0085 matters.
"""

from __future__ import annotations

import re

MAX_EVENT_BYTES = 64 * 2**20

_LINE_END = re.compile(rb"\r\n?|\n")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LINE_FEED = 0x0A
_ERROR = b"error"


class ErrorEvent(str):
    """Data of an event whose type is ``error``; empty where it had none."""

    __slots__ = ()


class SseError(ValueError):
    """The bytes are not an event stream: an event too large, or not UTF-8."""


class SseParser:
    """Assembles events; every byte is looked at once, whatever the chunking.

    Not to be fed again after it raised.
    """

    def __init__(self, *, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._line: list[bytes] = []
        self._line_bytes = 0
        self._lines: list[bytes] = []
        self._lines_bytes = 0
        self._type = b""
        self._at_start = True
        self._swallow_line_feed = False

    def feed(self, chunk: bytes) -> list[str]:
        """The data of the events that end within this chunk, in order; `ErrorEvent` for an error.

        Raises:
            SseError: an event exceeds the bound or is not UTF-8.
        """
        if not chunk:
            return []
        if self._is_one_plain_event(chunk):
            return [_decode(chunk[6:-2])]
        start = 1 if self._swallow_line_feed and chunk[0] == _LINE_FEED else 0
        self._swallow_line_feed = chunk.endswith(b"\r")
        events: list[str] = []
        for match in _LINE_END.finditer(chunk, start):
            self._append(chunk[start : match.start()])
            event = self._end_line()
            if event is not None:
                events.append(event)
            start = match.end()
        self._append(chunk[start:])
        return events

    def close(self) -> str | None:
        """Data of the event the stream ended inside of; None when it ended between events.

        The standard drops such an event. The caller gets to see it because a last ``[DONE]``
        without its blank line still says that the server was finished, and an error that it failed.
        """
        line = self._take_line()
        if line.startswith(b":"):
            line = b""
        inside = bool(line or self._lines)
        if line:
            self._take_field(line)
        text = b"\n".join(self._lines).decode("utf-8", "replace")
        if self._type == _ERROR:
            return ErrorEvent(text)
        return text if inside else None

    def _is_one_plain_event(self, chunk: bytes) -> bool:
        """Nothing is begun and the chunk is ``data: ...`` with its blank line: the usual case.

        Told apart because it takes a quarter of the time, which counts at thousands of tokens a
        second.
        """
        return (
            chunk.startswith(b"data: ")
            and chunk.find(b"\n") == len(chunk) - 2
            and chunk.endswith(b"\n\n")
            and b"\r" not in chunk
            and len(chunk) <= self._max_event_bytes
            and not (
                self._line or self._lines or self._type or self._swallow_line_feed or self._at_start
            )
        )

    def _append(self, piece: bytes) -> None:
        if not piece:
            return
        self._line.append(piece)
        self._line_bytes += len(piece)
        if self._line_bytes + self._lines_bytes > self._max_event_bytes:
            raise SseError(f"event above {self._max_event_bytes} bytes")

    def _take_line(self) -> bytes:
        line = b"".join(self._line)
        self._line.clear()
        self._line_bytes = 0
        if self._at_start:
            self._at_start = False
            line = line.removeprefix(_BYTE_ORDER_MARK)
        return line

    def _end_line(self) -> str | None:
        line = self._take_line()
        if line:
            self._take_field(line)
            return None
        kind, self._type = self._type, b""
        if not self._lines and kind != _ERROR:
            return None
        whole = b"\n".join(self._lines)
        self._lines.clear()
        self._lines_bytes = 0
        return ErrorEvent(_decode(whole)) if kind == _ERROR else _decode(whole)

    def _take_field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        if name == b"data":
            self._lines.append(value.removeprefix(b" "))
            # One more for the line end, so that endless empty data lines are bounded too.
            self._lines_bytes += len(value) + 1
        elif name == b"event":
            self._type = value.removeprefix(b" ")


def _decode(whole: bytes) -> str:
    try:
        return whole.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SseError(f"event is not UTF-8: {error}") from error
