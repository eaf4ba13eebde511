"""The verdict for a terminal: compact, ASCII signs, readable at 80 columns and without colour.

Texts from evidence are cleaned of control codes and never read as rich markup.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from harness.verdicts import CriterionResult, SignOff, Verdict
from reports.context import Following, Mark, ReasonGroup
from reports.formats import edge, interval, measured
from reports.safe import clean
from reports.texts import Texts, load
from reports.verdict_words import (
    bound_brief,
    gate_name,
    gate_title,
    label,
    mark,
    missed_words,
    reason_groups,
    root_cause,
    scope,
    sentence,
)

_STYLES = {
    "pass": "bold green",
    "stop": "bold red",
    "inconclusive": "bold yellow",
    "not-run": "bold bright_black",
}
_ID_COLUMNS = 44  # what 80 columns leave for the id, with usual values
_ASCII = {"≥": ">=", "≤": "<=", "–": "-", "·": ","}


def verdict_table(signoff: SignOff, locale: str = "en") -> RenderableType:
    """Criteria, root causes with remedies and consequences and, last, the verdict and why.

    Raises MissingText for an unknown or incomplete locale.
    """
    texts = load(locale)
    parts: list[RenderableType] = [_criteria(signoff, texts)]
    if aside := [check.name for check in signoff.checks if not check.applicable]:
        parts += ["", _heading(texts("terminal.not_applicable"))]
        parts.append(Padding(Text(clean(texts.listing(tuple(aside)))), (0, 0, 0, 2), expand=False))
    groups = reason_groups(signoff, texts)
    if groups:
        parts += ["", _heading(texts("terminal.reasons"))]
        parts += [part for group in groups for part in _reason(group, texts)]
    parts += ["", _last_line(signoff, texts)]
    return Group(*parts)


def print_signoff(signoff: SignOff, console: Console, locale: str = "en") -> None:
    """Prints `verdict_table`; characters the console cannot encode are spelled out."""
    with console.capture() as capture:
        console.print(verdict_table(signoff, locale))
    encoding = console.encoding or "utf-8"
    lines = [line.rstrip() for line in capture.get().rstrip("\n").split("\n")]
    shown = "\n".join([*lines, ""]).encode(encoding, "backslashreplace").decode(encoding)
    console.file.write(shown)
    console.file.flush()


def _criteria(signoff: SignOff, texts: Texts) -> RenderableType:
    results = [result for gate in signoff.gates for result in gate.criteria]
    if not results:
        return Text(texts("terminal.no_criteria"))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column(texts("terminal.id"), overflow="fold", min_width=20)
    table.add_column(texts("terminal.value"), justify="right", no_wrap=True)
    table.add_column(texts("terminal.bound"), justify="right", no_wrap=True)
    table.add_column(texts("terminal.n"), justify="right", no_wrap=True)
    table.add_column(texts("terminal.verdict"), no_wrap=True)
    for gate in signoff.gates:
        if gate.criteria:
            title = f"{gate_name(gate.gate, texts)} {gate_title(gate.gate, texts)}"
            table.add_row(Text(title, style="bold"))
        for name, grouped in itertools.groupby(gate.criteria, key=lambda found: found.criterion):
            of_name = tuple(grouped)
            if len(of_name) > 1:
                table.add_row(Text(clean(name)))
            for result in of_name:
                _add_result(table, result, texts, alone=len(of_name) == 1)
    if all(result.bound.default_target is None for result in results):
        return table
    return Group(table, Text(f"* {texts('criteria.overrides')}", style="dim"))


def _add_result(table: Table, result: CriterionResult, texts: Texts, *, alone: bool) -> None:
    """A row; the id's bracket only, where the criterion's name stands above."""
    measurement = result.measurement
    identifier = clean(result.id)
    value = measured(measurement.value, measurement.unit, result.bound, texts)
    wanted = bound_brief(result.bound, measurement.unit, texts)
    override = result.bound.default_target is not None
    table.add_row(
        Text(_breakable(identifier) if alone else f"  {_bracket(identifier)}"),
        _plain(value),
        _plain(wanted + (" *" if override else "")),
        Text(str(measurement.n)),
        _term(mark(result.verdict, texts)),
    )
    for line in _beside(result, texts):
        table.add_row(Padding(_plain(line), (0, 0, 0, 4)))


def _bracket(identifier: str) -> str:
    return "[" + identifier.rpartition("[")[2]


def _beside(result: CriterionResult, texts: Texts) -> Iterator[str]:
    """Why a value that seems fine is not a PASS: the repetition or the limit that fell short."""
    if result.verdict is Verdict.PASS:
        return
    if result.missed:
        yield texts("terminal.missed", repetitions=missed_words(result, texts))
    if result.bound.low is not None and result.measurement.low is not None:
        span, confidence = interval(result.measurement, texts)
        needed = edge(result.bound.low, result.measurement.unit)
        yield texts("terminal.interval", span=span, confidence=confidence, needed=needed)


def _breakable(identifier: str) -> str:
    """Long ids continue on a second line at the bracket, so that 80 columns do not cut a word."""
    if len(identifier) <= _ID_COLUMNS or "[" not in identifier:
        return identifier
    name, scope_part = identifier.split("[", 1)
    return f"{name}\n  [{scope_part}"


def _reason(group: ReasonGroup, texts: Texts) -> list[RenderableType]:
    first = _verdict(group.mark)
    first.append(f"  {group.code}", style="not bold default")
    lines: list[RenderableType] = [Padding(first, (0, 0, 0, 2), expand=False)]
    lines.append(Padding(Text(group.meaning), (0, 0, 0, 4), expand=False))
    for item in group.occurrences:
        only = item.places[0] if len(item.places) == 1 else ""
        text = f"{only}: {item.text}" if only and only not in item.text else item.text
        lines.append(Padding(Text(f"- {text}"), (0, 0, 0, 4), expand=False))
        if item.evidence:
            path = Text(f"{texts('terminal.evidence')} {item.evidence}", style="dim")
            lines.append(Padding(path, (0, 0, 0, 6), expand=False))
    if group.more:
        lines.append(Padding(Text(texts("why.more", count=group.more)), (0, 0, 0, 4), expand=False))
    remedy = Text(f"{texts('terminal.remedy')} ", style="bold")
    remedy.append(group.remedy, style="not bold")
    lines.append(Padding(remedy, (0, 0, 0, 4), expand=False))
    if group.following:
        heading = Text(texts("why.following"), style="dim")
        lines.append(Padding(heading, (0, 0, 0, 4), expand=False))
        lines += [Padding(_folded(f), (0, 0, 0, 6), expand=False) for f in group.following]
    return lines


def _folded(effect: Following) -> Text:
    """A consequence in one line: its code, how often, and the first finding."""
    times = f" ({effect.count} x)" if effect.count > 1 else ""
    return Text(f"{effect.code}{times}: {effect.occurrences[0].text}", style="dim")


def _last_line(signoff: SignOff, texts: Texts) -> Text:
    line = _verdict(mark(signoff.verdict, texts))
    rest = [sentence(signoff.verdict, texts), scope(signoff, texts)]
    note = label(signoff, texts)
    line.append("  " + texts("word.sentence_gap").join(rest), style="not bold default")
    if note:
        line.append(f" [{note}]", style="not bold default")
    if why := root_cause(signoff, texts):
        line.append(f"\n{texts('why.heading')}: {why}", style="not bold default")
    return line


def _term(verdict: Mark) -> Text:
    """The term alone, for a narrow column."""
    return Text(verdict.word, style=_STYLES[verdict.kind])


def _verdict(verdict: Mark) -> Text:
    word = f"{verdict.word} {verdict.local}".rstrip()
    return Text(word, style=_STYLES[verdict.kind])


def _heading(text: str) -> Text:
    return Text(text, style="bold underline")


def _plain(text: str) -> Text:
    for sign, spelling in _ASCII.items():
        text = text.replace(sign, spelling)
    return Text(text)
