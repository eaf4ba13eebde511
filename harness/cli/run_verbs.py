"""The verbs that take a run: `judge`, `report`; and `runs`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from harness.cli.console import steady_console
from harness.cli.parsing import VerbMaker
from harness.errors import PlanError, StorageError
from harness.evidence import results
from harness.run.judging import judge_directory
from harness.run.listing import list_runs, prune
from harness.verdicts import Verdict
from reports.signoff import render_html
from reports.terminal import print_signoff


def add_run_verbs(verb: VerbMaker) -> None:
    """Adds `judge`, `report` and `runs`."""
    sub = verb(
        "judge", _judge, "judge saved evidence again; needs no server", "kvgate judge runs/x/y"
    )
    sub.add_argument("run", type=Path, metavar="RUN", help="run directory")
    sub = verb(
        "report", _report, "write the sign-off page of a judged run", "kvgate report runs/x/y"
    )
    sub.add_argument("run", type=Path, metavar="RUN", help="run directory")
    sub.add_argument("--locale", choices=("en", "zh"), default="en", help="language of the page")
    sub = verb(
        "runs",
        _runs,
        "list runs and their state; prune removes old ones",
        "kvgate runs prune --keep 5",
    )
    sub.add_argument(
        "action", nargs="?", choices=("list", "prune"), default="list", help="default: list"
    )
    sub.add_argument(
        "--runs", type=Path, default=Path("runs"), help="where runs are; default runs/"
    )
    sub.add_argument(
        "--keep",
        type=_count,
        metavar="N",
        help="prune: keep the newest N runs of each campaign; dead and live runs are never removed",
    )


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"found {text!r}; allowed: a number from 0 on")
    return int(text)


def judge_and_report(path: Path, locale: str, console: Console) -> int:
    """Judges a run, writes verdict and report, prints them; returns the exit code."""
    signoff = judge_directory(path)
    with _named_storage(path, "verdict"):
        verdict_path = results.write_verdict(path, signoff)
    with _named_storage(path, "report"):
        html = render_html(signoff, results.read_provenance(path), locale=locale)
        report_path = results.write_report(path, html)
    print_signoff(signoff, console)
    console.print(f"verdict {verdict_path}", highlight=False, soft_wrap=True)
    console.print(f"report  {report_path}", highlight=False, soft_wrap=True)
    for line in closing_lines(signoff.verdict, os.environ):
        console.print(line, highlight=False, soft_wrap=True)
    return signoff.verdict.exit_code


def closing_lines(verdict: Verdict, environment: Mapping[str, str]) -> Iterator[str]:
    """Last words of a run: that it is over, what it found, and that its exit code is no error.

    tox ends with "evaluation failed" on every exit code but 0; ``TOX_ENV_NAME`` tells that it is
    the one that reads the code.
    """
    code = verdict.exit_code
    yield f"The run is finished, sealed and judged. Verdict: {verdict.value} (exit code {code})."
    if code and "TOX_ENV_NAME" in environment:
        yield (
            f"Nothing went wrong with the command: exit code {code} is the verdict. tox calls it "
            '"evaluation failed" below.'
        )


def _judge(arguments: argparse.Namespace) -> int:
    signoff = judge_directory(arguments.run)
    with _named_storage(arguments.run, "verdict"):
        verdict_path = results.write_verdict(arguments.run, signoff)
    console = steady_console()
    print_signoff(signoff, console)
    console.print(f"verdict {verdict_path}", highlight=False, soft_wrap=True)
    return signoff.verdict.exit_code


def _report(arguments: argparse.Namespace) -> int:
    signoff = results.read_verdict(arguments.run)
    html = render_html(signoff, results.read_provenance(arguments.run), locale=arguments.locale)
    with _named_storage(arguments.run, "report"):
        page = results.write_report(arguments.run, html)
    steady_console().print(str(page), markup=False, highlight=False, soft_wrap=True)
    return 0


@contextmanager
def _named_storage(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{path}: the {what} cannot be written: {error.strerror}; the evidence is sealed and "
            f"untouched; make the directory writable or free space, then `kvgate judge {path}` "
            f"and `kvgate report {path}`"
        ) from error


def _runs(arguments: argparse.Namespace) -> int:
    console = steady_console()
    if arguments.action == "prune":
        if arguments.keep is None:
            raise PlanError(["runs prune: found no --keep; required: how many runs to keep"])
        for path, size_bytes in prune(arguments.runs, keep=arguments.keep):
            console.print(f"removed {path} ({size_bytes / 2**20:.1f} MiB)", highlight=False)
        return 0
    table = Table(title=f"runs under {arguments.runs}")
    for column in ("campaign", "run", "state", "verdict", "size"):
        table.add_column(column, justify="right" if column == "size" else "left")
    for run in list_runs(arguments.runs):
        size = f"{run.size_bytes / 2**20:.1f} MiB"
        table.add_row(run.campaign, run.path.name, run.state.value, run.verdict or "-", size)
    console.print(table)
    return 0
