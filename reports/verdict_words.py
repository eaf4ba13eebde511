"""Verdicts, gates, reasons and sentences: the wording shared by page and terminal. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from harness.verdicts import (
    Bound,
    Check,
    CriterionResult,
    GateVerdict,
    Reason,
    ReasonCode,
    SignOff,
    Unit,
    Verdict,
)
from reports.context import GateTile, Mark, Occurrence, ReasonGroup
from reports.formats import edge, measured, target
from reports.safe import clean
from reports.texts import Texts

KNOWN_GATES = ("g1", "g2", "g3", "g4")
# Of one reason and of one finding; the rest stands in the tables of criteria and checks.
MAX_OCCURRENCES = 8
MAX_PLACES = 6
_KINDS = {
    Verdict.PASS: "pass",
    Verdict.STOP: "stop",
    Verdict.INCONCLUSIVE: "inconclusive",
    Verdict.NOT_RUN: "not-run",
}
_SEVERITY = (Verdict.STOP, Verdict.INCONCLUSIVE, Verdict.NOT_RUN, Verdict.PASS)


def mark(verdict: Verdict, texts: Texts) -> Mark:
    """Word and shape of a verdict; the English word is a term and stays in every language."""
    local = texts(f"verdict.{_KINDS[verdict]}.word")
    return Mark(_KINDS[verdict], verdict.value, "" if local == verdict.value else local)


def sentence(verdict: Verdict, texts: Texts) -> str:
    """What the verdict says, in one plain sentence."""
    return texts(f"verdict.{_KINDS[verdict]}.sentence")


def label(signoff: SignOff, texts: Texts) -> str:
    """What stands beside the verdict; empty only for a signable run without a label of its own."""
    own = clean(signoff.label)
    key = f"label.{own}"
    shown = texts(key) if key in texts else own
    if signoff.signable or "not signable" in own:
        return shown
    return texts.listing((*filter(None, [shown]), texts("word.not_signable")))


def gate_name(gate: str, texts: Texts) -> str:
    """G1 for g1; the name itself for anything else that was judged like a gate."""
    if gate.lower() in KNOWN_GATES:
        return gate.upper()
    key = f"gate_name.{gate}"
    return texts(key) if key in texts else clean(gate)


def gate_title(gate: str, texts: Texts) -> str:
    """Title of a known gate; another one has only its name."""
    key = f"gate.{gate.lower()}"
    return texts(key) if key in texts else ""


def gate_tiles(signoff: SignOff, texts: Texts) -> tuple[GateTile, ...]:
    """All four gates, after any other that was judged; a gate not selected is NOT RUN.

    Altered evidence comes as such another gate, and then no gate was judged at all.
    """
    by_name = {gate.gate.lower(): gate for gate in signoff.gates}
    others = [name for name in by_name if name not in KNOWN_GATES]
    absent = texts("gate_note.not_judged" if others else "gate_note.not_selected")
    return tuple(_tile(name, by_name.get(name), absent, texts) for name in (*others, *KNOWN_GATES))


def scope(signoff: SignOff, texts: Texts) -> str:
    """Which gates were judged and which were not."""
    groups: dict[str, list[str]] = {"judged": [], "unjudged": [], "not_run": []}
    by_name = {gate.gate.lower(): gate for gate in signoff.gates}
    for name in sorted({*KNOWN_GATES, *by_name}):
        gate = by_name.get(name)
        if gate is None or gate.verdict is Verdict.NOT_RUN:
            groups["not_run"].append(gate_name(name, texts))
        else:
            groups["judged" if gate.criteria else "unjudged"].append(gate_name(name, texts))
    return texts("word.sentence_gap").join(
        texts(f"banner.{group}", gates=texts.listing(tuple(names)))
        for group, names in groups.items()
        if names
    )


def comparison(result: CriterionResult, texts: Texts) -> str:
    """Arm, or arm against baseline."""
    if result.baseline is None:
        return clean(result.arm)
    return texts("word.against", arm=clean(result.arm), baseline=clean(result.baseline))


def bound_words(bound: Bound, unit: Unit, texts: Texts) -> tuple[str, str, str]:
    """The bound as the rule applied it, what belongs to it, override; the last two may be empty."""
    wanted, beside = edge(bound.target, unit, bound.comparison), ""
    if bound.each is not None:
        beside = texts("word.target", target=wanted)
        wanted = texts("word.each", edge=edge(bound.each, unit))
    elif bound.low is not None:
        beside = texts("word.low", edge=edge(bound.low, unit))
    elif bound.floor is not None:
        beside = texts("word.floor", floor=edge(bound.floor, unit, bound.comparison))
    override = ""
    if bound.default_target is not None:
        override = texts("word.default", default=target(bound.default_target, unit))
    return wanted, beside, override


def missed_words(result: CriterionResult, texts: Texts) -> str:
    """The repetitions that did not reach the bound, with their values; empty for none."""
    measurement = result.measurement
    numbers = measurement.detail.get("repetitions", [])
    by_number = dict(zip(numbers, measurement.repetitions, strict=False))
    return texts.listing(
        tuple(
            texts(
                "word.repetition",
                number=number,
                value=measured(by_number.get(number), measurement.unit, result.bound, texts),
            )
            for number in result.missed
        )
    )


def reason_groups(signoff: SignOff, texts: Texts) -> tuple[ReasonGroup, ...]:
    """Reasons of everything that is not PASS, once per code, the gravest first."""
    found: dict[ReasonCode, dict[tuple[str, str], list[tuple[Verdict, str]]]] = {}
    for verdict, place, reason in _reasons(signoff, texts):
        finding = (clean(reason.text), clean(reason.evidence))
        found.setdefault(reason.code, {}).setdefault(finding, []).append((verdict, place))
    groups = [_group(code, findings, texts) for code, findings in found.items()]
    order = [_KINDS[verdict] for verdict in _SEVERITY]
    return tuple(sorted(groups, key=lambda group: order.index(group.mark.kind)))


def _tile(name: str, gate: GateVerdict | None, absent: str, texts: Texts) -> GateTile:
    title = gate_title(name, texts)
    if gate is None:
        return GateTile(gate_name(name, texts), title, mark(Verdict.NOT_RUN, texts), absent)
    note = texts("gate_note.criteria", count=len(gate.criteria))
    if not gate.criteria:
        note = texts("gate_note.nothing_judged")
        if gate.reasons:
            note = texts.reason(gate.reasons[0].code).meaning
    return GateTile(gate_name(name, texts), title, mark(gate.verdict, texts), note)


def _reasons(signoff: SignOff, texts: Texts) -> Iterator[tuple[Verdict, str, Reason]]:
    """Criteria first, then checks, then gates: the most specific place of a reason stands first."""
    for gate in signoff.gates:
        for result in gate.criteria:
            if result.verdict is not Verdict.PASS:
                for reason in result.reasons:
                    yield result.verdict, clean(result.id), reason
    for check in signoff.checks:
        if check.failed:
            for reason in check.reasons:
                yield Verdict.INCONCLUSIVE, clean(check.name), _with_subject(check, reason)
    for gate in signoff.gates:
        if gate.verdict is not Verdict.PASS:
            for reason in gate.reasons:
                yield gate.verdict, gate_name(gate.gate, texts), reason


def _with_subject(check: Check, reason: Reason) -> Reason:
    """Names the trial as criteria do when they repeat a check's reason, so that both are one."""
    if reason.text.startswith(check.subject):
        return reason
    return dataclasses.replace(reason, text=f"{check.subject}: {reason.text}")


def _group(
    code: ReasonCode,
    findings: dict[tuple[str, str], list[tuple[Verdict, str]]],
    texts: Texts,
) -> ReasonGroup:
    words = texts.reason(code)
    verdicts = [verdict for found in findings.values() for verdict, _ in found]
    occurrences = tuple(
        _occurrence(text, evidence, tuple(dict.fromkeys(place for _, place in found)))
        for (text, evidence), found in findings.items()
    )
    return ReasonGroup(
        code=code.value,
        mark=mark(min(verdicts, key=_SEVERITY.index), texts),
        meaning=words.meaning,
        remedy=words.remedy,
        occurrences=occurrences[:MAX_OCCURRENCES],
        more=max(0, len(occurrences) - MAX_OCCURRENCES),
    )


def _occurrence(text: str, evidence: str, places: tuple[str, ...]) -> Occurrence:
    more = max(0, len(places) - MAX_PLACES)
    return Occurrence(text, evidence, places[:MAX_PLACES], more)
