"""Numbers and texts as readers see them."""

from __future__ import annotations

import pytest

from harness.verdicts import Bound, Measurement, Unit
from reports import formats
from reports.safe import clean, show
from reports.texts import load

EN = load("en")


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [
        (0.9647, Unit.RATIO, "96.5 %"),
        (16.319, Unit.RATIO, "1,632 %"),
        (-0.021, Unit.RATIO, "-2.1 %"),
        (0.0714, Unit.SECONDS, "0.0714 s"),
        (7.312, Unit.SECONDS, "7.31 s"),
        (149.48, Unit.SECONDS, "149 s"),
        (0.0, Unit.SECONDS, "0 s"),
        (30208.0, Unit.TOKENS, "30,208 tokens"),
        (71.64, Unit.TOKENS_PER_SECOND, "71.6 tokens/s"),
        (0.0, Unit.BYTES, "0 B"),
        (599187456.0, Unit.BYTES, "571 MiB"),
        (3.0, Unit.COUNT, "3"),
        (0.033, Unit.NATS, "0.0330 nats"),
    ],
)
def test_quantity(value: float, unit: Unit, expected: str) -> None:
    assert formats.quantity(value, unit) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.2498, "24.98 %"),  # would read 25.0 %
        (0.2499999, "24.99999 %"),
        (0.25, "25.0 %"),  # exactly at the bound
        (0.2204, "22.04 %"),  # would read as the floor
        (0.251, "25.1 %"),
    ],
)
def test_value_never_rounds_onto_its_bound(value: float, expected: str) -> None:
    assert formats.measured(value, Unit.RATIO, Bound(">=", 0.25, 0.22), EN) == expected


def test_infinite_reads_failed_and_absent_reads_no_measurement() -> None:
    bound = Bound(">=", 0.25)
    assert formats.measured("inf", Unit.RATIO, bound, EN) == "failed"
    assert formats.measured(None, Unit.RATIO, bound, EN) == "no measurement"


@pytest.mark.parametrize(
    ("low", "high", "confidence", "expected"),
    [
        (0.2311, 0.2876, 0.95, ("23.1 % to 28.8 %", "at 95 %")),
        (None, None, None, ("point", "")),
        (0.2311, None, 0.95, ("≥ 23.1 %", "at 95 %")),
        (None, 0.2876, None, ("≤ 28.8 %", "")),
    ],
)
def test_interval(
    low: float | None, high: float | None, confidence: float | None, expected: tuple[str, str]
) -> None:
    measurement = Measurement(
        "m", Unit.RATIO, 0.25, 6, "mean", low=low, high=high, confidence=confidence
    )
    assert formats.interval(measurement, EN) == expected


def test_bound_is_spelled_exactly() -> None:
    assert formats.edge(0.285, Unit.RATIO) == "≥ 28.5 %"
    assert formats.edge(1.0, Unit.RATIO, "<=") == "≤ 100 %"
    assert formats.edge(0.0, Unit.COUNT, "==") == "= 0"


def test_value_beside_the_applied_bound_does_not_round_onto_it() -> None:
    bound = Bound(">=", 0.8, each=0.9)
    assert formats.measured(0.89996, Unit.RATIO, bound, load("en")) == "89.996 %"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", "plain"),
        ("中文 ≥ é", "中文 ≥ é"),
        ("\x1b[2J", "\\x1b[2J"),  # clears a terminal
        ("a\nPASS", "a\\nPASS"),  # forges a line
        ("‮abc", "\\u202eabc"),  # reads backwards
        ("\ud800", "\\ud800"),  # cannot be written as UTF-8
        ("￿", "\\uffff"),  # cannot be written as XML
    ],
)
def test_clean_spells_out_what_no_medium_should_get(text: str, expected: str) -> None:
    assert clean(text) == expected


def test_show_keeps_text_and_spells_json() -> None:
    assert [show(v) for v in ("a", 1, 1.0, 0.5, True, None, [1, 2], {"b": "x\x1b"})] == [
        "a", "1", "1", "0.5", "true", "null", "[1,2]", '{"b":"x\\u001b"}'
    ]  # fmt: skip
