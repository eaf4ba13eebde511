"""From a heap of reasons to a tree: what went wrong first, and what merely follows from it. Pure.

A reason follows from another one when three things hold: the other comes earlier in `ORDER`, a
rule of `FOLLOWS` names the pair of codes, and both are about the same trials (`Scopes`), or, for a
reason about a pair of arms, about that pair. A reason that could follow from several follows from
the earliest. Nothing is left out: what follows stands under its root cause with all its findings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from harness.analysis.numbers import WAVES, TrialNumbers
from harness.campaign.plan import Plan
from harness.judge.validity import COUNTED, pair_name
from harness.records import StopCause, TrialFacts
from harness.verdicts import (
    Cause,
    Check,
    Consequence,
    CriterionResult,
    Finding,
    GateVerdict,
    Reason,
    ReasonCode,
    Verdict,
)

_C = ReasonCode

# The reason that stands for each cause of an early end.
ENDINGS: Mapping[StopCause, ReasonCode] = {
    StopCause.STOP_LOSS: _C.STOP_LOSS,
    StopCause.SERVER_UNREACHABLE: _C.SERVER_UNREACHABLE,
    StopCause.PORT_TAKEN: _C.PORT_TAKEN,
    StopCause.SERVER_UNUSABLE: _C.SERVER_UNUSABLE,
    StopCause.SERVER_NOT_READY: _C.SERVER_NOT_READY,
    StopCause.SERVER_ENDED: _C.SERVER_ENDED,
    StopCause.SERVER_SILENT: _C.SERVER_SILENT,
    StopCause.LOAD_FAILED: _C.HARNESS_FAILED,
    StopCause.SUSPENDED: _C.TRIAL_INCOMPLETE,
    StopCause.DISK_FULL: _C.DISK_FULL,
    StopCause.INTERRUPTED: _C.INTERRUPTED,
    StopCause.HARNESS_DIED: _C.HARNESS_DIED,
    StopCause.HARNESS_FAILED: _C.HARNESS_FAILED,
}

_ENDED = (
    _C.SERVER_UNREACHABLE,
    _C.PORT_TAKEN,
    _C.SERVER_UNUSABLE,
    _C.SERVER_ENDED,
    _C.SERVER_SILENT,
    _C.DISK_FULL,
    _C.INTERRUPTED,
    _C.HARNESS_DIED,
    _C.HARNESS_FAILED,
)

# A server, or one of its engines, was replaced or counted anew.
_RESTARTED = (_C.SERVER_CHANGED, _C.ENGINE_RESET, _C.ENGINE_VANISHED, _C.ENGINE_APPEARED)

# Causes before their consequences. Of several roots of equal gravity the earliest is shown first.
ORDER: tuple[ReasonCode, ...] = (
    _C.EVIDENCE_ALTERED,
    _C.EVIDENCE_UNSEALED,
    _C.EVIDENCE_MALFORMED,
    _C.EVIDENCE_IMPORTED,
    _C.JUDGE_FAILED,
    *_ENDED,
    *_RESTARTED,
    _C.TRIAL_INCOMPLETE,
    _C.REQUESTS_FAILED,
    _C.SERVER_NOT_READY,
    _C.OUTPUT_DIFFERS,
    _C.CONNECTOR_INEFFECTIVE,
    _C.KV_SIZE_DIFFERS,
    _C.UNDECLARED_DIFFERENCE,
    _C.UNEQUAL_COMPUTE,
    _C.UNEQUAL_SPEED,
    _C.UNEQUAL_CAPACITY,
    _C.EFFECTIVE_UNKNOWN,
    _C.NOT_COLD,
    _C.LOAD_FAILURES,
    _C.TIER_BYTES_MISMATCH,
    _C.WITNESSES_DISAGREE,
    _C.NO_TIER_HITS,
    _C.NOT_FROM_DISK,
    _C.UNEXPECTED_HITS,
    _C.PREEMPTED,
    _C.CLIENT_SATURATED,
    _C.NOT_STREAMED,
    _C.UNEQUAL_WORK,
    _C.METRIC_ABSENT,
    _C.NOT_WARM,
    _C.REFERENCE_UNSTABLE,
    _C.CONTROL_MISSED,
    _C.NOISE_EXCEEDED,
    _C.BELOW_TARGET,
    _C.UNDECIDED,
    _C.REPETITION_MISSED,
    _C.NOT_FROM_TIER,
    _C.TOO_FEW_REPETITIONS,
    _C.NO_MEASUREMENT,
    _C.STOP_LOSS,
    _C.GATE_NOT_REACHED,
    _C.TOO_MANY_INVALID,
)

# What is missing, or means nothing, where trials do not count.
_UNJUDGED = frozenset(
    {
        _C.BELOW_TARGET,
        _C.UNDECIDED,
        _C.REPETITION_MISSED,
        _C.TOO_FEW_REPETITIONS,
        _C.NO_MEASUREMENT,
        _C.NOT_FROM_TIER,
        _C.CONTROL_MISSED,
        _C.STOP_LOSS,
        _C.TOO_MANY_INVALID,
    }
)
# What a trial cannot show that was cut off.
_CUT_OFF = _UNJUDGED | {
    _C.SERVER_NOT_READY,
    _C.CONNECTOR_INEFFECTIVE,
    _C.TRIAL_INCOMPLETE,
    _C.REQUESTS_FAILED,
    *_RESTARTED,
    _C.NOT_COLD,
    _C.NO_TIER_HITS,
    _C.NOT_FROM_DISK,
    _C.UNEQUAL_WORK,
    _C.CLIENT_SATURATED,
    _C.METRIC_ABSENT,
    _C.NOT_WARM,
}

# Which reasons may follow from which.
FOLLOWS: Mapping[ReasonCode, frozenset[ReasonCode]] = {
    **dict.fromkeys(_ENDED, _CUT_OFF | {_C.GATE_NOT_REACHED}),
    _C.SERVER_NOT_READY: _CUT_OFF - {_C.SERVER_NOT_READY} | {_C.GATE_NOT_REACHED},
    # Counters that started again, and a cache that a new process does not have.
    **dict.fromkeys(
        _RESTARTED,
        _CUT_OFF - set(_RESTARTED) | {_C.TIER_BYTES_MISMATCH, _C.WITNESSES_DISAGREE},
    ),
    _C.TRIAL_INCOMPLETE: _CUT_OFF - {_C.TRIAL_INCOMPLETE},
    # A request that failed restored nothing, did no work and tells no usage.
    _C.REQUESTS_FAILED: _UNJUDGED
    | {
        _C.SERVER_NOT_READY,
        _C.CONNECTOR_INEFFECTIVE,
        _C.NO_TIER_HITS,
        _C.NOT_FROM_DISK,
        _C.TIER_BYTES_MISMATCH,
        _C.WITNESSES_DISAGREE,
        _C.UNEQUAL_WORK,
        _C.METRIC_ABSENT,
        _C.NOT_WARM,
    },
    # The weaker oracle sees what the exact one saw; a control cannot be told from a wrong answer.
    _C.OUTPUT_DIFFERS: frozenset({_C.NOISE_EXCEEDED, _C.CONTROL_MISSED, _C.STOP_LOSS}),
    _C.CONNECTOR_INEFFECTIVE: frozenset({_C.NO_MEASUREMENT, _C.STOP_LOSS}),
    _C.KV_SIZE_DIFFERS: frozenset({_C.TIER_BYTES_MISMATCH, _C.STOP_LOSS}),
    **dict.fromkeys(
        (
            _C.UNDECLARED_DIFFERENCE,
            _C.UNEQUAL_COMPUTE,
            _C.UNEQUAL_SPEED,
            _C.UNEQUAL_CAPACITY,
            _C.EFFECTIVE_UNKNOWN,
        ),
        frozenset({_C.BELOW_TARGET, _C.UNDECIDED, _C.REPETITION_MISSED}),
    ),
    # Tokens that the device gave were not asked of the tier.
    _C.NOT_COLD: _UNJUDGED | {_C.WITNESSES_DISAGREE, _C.NO_TIER_HITS, _C.NOT_FROM_DISK},
    _C.LOAD_FAILURES: _UNJUDGED | {_C.NO_TIER_HITS, _C.NOT_FROM_DISK, _C.WITNESSES_DISAGREE},
    # Counters of one kind that are wrong disagree with all that are right.
    _C.TIER_BYTES_MISMATCH: _UNJUDGED | {_C.WITNESSES_DISAGREE, _C.NO_TIER_HITS, _C.NOT_FROM_DISK},
    _C.WITNESSES_DISAGREE: _UNJUDGED | {_C.NO_TIER_HITS, _C.NOT_FROM_DISK},
    _C.NO_TIER_HITS: _UNJUDGED | {_C.NOT_FROM_DISK},
    _C.CLIENT_SATURATED: _UNJUDGED | {_C.NOT_WARM},
    **dict.fromkeys(
        (
            _C.NOT_FROM_DISK,
            _C.UNEXPECTED_HITS,
            _C.PREEMPTED,
            _C.NOT_STREAMED,
            _C.UNEQUAL_WORK,
            _C.METRIC_ABSENT,
            _C.NOT_WARM,
        ),
        _UNJUDGED,
    ),
    _C.REFERENCE_UNSTABLE: frozenset({_C.CONTROL_MISSED, _C.NOT_FROM_TIER}),
    _C.NOT_FROM_TIER: frozenset({_C.STOP_LOSS}),
    _C.NO_MEASUREMENT: frozenset({_C.STOP_LOSS}),
    _C.STOP_LOSS: _UNJUDGED - {_C.STOP_LOSS} | {_C.GATE_NOT_REACHED},
    _C.GATE_NOT_REACHED: _CUT_OFF - {_C.STOP_LOSS},
}

# A measured miss of a planted fault follows only from these; one that was not asked from any cause.
_BLINDING = frozenset(
    {*_RESTARTED, _C.NOT_COLD, _C.LOAD_FAILURES, _C.NO_TIER_HITS, _C.OUTPUT_DIFFERS}
)

# What a measure draws on: (workloads of the arm, of its baseline, of the reference arm); of waves
# those of the criterion's level, or of the level after the @.
_Draws = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]
DRAWS: Mapping[str, _Draws] = {
    "ttft_reduction": (WAVES, WAVES, ()),
    "wave_throughput_gain": (WAVES, WAVES, ()),
    "arrival_answers": (("arrival",), (), ()),
    "arrival_round_trip_ratio": (("arrival",), (), ()),
    "arrival_kv_size_ratio": (("arrival",), (), ()),
    "oracle_exact_mismatches": (("oracle", "cold_recovery@1"), (), ("populate",)),
    "oracle_after_load_mismatches": (("cold_recovery",), (), ("populate",)),
    "oracle_first_token_excess": (("cold_recovery",), ("cold_recovery", "populate"), ()),
    "negative_controls_missed": (("oracle",), (), ("populate",)),
    "fits_device_hit_share": (("fits_in_hbm",), (), ()),
}


@dataclass(frozen=True)
class Scopes:
    """Which trials (by index in the plan) a check, a criterion or the end of the run is about."""

    trials: tuple[TrialFacts, ...] = ()
    recorded: Mapping[str, int] = dataclasses.field(default_factory=dict)
    missing: frozenset[int] = frozenset()
    unfinished: frozenset[int] = frozenset()
    reference_arm: str | None = None
    is_stop_loss: bool = False

    @classmethod
    def of(
        cls, plan: Plan, numbers: Sequence[TrialNumbers], *, is_stop_loss: bool = False
    ) -> Scopes:
        """The scopes of a run: planned trials, and which of them were recorded to their end."""
        planned = {} if plan.campaign.is_imported else {f.index: f for f in plan.trials()}
        planned |= {n.facts.index: n.facts for n in numbers}
        recorded = {n.facts.index for n in numbers}
        finished = {n.facts.index for n in numbers if n.complete}
        return cls(
            trials=tuple(planned[index] for index in sorted(planned)),
            recorded={n.id: n.facts.index for n in numbers},
            missing=frozenset(planned) - recorded,
            unfinished=frozenset(planned) - finished,
            reference_arm=next(
                (n for n, a in plan.campaign.arms.items() if a.role == "hbm_only"), None
            ),
            is_stop_loss=is_stop_loss,
        )

    def of_criterion(self, result: CriterionResult) -> frozenset[int]:
        """Trials a criterion draws on; of a measure that is not in `DRAWS`, all of its gate."""
        draws = DRAWS.get(result.measurement.name)
        if draws is None:
            compared = {result.arm, result.baseline}
            return frozenset(
                f.index for f in self.trials if f.gate == result.gate and f.arm in compared
            )
        arms = (result.arm, result.baseline, self.reference_arm)
        return frozenset(
            f.index
            for f in self.trials
            for arm, workloads in zip(arms, draws, strict=True)
            if f.arm == arm and _is_drawn(f, workloads, result.level)
        )

    def of_gate(self, gate: str) -> frozenset[int]:
        """All trials of a gate."""
        return frozenset(f.index for f in self.trials if f.gate == gate)

    def of_arm(self, arm: str) -> frozenset[int]:
        """All trials of an arm."""
        return frozenset(f.index for f in self.trials if f.arm == arm)

    def later_in_arm(self, index: int) -> frozenset[int]:
        """A trial and the later ones of its arm, which rest on what it stored."""
        arm = next((f.arm for f in self.trials if f.index == index), None)
        return frozenset(f.index for f in self.trials if f.arm == arm and f.index >= index)

    def is_counted(self, index: int) -> bool:
        """Whether a trial measures, and does not merely prepare those that do."""
        return any(f.index == index and f.workload in COUNTED for f in self.trials)


def _is_drawn(facts: TrialFacts, workloads: Sequence[str], level: int | None) -> bool:
    for workload in workloads:
        name, _, only = workload.partition("@")
        if facts.workload == name:
            wanted = int(only) if only else level
            return name not in WAVES or wanted in (None, facts.concurrency)
    return False


@dataclass
class _Item:
    """One finding. It may follow from what is about ``trials``, and explain what is in ``reach``.

    ``pair``: two arms that a check compares, and ``arms``: those of a criterion. ``measured``:
    false where a value is absent. ``hidden``: worth showing only if something follows from it.
    ``ends``: it ended the run.
    """

    code: ReasonCode
    text: str
    evidence: str
    verdict: Verdict
    places: dict[str, None]
    trials: frozenset[int]
    reach: frozenset[int]
    pair: frozenset[str] = frozenset()
    arms: frozenset[str] = frozenset()
    measured: bool = False
    hidden: bool = False
    ends: bool = False


def causes(
    gates: Sequence[GateVerdict],
    checks: Sequence[Check],
    scopes: Scopes | None = None,
    troubles: Sequence[tuple[int, Reason]] = (),
) -> tuple[Cause, ...]:
    """The tree of all reasons of everything that is not PASS, the root cause of the verdict first.

    ``troubles``: (index of the trial, reason) of trials that no check is made of, such as requests
    that failed while sessions were populated; shown where they explain something.
    """
    scopes = scopes or Scopes()
    items = sorted(_items(gates, checks, scopes, troubles), key=lambda item: _rank(item, scopes))
    roots: list[int] = []
    for index, item in enumerate(items):
        parent = next((i for i in range(index) if _explains(items[i], item)), None)
        roots.append(index if parent is None else roots[parent])
    grouped: dict[ReasonCode, list[_Item]] = {}
    following: dict[ReasonCode, dict[ReasonCode, list[_Item]]] = {}
    for index, item in enumerate(items):
        if roots[index] != index:
            under = following.setdefault(items[roots[index]].code, {})
            under.setdefault(item.code, []).append(item)
        elif not item.hidden or roots.count(index) > 1:
            grouped.setdefault(item.code, []).append(item)
    found = [_cause(code, own, following.get(code, {})) for code, own in grouped.items()]
    return tuple(sorted(found, key=lambda cause: _GRAVITY.index(cause.verdict)))


_GRAVITY = (Verdict.STOP, Verdict.INCONCLUSIVE, Verdict.NOT_RUN, Verdict.PASS)


def _rank(item: _Item, scopes: Scopes) -> tuple[int, int]:
    """Phase, then `ORDER`: what ended the run, what its trials show, what it did not come to.

    So each reason comes after all that it may follow from, and a stop-loss lies between the gate
    that was not met and the trials that were not run for it.
    """
    order = ORDER.index(item.code)
    if item.code is _C.STOP_LOSS:
        return 2, order
    if item.code is _C.GATE_NOT_REACHED:
        return 3 if scopes.is_stop_loss else 0, order
    if item.ends:
        return 0, order
    return (4 if item.trials and item.trials <= scopes.missing else 1), order


def _explains(cause: _Item, effect: _Item) -> bool:
    if effect.code not in FOLLOWS.get(cause.code, ()):
        return False
    if effect.code is _C.CONTROL_MISSED and effect.measured and cause.code not in _BLINDING:
        return False
    if cause.pair:
        return cause.pair <= effect.arms
    return bool(cause.reach & effect.trials)


def _items(
    gates: Sequence[GateVerdict],
    checks: Sequence[Check],
    scopes: Scopes,
    troubles: Sequence[tuple[int, Reason]],
) -> Iterable[_Item]:
    """Every finding once, with all places that name it: first checks, whose subject is exact."""
    exact: dict[tuple[ReasonCode, str, str], _Item] = {}
    broad: dict[tuple[ReasonCode, str, str, frozenset[int], frozenset[str]], _Item] = {}

    def note(item: _Item, place: str) -> None:
        key = (item.code, item.text, item.evidence)
        known = exact.get(key) or broad.setdefault((*key, item.trials, item.arms), item)
        known.places[place] = None
        known.verdict = min(known.verdict, item.verdict, key=_GRAVITY.index)

    names = {index: name for name, index in scopes.recorded.items()}
    for index, reason in troubles:
        item = _item(reason, Verdict.INCONCLUSIVE, {index})
        if not scopes.is_counted(index):
            item.reach = scopes.later_in_arm(index)
        item.hidden = True
        exact.setdefault((item.code, item.text, item.evidence), item)
        note(item, names.get(index, ""))
    for check in checks:
        for reason in check.reasons if check.failed else ():
            about = {scopes.recorded[check.subject]} if check.subject in scopes.recorded else set()
            item = _item(reason, Verdict.INCONCLUSIVE, about, text=named(check.subject, reason))
            item.pair = item.arms = _pair(check.subject)
            if reason.code is _C.NO_TIER_HITS:  # what was never stored is missing later as well
                item.reach = frozenset(i for index in about for i in scopes.later_in_arm(index))
            exact.setdefault((item.code, item.text, item.evidence), item)
            note(item, check.name)
    for gate in gates:
        for result in gate.criteria:
            for reason in result.reasons if result.verdict is not Verdict.PASS else ():
                item = _item(reason, result.verdict, scopes.of_criterion(result))
                # Shared with other arms is only what they are compared with.
                item.reach = item.trials & scopes.of_arm(result.arm)
                item.arms = _pair(pair_name(result.arm, result.baseline or ""))
                item.measured = result.measurement.value is not None
                note(item, result.id)
    for gate in gates:
        for reason in gate.reasons if gate.verdict is not Verdict.PASS else ():
            note(_gate_item(reason, gate, scopes), gate.gate)
    return [*exact.values(), *broad.values()]


def _gate_item(reason: Reason, gate: GateVerdict, scopes: Scopes) -> _Item:
    about: Iterable[int] = scopes.of_gate(gate.gate)
    if reason.code is _C.STOP_LOSS:
        about = scopes.of_gate("g1") - scopes.missing
    elif reason.code is _C.GATE_NOT_REACHED or reason.code in ENDINGS.values():
        about = scopes.unfinished
    # A gate that is STOP is so for a criterion; what a gate says of itself only leaves it open.
    is_run = gate.verdict is not Verdict.NOT_RUN
    item = _item(reason, Verdict.INCONCLUSIVE if is_run else Verdict.NOT_RUN, about)
    item.ends = reason.code in ENDINGS.values()
    if item.ends:
        item.reach = scopes.unfinished
    return item


def _item(reason: Reason, verdict: Verdict, trials: Iterable[int], *, text: str = "") -> _Item:
    about = frozenset(trials)
    return _Item(
        code=reason.code,
        text=text or reason.text,
        evidence=reason.evidence,
        verdict=verdict,
        places={},
        trials=about,
        reach=about,
    )


def named(subject: str, reason: Reason) -> str:
    """The text of a check's reason as criteria repeat it: with the trial or pair it is about."""
    return f"{subject}: {reason.text}"


def _pair(subject: str) -> frozenset[str]:
    one, between, other = subject.partition(" vs ")
    return frozenset({one, other}) if between else frozenset()


def _cause(
    code: ReasonCode, own: Sequence[_Item], following: Mapping[ReasonCode, Sequence[_Item]]
) -> Cause:
    consequences = tuple(
        Consequence(effect, _gravest(items), _findings(items))
        for effect, items in following.items()
    )
    gravest = min([_gravest(own), *(effect.verdict for effect in consequences)], key=_GRAVITY.index)
    return Cause(code, gravest, _findings(own), consequences)


def _findings(items: Iterable[_Item]) -> tuple[Finding, ...]:
    """Findings of the same words as one, with the places of all of them."""
    places: dict[tuple[str, str], dict[str, None]] = {}
    for item in items:
        places.setdefault((item.text, item.evidence), {}).update(item.places)
    return tuple(Finding(text, path, tuple(found)) for (text, path), found in places.items())


def _gravest(items: Iterable[_Item]) -> Verdict:
    return min((item.verdict for item in items), key=_GRAVITY.index)
