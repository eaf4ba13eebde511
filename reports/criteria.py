"""Criteria of the gates: rows, grids over the levels, and where each of them is. Formats only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.verdicts import CriterionResult, GateVerdict, Measurement, SignOff, Verdict
from reports.charts import arm_order
from reports.context import GateBlock, GridCell, GridLine, Group, Headline, Result
from reports.formats import interval, quantity
from reports.formats import measured as measured_words
from reports.safe import clean, show
from reports.texts import Texts
from reports.verdict_words import (
    bound_brief,
    bound_words,
    comparison,
    gate_name,
    gate_title,
    mark,
    missed_words,
)

# Which sentence states a measure whose both sides are known: key of better, key of worse.
_SENTENCES = {
    "ttft_reduction": ("headline.sooner", "headline.later"),
    "wave_throughput_gain": ("headline.lower", "headline.higher"),
}


def anchors(signoff: SignOff, texts: Texts) -> dict[str, str]:
    """Where a reason's place is: ids of criteria, names of checks, names of gates."""
    found = {clean(check.name): "checks" for check in signoff.checks}
    for index, gate in enumerate(signoff.gates):
        found[gate_name(gate.gate, texts)] = f"gate-{index}"
    number = 0
    for gate in signoff.gates:
        for result in gate.criteria:
            number += 1
            found[clean(result.id)] = f"row-{number}"
    return found


def headlines(signoff: SignOff, places: Mapping[str, str], texts: Texts) -> tuple[Headline, ...]:
    """The first arm's comparisons at the highest level, in words; both sides come from the file."""
    compared = [
        result
        for gate in signoff.gates
        for result in gate.criteria
        if result.measurement.compared is not None and result.measurement.name in _SENTENCES
    ]
    if not compared:
        return ()
    arm = compared[0].arm
    highest: dict[str, CriterionResult] = {}
    for result in compared:
        if result.arm == arm:
            last = highest.get(result.criterion, result)
            highest[result.criterion] = max(last, result, key=lambda found: found.level or 0)
    return tuple(_headline(result, places, texts) for result in highest.values())


def _headline(result: CriterionResult, places: Mapping[str, str], texts: Texts) -> Headline:
    measurement = result.measurement
    both = measurement.compared
    assert both is not None
    below, above = _SENTENCES[measurement.name]
    if isinstance(both.ratio, str) or isinstance(both.candidate, str):
        sentence = texts("headline.failed", before=quantity(both.baseline, both.unit))
    else:
        sentence = texts(
            below if both.ratio < 1 else above,
            times=_times(both.inverse if both.ratio < 1 else both.ratio),
            before=quantity(both.baseline, both.unit),
            after=quantity(both.candidate, both.unit),
        )
    parts = [comparison(result, texts)]
    if result.level is not None:
        parts.append(texts("charts.level", level=result.level))
    parts.append(texts("headline.repetitions", count=measurement.n))
    return Headline(
        sentence=sentence,
        where=" · ".join(parts),
        required=texts(
            "headline.required", bound=bound_brief(result.bound, measurement.unit, texts)
        ),
        mark=mark(result.verdict, texts),
        anchor=places[clean(result.id)],
    )


def _times(value: float) -> str:
    """A factor as it is said: 13.9, 1.07, 140."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def gate_block(gate: GateVerdict, signoff: SignOff, texts: Texts) -> GateBlock:
    """One gate: what is not a PASS first, then criterion by criterion over the levels."""
    places = anchors(signoff, texts)
    order = arm_order(signoff)
    levels = sorted({r.level for r in gate.criteria if r.level is not None})
    by_name: dict[str, list[CriterionResult]] = {}
    for result in gate.criteria:
        by_name.setdefault(result.criterion, []).append(result)
    return GateBlock(
        name=gate_name(gate.gate, texts),
        title=gate_title(gate.gate, texts),
        mark=mark(gate.verdict, texts),
        anchor=places[gate_name(gate.gate, texts)],
        levels=tuple(texts("charts.level", level=level) for level in levels),
        failed=tuple(
            _result(result, places, order, texts)
            for result in gate.criteria
            if result.verdict is not Verdict.PASS
        ),
        groups=tuple(_group(found, levels, places, order, texts) for found in by_name.values()),
        reasons=tuple(
            texts(
                "word.reason_of",
                meaning=texts.reason(reason.code).meaning,
                text=texts.said(clean(reason.text)),
            )
            for reason in gate.reasons
        ),
    )


def _group(
    results: list[CriterionResult],
    levels: Sequence[int],
    places: Mapping[str, str],
    order: Sequence[str],
    texts: Texts,
) -> Group:
    first = results[0]
    estimators = {result.measurement.estimator for result in results}
    shared = estimators.pop() if len(estimators) == 1 else ""
    rule = f"rule.{first.decide}"
    return Group(
        criterion=clean(first.criterion),
        title=texts.said(clean(first.title)),
        estimator=texts.said(clean(shared)),
        rule=texts(rule) if rule in texts else "",
        decide=clean(first.decide),
        rationale=texts.said(clean(first.rationale)),
        is_levelled=any(result.level is not None for result in results),
        lines=tuple(_line(found, levels, places, order, texts) for found in _lines(results)),
        results=tuple(
            _result(result, places, order, texts)
            for result in results
            if result.verdict is Verdict.PASS
        ),
    )


def _lines(results: list[CriterionResult]) -> list[list[CriterionResult]]:
    """Levels of one comparison together."""
    lines: dict[tuple[str, str | None], list[CriterionResult]] = {}
    for result in results:
        lines.setdefault((result.arm, result.baseline), []).append(result)
    return list(lines.values())


def _line(
    results: list[CriterionResult],
    levels: Sequence[int],
    places: Mapping[str, str],
    order: Sequence[str],
    texts: Texts,
) -> GridLine:
    first = results[0]
    by_level = {result.level: result for result in results}
    columns: Sequence[int | None] = [None] if None in by_level else levels
    bound, beside, override = bound_words(first.bound, first.measurement.unit, texts)
    return GridLine(
        comparison=comparison(first, texts),
        arm=_number(first.arm, order),
        cells=tuple(_cell(by_level.get(level), level, places, texts) for level in columns),
        bound=bound,
        beside=beside,
        override=override,
    )


def _cell(
    result: CriterionResult | None, level: int | None, places: Mapping[str, str], texts: Texts
) -> GridCell:
    heading = texts("column.value") if level is None else texts("charts.level", level=level)
    if result is None:
        return GridCell(heading, texts("word.none"), None, "")
    unit = result.measurement.unit
    return GridCell(
        heading=heading,
        value=measured_words(result.measurement.value, unit, result.bound, texts),
        mark=mark(result.verdict, texts),
        anchor="" if result.verdict is Verdict.PASS else places[clean(result.id)],
    )


def _result(
    result: CriterionResult, places: Mapping[str, str], order: Sequence[str], texts: Texts
) -> Result:
    measurement = result.measurement
    target, floor, override = bound_words(result.bound, measurement.unit, texts)
    span, confidence = interval(measurement, texts)
    n = f"{measurement.n:,}"
    if result.bound.least_n is not None:
        n = texts("word.n_of", n=n, least=f"{result.bound.least_n:,}")
    return Result(
        id=clean(result.id),
        anchor=places[clean(result.id)],
        title=texts.said(clean(result.title)),
        comparison=comparison(result, texts),
        arm=_number(result.arm, order),
        level=texts("word.none") if result.level is None else str(result.level),
        value=measured_words(measurement.value, measurement.unit, result.bound, texts),
        repetitions=_repetitions(result, texts),
        interval=texts("word.none") if measurement.value is None else span,
        confidence=confidence,
        target=target,
        floor=floor,
        override=override,
        missed=missed_words(result, texts),
        n=n,
        estimator=texts.said(clean(measurement.estimator)),
        mark=mark(result.verdict, texts),
        codes=tuple(dict.fromkeys(reason.code.value for reason in result.reasons)),
        trials=tuple(clean(trial) for trial in measurement.trials),
        detail=_detail(measurement),
    )


def _number(arm: str, order: Sequence[str]) -> int:
    return order.index(arm) if arm in order else len(order)


def _repetitions(result: CriterionResult, texts: Texts) -> str:
    """Each repetition; nothing for one, which is the value itself."""
    measurement = result.measurement
    if len(measurement.repetitions) < 2:
        return ""
    return " · ".join(
        measured_words(value, measurement.unit, result.bound, texts)
        for value in measurement.repetitions
    )


def _detail(measurement: Measurement) -> str:
    return show(measurement.detail) if measurement.detail else ""
