"""Bandwidth shared by concurrent loads. Pure: time is an argument, in simulated seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

# Less than a byte: nothing is left. Sums of floats do not reach zero.
_NOTHING_BYTES = 0.5


def total_bandwidth(curve: Sequence[Sequence[float]], loads: int) -> float:
    """Bytes per second of so many concurrent loads together: straight between the curve's points.

    Below the first point the first value holds, above the last the last one.
    """
    first, last = curve[0], curve[-1]
    if loads <= first[0]:
        return first[1]
    if loads >= last[0]:
        return last[1]
    for (x0, y0), (x1, y1) in pairwise(curve):
        if loads <= x1:
            return y0 + (y1 - y0) * (loads - x0) / (x1 - x0)
    raise AssertionError("a curve is ascending")


class SharedMedium:
    """Loads in progress; all get an equal part of what the curve gives at their number.

    ``read_bytes`` is the medium's own count, apart from any counter of the connector.
    """

    def __init__(self, curve: Sequence[Sequence[float]]) -> None:
        self._curve = curve
        self._left: dict[int, float] = {}
        self._now_s = 0.0
        self._next_id = 0
        self.read_bytes = 0

    def start(self, now_s: float, size_bytes: int) -> int:
        """Begins a load; returns its id. ``now_s`` never goes back."""
        self.advance(now_s)
        self._next_id += 1
        self._left[self._next_id] = float(size_bytes)
        self.read_bytes += size_bytes
        return self._next_id

    def is_done(self, load: int) -> bool:
        """Whether a load has ended by the time last advanced to."""
        return self._left.get(load, 0.0) <= _NOTHING_BYTES

    def advance(self, now_s: float) -> None:
        """Lets time pass; loads that end on the way leave their part to the others."""
        while self._left and self._now_s < now_s:
            end_s = self.next_end()
            step_s = min(end_s, now_s) - self._now_s
            rate = self._rate()
            self._left = {i: left - rate * step_s for i, left in self._left.items()}
            self._now_s = min(end_s, now_s)
            self._left = {i: left for i, left in self._left.items() if left > _NOTHING_BYTES}
        self._now_s = max(self._now_s, now_s)

    def next_end(self) -> float:
        """When the next load ends if none is started before; infinity without one."""
        if not self._left:
            return math.inf
        return self._now_s + min(self._left.values()) / self._rate()

    def _rate(self) -> float:
        count = len(self._left)
        return total_bandwidth(self._curve, count) / count
