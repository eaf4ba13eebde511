"""What each drill must end with, the file of what it did end with, and the page made of it.

    KVGATE_DRILLS=all KVGATE_DRILL_RESULTS=tests/drills/results.json pytest tests/drills
    python -m tests.drills.table > docs/failures.md

A test fails when the page and the results differ, or when a result is not as it must be.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.drills.drill import FAULTS, SIGNALS, Outcome
from tests.drills.fake import PHASES

RESULTS = Path(__file__).with_name("results.json")
FAKE = "fake"
# The server is not there yet, so there is nothing to kill.
IMPOSSIBLE = {
    ("install check", fault)
    for fault in FAULTS
    if fault not in SIGNALS and fault != "kill -9 harness"
}
CELLS = [(p, f) for p in PHASES for f in FAULTS if (p, f) not in IMPOSSIBLE]


@dataclass(frozen=True)
class Expected:
    """Exit code, and what the reason must contain, as a pattern."""

    exit_code: int
    reason: str


def expected(phase: str, fault: str) -> Expected:
    """The rule of a cell; docs/running.md says the same in words."""
    if fault in SIGNALS:
        how = "" if fault == "SIGINT" else rf" \({fault}\)"
        reason = rf"^interrupted by the operator{how}$"
        return Expected(130, "nothing was started" if phase == "install check" else reason)
    if fault == "kill -9 harness":
        return Expected(-9, "nothing was started" if phase == "install check" else "^not sealed$")
    reasons = {
        "kill -9 supervisor": "the supervisor of the server ended with code -9",
        "kill -9 API server": "the server ended by itself with code -9",
        # vLLM notices the end of its engine and ends, or answers every request with an error.
        "kill -9 EngineCore": "the server (ended by itself|stopped answering)",
        "SIGSTOP API server": "the server stopped answering: no answer",
    }
    if phase == "server start" and fault == "SIGSTOP API server":
        return Expected(2, "not ready after")
    return Expected(2, reasons[fault])


def assert_as_expected(phase: str, fault: str, outcome: Outcome) -> None:
    """Exit code, reason and rest are as the rule says."""
    rule = expected(phase, fault)
    assert outcome.exit_code == rule.exit_code
    assert re.search(rule.reason, outcome.reason), outcome.reason
    assert outcome.left == ()


@dataclass(frozen=True)
class Result:
    """One cell that was run. ``where``: fake, or the version of the real vLLM."""

    phase: str
    fault: str
    where: str
    exit_code: int
    reason: str
    left: tuple[str, ...]
    next_run: str


def result_of(phase: str, fault: str, outcome: Outcome, *, where: str) -> Result:
    """The row of a cell; whether the next run did what it says is for the next run to show."""
    is_dead = outcome.reason == "not sealed"
    next_run = "started, cleaned up and sealed it" if is_dead else "started"
    return Result(phase, fault, where, outcome.exit_code, outcome.reason, outcome.left, next_run)


def record(result: Result) -> None:
    """Puts a result into the file that ``KVGATE_DRILL_RESULTS`` names; without it, does nothing."""
    target = os.environ.get("KVGATE_DRILL_RESULTS")
    if target is None:
        return
    found = {(r.phase, r.fault, r.where): r for r in read_results(Path(target))}
    found[result.phase, result.fault, result.where] = result
    order = {cell: index for index, cell in enumerate(CELLS)}
    rows = sorted(found.values(), key=lambda r: (order[r.phase, r.fault], r.where))
    text = json.dumps([asdict(row) for row in rows], indent=1)
    Path(target).write_text(text + "\n")


def read_results(path: Path = RESULTS) -> list[Result]:
    """All results of a file."""
    if not path.is_file():
        return []
    return [Result(**{**row, "left": tuple(row["left"])}) for row in json.loads(path.read_text())]


_OPENING = """\
# Failures

What a run ends with when it is broken on purpose, by phase and fault. Made by tests: each cell
kills, stops or interrupts a running `kvgate run` and looks at exit code, reason and what is left
30 s later: processes of the run, its ports, its files in `/dev/shm`, its lock. The run after it is
started in the same runs directory and must start; after `kill -9` of the harness it must also have
ended, removed and sealed what the dead run left.

Cells marked **vLLM** ran on real vLLM on the CPU, the others on a stand-in that speaks enough of
vLLM's API and has an engine process and a file in `/dev/shm` of its own. The mark (fake) says that
only the stand-in was used. Made by `python -m tests.drills.table` from `tests/drills/results.json`;
do not edit.

| exit code | means |
| --- | --- |
| 130 | interrupted: servers stopped in order, all sealed, no verdict |
| 137 | SIGKILL: the supervisor stops the server; the next run seals it as `harness died` |
| 2 | the run was stopped, sealed and judged: INCONCLUSIVE |

"""


def markdown(results: list[Result]) -> str:
    """docs/failures.md."""
    lines = [_OPENING.rstrip("\n"), ""]
    lines += ["## Phase by fault", "", "| phase | " + " | ".join(FAULTS) + " |"]
    lines.append("| --- |" + " --- |" * len(FAULTS))
    for phase in PHASES:
        cells = [_cell(phase, fault, results) for fault in FAULTS]
        lines.append(f"| {phase} | " + " | ".join(cells) + " |")
    lines += ["", "Nothing was left in any cell." if not _left(results) else "", ""]
    lines += ["## Every cell", ""]
    lines += ["| phase | fault | server | exit code | reason | left | next run |"]
    lines.append("| --- |" + " --- |" * 6)
    for r in results:
        left = ", ".join(r.left) or "nothing"
        lines.append(
            f"| {r.phase} | {r.fault} | {_where(r)} | {_shell(r.exit_code)} | {r.reason} | {left} "
            f"| {r.next_run} |"
        )
    return "\n".join(lines) + "\n"


def _cell(phase: str, fault: str, results: list[Result]) -> str:
    if (phase, fault) in IMPOSSIBLE:
        return "no server yet"
    found = [r for r in results if (r.phase, r.fault) == (phase, fault)]
    if not found:
        return "not run"
    codes = "/".join(sorted({str(_shell(r.exit_code)) for r in found}))
    is_real = any(r.where != FAKE for r in found)
    left = "" if not _left(found) else ", LEFT SOMETHING"
    return f"{codes} {'**vLLM**' if is_real else '(fake)'}{left}"


def _left(results: list[Result]) -> bool:
    return any(r.left for r in results)


def _where(result: Result) -> str:
    return "fake" if result.where == FAKE else f"**{result.where}**"


def _shell(code: int) -> int:
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    print(markdown(read_results()), end="")
