"""Figures of `benchmarks.connector`: medians with bootstrap intervals, tables, and bounds kept."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.foreign_cpu import ALLOWED_CORES

_RESAMPLES = 4000
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Figure:
    """The median of repetitions and a percentile bootstrap interval of it.

    With one repetition the interval is the value itself.
    """

    median: float
    low: float
    high: float
    count: int

    def text(self, scale: float = 1.0, digits: int = 1) -> str:
        """Median and interval, each multiplied by ``scale``."""
        low, high = self.low * scale, self.high * scale
        return f"{self.median * scale:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def figure(values: Sequence[float]) -> Figure:
    """Summarises repetitions. The resampling is seeded: the same values give the same interval."""
    draws = np.random.default_rng(20260718).choice(
        np.asarray(values, dtype=float), size=(_RESAMPLES, len(values))
    )
    tail = 100 * (1 - _CONFIDENCE) / 2
    low, high = np.percentile(np.median(draws, axis=1), [tail, 100 - tail])
    return Figure(statistics.median(values), float(low), float(high), len(values))


def ratio(candidate: Sequence[float], baseline: Sequence[float]) -> Figure:
    """Candidate over baseline, repetition by repetition."""
    return figure([a / b for a, b in zip(candidate, baseline, strict=True)])


@dataclass
class Report:
    """Collects bounds as they are measured and prints them at the end."""

    lines: list[tuple[bool, str]] = field(default_factory=list)

    def check(self, what: str, found: Figure, relation: str, bound: float, unit: str = "") -> None:
        """``relation``: ``<=``, ``<`` or ``>=``; decided on the median, the interval is shown."""
        is_kept = {
            "<=": found.median <= bound,
            "<": found.median < bound,
            ">=": found.median >= bound,
        }[relation]
        text = f"{what}: {found.text(digits=3)}{unit}, allowed {relation} {bound:g}{unit}"
        if found.low <= bound <= found.high:
            text += " (the interval holds the bound)"
        self.lines.append((is_kept, text))

    def check_quiet(self, foreign_cores: Mapping[str, float], repeated: int) -> None:
        """One line for all cells: figures of a machine that others used are no finding."""
        loud = {cell: cores for cell, cores in foreign_cores.items() if not cores <= ALLOWED_CORES}
        worst = max(foreign_cores, key=lambda cell: foreign_cores[cell])
        text = (
            f"quiet machine: others took at most {foreign_cores[worst]:.2f} cores in a cell "
            f"({worst}), allowed <= {ALLOWED_CORES:g}; {repeated} disturbed readings repeated"
        )
        if loud:
            text += f"; NOT QUIET in {len(loud)} of {len(foreign_cores)} cells: the figures above "
            text += "are a suspicion, no finding"
        self.lines.append((not loud, text))

    def print(self) -> bool:
        """Prints one line per bound; returns whether all were kept."""
        for is_kept, text in self.lines:
            print(f"CHECK {'ok    ' if is_kept else 'missed'} {text}", flush=True)
        return all(is_kept for is_kept, _ in self.lines)


def say(text: str) -> None:
    """A line of progress or result, at once."""
    print(text, flush=True)
