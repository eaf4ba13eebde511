"""From a run directory to its sign-off: opens, measures, judges. Says what cannot be judged."""

from __future__ import annotations

import json
from pathlib import Path

from harness.analysis import measure_run
from harness.errors import DigestMismatch, EvidenceError, PlanError, Unsealed
from harness.judge import judge_run, unjudgeable
from harness.plan import Plan, parse_campaign, parse_criteria
from harness.records import RecordError
from harness.store import RunEvidence, open_run
from harness.verdicts import ReasonCode, SignOff


def judge_directory(path: Path) -> SignOff:
    """The sign-off of a run. Raises EvidenceError only when ``path`` is no run directory at all."""
    if not (path / "trials").is_dir():
        raise EvidenceError(
            f"{path}: not a run directory (no trials/); give runs/<campaign>/<time>"
        )
    try:
        run = open_run(path)
        plan = plan_of(run)
        numbers = measure_run(plan, run.trials)
        return judge_run(
            plan, numbers, plan_record=run.plan, stopped=run.stopped, evidence_digest=run.digest
        )
    except DigestMismatch as error:
        return _unjudgeable(path, ReasonCode.EVIDENCE_ALTERED, error.problems)
    except Unsealed:
        return _unjudgeable(
            path, ReasonCode.EVIDENCE_UNSEALED, ["no seal.json: the run never ended"]
        )
    except (EvidenceError, RecordError, PlanError) as error:
        text = str(error).replace(f"{path}/", "")
        return _unjudgeable(path, ReasonCode.EVIDENCE_MALFORMED, text.splitlines())
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
        text = f"{type(error).__name__}: {error}"
        return _unjudgeable(path, ReasonCode.JUDGE_FAILED, [text])


def plan_of(run: RunEvidence) -> Plan:
    """The plan as it was saved with the evidence; today's bundled criteria play no part."""
    campaign = parse_campaign(run.campaign_text)
    return Plan(
        campaign=campaign,
        campaign_text=run.campaign_text,
        profile=parse_criteria(run.criteria_text, campaign.profile),
        criteria_text=run.criteria_text,
        model_config=run.plan["model"]["config"],
        gates=tuple(run.plan["gates"]),
    )


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


def _unjudgeable(path: Path, code: ReasonCode, problems: list[str]) -> SignOff:
    return unjudgeable(
        campaign=path.resolve().parent.name, profile="unknown", code=code, problems=problems
    )
