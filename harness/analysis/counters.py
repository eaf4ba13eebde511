"""Growth of counters between two marks, series by series before anything is added up. Pure.

A sum over engines hides what happens to one of them: {100, 100} to {5, 300} is no growth of 105 but
an engine that began anew. So resets, engines that went and engines that came are found first, with
the identity of each series, and a counter that any of them concerns has no growth at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from harness.records import MetricSample

# Labels that tell who counted. Evidence older than they are has none, which is one engine.
IDENTITY = ("instance", "model_name", "engine")
# Labels that tell the parts of a counter apart; series that differ in any other are added up.
PARTS = ("tier", "source")
# Gauges go up and down as they like: no growth, no reset.
GAUGES = frozenset(
    {
        "tier_store_backlog_blocks",
        "tier_host_used_bytes",
        "tier_host_capacity_bytes",
        "tier_disk_enabled",
        "tier_direct_io",
    }
)

Labels = tuple[tuple[str, str], ...]
# Name of the metric and all labels of one series.
Series = tuple[str, Labels]


@dataclass(frozen=True)
class Counters:
    """Growth of counters between two marks, by name or ``name/part``. Missing key: unknown.

    ``resets``: one sentence per counter of an engine that went down. ``at_least``: the smallest
    growth that such a counter can have had. ``vanished``, ``appeared``: engines that only one of
    the marks knows. ``whole_reset``: every engine has a counter that went down.
    """

    deltas: Mapping[str, float] = field(default_factory=dict)
    resets: tuple[str, ...] = ()
    at_least: Mapping[str, float] = field(default_factory=dict)
    vanished: tuple[str, ...] = ()
    appeared: tuple[str, ...] = ()
    whole_reset: bool = False
    unknown: frozenset[str] = frozenset()

    def get(self, name: str) -> float | None:
        """The growth; None when the metric was absent or reset."""
        return self.deltas.get(name)

    def total(self, name: str) -> float | None:
        """Sum over all parts of a labelled counter; None when one of them is unknown."""
        if any(key.partition("/")[0] == name for key in self.unknown):
            return None
        parts = [value for key, value in self.deltas.items() if key.partition("/")[0] == name]
        return math.fsum(parts) if parts else None


def counter_deltas(samples: Iterable[MetricSample], start: str, end: str) -> Counters:
    """Growth of all counters of the server between two marks.

    A series that is new in an engine which had others of that metric began at 0, as clients of
    Prometheus make them when they are first counted. Nothing is assumed of a new engine.
    """
    samples = [s for s in samples if s.source == "prometheus" and s.name not in GAUGES]
    first, last = _values(samples, start), _values(samples, end)
    engines, engines_now = _engines(first), _engines(last)
    known: dict[str, list[float]] = {}
    least: dict[str, float] = {}
    resets: list[str] = []
    reset_engines: set[Labels] = set()
    unknown: set[str] = set()
    counted = {(n, _identity(ls)) for (n, ls), value in first.items() if value is not None}
    for series in sorted(first.keys() | last.keys()):
        name, labels = series
        who, key = _identity(labels), _key(name, labels)
        before, after = first.get(series), last.get(series)
        if series not in first and (name, who) in counted:
            before = 0.0
        if before is None or after is None or before < 0:  # no counter begins below zero
            unknown.add(key)
            continue
        grown = after - before
        if grown < 0:
            unknown.add(key)
            reset_engines.add(who)
            resets.append(
                f"{_spelt(name, labels)}{_of(who)} went from {before:.10g} to {after:.10g}"
            )
            grown = max(after, 0.0)
        least[key] = least.get(key, 0.0) + grown
        known.setdefault(key, []).append(grown)
    both = bool(engines and engines_now)  # a page that was not read says nothing of its engines
    return Counters(
        deltas={key: math.fsum(v) for key, v in known.items() if key not in unknown},
        resets=tuple(resets),
        at_least={key: least[key] for key in sorted(unknown & least.keys())},
        vanished=tuple(_named(e) for e in sorted(engines - engines_now) if e) if both else (),
        appeared=tuple(_named(e) for e in sorted(engines_now - engines) if e) if both else (),
        whole_reset=bool(reset_engines) and reset_engines == engines & engines_now,
        unknown=frozenset(unknown),
    )


def _values(samples: Iterable[MetricSample], mark: str) -> dict[Series, float | None]:
    """Readings at a mark; what stands there twice is unknown."""
    found: dict[Series, float | None] = {}
    for sample in samples:
        if sample.mark != mark:
            continue
        series = sample.name, tuple(sorted(sample.labels.items()))
        found[series] = None if series in found else sample.value
    return found


def _engines(values: Mapping[Series, float | None]) -> set[Labels]:
    return {_identity(labels) for (_, labels), value in values.items() if value is not None}


def _identity(labels: Labels) -> Labels:
    return tuple(item for item in labels if item[0] in IDENTITY)


def _key(name: str, labels: Labels) -> str:
    part = "/".join(text for label, text in labels if label in PARTS)
    return f"{name}/{part}" if part else name


def _spelt(name: str, labels: Labels) -> str:
    """A series in words, without who counted."""
    parts = [text for label, text in labels if label not in IDENTITY]
    return "/".join([name, *parts])


def _of(who: Labels) -> str:
    return f" of {_named(who)}" if who else ""


def _named(who: Labels) -> str:
    """An engine in words: its number, and what else tells it from others."""
    found = dict(who)
    engine = f"engine {found.pop('engine', '?')}"
    return " ".join([engine, *(f"({label} {text})" for label, text in found.items())])
