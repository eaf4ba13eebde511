"""Builds the page's context from a verdict file's content. Pure: no clock, path or judgement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.verdicts import (
    Check,
    CriterionResult,
    GateVerdict,
    Measurement,
    SignOff,
    Verdict,
)
from reports import verdict_words
from reports.charts import measured
from reports.configuration import configuration
from reports.context import (
    Banner,
    CheckGroup,
    CheckRow,
    Checks,
    Decisive,
    Fact,
    Family,
    GateBlock,
    Page,
    Result,
    Summary,
)
from reports.formats import interval
from reports.formats import measured as measured_words
from reports.safe import clean, show
from reports.texts import Texts
from reports.verdict_words import bound_words, comparison, gate_name, gate_title, mark

_LANGUAGES = {"en": "en", "zh": "zh-CN"}


def build_page(signoff: SignOff, provenance: Mapping[str, str], texts: Texts) -> Page:
    """Everything the sign-off page shows, in the language of ``texts``."""
    answer = banner(signoff, texts)
    return Page(
        language=_LANGUAGES[texts.locale],
        title=texts("page.title", campaign=answer.campaign, verdict=answer.mark.word),
        banner=answer,
        reasons=verdict_words.reason_groups(signoff, texts),
        summary=summary(signoff, texts),
        overrides=tuple(clean(text) for text in signoff.overrides),
        gates=tuple(gate_block(gate, texts) for gate in signoff.gates),
        measured=measured(signoff, texts),
        configuration=configuration(signoff, texts),
        plan=tuple(Fact(clean(key), show(value)) for key, value in _flat(signoff.plan, "")),
        checks=checks(signoff, texts),
        not_tested=tuple(clean(text) for text in signoff.not_tested),
        commands=commands(signoff),
        signable=signoff.signable,
        digests=_digests(signoff, texts),
        provenance=_provenance(signoff, provenance, texts),
    )


def banner(signoff: SignOff, texts: Texts) -> Banner:
    """The answer for the first screen."""
    return Banner(
        mark=mark(signoff.verdict, texts),
        sentence=verdict_words.sentence(signoff.verdict, texts),
        scope=verdict_words.scope(signoff, texts),
        label=verdict_words.label(signoff, texts),
        campaign=clean(signoff.campaign),
        profile=clean(signoff.profile),
        gates=verdict_words.gate_tiles(signoff, texts),
    )


def summary(signoff: SignOff, texts: Texts) -> Summary | None:
    """Criteria with levels, the last gate's, for a PASS; without any, all criteria of that gate."""
    judged = [gate for gate in signoff.gates if gate.criteria]
    if signoff.verdict is not Verdict.PASS or not judged:
        return None
    last = judged[-1]
    chosen = [result for result in last.criteria if result.level is not None] or list(last.criteria)
    levels = sorted({result.level for result in chosen if result.level is not None})
    rows = []
    for results in _families(chosen) if levels else [[result] for result in chosen]:
        first = results[0]
        by_level = {result.level: result for result in results}
        columns: list[int | None] = [*levels] or [None]
        rows.append(
            Decisive(
                title=clean(first.title),
                comparison=_comparisons(results, texts),
                values=tuple(_value_at(by_level.get(level), texts) for level in columns),
                bound=bound_words(first.bound, first.measurement.unit, texts)[0],
            )
        )
    total = sum(len(gate.criteria) for gate in signoff.gates)
    headings = tuple(texts("charts.level", level=level) for level in levels)
    return Summary(headings or (texts("column.value"),), tuple(rows), total - len(chosen))


def gate_block(gate: GateVerdict, texts: Texts) -> GateBlock:
    """One gate with its criteria, those of one name and comparison together."""
    return GateBlock(
        name=gate_name(gate.gate, texts),
        title=gate_title(gate.gate, texts),
        mark=mark(gate.verdict, texts),
        families=tuple(_family(results, texts) for results in _families(gate.criteria)),
        reasons=tuple(
            texts(
                "word.reason_of", meaning=texts.reason(reason.code).meaning, text=clean(reason.text)
            )
            for reason in gate.reasons
        ),
    )


def checks(signoff: SignOff, texts: Texts) -> Checks:
    """Failed checks one by one, passed ones by name in the order of their first appearance."""
    failed = [check for check in signoff.checks if check.failed]
    aside = [check for check in signoff.checks if not check.applicable]
    passed: dict[str, list[Check]] = {}
    for check in signoff.checks:
        if check.passed:
            passed.setdefault(check.name, []).append(check)
    return Checks(
        summary=texts(
            "checks.summary",
            failed=len(failed),
            passed=sum(len(group) for group in passed.values()),
        )
        if len(aside) < len(signoff.checks) or not aside
        else texts("checks.summary_imported", count=len(aside)),
        failed=tuple(_check(check) for check in failed),
        passed=tuple(
            CheckGroup(clean(name), len(group), tuple(_check(check) for check in group))
            for name, group in passed.items()
        ),
        not_applicable=tuple(_check(check) for check in aside),
    )


def commands(signoff: SignOff) -> tuple[str, ...]:
    """How to judge the same evidence again; RUN stands for the run directory."""
    judged = [gate.gate.lower() for gate in signoff.gates if gate.verdict is not Verdict.NOT_RUN]
    names = [clean(name) for name in judged if name in verdict_words.KNOWN_GATES]
    return ("kvgate judge RUN", *(f"pytest gates/ -m {name} --evidence RUN" for name in names))


def _families(
    results: tuple[CriterionResult, ...] | list[CriterionResult],
) -> list[list[CriterionResult]]:
    """Levels of one comparison together; a criterion without levels with all its arms."""
    groups: dict[tuple[str, str, str | None], list[CriterionResult]] = {}
    for result in results:
        arm = result.arm if result.level is not None or result.baseline is not None else ""
        groups.setdefault((result.criterion, arm, result.baseline), []).append(result)
    return list(groups.values())


def _comparisons(results: list[CriterionResult], texts: Texts) -> str:
    return texts.listing(tuple(dict.fromkeys(comparison(result, texts) for result in results)))


def _value_at(result: CriterionResult | None, texts: Texts) -> str:
    if result is None:
        return texts("word.none")
    unit = result.measurement.unit
    return measured_words(result.measurement.value, unit, result.bound, texts)


def _family(results: list[CriterionResult], texts: Texts) -> Family:
    first = results[0]
    estimators = {result.measurement.estimator for result in results}
    shared = estimators.pop() if len(estimators) == 1 else ""
    return Family(
        criterion=clean(first.criterion),
        title=clean(first.title),
        comparison=_comparisons(results, texts),
        estimator=clean(shared),
        decide=clean(first.decide),
        rationale=clean(first.rationale),
        results=tuple(_result(result, shared, texts) for result in results),
    )


def _result(result: CriterionResult, shared: str, texts: Texts) -> Result:
    measurement = result.measurement
    target, floor, override = bound_words(result.bound, measurement.unit, texts)
    span, confidence = interval(measurement, texts)
    return Result(
        id=clean(result.id),
        level=texts("word.none") if result.level is None else str(result.level),
        value=measured_words(measurement.value, measurement.unit, result.bound, texts),
        repetitions=_repetitions(measurement, texts),
        interval=texts("word.none") if measurement.value is None else span,
        confidence=confidence,
        target=target,
        floor=floor,
        override=override,
        n=f"{measurement.n:,}",
        estimator="" if shared else clean(measurement.estimator),
        mark=mark(result.verdict, texts),
        codes=tuple(dict.fromkeys(reason.code.value for reason in result.reasons)),
        trials=texts.listing(tuple(clean(trial) for trial in measurement.trials)),
        detail=show(measurement.detail) if measurement.detail else "",
    )


def _repetitions(measurement: Measurement, texts: Texts) -> str:
    """Each repetition; nothing for one, which is the value itself."""
    if len(measurement.repetitions) < 2:
        return ""
    return " · ".join(
        measured_words(value, measurement.unit, None, texts) for value in measurement.repetitions
    )


def _check(check: Check) -> CheckRow:
    return CheckRow(
        name=clean(check.name),
        subject=clean(check.subject),
        found=clean(check.found),
        allowed=clean(check.allowed),
        codes=tuple(dict.fromkeys(reason.code.value for reason in check.reasons)),
        texts=tuple(dict.fromkeys(clean(reason.text) for reason in check.reasons)),
    )


def _digests(signoff: SignOff, texts: Texts) -> tuple[Fact, ...]:
    absent = texts("word.absent")
    return (
        Fact(texts("provenance.evidence_digest"), clean(signoff.evidence_digest or absent)),
        Fact(texts("provenance.criteria_digest"), clean(signoff.criteria_digest or absent)),
        Fact(texts("provenance.judge_version"), clean(signoff.judge_version)),
    )


def _provenance(signoff: SignOff, provenance: Mapping[str, str], texts: Texts) -> tuple[Fact, ...]:
    """What the verdict file itself says first; then what the caller knows, in its order."""
    own = ("evidence_digest", "criteria_digest", "judge_version")
    facts = list(_digests(signoff, texts))
    for name, value in provenance.items():
        key = name.strip().lower().replace(" ", "_")
        if key in own:
            continue
        known = f"provenance.{key}"
        facts.append(Fact(texts(known) if known in texts else clean(name), clean(value)))
    return tuple(facts)


def _flat(value: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            found.extend(_flat(item, f"{prefix}{key}."))
        else:
            found.append((f"{prefix}{key}", item))
    return found
