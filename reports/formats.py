"""Numbers as readers see them. Formats what the verdict file says; computes nothing of its own."""

from __future__ import annotations

import math

from harness.verdicts import Bound, Measurement, Unit
from reports.safe import clean
from reports.texts import Texts

_SIGNS = {">=": "≥", "<=": "≤", "==": "="}
_SUFFIX = {
    Unit.SECONDS: " s",
    Unit.TOKENS: " tokens",
    Unit.TOKENS_PER_SECOND: " tokens/s",
    Unit.NATS: " nats",
}
_MAX_EXTRA_DIGITS = 6


def significant(value: float, digits: int = 3) -> str:
    """Plain decimal with about ``digits`` significant digits, thousands separated, never 1e-3."""
    if value == 0:
        return "0"
    decimals = min(9, max(0, digits - 1 - math.floor(math.log10(abs(value)))))
    return f"{value:,.{decimals}f}"


def integer(value: int | None, absent: str) -> str:
    """Thousands separated, or the word for absent: absent is never zero."""
    return absent if value is None else f"{value:,}"


def size(value: float, digits: int = 3) -> str:
    """Bytes in binary units."""
    scaled, unit = float(value), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(scaled) < 1024:
            break
        scaled, unit = scaled / 1024, larger
    return f"{scaled:,.0f} B" if unit == "B" else f"{significant(scaled, digits)} {unit}"


def quantity(value: float, unit: Unit, digits: int = 0) -> str:
    """A value with its unit; ratios as percent. ``digits``: more than the usual ones."""
    if unit is Unit.RATIO:
        decimals = (0 if abs(value) >= 10 else 1) + digits
        return f"{value * 100:,.{decimals}f} %"
    if unit is Unit.BYTES:
        return size(value, 3 + digits)
    if unit in (Unit.COUNT, Unit.TOKENS) and value.is_integer():
        return f"{value:,.0f}{_SUFFIX.get(unit, '')}"
    return f"{significant(value, 3 + digits)}{_SUFFIX.get(unit, '')}"


def target(value: float, unit: Unit) -> str:
    """A bound: the shortest spelling that is exact, so 25 % and not 25.0 %."""
    if unit is Unit.RATIO:
        return f"{value * 100:,.6f}".rstrip("0").rstrip(".") + " %"
    if unit is Unit.BYTES:
        return size(value)
    return f"{value:,.9f}".rstrip("0").rstrip(".") + _SUFFIX.get(unit, "")


def measured(value: float | str | None, unit: Unit, bound: Bound | None, texts: Texts) -> str:
    """The value of a measurement in words.

    A value that would round onto an edge of its bound is given more digits: 24.98 % against 25 %
    must not read as 25.0 %, because verdicts compare unrounded.
    """
    if value is None:
        return texts("word.no_measurement")
    if isinstance(value, str):
        return texts("word.failed") if value == "inf" else clean(value)
    digits = 0
    edges = () if bound is None else (bound.target, bound.floor, bound.each, bound.low)
    while digits < _MAX_EXTRA_DIGITS and any(
        edge is not None
        and edge != value
        and quantity(edge, unit, digits) == quantity(value, unit, digits)
        for edge in edges
    ):
        digits += 1
    return quantity(value, unit, digits)


def interval(measurement: Measurement, texts: Texts) -> tuple[str, str]:
    """Interval and its confidence; ("point", "") where the measurement has none."""
    low, high, unit = measurement.low, measurement.high, measurement.unit
    if low is None and high is None:
        return texts("word.point"), ""
    if low is None or high is None:
        side = f"≤ {quantity(high, unit)}" if high is not None else f"≥ {quantity(low or 0, unit)}"
        return side, _confidence(measurement, texts)
    span = texts("word.to", low=quantity(low, unit), high=quantity(high, unit))
    return span, _confidence(measurement, texts)


def edge(value: float, unit: Unit, comparison: str = ">=") -> str:
    """Comparison and one edge of a bound: "≥ 25 %"."""
    return f"{sign(comparison)} {target(value, unit)}"


def sign(comparison: str) -> str:
    """Typographic comparison sign."""
    return _SIGNS.get(comparison, clean(comparison))


def _confidence(measurement: Measurement, texts: Texts) -> str:
    if measurement.confidence is None:
        return ""
    return texts("word.at_confidence", confidence=target(measurement.confidence, Unit.RATIO))
