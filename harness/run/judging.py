"""From a run directory to its sign-off: read, check, measure, decide."""

from __future__ import annotations

from pathlib import Path

from harness.analysis.numbers import measure_run
from harness.campaign.plan import Plan
from harness.errors import DigestMismatch, EvidenceError, PlanError, Unsealed
from harness.evidence.store import TrialEvidence, open_run
from harness.judge.signoff import judge_run, undecided, unjudgeable
from harness.records import RecordError, TrialFacts, parse_json
from harness.run.checking import check_run
from harness.verdicts import ReasonCode, SignOff


def judge_directory(path: Path) -> SignOff:
    """The sign-off of a run. Raises EvidenceError only when ``path`` is no run directory at all."""
    if not (path / "trials").is_dir():
        raise EvidenceError(
            f"{path}: not a run directory (no trials/); give runs/<campaign>/<time>"
        )
    try:
        run = open_run(path)  # read
        plan, trials = check_run(run)  # check
        numbers = measure_run(trials)  # measure
        return judge_run(  # decide
            plan,
            numbers,
            plan_record=run.plan,
            stopped=run.stopped,
            cause=run.cause,
            evidence_digest=run.digest,
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
    except (
        ArithmeticError,
        AssertionError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        text = f"{type(error).__name__}: {error}"
        return _unjudgeable(path, ReasonCode.JUDGE_FAILED, [text])


def still_undecided(plan: Plan, path: Path) -> list[str]:
    """Criteria of a run under way that its next look could decide. Digests are not verified."""
    facts = [
        (trial, TrialFacts.from_json(parse_json((trial / "trial.json").read_text("utf-8"))))
        for trial in (path / "trials").iterdir()
        if (trial / "manifest.json").is_file()
    ]
    facts.sort(key=lambda item: item[1].index)
    return undecided(plan, measure_run([TrialEvidence(*item) for item in facts]))


def _unjudgeable(path: Path, code: ReasonCode, problems: list[str]) -> SignOff:
    return unjudgeable(
        campaign=path.resolve().parent.name, profile="unknown", code=code, problems=problems
    )
