"""The circuit breaker, on a clock of its own."""

from __future__ import annotations

from harness.connector.breaker import BreakerState, CircuitBreaker


class _Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def _breaker() -> tuple[CircuitBreaker, _Clock]:
    clock = _Clock()
    return CircuitBreaker(30.0, error_limit=3, clock=clock), clock


def test_three_errors_in_a_row_open_it_once() -> None:
    breaker, _ = _breaker()
    assert [breaker.failed() for _ in range(4)] == [False, False, True, False]
    assert breaker.state is BreakerState.OPEN


def test_a_success_between_errors_keeps_it_closed() -> None:
    breaker, _ = _breaker()
    for _ in range(5):
        breaker.failed()
        breaker.failed()
        breaker.succeeded()
    assert breaker.is_closed


def test_trip_opens_at_once_and_says_so_once() -> None:
    breaker, _ = _breaker()
    assert (breaker.trip(), breaker.trip()) == (True, False)


def test_one_probe_after_each_rest() -> None:
    breaker, clock = _breaker()
    assert not breaker.wants_probe()
    breaker.trip()
    clock.now += 29.9
    assert not breaker.wants_probe()
    clock.now += 0.1
    assert (breaker.wants_probe(), breaker.wants_probe()) == (True, False)
    assert breaker.state is BreakerState.PROBING
    breaker.probe_ended(is_well=False)
    assert not breaker.wants_probe()
    clock.now += 30.0
    assert breaker.wants_probe()
    breaker.probe_ended(is_well=True)
    assert breaker.is_closed
    assert [breaker.failed(), breaker.failed()] == [False, False], "errors count anew"
