"""The verbs `import`, `export` and `tier`, and what `kvgate plan` says of a plan's power.

Hooked into the command line by `add_verbs`; judging and reporting are the command line's own.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from harness.errors import PlanError, StorageError
from harness.exports import FORMATS, export_junit, export_requests
from harness.judging import judge_directory
from harness.plan import Plan
from harness.power import ASSUMED_NOISE, measured_noise, power_lines
from harness.published import import_published
from harness.tier_verbs import add_tier_verb
from harness.verdicts import Verdict

# Makes the parser of a verb from its name, command, summary and example.
VerbMaker = Callable[[str, object, str, str], argparse.ArgumentParser]
# Judges a run, writes verdict and report, prints them; returns the exit code.
JudgeAndReport = Callable[[Path, str, Console], int]


def add_verbs(verb: VerbMaker, judge_and_report: JudgeAndReport) -> None:
    """Adds `import`, `export` and `tier`."""

    def import_(arguments: argparse.Namespace) -> int:
        try:
            paths = import_published(
                arguments.file, runs_root=arguments.runs, started=datetime.now(UTC)
            )
        except OSError as error:
            raise StorageError(f"{arguments.runs}: cannot write a run there: {error}") from error
        console = Console()
        codes = set()
        for path in paths:
            console.rule(path.parent.name)
            codes.add(judge_and_report(path, arguments.locale, console))
        worst = (Verdict.STOP, Verdict.INCONCLUSIVE, Verdict.PASS)
        return next(v.exit_code for v in worst if v.exit_code in codes)

    sub = verb(
        "import",
        import_,
        "turn a published table into imported evidence and judge its arithmetic",
        "kvgate import published",
    )
    sub.add_argument("what", choices=("published",), help="what to import")
    sub.add_argument("--file", type=Path, help="table to read; default: the bundled figures")
    sub.add_argument("--runs", type=Path, default=Path("runs"), help="where runs go; default runs/")
    sub.add_argument("--locale", choices=("en", "zh"), default="en", help="language of the page")

    sub = verb(
        "export",
        _export,
        "write a run in the formats of other tools",
        "kvgate export runs/x/y --format csv",
    )
    sub.add_argument("run", type=Path, metavar="RUN", help="run directory")
    sub.add_argument("--format", choices=FORMATS, required=True, help="format to write")
    sub.add_argument("--out", type=Path, metavar="DIR", help="where to; default RUN/report")

    add_tier_verb(verb)


def _export(arguments: argparse.Namespace) -> int:
    try:
        if arguments.format == "junit":
            paths = export_junit(arguments.run, judge_directory(arguments.run), arguments.out)
        else:
            paths = export_requests(arguments.run, arguments.format, arguments.out)
    except OSError as error:
        raise StorageError(f"{arguments.run}: the export cannot be written: {error}") from error
    for path in paths:
        print(path)
    return 0


def add_power_options(parser: argparse.ArgumentParser) -> None:
    """The options of `kvgate plan` that say how noisy the machine is."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--noise",
        type=_noise,
        metavar="SHARE",
        help=f"noise of a wave that the power is computed for, 0..1; default {ASSUMED_NOISE:g}",
    )
    group.add_argument(
        "--noise-from", type=Path, metavar="RUN", help="take the noise of this run instead"
    )


def plan_power_lines(plan: Plan, arguments: argparse.Namespace) -> Iterator[str]:
    """What `kvgate plan` prints of the plan's power. Raises PlanError, EvidenceError."""
    if arguments.noise_from is None:
        yield from power_lines(plan, ASSUMED_NOISE if arguments.noise is None else arguments.noise)
        return
    noise = measured_noise(judge_directory(arguments.noise_from).cells)
    if noise is None:
        raise PlanError([f"--noise-from: {arguments.noise_from} holds no cell of two waves"])
    yield from power_lines(plan, noise, origin=f"measured in {arguments.noise_from}")


def _noise(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"found {text!r}; allowed: above 0 and up to 1")
    return value
