"""docs/connector_drills.md, made of the cells of one test run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.live.connector_faults import CONCURRENCIES, Drill

VARIABLE = "KVGATE_WRITE_DRILLS"

_OPENING = """\
# Drills of the connector

What was done to a live server with the bundled connector, at 1, 4 and 8 requests at a time, and
what came of it. Each cell asks 8 sessions that are on disk (where new blocks matter, also 2 that
are not) while the fault is there. It passes when every answer is right, the engine and all
processes live, every failure is in a metric, and afterwards each session, asked alone, answers bit
for bit as from a device prefix hit of a server without connector: first from the blocks on the
device, then from the repaired files, then from host memory.

Made by `KVGATE_WRITE_DRILLS=docs/connector_drills.md pytest tests/live/test_connector_drills.py -m
live`; do not edit. A cell shows answers right / asked, and the failure counters that grew while the
fault was there. Among several requests some wait, and their files are read ahead: a bad one is then
known before its request is scheduled, so that its hit is shorter and no load fails.

"""


@dataclass(frozen=True)
class Row:
    """A drill as the page names it."""

    name: str
    happens: str
    allowed: str
    concurrencies: tuple[int, ...] = CONCURRENCIES

    @classmethod
    def of(cls, drill: Drill) -> Row:
        """The row of a table drill."""
        return cls(drill.name, drill.happens, drill.allowed, drill.concurrencies)


@dataclass
class Page:
    """Cells by drill name and concurrency: begun ones did not pass until they are recorded."""

    cells: dict[tuple[str, int], str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def begin(self, name: str, concurrency: int) -> None:
        """A cell is tried."""
        self.cells[name, concurrency] = "DID NOT PASS"

    def record(
        self,
        name: str,
        concurrency: int,
        *,
        answers: int,
        counters: Mapping[str, int],
        remark: str = "",
    ) -> None:
        """Takes in a cell that passed, so all of its answers were right."""
        lines = [f"{answers}/{answers} right", *([remark] if remark else [])]
        lines += [f"`{counter}` {count}" for counter, count in counters.items()]
        self.cells[name, concurrency] = "<br>".join(lines)

    def markdown(self, rows: list[Row], version: str) -> str:
        """The whole page."""
        heads = " | ".join(f"seen at {c}" for c in CONCURRENCIES)
        lines = [_OPENING.rstrip("\n"), "", f"Run on vLLM {version} on the CPU."]
        lines += [*self.notes, "", f"| drill | what happens | allowed | {heads} |"]
        lines.append("| --- |" + " --- |" * (2 + len(CONCURRENCIES)))
        for row in rows:
            cells = [self._cell(row, concurrency) for concurrency in CONCURRENCIES]
            lines.append(f"| {row.name} | {row.happens} | {row.allowed} | {' | '.join(cells)} |")
        return "\n".join(lines) + "\n"

    def write(self, path: Path, rows: list[Row], version: str) -> None:
        """Writes the page."""
        path.write_text(self.markdown(rows, version), encoding="utf-8")

    def _cell(self, row: Row, concurrency: int) -> str:
        if concurrency not in row.concurrencies:
            return "needs company"
        return self.cells.get((row.name, concurrency), "not run")
