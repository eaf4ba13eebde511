"""Command line of kvgate. One verb per command; all it knows comes from the modules it calls."""

from __future__ import annotations

import argparse
import logging
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.table import Table

import harness
from harness import arms, interrupts, store
from harness.console import ConsoleObserver, SteadyStream, steady_console
from harness.doctor import disk_bytes_needed, examine
from harness.errors import EvidenceError, HarnessError, PlanError, StorageError
from harness.judge import unknown_measures
from harness.judging import judge_directory
from harness.plan import DEFAULT_CAMPAIGN, GATES, Plan, load_campaign, make_plan, read_model_config
from harness.run import CampaignRun, clean_up_dead_runs, model_directory
from harness.runs import list_runs, prune
from harness.server.environment import is_ready, make_environment
from harness.verbs import add_power_options, add_verbs, plan_power_lines
from reports.signoff import render_html
from reports.terminal import print_signoff

EXIT_USAGE = 64
EXIT_INTERNAL = 70
EXIT_INTERRUPTED = 130

_EPILOG = """\
examples:
  kvgate setup                        make the vLLM CPU environment (once, minutes)
  kvgate plan                         what the bundled cpu-demo campaign would run
  kvgate run                          run it, judge it, write the report
  kvgate run my.toml --gates g3       one gate of your own campaign
  kvgate judge runs/cpu-demo/20261130T120000Z
  kvgate report runs/cpu-demo/20261130T120000Z --locale zh
  kvgate runs                         what is there, and in which state
  kvgate tier ls /mnt/nvme/kv         what a connector's directory holds

exit codes: 0 PASS, 1 STOP, 2 INCONCLUSIVE or NOT RUN, 64 usage, 70 internal error, 130 interrupted
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(EXIT_USAGE, f"{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of the `kvgate` script; returns the exit code."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s %(message)s")
    try:
        with interrupts.handled(to_the_end=True):
            return int(arguments.command(arguments))
    except PlanError as error:
        _complain(*error.problems)
        return EXIT_USAGE
    except EvidenceError as error:  # the directory given is not a run, or not judged yet
        _complain(str(error))
        return EXIT_USAGE
    except HarnessError as error:
        _complain(str(error))
        return EXIT_INTERNAL
    except Exception:
        # A traceback's exit code would be 1, which means STOP.
        _complain(
            f"{traceback.format_exc()}kvgate: internal error, a defect of ours; please report it"
        )
        return EXIT_INTERNAL
    except KeyboardInterrupt:
        _complain("interrupted; servers are stopped, what was recorded is kept")
        return EXIT_INTERRUPTED


def _complain(*problems: str) -> None:
    stream = SteadyStream(sys.stderr)  # a closed terminal must not change the exit code
    for problem in problems:
        stream.write(f"kvgate: {problem}\n")
    stream.flush()


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="kvgate",
        description="Gated acceptance test for tiered KV-cache offload on vLLM.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"kvgate {harness.__version__}")
    verbs = parser.add_subparsers(
        dest="verb", required=True, metavar="COMMAND", parser_class=_Parser
    )

    def verb(name: str, command: object, summary: str, example: str) -> argparse.ArgumentParser:
        sub = verbs.add_parser(
            name,
            help=summary,
            description=summary,
            epilog=f"example:\n  {example}\n",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.set_defaults(command=command)
        return sub

    for name, command, summary, example in (
        ("plan", _plan, "show what a campaign will run, its sizes, time and disk", "kvgate plan"),
        ("run", _run, "run a campaign, judge it and write the report", "kvgate run --gates g1,g3"),
        ("doctor", _doctor, "is this machine able to run a campaign?", "kvgate doctor my.toml"),
    ):
        sub = verb(name, command, summary, example)
        sub.add_argument(
            "campaign",
            nargs="?",
            default=DEFAULT_CAMPAIGN,
            help=f"campaign file (.toml) or the name of a bundled one; default {DEFAULT_CAMPAIGN}",
        )
        sub.add_argument(
            "--gates",
            type=_gates,
            help=f"comma-separated, of {','.join(GATES)}; default: the campaign's",
        )
        sub.add_argument("--criteria", type=Path, help="criteria file; default: the bundled one")
        sub.add_argument(
            "--runs", type=Path, default=Path("runs"), help="where runs go; default runs/"
        )
    add_power_options(verbs.choices["plan"])
    verbs.choices["run"].add_argument("--locale", choices=("en", "zh"), default="en")

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
    add_verbs(verb, _judge_and_report)
    verb(
        "setup", _setup, 'make the vLLM CPU environment that `python = "auto"` uses', "kvgate setup"
    )
    return parser


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"found {text!r}; allowed: a number from 0 on")
    return int(text)


def _gates(text: str) -> list[str]:
    gates = text.split(",")
    unknown = sorted(set(gates) - set(GATES))
    if unknown:
        raise argparse.ArgumentTypeError(
            f"unknown gate {unknown[0]!r}; allowed: {', '.join(GATES)}"
        )
    return gates


def _make_plan(arguments: argparse.Namespace) -> tuple[Plan, Path]:
    campaign, text = load_campaign(arguments.campaign)
    model_dir = model_directory(campaign, arms.default_home())
    plan = make_plan(
        campaign,
        text,
        model_config=read_model_config(model_dir),
        gates=arguments.gates,
        criteria=arguments.criteria,
        label=str(arguments.campaign),
    )
    if problems := unknown_measures(plan):
        raise PlanError([f"{arguments.criteria}: {problem}" for problem in problems])
    return plan, model_dir


def _plan(arguments: argparse.Namespace) -> int:
    plan, _model_dir = _make_plan(arguments)
    console = steady_console()
    sizes, work = plan.sizes, plan.campaign.cold_recovery
    mib = 2**20
    facts = Table(
        title=f"{plan.campaign.name}  (profile {plan.campaign.profile})", show_header=False
    )
    ratio = sizes.working_set_ratio
    device = (
        "natural" if sizes.device_kv_bytes is None else f"{sizes.device_kv_bytes / mib:.0f} MiB"
    )
    for key, value in (
        ("gates", ", ".join(plan.gates)),
        ("levels", ", ".join(map(str, work.levels))),
        ("repetitions", str(work.repetitions)),
        ("sessions", f"{work.sessions} x {work.prompt_tokens} tokens, {work.output_tokens} out"),
        ("KV per token", f"{sizes.kv_bytes_per_token} bytes"),
        (
            "KV per session",
            f"{sizes.session_kv_bytes / mib:.1f} MiB in {sizes.session_blocks} blocks",
        ),
        ("device KV", device),
        (
            "working set",
            f"{sizes.working_set_bytes / mib:.0f} MiB"
            + ("" if ratio is None else f" = {ratio:.2f} x the device cache"),
        ),
        ("disk", f"about {disk_bytes_needed(plan) / mib:.0f} MiB while it runs"),
        ("time", f"about {estimate_s(plan) / 60:.0f} min on two slow CPU cores"),
    ):
        facts.add_row(key, value)
    console.print(facts)
    table = Table(title="trials, in order")
    for column in ("arm", "role", "medium", "trials"):
        table.add_column(column)
    trials = list(plan.trials())
    for arm in plan.campaign.arms.values():
        own = [t for t in trials if t.arm == arm.name]
        names = dict.fromkeys(
            f"{t.workload} c{t.concurrency}" if t.workload == "cold_recovery" else t.workload
            for t in own
        )
        table.add_row(arm.name, arm.role, arm.medium or "-", f"{len(own)}: {', '.join(names)}")
    console.print(table)
    for line in plan_power_lines(plan, arguments):
        console.print(line, highlight=False, soft_wrap=True)
    return 0


# Measured on two AVX2 cores with the demo model: start of a server, a prefill, a restore with
# decode.
_START_S = 55.0
_PREFILL_S_PER_TOKEN = 5.0e-4
_ANSWER_S = 0.7


def estimate_s(plan: Plan) -> float:
    """Rough duration of a run; a guide for planning, never used elsewhere."""
    work = plan.campaign.cold_recovery
    waves = sum(work.levels) * work.repetitions + work.levels[-1] * work.steady_cycles
    prefill = work.prompt_tokens * _PREFILL_S_PER_TOKEN
    total = 0.0
    for arm in plan.campaign.arms.values():
        prefills = work.sessions + work.levels[-1] + 2
        prefills += 0 if arm.role == "tiered" else waves
        total += _START_S + prefills * prefill + 2 * waves * _ANSWER_S
    return total


def _run(arguments: argparse.Namespace) -> int:
    plan, model_dir = _make_plan(arguments)
    home = arms.default_home()
    console = steady_console()
    # First: what a dead run still holds would be missing below.
    clean_up_dead_runs(arguments.runs, lambda text: console.print(text, markup=False))
    missing = [
        f for f in examine(plan, home=home, runs_root=arguments.runs) if f.required and not f.fine
    ]
    if missing:
        raise PlanError(
            [f"{f.name}: {f.found}; needed: {f.needed}. {f.remedy}".strip() for f in missing]
        )
    with ConsoleObserver(console) as observer:
        run = CampaignRun(
            plan, runs_root=arguments.runs, home=home, model_dir=model_dir, observer=observer
        )
        path = run.execute()
    return _judge_and_report(path, arguments.locale, console)


def _judge_and_report(path: Path, locale: str, console: Console) -> int:
    signoff = judge_directory(path)
    with _named_storage(path, "verdict"):
        verdict_path = store.write_verdict(path, signoff)
    with _named_storage(path, "report"):
        html = render_html(signoff, store.read_provenance(path), locale=locale)
        report_path = store.write_report(path, html)
    print_signoff(signoff, console)
    console.print(f"verdict {verdict_path}", highlight=False, soft_wrap=True)
    console.print(f"report  {report_path}", highlight=False, soft_wrap=True)
    return signoff.verdict.exit_code


def _judge(arguments: argparse.Namespace) -> int:
    signoff = judge_directory(arguments.run)
    with _named_storage(arguments.run, "verdict"):
        verdict_path = store.write_verdict(arguments.run, signoff)
    console = steady_console()
    print_signoff(signoff, console)
    console.print(f"verdict {verdict_path}", highlight=False, soft_wrap=True)
    return signoff.verdict.exit_code


def _report(arguments: argparse.Namespace) -> int:
    signoff = store.read_verdict(arguments.run)
    html = render_html(signoff, store.read_provenance(arguments.run), locale=arguments.locale)
    with _named_storage(arguments.run, "report"):
        page = store.write_report(arguments.run, html)
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


def _setup(arguments: argparse.Namespace) -> int:
    home = arms.default_home()
    console = steady_console()
    if is_ready(home):
        console.print("vLLM environment: ready", highlight=False)
        return 0
    home.mkdir(parents=True, exist_ok=True)
    python = make_environment(
        home, home / "setup.log", lambda text: console.print(text, highlight=False)
    )
    console.print(f"vLLM environment: ready ({python})", highlight=False, soft_wrap=True)
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    plan, _model_dir = _make_plan(arguments)
    findings = examine(plan, home=arms.default_home(), runs_root=arguments.runs)
    console = steady_console()
    table = Table(title=f"doctor: {plan.campaign.name}")
    for column in ("", "what", "found", "needed", "what to do"):
        table.add_column(column)
    for finding in findings:
        mark = "[green]ok[/green]" if finding.fine else "[red]no[/red]"
        if not finding.fine and not finding.required:
            mark = "[yellow]warn[/yellow]"
        remedy = "" if finding.fine else finding.remedy
        table.add_row(mark, finding.name, finding.found, finding.needed, remedy)
    console.print(table)
    return 0 if all(f.fine for f in findings if f.required) else 2


if __name__ == "__main__":
    sys.exit(main())
