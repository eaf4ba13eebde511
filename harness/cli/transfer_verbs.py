"""The verbs `import` and `export`."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from harness.cli.parsing import VerbMaker
from harness.cli.run_verbs import judge_and_report
from harness.errors import StorageError
from harness.evidence.exports import FORMATS, export_junit, export_requests
from harness.evidence.published import import_published
from harness.run.judging import judge_directory
from harness.verdicts import Verdict


def add_transfer_verbs(verb: VerbMaker) -> None:
    """Adds `import` and `export`."""

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
