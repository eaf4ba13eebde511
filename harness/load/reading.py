"""Bytes of streams that were stamped when they came and are read when there is time. Pure.

An engine step gives every stream a token at once. Parsing each before the next is received would
stamp the last of a hundred streams milliseconds late, so reading waits until the event loop has
nothing else to do, at the latest until the request ends.
"""

from __future__ import annotations

from harness.load.completion import CompletionStream
from harness.load.sse import SseError, SseParser

# Of one stream; above it, bytes are read as they come.
MAX_KEPT_BYTES = 2**20


class Backlog:
    """The readings that have something to read, longest waiting first."""

    def __init__(self) -> None:
        self._readings: dict[Reading, None] = {}

    def __len__(self) -> int:
        return len(self._readings)

    def add(self, reading: Reading) -> None:
        """Something came."""
        self._readings[reading] = None

    def work_off(self, count: int) -> None:
        """Reads what so many of them have."""
        for reading in list(self._readings)[:count]:
            self.remove(reading)
            reading.work_off()

    def remove(self, reading: Reading) -> None:
        """Nothing is left of it; harmless when nothing was there."""
        self._readings.pop(reading, None)


class Reading:
    """One body on its way to ``stream``. ``is_broken``: no event stream, more need not be read."""

    def __init__(self, backlog: Backlog) -> None:
        self.stream = CompletionStream()
        self.is_broken = False
        self._backlog = backlog
        self._parser = SseParser()
        self._chunks: list[tuple[int, bytes]] = []
        self._kept_bytes = 0

    def take(self, t_ns: int, chunk: bytes) -> None:
        """A chunk that arrived at ``t_ns``, monotonic nanoseconds."""
        self._chunks.append((t_ns, chunk))
        self._kept_bytes += len(chunk)
        self._backlog.add(self)
        if self._kept_bytes > MAX_KEPT_BYTES:
            self.work_off()

    def work_off(self) -> None:
        """Reads what has come. Never raises; a bad stream is marked."""
        chunks, self._chunks, self._kept_bytes = self._chunks, [], 0
        try:
            for t_ns, chunk in chunks:
                if self.is_broken:
                    return
                for event in self._parser.feed(chunk):
                    self.stream.fold(t_ns, event)
        except SseError as error:
            self.is_broken = True
            self.stream.mark_malformed(str(error))

    def end(self, *, is_whole: bool) -> None:
        """No more will come; ``is_whole``: and the body had its end."""
        self._backlog.remove(self)
        self.work_off()
        if is_whole and not self.is_broken:
            self.stream.end(self._parser.close())
