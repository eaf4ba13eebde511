"""A circuit breaker for a sick directory. Standard library only; thread-safe.

Closed: the directory is used. Open: it is left alone, so that requests recompute instead of waiting
for it. After a rest one probe may try it; the probe's outcome closes the breaker or opens it again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from enum import IntEnum


class BreakerState(IntEnum):
    """The values of the metric ``breaker_state``."""

    CLOSED = 0
    OPEN = 1
    PROBING = 2


class CircuitBreaker:
    """Opens after ``error_limit`` errors in a row, or at once by ``trip``."""

    def __init__(
        self,
        rest_s: float,
        *,
        error_limit: int = 3,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``rest_s``: seconds between opening and the next probe."""
        self._rest_s = rest_s
        self._error_limit = error_limit
        self._clock = clock
        self._lock = threading.Lock()
        self._state = BreakerState.CLOSED
        self._errors = 0
        self._opened_s = 0.0
        self.opened_count = 0  # times it opened from closed, since the start

    @property
    def state(self) -> BreakerState:
        """The state now."""
        return self._state

    @property
    def is_closed(self) -> bool:
        """Whether the directory may be used."""
        return self._state is BreakerState.CLOSED

    def succeeded(self) -> None:
        """An operation worked; errors before it no longer count."""
        self._errors = 0

    def failed(self) -> bool:
        """An operation failed. Returns whether this one opened the breaker."""
        with self._lock:
            self._errors += 1
            if self._state is not BreakerState.CLOSED or self._errors < self._error_limit:
                return False
            self._open()
            self.opened_count += 1
            return True

    def trip(self) -> bool:
        """Opens at once. Returns False when it was not closed."""
        with self._lock:
            if self._state is not BreakerState.CLOSED:
                return False
            self._open()
            self.opened_count += 1
            return True

    def wants_probe(self) -> bool:
        """True once after each rest; the caller then probes and calls ``probe_ended``."""
        with self._lock:
            is_due = (
                self._state is BreakerState.OPEN and self._clock() - self._opened_s >= self._rest_s
            )
            if is_due:
                self._state = BreakerState.PROBING
            return is_due

    def probe_ended(self, *, is_well: bool) -> None:
        """Closes the breaker, or opens it for another rest."""
        with self._lock:
            if is_well:
                self._state, self._errors = BreakerState.CLOSED, 0
            else:
                self._open()

    def _open(self) -> None:
        self._state, self._opened_s = BreakerState.OPEN, self._clock()
