"""Measures what a demonstration's sizes are chosen by, before its plan is fixed.

The calibration is a run of its own, with sealed evidence: one server, a few sessions. Nothing of it
is judged, and nothing that is judged is measured before the sizes are fixed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness import stats
from harness.analysis.numbers import TrialNumbers, measure_run, select
from harness.campaign.plan import Plan, require_possible
from harness.campaign.reading import parse_campaign, read_model_config
from harness.campaign.sections import Arm
from harness.campaign.sizing import (
    Calibration,
    calibration_record,
    calibration_text,
    choose,
    sized_text,
)
from harness.errors import HarnessError
from harness.evidence.store import open_run
from harness.records import Outcome, RequestRecord, TrialFacts
from harness.run.campaign_run import CampaignRun, Observer
from harness.run.planning import model_directory


@dataclass
class _Timed:
    """An observer that also notes how long the server took to be ready."""

    observer: Observer
    arm_s: float = 0.0
    ready_s: float | None = None
    started: float = field(default_factory=time.monotonic)

    def run_started(self, path: Path, trials: Sequence[TrialFacts]) -> None:
        self.observer.run_started(path, trials)

    def arm_started(self, arm: Arm) -> None:
        self.arm_s = time.monotonic()
        self.observer.arm_started(arm)

    def trial_started(self, facts: TrialFacts) -> None:
        if self.ready_s is None:
            self.ready_s = time.monotonic() - self.arm_s
        self.observer.trial_started(facts)

    def progress(self, text: str) -> None:
        self.observer.progress(text)

    def trial_ended(self, facts: TrialFacts, duration_s: float) -> None:
        self.observer.trial_ended(facts, duration_s)

    def note(self, text: str) -> None:
        self.observer.note(text)


def sized_plan(
    intended: Plan, model_dir: Path, *, runs_root: Path, home: Path, observer: Observer
) -> tuple[Plan, Path, dict[str, Any] | None]:
    """The plan with sizes that suit this machine, its model's directory, and what they rest on.

    Leaves a sealed run of the calibration. Where nothing could be measured (the server does not
    start, say) the file's own sizes stand, and the run itself will tell what is wrong. A plan
    without a choice of sizes is returned as it is. Raises PlanError, and KeyboardInterrupt.
    """
    campaign = intended.campaign
    if campaign.sizing is None or "g3" not in intended.gates:
        return intended, model_dir, None
    observer.note("calibration: how fast does this machine compute, and restore?")
    timed = _Timed(observer)
    plan = _plan(intended, home)
    path = CampaignRun(
        plan,
        runs_root=runs_root,
        home=home,
        model_dir=model_directory(plan.campaign, home),
        observer=timed,
    ).execute()
    name = f"{path.parent.name}/{path.name}"
    try:
        run = open_run(path)
        if run.stopped is not None:
            raise HarnessError(run.stopped)
        measured = read_calibration(measure_run(run.trials), timed.ready_s)
    except HarnessError as error:
        observer.note(f"calibration {name} failed, the sizes of the file stand: {error}")
        return intended, model_dir, {"run": name, "failed": str(error)}
    chosen, predictions = choose(campaign, measured)
    summary = (
        f"calibration {name}: prefill {measured.prefill_s:.3g} s, restore {measured.restore_s:.3g} "
        f"s, resident {measured.resident_s:.3g} s, start {measured.start_s:.3g} s; chosen "
        f"{chosen.size.num_layers} layers, MLP {chosen.size.intermediate_size}, "
        f"{chosen.size.prompt_tokens} tokens; expected: a prefill takes {chosen.contrast:.0f} "
        f"restores, a round {chosen.round_s / 60:.0f} min"
    )
    observer.note(summary)
    why = f"{campaign.name}, sized by {summary}"
    text = sized_text(intended.campaign_text, campaign, chosen.size, why=why)
    sized = parse_campaign(text, campaign.name)
    model_dir = model_directory(sized, home)
    plan = replace(
        intended, campaign=sized, campaign_text=text, model_config=read_model_config(model_dir)
    )
    require_possible(plan, f"{campaign.name}, sized")
    record = {"run": name, "digest": run.digest}
    return plan, model_dir, record | calibration_record(measured, chosen, predictions)


def _plan(intended: Plan, home: Path) -> Plan:
    """Not `make_plan`: it has no baselines, and its working set is not what it is about."""
    text = calibration_text(intended.campaign_text, intended.campaign)
    campaign = parse_campaign(text, f"{intended.campaign.name}: calibration")
    config = read_model_config(model_directory(campaign, home))
    gates = tuple(campaign.gates)
    return Plan(campaign, text, intended.profile, intended.criteria_text, config, gates)


def read_calibration(trials: Sequence[TrialNumbers], start_s: float | None) -> Calibration:
    """Medians over a calibration's sessions. Raises HarnessError naming what is missing."""
    waves = select(trials, workload="cold_recovery")
    populate = [r for n in select(trials, workload="populate") for r in n.phase("populate")]
    restored = [r for n in waves for r in n.requests]
    again = [r for n in waves for r in n.phase("reask")]
    if start_s is None:
        raise HarnessError("the server was never ready")
    for request in restored:
        if not request.cached_tokens:
            raise HarnessError(f"session {request.session} was not restored")
    return Calibration(
        prefill_s=_median("a prefill", populate),
        restore_s=_median("a restore", restored),
        resident_s=_median("an answer from the device cache", again),
        start_s=start_s,
    )


def _median(what: str, records: Sequence[RequestRecord]) -> float:
    values = [r.ttft_s for r in records if r.outcome is Outcome.OK and r.ttft_s is not None]
    if not values:
        raise HarnessError(f"{what} was not measured: no request of {len(records)} was answered")
    return stats.percentile(values, 0.5)
