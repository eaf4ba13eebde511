"""Effective configuration of the arms side by side, for the page. Pure; judges nothing.

Whether a difference is declared comes from `SignOff.differences`: each entry names its ``key``,
the pair (``arm``, ``baseline``), their values (``arm_value``, ``baseline_value``) and whether it is
``declared``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.records import canonical_json
from harness.verdicts import ArmSummary, SignOff
from reports.charts import arm_order
from reports.context import ArmColumn, Configuration, SettingRow
from reports.figures import arm_colour
from reports.safe import clean, show
from reports.texts import Texts

_ORDER = ("undeclared", "declared", "differs", "same")


def configuration(signoff: SignOff, texts: Texts) -> Configuration:
    """Differing keys first, undeclared before declared; then those that all arms share."""
    order = arm_order(signoff)
    columns = tuple(_column(arm, order) for arm in signoff.arms)
    compared = _compared(signoff)
    keys = sorted({key for arm in signoff.arms for key in arm.effective} | set(compared))
    rows = [row for key in keys for row in _rows(key, signoff, compared.get(key), texts)]
    differing = sorted(
        (row for row in rows if row.status != "same"), key=lambda row: _ORDER.index(row.status)
    )
    return Configuration(
        arms=columns,
        differing=tuple(differing),
        same=tuple(row for row in rows if row.status == "same"),
        notes=tuple(show(entry) for entry in signoff.differences if not _is_keyed(entry)),
    )


def _column(arm: ArmSummary, order: tuple[str, ...]) -> ArmColumn:
    return ArmColumn(
        arm=clean(arm.arm),
        colour=arm_colour(arm.arm, order),
        role=clean(arm.role),
        medium=clean(arm.medium or ""),
        argv=tuple(clean(argument) for argument in arm.argv),
    )


def _compared(signoff: SignOff) -> dict[str, str]:
    """Status of each key that differs in a comparison; the worst where comparisons disagree."""
    found: dict[str, str] = {}
    for entry in signoff.differences:
        if _is_keyed(entry):
            status = _entry_status(entry, signoff)
            found[entry["key"]] = min(status, found.get(entry["key"], status), key=_ORDER.index)
    return found


def _entry_status(entry: Mapping[str, Any], signoff: SignOff) -> str:
    """Undeclared, unless every check of the pair passed: a capacity may differ within its bound."""
    if entry.get("declared") is True:
        return "declared"
    pair = f"{entry.get('arm')} vs {entry.get('baseline')}"
    passed = [check.passed for check in signoff.checks if check.subject == pair]
    return "differs" if passed and all(passed) else "undeclared"


def _rows(key: str, signoff: SignOff, status: str | None, texts: Texts) -> list[SettingRow]:
    """One row; of a table (the connector's own configuration) one per key of it.

    A key of a table is the same where all arms that have the table agree: that some have none is
    said by another key.
    """
    values = [_value(key, arm, signoff) for arm in signoff.arms]
    tables = [value[0] for value in values if value and isinstance(value[0], Mapping)]
    if not tables or any(value and value[0] and value[0] not in tables for value in values):
        return [_row(key, values, status, texts)]
    rows = []
    for part in sorted({name for table in tables for name in table}):
        shown = [
            (value[0][part],) if value and value[0] and part in value[0] else () for value in values
        ]
        is_same = len({canonical_json(table.get(part)) for table in tables}) == 1
        rows.append(_row(f"{key}.{part}", shown, "same" if is_same else status, texts))
    return rows


def _row(key: str, values: list[tuple[Any, ...]], status: str | None, texts: Texts) -> SettingRow:
    if status is None:
        status = "same" if len({canonical_json(value) for value in values}) <= 1 else "differs"
    return SettingRow(
        key=clean(key),
        values=tuple(_words(value, texts) for value in values),
        status=status,
        word=texts(f"setting.{status}"),
    )


def _value(key: str, arm: ArmSummary, signoff: SignOff) -> tuple[Any, ...]:
    """The value in a tuple; () where the arm does not have the key, which is not null."""
    if key in arm.effective:
        return (arm.effective[key],)
    if any(key in other.effective for other in signoff.arms):
        return ()
    for entry in signoff.differences:
        if _is_keyed(entry) and entry["key"] == key:
            for part in ("arm", "baseline"):
                if entry.get(part) == arm.arm and f"{part}_value" in entry:
                    return (entry[f"{part}_value"],)
    return ()


def _words(value: tuple[Any, ...], texts: Texts) -> str:
    if not value:
        return texts("word.absent")
    return texts("word.nothing") if value[0] is None else show(value[0])


def _is_keyed(entry: Mapping[str, Any]) -> bool:
    return isinstance(entry.get("key"), str)
