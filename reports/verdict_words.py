"""Verdicts, gates, reasons and sentences: the wording shared by page and terminal. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from harness.verdicts import (
    GATES_BUILT,
    Bound,
    Cause,
    Consequence,
    CriterionResult,
    Finding,
    GateVerdict,
    SignOff,
    Unit,
    Verdict,
)
from reports.context import Following, GateTile, Mark, Occurrence, ReasonGroup
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


def _is_missing(name: str, gate: GateVerdict | None) -> bool:
    """True for a gate of the protocol that this version cannot run at all."""
    return gate is None and name not in GATES_BUILT


def scope(signoff: SignOff, texts: Texts) -> str:
    """Which gates were judged and which were not."""
    groups: dict[str, list[str]] = {"judged": [], "unjudged": [], "not_run": [], "not_built": []}
    by_name = {gate.gate.lower(): gate for gate in signoff.gates}
    for name in sorted({*KNOWN_GATES, *by_name}):
        gate = by_name.get(name)
        if _is_missing(name, gate):
            groups["not_built"].append(gate_name(name, texts))
        elif gate is None or gate.verdict is Verdict.NOT_RUN:
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


def bound_brief(bound: Bound, unit: Unit, texts: Texts) -> str:
    """The bound as the rule applied it, for a narrow column."""
    if bound.each is not None:
        return texts("word.each", edge=edge(bound.each, unit))
    return edge(bound.target, unit, bound.comparison)


def bound_words(bound: Bound, unit: Unit, texts: Texts) -> tuple[str, str, str]:
    """The bound as the rule applied it, what belongs to it, override; the last two may be empty."""
    wanted, beside = edge(bound.target, unit, bound.comparison), ""
    if bound.each is not None:
        beside = texts("word.every", target=wanted)
        wanted = edge(bound.each, unit)
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
    """Root causes as the judge ordered them, the one of the verdict first, with what follows."""
    names = {gate.gate: gate_name(gate.gate, texts) for gate in signoff.gates}
    return tuple(_group(cause, names, texts) for cause in signoff.causes)


def root_cause(signoff: SignOff, texts: Texts) -> str:
    """Why, in one line: the root cause of the verdict; empty for a PASS and where none is named."""
    if signoff.verdict is Verdict.PASS or not signoff.causes:
        return ""
    cause = signoff.causes[0]
    meaning = texts.reason(cause.code).meaning
    return texts("word.reason_of", meaning=meaning, text=texts.said(clean(cause.findings[0].text)))


def _tile(name: str, gate: GateVerdict | None, absent: str, texts: Texts) -> GateTile:
    title = gate_title(name, texts)
    if _is_missing(name, gate):
        word = Mark("not-built", texts("gate_note.not_built_word"), "")
        return GateTile(gate_name(name, texts), title, word, texts("gate_note.not_built"))
    if gate is None:
        return GateTile(gate_name(name, texts), title, mark(Verdict.NOT_RUN, texts), absent)
    note = texts("gate_note.criteria", count=len(gate.criteria))
    if not gate.criteria:
        note = texts("gate_note.nothing_judged")
        if gate.reasons:
            note = texts.reason(gate.reasons[0].code).meaning
    return GateTile(gate_name(name, texts), title, mark(gate.verdict, texts), note)


def _group(cause: Cause, names: Mapping[str, str], texts: Texts) -> ReasonGroup:
    words = texts.reason(cause.code)
    return ReasonGroup(
        code=cause.code.value,
        mark=mark(cause.verdict, texts),
        meaning=words.meaning,
        remedy=words.remedy,
        occurrences=_occurrences(cause.findings, names, texts),
        more=max(0, len(cause.findings) - MAX_OCCURRENCES),
        following=tuple(_following(effect, names, texts) for effect in cause.consequences),
    )


def _following(effect: Consequence, names: Mapping[str, str], texts: Texts) -> Following:
    return Following(
        code=effect.code.value,
        mark=mark(effect.verdict, texts),
        meaning=texts.reason(effect.code).meaning,
        count=len(effect.findings),
        occurrences=_occurrences(effect.findings, names, texts),
        more=max(0, len(effect.findings) - MAX_OCCURRENCES),
    )


def _occurrences(
    findings: tuple[Finding, ...], names: Mapping[str, str], texts: Texts
) -> tuple[Occurrence, ...]:
    return tuple(
        Occurrence(
            text=texts.said(clean(finding.text)),
            evidence=clean(finding.evidence),
            places=tuple(clean(names.get(place, place)) for place in finding.places[:MAX_PLACES]),
            more_places=max(0, len(finding.places) - MAX_PLACES),
        )
        for finding in findings[:MAX_OCCURRENCES]
    )
