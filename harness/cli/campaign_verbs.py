"""The verbs that take a campaign: `plan`, `run`, `doctor`; and `setup`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from rich.table import Table

from harness.campaign import arms
from harness.campaign.estimates import estimate_s
from harness.campaign.plan import Plan
from harness.campaign.sections import DEFAULT_CAMPAIGN, GATES
from harness.cli.console import ConsoleObserver, steady_console
from harness.cli.parsing import EXIT_USAGE, VerbMaker
from harness.cli.placement_screen import reported_capacity, show_placement
from harness.cli.run_verbs import judge_and_report
from harness.errors import PlanError
from harness.judge.power import ASSUMED_NOISE, measured_noise, power_lines
from harness.run.calibration import sized_plan
from harness.run.campaign_run import CampaignRun, clean_up_dead_runs
from harness.run.doctor import disk_bytes_needed, examine
from harness.run.judging import judge_directory
from harness.run.planning import checked_plan, require_able
from harness.server.environment import is_ready, make_environment


def add_campaign_verbs(verb: VerbMaker) -> None:
    """Adds `plan`, `run`, `doctor` and `setup`."""
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

        if name == "plan":
            _add_power_options(sub)
            sub.add_argument(
                "--capacity-from",
                type=Path,
                metavar="RUN",
                help="set the KV capacity that this run's servers reported beside the computed",
            )
        if name == "run":
            sub.add_argument("--locale", choices=("en", "zh"), default="en")
    verb(
        "setup", _setup, 'make the vLLM CPU environment that `python = "auto"` uses', "kvgate setup"
    )


def _gates(text: str) -> list[str]:
    gates = text.split(",")
    unknown = sorted(set(gates) - set(GATES))
    if unknown:
        raise argparse.ArgumentTypeError(
            f"unknown gate {unknown[0]!r}; allowed: {', '.join(GATES)}"
        )
    return gates


def _make_plan(arguments: argparse.Namespace) -> tuple[Plan, Path]:
    return checked_plan(
        arguments.campaign,
        home=arms.default_home(),
        gates=arguments.gates,
        criteria=arguments.criteria,
    )


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
        *([("sizes", _sizing_words(plan))] if plan.campaign.sizing else []),
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
    show_placement(plan, console, reported_capacity(arguments.capacity_from))
    for line in _plan_power_lines(plan, arguments):
        console.print(line, highlight=False, soft_wrap=True)
    return 0


def _sizing_words(plan: Plan) -> str:
    assert plan.campaign.sizing is not None
    count = len(plan.campaign.sizing.choices)
    return f"one of {count} is chosen by a calibration when it runs; shown is the calibration's own"


def _run(arguments: argparse.Namespace) -> int:
    plan, model_dir = _make_plan(arguments)
    home = arms.default_home()
    console = steady_console()
    # First: what a dead run still holds would be missing below.
    clean_up_dead_runs(arguments.runs, lambda text: console.print(text, markup=False))
    require_able(plan, home=home, runs_root=arguments.runs)
    with ConsoleObserver(console) as observer:
        plan, model_dir, calibration = sized_plan(
            plan, model_dir, runs_root=arguments.runs, home=home, observer=observer
        )
    with ConsoleObserver(console) as observer:
        run = CampaignRun(
            plan,
            runs_root=arguments.runs,
            home=home,
            model_dir=model_dir,
            observer=observer,
            calibration=calibration,
        )
        path = run.execute()
    return judge_and_report(path, arguments.locale, console)


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
    return 0 if all(f.fine for f in findings if f.required) else EXIT_USAGE


def _add_power_options(parser: argparse.ArgumentParser) -> None:
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


def _plan_power_lines(plan: Plan, arguments: argparse.Namespace) -> Iterator[str]:
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
