"""Does what was sealed hold together: the saved plan, and the trials that claim to follow it?

Digests are the store's business, and whether a trial counts is the judge's.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.analysis.measures import unknown_measures
from harness.analysis.numbers import PUBLISHED
from harness.campaign.plan import Plan
from harness.campaign.reading import parse_campaign, parse_criteria
from harness.campaign.sections import GATES
from harness.errors import EvidenceError, PlanError
from harness.evidence.store import RunEvidence, TrialEvidence


def check_run(run: RunEvidence) -> tuple[Plan, list[TrialEvidence]]:
    """The plan and the trials of a run. Raises EvidenceError or PlanError, naming the file."""
    plan = plan_of(run)
    misnamed = [t.path.name for t in run.trials if t.path.name != t.id]
    if misnamed:
        raise EvidenceError(f"trials/{misnamed[0]}/trial.json: describes another trial")
    return plan, _trials(plan, run)


def plan_of(run: RunEvidence) -> Plan:
    """The plan as it was saved with the evidence; today's bundled criteria play no part.

    Raises PlanError or EvidenceError, naming the file.
    """
    campaign = parse_campaign(run.campaign_text)
    record: Any = run.plan
    problems = list(_plan_problems(record))
    if problems:
        raise EvidenceError("\n".join(f"plan.json: {problem}" for problem in problems))
    plan = Plan(
        campaign=campaign,
        campaign_text=run.campaign_text,
        profile=parse_criteria(run.criteria_text, campaign.profile),
        criteria_text=run.criteria_text,
        model_config=record["model"]["config"],
        gates=tuple(record["gates"]),
    )
    unknown = sorted(set(campaign.criteria) - set(plan.profile.criteria))
    problems = [f"campaign.toml: criteria.{name}: no such criterion" for name in unknown]
    problems += [
        f"criteria.toml: {problem}" for problem in unknown_measures(plan.profile.criteria.values())
    ]
    if problems:
        raise PlanError(problems)
    return plan


def _trials(plan: Plan, run: RunEvidence) -> list[TrialEvidence]:
    """The trials, each with the plan's figures. Raises EvidenceError where its own differ.

    A trial that ended before it was given any has the plan's; it is incomplete in any case.
    """
    imported = plan.campaign.is_imported
    mixed = [t.id for t in run.trials if (t.facts.workload == PUBLISHED) is not imported]
    if mixed:
        raise EvidenceError(f"trials/{mixed[0]}: imported and measured trials in one run")
    if imported:
        return list(run.trials)
    trials = []
    for trial in run.trials:
        arm = plan.campaign.arms.get(trial.facts.arm)
        if arm is None:
            raise EvidenceError(f"trials/{trial.id}/trial.json: the campaign has no such arm")
        found, planned = trial.facts.figures, plan.figures(arm)
        wrong = [key for key in planned if found and found.get(key) != planned[key]]
        if wrong:
            key = wrong[0]
            raise EvidenceError(
                f"trials/{trial.id}/trial.json: figures.{key}: found {found.get(key)!r}; "
                f"the plan says {planned[key]!r}"
            )
        facts = dataclasses.replace(trial.facts, figures={**found, **planned})
        trials.append(dataclasses.replace(trial, facts=facts))
    return trials


def _plan_problems(record: Any) -> Iterator[str]:
    """What of plan.json the judge reads and does not find."""
    if not isinstance(record, dict):
        yield f"expected an object, found {type(record).__name__}"
        return
    model = record.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("config"), dict):
        yield "model.config: expected an object"
    gates = record.get("gates")
    if not isinstance(gates, list) or not gates or any(gate not in GATES for gate in gates):
        yield f"gates: found {gates!r}; allowed: {', '.join(GATES)}"
    elif len(set(gates)) != len(gates):
        yield f"gates: found {gates!r}; allowed: none twice"


def saved_plan(path: Path) -> Plan | None:
    """The plan of a run, unverified: it only names tests. None when it cannot be read."""
    try:
        campaign_text = (path / "campaign.toml").read_text(encoding="utf-8")
        criteria_text = (path / "criteria.toml").read_text(encoding="utf-8")
        record = json.loads((path / "plan.json").read_text(encoding="utf-8"))
        campaign = parse_campaign(campaign_text)
        return Plan(
            campaign=campaign,
            campaign_text=campaign_text,
            profile=parse_criteria(criteria_text, campaign.profile),
            criteria_text=criteria_text,
            model_config=record["model"]["config"],
            gates=tuple(record["gates"]),
        )
    except (OSError, ValueError, KeyError, TypeError, PlanError):
        return None
