"""Signals end a run once, in order, and wait for what must not be left half done."""

from __future__ import annotations

import os
import signal

import pytest

from harness import interrupts
from harness.interrupts import Interrupted, handled, shield


def send(name: str) -> None:
    os.kill(os.getpid(), getattr(signal, name))


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_each_signal_is_a_ctrl_c_that_names_itself(name: str) -> None:
    with pytest.raises(KeyboardInterrupt) as stop, handled():
        send(name)
    assert isinstance(stop.value, Interrupted)
    assert stop.value.name == name


def test_the_second_signal_changes_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    done = []

    def stop_in_order() -> None:
        try:
            send("SIGINT")
        finally:
            send("SIGINT")
            send("SIGTERM")
            done.append("the stop went on")

    with pytest.raises(Interrupted), handled():
        stop_in_order()
    assert done == ["the stop went on"]
    assert capfd.readouterr().err.count("stopping already") == 2


def test_a_shielded_step_is_finished_first() -> None:
    done = []

    def step() -> None:
        with shield():
            with shield():
                send("SIGTERM")
                done.append("inner")
            done.append("outer")
        done.append("never")

    with pytest.raises(Interrupted) as stop, handled():
        step()
    assert done == ["inner", "outer"]
    assert stop.value.name == "SIGTERM"


def test_a_shield_keeps_its_own_error_in_sight() -> None:
    def step() -> None:
        with shield():
            send("SIGINT")
            raise ValueError("of the step")

    with pytest.raises(Interrupted) as stop, handled():
        step()
    assert isinstance(stop.value.__context__, ValueError)


def test_the_handlers_of_before_come_back() -> None:
    before = [signal.getsignal(number) for number in interrupts.SIGNALS]
    with handled(), handled():
        assert signal.getsignal(signal.SIGTERM) is not before[1]
    assert [signal.getsignal(number) for number in interrupts.SIGNALS] == before


def test_once_a_process_is_ending_no_signal_changes_its_exit_code() -> None:
    before = [signal.getsignal(number) for number in interrupts.SIGNALS]
    try:
        with pytest.raises(Interrupted), handled(to_the_end=True):
            send("SIGTERM")
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            send(name)
    finally:
        for number, handler in zip(interrupts.SIGNALS, before, strict=True):
            signal.signal(number, handler)


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with handled():
            send("SIGHUP")
    finally:
        signal.signal(signal.SIGHUP, before)
