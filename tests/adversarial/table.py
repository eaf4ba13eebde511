"""The table fault -> expected -> seen of docs/faults.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.sim.faults import FAULT_TEXTS, FaultName

_HEAD = """\
# Faults

What a server, a proxy or a tier can do to a measurement, each injected into a simulated server
([sim.md](sim.md)), run through the whole harness and judged. One row is one test of
`tests/adversarial`; a row is written only when its test has passed.

Made by `KVGATE_WRITE_FAULTS=docs/faults.md pytest tests/adversarial`; do not edit.

| fault | what happens | arm | expected | seen |
| --- | --- | --- | --- | --- |
"""


@dataclass(frozen=True)
class Row:
    """One fault that was run. ``name`` None: the control without a fault."""

    name: FaultName | None
    arm: str
    expected: str
    seen: str


def markdown(rows: Sequence[Row]) -> str:
    """The page."""
    lines = []
    for row in rows:
        fault, text = (
            ("none", "Nothing: the control.")
            if row.name is None
            else (
                f"`{row.name.value}`",
                FAULT_TEXTS[row.name],
            )
        )
        lines.append(f"| {fault} | {text} | `{row.arm}` | {row.expected} | {row.seen} |\n")
    return _HEAD + "".join(lines)
