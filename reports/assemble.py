"""Builds the page's context from a verdict file's content. Pure: no clock, path or judgement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.verdicts import (
    Check,
    CriterionResult,
    SignOff,
    Verdict,
)
from reports import verdict_words
from reports.charts import arm_order, measured
from reports.configuration import configuration
from reports.context import (
    Banner,
    CheckGroup,
    CheckRow,
    Checks,
    Decisive,
    Fact,
    Page,
    ReasonGroup,
    Summary,
)
from reports.criteria import anchors, gate_block, headlines
from reports.formats import measured as measured_words
from reports.safe import clean, show
from reports.texts import Texts
from reports.verdict_words import bound_brief, comparison, mark

_LANGUAGES = {"en": "en", "zh": "zh-CN"}


def build_page(signoff: SignOff, provenance: Mapping[str, str], texts: Texts) -> Page:
    """Everything the sign-off page shows, in the language of ``texts``."""
    answer = banner(signoff, texts)
    places = anchors(signoff, texts)
    reasons = verdict_words.reason_groups(signoff, texts)
    return Page(
        language=_LANGUAGES[texts.locale],
        title=texts("page.title", campaign=answer.campaign, verdict=answer.mark.word),
        banner=answer,
        facts=first_facts(signoff, provenance, texts),
        headlines=headlines(signoff, places, texts),
        parties=(clean(signoff.supplier), clean(signoff.customer)),
        arms=tuple(clean(arm) for arm in arm_order(signoff)),
        anchors=places,
        why=_why(reasons),
        reasons=reasons,
        summary=summary(signoff, texts),
        overrides=tuple(clean(text) for text in signoff.overrides),
        gates=tuple(gate_block(gate, signoff, texts) for gate in signoff.gates),
        measured=measured(signoff, texts),
        configuration=configuration(signoff, texts),
        plan=tuple(Fact(clean(key), show(value)) for key, value in _flat(signoff.plan, "")),
        checks=checks(signoff, texts),
        not_tested=tuple(texts.said(clean(text)) for text in signoff.not_tested),
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


def first_facts(signoff: SignOff, provenance: Mapping[str, str], texts: Texts) -> tuple[Fact, ...]:
    """When, which run, on what, for whom: all of it sealed or judged, none from a directory."""
    absent = texts("word.absent")

    def known(name: str) -> str:
        return clean(provenance.get(name, "")) or absent

    machine = [known("processor"), texts("fact.cores", count=known("cores")), known("memory")]
    versions = dict.fromkeys(version for arm in signoff.arms for version in arm.versions)
    servers = texts.listing(tuple(clean(version) for version in versions)) or absent
    digest = clean(signoff.evidence_digest or "")
    return (
        Fact(texts("fact.date"), _minute(known("started"))),
        Fact(texts("fact.run"), known("run")),
        Fact(texts("fact.evidence"), digest[:16] or absent),
        Fact(texts("fact.model"), clean(signoff.model) or absent),
        Fact(texts("fact.server"), servers),
        Fact(texts("fact.machine"), texts.listing(tuple(machine))),
        Fact(texts("fact.supplier"), clean(signoff.supplier) or texts("fact.unnamed")),
        Fact(texts("fact.customer"), clean(signoff.customer) or texts("fact.unnamed")),
    )


def _minute(started: str) -> str:
    """2026-12-07 11:30 of a sealed UTC time; any other text as it stands."""
    return started[:16].replace("T", " ") if started.endswith("+00:00") else started


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
                title=texts.said(clean(first.title)),
                comparison=comparison(first, texts),
                values=tuple(_value_at(by_level.get(level), texts) for level in columns),
                bound=bound_brief(first.bound, first.measurement.unit, texts),
            )
        )
    total = sum(len(gate.criteria) for gate in signoff.gates)
    headings = tuple(texts("charts.level", level=level) for level in levels)
    return Summary(headings or (texts("column.value"),), tuple(rows), total - len(chosen))


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
        failed=tuple(_check(check, texts) for check in failed),
        passed=tuple(
            CheckGroup(clean(name), len(group), tuple(_check(check, texts) for check in group))
            for name, group in passed.items()
        ),
        not_applicable=tuple(_check(check, texts) for check in aside),
    )


def commands(signoff: SignOff) -> tuple[str, ...]:
    """How to judge the same evidence again; RUN stands for the run directory."""
    judged = [gate.gate.lower() for gate in signoff.gates if gate.verdict is not Verdict.NOT_RUN]
    names = [clean(name) for name in judged if name in verdict_words.KNOWN_GATES]
    return ("kvgate judge RUN", *(f"pytest gates/ -m {name} --evidence RUN" for name in names))


def _families(
    results: list[CriterionResult],
) -> list[list[CriterionResult]]:
    """Levels of one comparison together."""
    groups: dict[tuple[str, str, str | None], list[CriterionResult]] = {}
    for result in results:
        groups.setdefault((result.criterion, result.arm, result.baseline), []).append(result)
    return list(groups.values())


def _value_at(result: CriterionResult | None, texts: Texts) -> str:
    if result is None:
        return texts("word.none")
    unit = result.measurement.unit
    return measured_words(result.measurement.value, unit, result.bound, texts)


def _check(check: Check, texts: Texts) -> CheckRow:
    return CheckRow(
        name=clean(check.name),
        subject=clean(check.subject),
        found=texts.said(clean(check.found)),
        allowed=texts.said(clean(check.allowed)),
        codes=tuple(dict.fromkeys(reason.code.value for reason in check.reasons)),
        texts=tuple(dict.fromkeys(texts.said(clean(r.text)) for r in check.reasons)),
    )


def _why(reasons: Sequence[ReasonGroup]) -> dict[str, str]:
    """Each code to its own root cause, or to the first that it follows from."""
    found: dict[str, str] = {}
    for index, group in enumerate(reasons):
        found.setdefault(group.code, f"why-{index}")
    for index, group in enumerate(reasons):
        for effect in group.following:
            found.setdefault(effect.code, f"why-{index}")
    return found


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
