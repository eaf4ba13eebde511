"""Numbers to verdicts. Pure: the same evidence, criteria and judge version give the same sign-off.

`judge_run` is the entry; `validity` says which trials count, `decide` turns a number into a
verdict.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import PurePath

from harness.analysis.cells import cells
from harness.analysis.measures import (
    Request,
    RunNumbers,
    measure,
)
from harness.analysis.numbers import MEASURED, TrialNumbers
from harness.campaign.criteria import CriterionSpec
from harness.campaign.plan import Plan
from harness.campaign.sections import Arm
from harness.judge.causes import ENDINGS, Scopes, causes, named
from harness.judge.decide import Looks, applied, decide, with_required
from harness.judge.validity import (
    COUNTED,
    arm_checks,
    differing_keys,
    effective_value,
    imported_checks,
    invalid_trials,
    is_declared,
    pair_name,
    speed_checks,
    trial_checks,
)
from harness.records import Outcome, ServerFacts, StopCause, digest
from harness.verdicts import (
    JUDGE_VERSION,
    ArmSummary,
    Bound,
    Check,
    CriterionResult,
    GateVerdict,
    Reason,
    ReasonCode,
    SignOff,
    Verdict,
    merge,
)

# What stands beside every verdict on a simulated server, whatever profile judged it.
SIMULATED_LABEL = "SIMULATED, not signable"

# What stands beside every verdict on imported figures, whatever profile or label they came with.
IMPORTED_LABEL = "arithmetic of the published table"


def judge_run(
    plan: Plan,
    trials: Sequence[TrialNumbers],
    *,
    plan_record: dict[str, object],
    stopped: str | None,
    evidence_digest: str,
    cause: StopCause | None = None,
) -> SignOff:
    """The sign-off of a run whose evidence was verified.

    ``stopped``, ``cause``: why it ended before its plan; old seals have only the words.
    """
    if cause is None and stopped is not None and stopped.startswith("stop-loss"):
        cause = StopCause.STOP_LOSS  # sealed before causes had names
    servers = _servers(trials)
    pairs = list(_pairs(plan))
    imported, simulated = plan.campaign.is_imported, _is_simulated(plan, trials)
    checks = (
        imported_checks()
        if imported
        else [
            *trial_checks(trials, plan.profile.validity),
            *arm_checks(plan, servers, pairs),
            *speed_checks(trials, pairs, plan.profile.validity.speed_ratio_max),
        ]
    )
    run = RunNumbers(tuple(trials), _valid(trials, checks))
    ended = None if stopped is None else _ended(stopped, cause)
    gates = tuple(_gate(plan, gate, run, checks, ended) for gate in plan.gates)
    scopes = Scopes.of(plan, trials, is_stop_loss=cause is StopCause.STOP_LOSS)
    return SignOff(
        judge_version=JUDGE_VERSION,
        campaign=plan.campaign.name,
        profile=plan.campaign.profile,
        signable=plan.profile.signable and not imported and not simulated,
        label=_label(plan, imported=imported, simulated=simulated),
        verdict=_overall(gates),
        causes=causes(gates, checks, scopes, list(_troubles(trials))),
        gates=gates,
        checks=tuple(checks),
        cells=cells(run, steady_cycles=plan.campaign.cold_recovery.steady_cycles),
        arms=tuple(
            _arm_summary(arm, servers.get(name)) for name, arm in plan.campaign.arms.items()
        ),
        differences=tuple(_differences(plan, servers, pairs)),
        plan=dict(plan_record),
        overrides=tuple(
            f"{name}: target {plan.profile.criteria[name].target:g} overridden by "
            f"{override.target:g}"
            for name, override in sorted(plan.campaign.criteria.items())
        ),
        not_tested=tuple(_not_tested(plan)),
        evidence_digest=evidence_digest,
        criteria_digest=digest(plan.criteria_text),
        model=_model(plan),
        supplier=plan.campaign.parties.supplier,
        customer=plan.campaign.parties.customer,
    )


def _model(plan: Plan) -> str:
    """The model in one line, by its own config.json."""
    config, model = plan.model_config, plan.campaign.model
    if plan.campaign.is_imported:
        return ""  # a table has no model that anybody could check
    name = PurePath(model.path).name if model.kind == "path" and model.path else "generated"
    families = config.get("architectures") or ["architecture unknown"]
    layers, width = config.get("num_hidden_layers"), config.get("hidden_size")
    return f"{name}: {families[0]}, {layers} layers, hidden size {width}"


def _is_simulated(plan: Plan, trials: Iterable[TrialNumbers]) -> bool:
    """True when the campaign, a trial or a server says so."""
    return any(arm.kind == "sim" for arm in plan.campaign.arms.values()) or any(
        n.facts.figures.get("simulated") or (n.server is not None and n.server.kind == "sim")
        for n in trials
    )


def _ended(stopped: str, cause: StopCause | None) -> Reason:
    """What ended the run, as a reason."""
    if cause is None:
        return Reason(ReasonCode.GATE_NOT_REACHED, f"the run ended early: {stopped}")
    return Reason(ENDINGS[cause], stopped, "seal.json")


def _troubles(trials: Iterable[TrialNumbers]) -> Iterable[tuple[int, Reason]]:
    """Failed requests of phases that no check looks at: they explain what follows them."""
    for trial in trials:
        looked_at = MEASURED[trial.facts.workload][0] if trial.facts.workload in COUNTED else None
        asked = [r for r in trial.all_requests if r.phase != looked_at]
        failed = [r for r in asked if r.outcome is not Outcome.OK]
        if failed:
            kinds = sorted({r.error_kind.value if r.error_kind else "unknown" for r in failed})
            first = next((r.error_detail for r in failed if r.error_detail), "no detail")
            text = (
                f"{trial.id}: {len(failed)} of {len(asked)} failed "
                f"({', '.join(kinds)}); the first: {first}"
            )
            path = f"trials/{trial.id}/requests.jsonl"
            yield trial.facts.index, Reason(ReasonCode.REQUESTS_FAILED, text, path)


def _label(plan: Plan, *, imported: bool, simulated: bool) -> str:
    if simulated:
        return SIMULATED_LABEL
    return IMPORTED_LABEL if imported else plan.profile.label


def judge_arrival(plan: Plan, trials: Sequence[TrialNumbers]) -> list[CriterionResult]:
    """Criteria of g1 for the arms seen so far; the stop-loss of a running campaign."""
    seen = {n.facts.arm for n in trials}
    run = RunNumbers(tuple(trials), frozenset(n.id for n in trials))
    return [
        _result(plan, spec, run, arm, None, ())
        for spec in plan.profile.criteria.values()
        if spec.gate == "g1"
        for arm in _candidates(plan, spec)
        if arm in seen
    ]


def undecided(plan: Plan, trials: Sequence[TrialNumbers]) -> list[str]:
    """Criteria that another look could still decide, by the trials so far.

    A run with ``restart = "look"`` goes on for these alone. What a failed check blocks, more
    repetitions do not mend.
    """
    pairs = list(_pairs(plan))
    checks = [
        *trial_checks(trials, plan.profile.validity),
        *arm_checks(plan, _servers(trials), pairs),
        *speed_checks(trials, pairs, plan.profile.validity.speed_ratio_max),
    ]
    run = RunNumbers(tuple(trials), _valid(trials, checks))
    open_codes = {ReasonCode.UNDECIDED, ReasonCode.TOO_FEW_REPETITIONS}
    found = []
    for spec in plan.profile.criteria.values():
        if spec.decide != "interval" or spec.gate not in plan.gates:
            continue
        levels = plan.campaign.cold_recovery.levels if spec.per_level else [None]
        for arm in _candidates(plan, spec):
            results = [_result(plan, spec, run, arm, level, checks) for level in levels]
            found += [
                result.id
                for result in results
                if result.verdict is Verdict.INCONCLUSIVE
                and {reason.code for reason in result.reasons} <= open_codes
            ]
    return found


def criterion_ids(plan: Plan, gate: str) -> list[str]:
    """Ids of all criteria of a gate, in order; known before anything has run."""
    found: list[str] = []
    if gate not in plan.gates:
        return found
    for spec in plan.profile.criteria.values():
        if spec.gate == gate:
            for arm in _candidates(plan, spec):
                scopes = _scopes(plan, spec, arm)
                found += [f"{spec.id}[{scope}]" for scope in scopes]
    return found


def _scopes(plan: Plan, spec: CriterionSpec, arm: str) -> list[str]:
    levels = plan.campaign.cold_recovery.levels
    return [f"{arm}-c{level}" for level in levels] if spec.per_level else [arm]


def unjudgeable(
    *,
    campaign: str,
    profile: str,
    code: ReasonCode,
    problems: Sequence[str],
    criteria_digest: str = "",
) -> SignOff:
    """The sign-off of evidence that cannot be judged: INCONCLUSIVE, naming every problem."""
    reasons = tuple(Reason(code, problem) for problem in problems)
    gates = (GateVerdict("evidence", Verdict.INCONCLUSIVE, (), reasons),)
    return SignOff(
        judge_version=JUDGE_VERSION,
        campaign=campaign,
        profile=profile,
        signable=False,
        label="evidence that cannot be judged",
        verdict=Verdict.INCONCLUSIVE,
        causes=causes(gates, ()),
        gates=gates,
        checks=(),
        cells=(),
        arms=(),
        differences=(),
        plan={},
        overrides=(),
        not_tested=("everything: the evidence was not judged",),
        evidence_digest=None,
        criteria_digest=criteria_digest,
    )


def _servers(trials: Iterable[TrialNumbers]) -> dict[str, ServerFacts]:
    servers: dict[str, ServerFacts] = {}
    for trial in trials:
        if trial.server is not None and trial.server.effective:
            servers.setdefault(trial.facts.arm, trial.server)
    return servers


def _valid(trials: Iterable[TrialNumbers], checks: Iterable[Check]) -> frozenset[str]:
    return frozenset(n.id for n in trials) - invalid_trials(checks)


def _candidates(plan: Plan, spec: CriterionSpec) -> list[str]:
    """Arms a criterion applies to: by name, role or medium."""
    return [
        name
        for name, arm in plan.campaign.arms.items()
        if {name, arm.role, arm.medium} & set(spec.arms) and name != spec.baseline
    ]


def _baseline(plan: Plan, spec: CriterionSpec) -> str | None:
    """The baseline arm of a criterion, named or by role."""
    if spec.baseline is None or spec.baseline in plan.campaign.arms:
        return spec.baseline
    return next(
        (n for n, a in plan.campaign.arms.items() if a.role == spec.baseline), spec.baseline
    )


def _pairs(plan: Plan) -> Iterable[tuple[str, str]]:
    found: dict[tuple[str, str], None] = {}
    for spec in plan.profile.criteria.values():
        baseline = _baseline(plan, spec)
        if spec.gate in plan.gates and baseline is not None:
            for arm in _candidates(plan, spec):
                found[(arm, baseline)] = None
    return found


def _gate(
    plan: Plan, gate: str, run: RunNumbers, checks: Sequence[Check], ended: Reason | None
) -> GateVerdict:
    if ended is not None and ended.code is ReasonCode.STOP_LOSS and gate != "g1":
        return GateVerdict(gate, Verdict.NOT_RUN, (), (ended,))
    results = []
    for spec in plan.profile.criteria.values():
        if spec.gate != gate:
            continue
        levels: list[int | None] = (
            list(plan.campaign.cold_recovery.levels) if spec.per_level else [None]
        )
        for arm in _candidates(plan, spec):
            results += [_result(plan, spec, run, arm, level, checks) for level in levels]
    reasons = list(_incomplete(plan, gate, run, ended))
    verdict = merge(result.verdict for result in results)
    if reasons:
        verdict = merge([verdict, Verdict.INCONCLUSIVE])
    share = _invalid_share(plan, run)
    if gate == "g3" and share > plan.profile.validity.invalid_share_max:
        verdict = merge([verdict, Verdict.INCONCLUSIVE])
        allowed = plan.profile.validity.invalid_share_max
        text = f"{share:.0%} of the measured trials are invalid; allowed: {allowed:.0%}"
        reasons.append(Reason(ReasonCode.TOO_MANY_INVALID, text))
    return GateVerdict(gate, verdict, tuple(results), tuple(reasons))


def _incomplete(plan: Plan, gate: str, run: RunNumbers, ended: Reason | None) -> Iterable[Reason]:
    """A run that ended early, or lacks trials of its own plan, proves less than it planned."""
    if ended is not None:
        yield ended
    if plan.campaign.is_imported:
        return  # a table has the rows it has; a criterion whose row is missing has no measurement
    present = {n.id for n in run.trials}
    # A round that was not begun is a look that was not needed, or one there was no time for: what
    # it would have decided is then undecided by itself.
    begun = {n for n, trials in plan.trials_by_round.items() if present & {f.id for f in trials}}
    needed = [f for n in sorted({1} | begun) for f in plan.trials_by_round[n]]
    missing = [f.id for f in needed if f.gate == gate and f.id not in present]
    if missing:
        text = f"{len(missing)} planned trials are missing, the first is {missing[0]}"
        yield Reason(ReasonCode.GATE_NOT_REACHED, text)


def _invalid_share(plan: Plan, run: RunNumbers) -> float:
    counted = [n for n in run.trials if n.facts.workload == "cold_recovery"]
    if not counted:
        return 0.0
    return sum(n.id not in run.valid for n in counted) / len(counted)


def _result(
    plan: Plan,
    spec: CriterionSpec,
    run: RunNumbers,
    arm: str,
    level: int | None,
    checks: Sequence[Check],
) -> CriterionResult:
    baseline = _baseline(plan, spec)
    override = plan.campaign.criteria.get(spec.id)
    bound = Bound(
        comparison=spec.comparison,
        target=override.target if override else spec.target,
        floor=spec.floor,
        default_target=spec.target if override else None,
    )
    reference = next((n for n, a in plan.campaign.arms.items() if a.role == "hbm_only"), None)
    measurement = measure(run, Request(spec.measure, arm, baseline, level, reference))
    levels = len(plan.campaign.cold_recovery.levels) if spec.per_level else 1
    decision = decide(spec, bound, measurement, Looks(plan.looks, levels))
    verdict = decision.verdict
    blocking = list(_blocking(checks, spec, run, arm, baseline, level))
    if plan.campaign.is_imported and spec.decide != "point":
        text = f"decide = {spec.decide!r}; allowed for imported figures: 'point'"
        blocking.append(Reason(ReasonCode.EVIDENCE_IMPORTED, text))
        verdict = Verdict.INCONCLUSIVE
    if blocking and verdict is not Verdict.STOP:
        # An oracle's STOP stands whatever else is wrong: wrong KV is wrong KV.
        verdict = Verdict.INCONCLUSIVE
    elif blocking and spec.decide != "exact":
        verdict = Verdict.INCONCLUSIVE
    return CriterionResult(
        criterion=spec.id,
        gate=spec.gate,
        title=spec.title,
        arm=arm,
        baseline=baseline,
        level=level,
        verdict=verdict,
        bound=applied(spec, bound),
        measurement=with_required(spec, bound, decision.measurement),
        reasons=(*decision.reasons, *blocking),
        decide=spec.decide,
        rationale=spec.rationale,
        missed=decision.missed,
    )


def _blocking(
    checks: Sequence[Check],
    spec: CriterionSpec,
    run: RunNumbers,
    arm: str,
    baseline: str | None,
    level: int | None,
) -> Iterable[Reason]:
    """Reasons of failed checks that a comparison of two arms rests on, each code once."""
    if spec.decide == "exact":
        return []  # oracles and controls carry their own conditions
    pair = pair_name(arm, baseline) if baseline else None
    cell = {
        n.id
        for n in run.trials
        if n.facts.arm in (arm, baseline)
        and n.facts.workload == "cold_recovery"
        and (level is None or n.facts.concurrency == level)
    }
    found: dict[ReasonCode, Reason] = {}
    for check in checks:
        if check.failed and (check.subject == pair or check.subject in cell):
            for reason in check.reasons:
                found.setdefault(
                    reason.code,
                    Reason(reason.code, named(check.subject, reason), reason.evidence),
                )
    return found.values()


def _overall(gates: Sequence[GateVerdict]) -> Verdict:
    """Worst of the gates that were run; one not run because of stop-loss adds nothing."""
    ran = [gate.verdict for gate in gates if gate.verdict is not Verdict.NOT_RUN]
    return merge(ran or [Verdict.NOT_RUN])


def _differences(
    plan: Plan, servers: dict[str, ServerFacts], pairs: Iterable[tuple[str, str]]
) -> Iterable[dict[str, object]]:
    for candidate, baseline in pairs:
        if candidate not in servers or baseline not in servers:
            continue
        one, other = servers[candidate], servers[baseline]
        declared = {*plan.campaign.arms[candidate].declared, *plan.campaign.arms[baseline].declared}
        for key in differing_keys(one, other):
            yield {
                "key": key,
                "arm": candidate,
                "baseline": baseline,
                "arm_value": effective_value(one, key),
                "baseline_value": effective_value(other, key),
                "declared": is_declared(key, declared),
            }


def _arm_summary(arm: Arm, server: ServerFacts | None) -> ArmSummary:
    return ArmSummary(
        arm=arm.name,
        role=arm.role,
        medium=arm.medium,
        argv=server.argv if server else (),
        effective=server.effective if server else {},
        declared=tuple(arm.declared),
        versions=tuple(f"{name} {v}" for name, v in sorted(server.versions.items()))
        if server
        else (),
    )


def _not_tested(plan: Plan) -> Iterable[str]:
    yield from plan.profile.not_tested
    for gate in ("g1", "g3"):
        if gate not in plan.gates:
            yield f"{gate.upper()} was not selected in this run"
    for arm in plan.campaign.arms.values():
        if arm.kind == "sim":
            yield f"{arm.name}: a simulated server; no vLLM, model, device or disk was tested"
        if arm.kind == "url":
            yield f"{arm.name}: run by somebody else; no restart, reset, log or process counters"
