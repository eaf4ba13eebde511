"""One function per measure that a criterion can name; `MEASURES` is their registry. Pure.

A measure that cannot be computed has value None and says why in ``detail["absent"]``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from harness import stats
from harness.analysis import oracles
from harness.analysis.numbers import WAVES, TrialNumbers, select, tier_facts
from harness.campaign.criteria import CriterionSpec
from harness.records import ENVIRONMENT, ErrorKind, Outcome, RequestRecord, StopCause
from harness.verdicts import Compared, Measurement, ReasonCode, Unit, finite_or_inf

# Noise of recompute against itself is measured on a handful of sessions; its maximum over so few
# underestimates the true one. The bounded oracle allows this multiple of it, and never less than
# this.
NOISE_MULTIPLE = 4.0
NOISE_FLOOR_NATS = 1e-3

# Ends of a request of which nobody can say whether the server or the way to it was at fault.
_LOST = (ErrorKind.CONNECT, ErrorKind.RESET, ErrorKind.TRUNCATED, ErrorKind.TIMEOUT)


@dataclass(frozen=True)
class Request:
    """What a criterion asks of a measure."""

    name: str
    arm: str
    baseline: str | None
    level: int | None
    reference_arm: str | None


@dataclass(frozen=True)
class RunNumbers:
    """All trials with the ids of those whose evidence is valid."""

    trials: tuple[TrialNumbers, ...]
    valid: frozenset[str]

    def valid_trials(self, arm: str, workload: str, level: int | None) -> list[TrialNumbers]:
        """Valid trials of a cell."""
        found = select(self.trials, arm=arm, workload=workload, level=level)
        return [n for n in found if n.id in self.valid]


Measure = Callable[[RunNumbers, Request], Measurement]


def measure(run: RunNumbers, request: Request) -> Measurement:
    """Computes one measurement. Raises KeyError on an unknown measure, naming the known ones."""
    if request.name not in MEASURES:
        raise KeyError(f"no measure {request.name!r}; known: {', '.join(sorted(MEASURES))}")
    return MEASURES[request.name](run, request)


def absent(
    name: str, unit: Unit, why: str, code: ReasonCode = ReasonCode.NO_MEASUREMENT
) -> Measurement:
    """A measurement that is not there, and why."""
    detail = {"absent": why, "code": code.value}
    return Measurement(name, unit, None, 0, "none", detail=detail)


def first_line(text: str) -> str:
    """The first line of a failure; what a log adds below it stands in the evidence."""
    return (text.splitlines() or [""])[0].partition("; last lines of")[0]


def _number(value: float) -> float | str:
    return finite_or_inf(stats.round9(value))


# --- performance ------------------------------------------------------------


def _paired(
    run: RunNumbers, request: Request, statistic: Callable[[TrialNumbers], float | None]
) -> tuple[list[TrialNumbers], list[float], list[float]]:
    """Trials and both arms' statistic, over repetitions that are valid and have it in both."""
    assert request.baseline is not None

    def waves(arm: str) -> dict[int, tuple[TrialNumbers, float]]:
        trials = [n for w in WAVES for n in run.valid_trials(arm, w, request.level)]
        values = [(n, statistic(n)) for n in trials]
        return {n.facts.repetition: (n, value) for n, value in values if value is not None}

    candidate, baseline = waves(request.arm), waves(request.baseline)
    both = sorted(candidate.keys() & baseline.keys())
    return (
        [n for r in both for n in (candidate[r][0], baseline[r][0])],
        [candidate[r][1] for r in both],
        [baseline[r][1] for r in both],
    )


def ttft_reduction(run: RunNumbers, request: Request) -> Measurement:
    """1 - TTFT ratio over repetitions; a wave counts with its p50, or its mean below six.

    Beside a mean, ``detail`` has what the p50 would read: described, never judged.
    """
    found = _effect(
        run,
        request,
        statistic=lambda n: None if (wave := n.wave_ttft) is None else wave[0],
        convert=lambda ratio: 1 - ratio,
        estimator=f"1 - exp(mean ln ratio) of wave {_wave_estimator(request)}",
        published="1 - ratio of published TTFT p50",
        unit=Unit.SECONDS,
    )
    if found.value is None or _wave_estimator(request) == "p50":
        return found
    p50 = _described_p50(run, request)
    return dataclasses.replace(found, detail={**found.detail, "p50_described": p50})


def _described_p50(run: RunNumbers, request: Request) -> float | str | None:
    """The reduction with each wave's nearest-rank p50; None where there are no requests."""
    _, candidate, baseline = _paired(
        run, request, lambda n: stats.percentile(n.ttft_s, 0.5) if n.requests else None
    )
    try:
        return _number(1 - stats.paired_effect(candidate, baseline).ratio)
    except ValueError:
        return None


def wave_throughput_gain(run: RunNumbers, request: Request) -> Measurement:
    """Throughput ratio - 1 over repetitions; N x O / wall of each wave."""
    return _effect(
        run,
        request,
        statistic=lambda n: n.wave_throughput,
        convert=lambda ratio: ratio - 1,
        estimator="exp(mean ln ratio) - 1 of wave N x O / wall",
        published="ratio of published N x O / wall - 1",
        unit=Unit.TOKENS_PER_SECOND,
    )


def _wave_estimator(request: Request) -> str:
    enough = request.level is not None and request.level >= stats.MIN_UNITS[0.5]
    return "p50" if enough else "mean"


def _effect(
    run: RunNumbers,
    request: Request,
    *,
    statistic: Callable[[TrialNumbers], float | None],
    convert: Callable[[float], float],
    estimator: str,
    published: str,
    unit: Unit,
) -> Measurement:
    """``published``: the estimator of points from a table; ``unit``: of the statistic."""
    trials, candidate, baseline = _paired(run, request, statistic)
    if not candidate:
        return absent(request.name, Unit.RATIO, "no repetition is valid in both arms")
    try:
        effect = stats.paired_effect(candidate, baseline)
    except ValueError as error:
        return absent(request.name, Unit.RATIO, str(error))
    interval = sorted(
        stats.round9(convert(edge)) for edge in (effect.low, effect.high) if edge is not None
    )
    return Measurement(
        name=request.name,
        unit=Unit.RATIO,
        value=_number(convert(effect.ratio)),
        n=len(candidate),
        estimator=published if trials[0].is_imported else estimator,
        low=interval[0] if interval else None,
        high=interval[1] if interval else None,
        confidence=effect.confidence if interval else None,
        repetitions=tuple(_number(convert(ratio)) for ratio in effect.ratios),
        trials=tuple(n.id for n in trials),
        detail={
            "candidate": [_number(value) for value in candidate],
            "baseline": [_number(value) for value in baseline],
            "ratios": [_number(ratio) for ratio in effect.ratios],
            "repetitions": [n.facts.repetition for n in trials[::2]],
        },
        compared=compared(candidate, baseline, unit),
    )


def compared(candidate: Sequence[float], baseline: Sequence[float], unit: Unit) -> Compared:
    """Both sides over their repetitions. Raises ValueError on none, or one not above 0."""
    of_candidate, of_baseline = stats.geometric_mean(candidate), stats.geometric_mean(baseline)
    return Compared(
        unit=unit,
        candidate=_number(of_candidate),
        baseline=stats.round9(of_baseline),
        ratio=_number(of_candidate / of_baseline),
        inverse=stats.round9(of_baseline / of_candidate),
    )


# --- arrival ----------------------------------------------------------------


def arrival_answers(run: RunNumbers, request: Request) -> Measurement:
    """1 when the first request was answered in full, 0 when the server or the request failed.

    Absent where the failure says nothing about the deployment: a server of somebody else's that
    could not be reached, a port on which somebody else answered, a full disk, an interrupt.
    """
    trials = select(run.trials, arm=request.arm, workload="arrival")
    if not trials:
        return absent(request.name, Unit.COUNT, "no arrival trial")
    for trial in trials:
        if (excused := _not_the_deployment(trial)) is not None:
            code, why = excused
            return absent(request.name, Unit.COUNT, why, code)
    asked = [r for n in trials for r in n.phase("arrival_store")]
    answered = [r for r in asked if r.outcome is Outcome.OK]
    failures = [first_line(n.failure) for n in trials if n.failure]
    failures += [
        f"{(r.error_kind or r.outcome).value}: {r.error_detail or 'no detail'}"
        for r in asked
        if r.outcome is not Outcome.OK
    ]
    return Measurement(
        request.name,
        Unit.COUNT,
        1.0 if answered and not any(n.failure for n in trials) else 0.0,
        len(trials),
        "requests answered",
        trials=tuple(n.id for n in trials),
        detail={"failure": failures[0]} if failures else {},
    )


_EXCUSES = {
    StopCause.PORT_TAKEN: ReasonCode.PORT_TAKEN,
    StopCause.SERVER_UNREACHABLE: ReasonCode.SERVER_UNREACHABLE,
}


def _not_the_deployment(trial: TrialNumbers) -> tuple[ReasonCode, str] | None:
    """Why an arrival trial that failed proves nothing against the deployment; None: it may."""
    failure = first_line(trial.failure or "")
    if trial.cause in ENVIRONMENT:
        return _EXCUSES.get(trial.cause, ReasonCode.NO_MEASUREMENT), failure
    if trial.server is None or trial.server.kind != "url":
        return None
    if trial.failure is not None:
        return ReasonCode.SERVER_UNREACHABLE, failure
    lost = [r for r in trial.all_requests if r.outcome is not Outcome.OK and _is_lost(r)]
    if not lost:
        return None
    kind = lost[0].error_kind.value if lost[0].error_kind else "unknown"
    why = f"{len(lost)} requests got no answer of the server's own, the first: {kind}"
    return ReasonCode.SERVER_UNREACHABLE, why


def _is_lost(record: RequestRecord) -> bool:
    """The connection broke, or a status of 5xx, as a gateway or a dying engine gives it."""
    if record.error_kind is ErrorKind.HTTP_STATUS:
        return (record.http_status or 500) >= 500
    return record.error_kind in _LOST


def arrival_round_trip_ratio(run: RunNumbers, request: Request) -> Measurement:
    """Bytes restored from the arm's medium over the bytes of the session's whole blocks."""
    trials = select(run.trials, arm=request.arm, workload="arrival")
    if not trials:
        return absent(request.name, Unit.RATIO, "no arrival trial")
    trial = trials[0]
    if trial.cold is not True:
        why = "the server was not made cold, so the device may have answered"
        return absent(request.name, Unit.RATIO, why, ReasonCode.NOT_COLD)
    restored = trial.counters.get(f"tier_read_bytes/{trial.medium}")
    connector = trial.connector
    if restored is None and connector == "none":
        restored = 0.0  # known, not missing: the server's own log names no connector
    if restored is None or not trial.requests:
        return absent(request.name, Unit.RATIO, "the connector's byte counter is absent")
    planned = trial.planned_tier_tokens * trial.figure("kv_bytes_per_token")
    return Measurement(
        request.name,
        Unit.RATIO,
        stats.round9(restored / planned),
        len(trial.requests),
        "restored bytes / planned bytes",
        trials=(trial.id,),
        detail={"restored_bytes": int(restored), "planned_bytes": planned},
    )


def arrival_kv_size_ratio(run: RunNumbers, request: Request) -> Measurement:
    """KV bytes per token in the device tensors of all ranks over those computed from the model."""
    trials = select(run.trials, arm=request.arm, workload="arrival")
    facts = tier_facts(trials[0]) if trials else {}
    found = facts.get("kv_bytes_per_token")
    # The connector tells a rank's bytes and how many ranks there are; before it knew of ranks it
    # ran on one only, and told none.
    ranks = facts.get("rank_count", 1)
    if not isinstance(found, (int, float)) or not isinstance(ranks, int):
        return absent(request.name, Unit.RATIO, "the connector did not report its tensors")
    allocated = found * ranks
    computed = trials[0].figure("kv_bytes_per_token")
    return Measurement(
        request.name,
        Unit.RATIO,
        stats.round9(allocated / computed),
        1,
        "allocated / computed",
        trials=(trials[0].id,),
        detail={"allocated_bytes_per_token": allocated, "computed_bytes_per_token": computed},
    )


# --- oracles ----------------------------------------------------------------


def _references(run: RunNumbers, request: Request) -> oracles.References:
    arm = request.reference_arm
    return oracles.references(run.trials, arm) if arm else oracles.References({}, ())


def _exact(
    run: RunNumbers,
    request: Request,
    pairs: Sequence[tuple[TrialNumbers, str, bool]],
    estimator: str,
) -> Measurement:
    """Compares the phases of trials that count (third item) with the reference.

    A difference is a difference whatever else is wrong. Without one, every planned check must have
    counted: a check left out is not a check passed.
    """
    reference = _references(run, request)
    if reference.unstable:
        why = f"the reference differs from its own repeat in sessions {list(reference.unstable)}"
        return absent(request.name, Unit.COUNT, why, ReasonCode.REFERENCE_UNSTABLE)
    records = [(n.id, r) for n, phase, counts in pairs if counts for r in n.phase(phase)]
    result = oracles.compare(records, reference)
    left_out = [f"{n.id}: not restored from {n.medium}" for n, _, counts in pairs if not counts]
    left_out += result.excluded
    if not result.differing and (left_out or not result.compared):
        why = f"{len(left_out)} left out; {left_out[0] if left_out else 'nothing to compare'}"
        return absent(request.name, Unit.COUNT, why, ReasonCode.NOT_FROM_TIER)
    return Measurement(
        request.name,
        Unit.COUNT,
        float(len(result.differing)),
        result.compared,
        estimator,
        trials=tuple(dict.fromkeys(n.id for n, _phase, _counts in pairs)),
        detail={"differing": list(result.differing), "left_out": left_out},
    )


def oracle_exact_mismatches(run: RunNumbers, request: Request) -> Measurement:
    """Oracle (a): restores at concurrency 1 that differ from the reference.

    Counts only trials whose tokens came from the medium under test without a load failure.
    """
    waves = select(run.trials, arm=request.arm, workload="cold_recovery", level=1)
    trials = [*waves, *select(run.trials, arm=request.arm, workload="oracle")]
    pairs = [
        (n, "oracle" if n.facts.workload == "oracle" else "wave", came_from_medium(n))
        for n in trials
    ]
    return _exact(run, request, pairs, "differing outputs at concurrency 1")


def oracle_after_load_mismatches(run: RunNumbers, request: Request) -> Measurement:
    """Oracle (c): sessions asked again on the device after a loaded restore that differ."""
    trials = select(run.trials, arm=request.arm, workload="cold_recovery", level=request.level)
    pairs = [(n, "reask", came_from_medium(n) and _still_on_device(n)) for n in trials]
    return _exact(run, request, pairs, "differing outputs asked again after the wave")


def came_from_medium(n: TrialNumbers, share: float = 0.95) -> bool:
    """At least this share of planned tokens came from the arm's medium, with no load failure."""
    if not n.requests or n.medium is None:
        return False
    tokens = n.counters.get(f"tier_hit_tokens/{n.medium}")
    failures = n.counters.get("tier_load_failed_blocks")
    return tokens is not None and tokens >= share * n.planned_tier_tokens and failures == 0


def _still_on_device(n: TrialNumbers, share: float = 0.95) -> bool:
    hits = n.reask_counters.get("device_hit_tokens")
    return hits is not None and hits >= share * n.planned_tier_tokens


def oracle_first_token_excess(run: RunNumbers, request: Request) -> Measurement:
    """Oracle (b): first-token change under load against recompute, over recompute's own change.

    1 and below: no more disagreeing first tokens (as a share) than recompute against itself plus
    one request, and |delta log probability| within NOISE_MULTIPLE x recompute's own maximum.
    """
    assert request.baseline is not None
    alone = {
        record.session: record
        for n in select(run.trials, arm=request.baseline, workload="populate")
        for record in n.phase("populate")
    }

    def against_alone(arm: str) -> oracles.FirstTokens:
        waves = select(run.trials, arm=arm, workload="cold_recovery")
        return oracles.first_tokens([r for n in waves for r in n.requests], alone)

    own, seen = against_alone(request.baseline), against_alone(request.arm)
    if not own.pairs or not seen.pairs:
        return absent(request.name, Unit.RATIO, "no session was asked in both arms")
    allowed_delta = max(NOISE_MULTIPLE * own.delta_nats_max, NOISE_FLOOR_NATS)
    allowed_share = (own.disagreeing + 1) / own.pairs
    excess = max(
        seen.delta_nats_max / allowed_delta, (seen.disagreeing / seen.pairs) / allowed_share
    )
    return Measurement(
        request.name,
        Unit.RATIO,
        stats.round9(excess),
        seen.pairs,
        "worst of disagreement and |delta logprob|, over allowed",
        detail={
            "pairs": seen.pairs,
            "disagreeing": seen.disagreeing,
            "delta_nats_max": stats.round9(seen.delta_nats_max),
            "own_pairs": own.pairs,
            "own_disagreeing": own.disagreeing,
            "own_delta_nats_max": stats.round9(own.delta_nats_max),
            "smallest_detectable_delta_nats": stats.round9(allowed_delta),
        },
    )


def negative_controls_missed(run: RunNumbers, request: Request) -> Measurement:
    """Planted faults that oracle (a) or (c) did not see; n counts those planted."""
    reference = _references(run, request)
    results, clean = oracles.control_results(run.trials, request.arm, reference)
    if clean is not True:
        why = {None: "no clean control was asked", False: "the clean control differs too"}[clean]
        return absent(request.name, Unit.COUNT, why, ReasonCode.CONTROL_MISSED)
    missed = [r.name for r in results if not (r.seen_restored and r.seen_again)]
    return Measurement(
        request.name,
        Unit.COUNT,
        float(len(missed)),
        len(results),
        "planted faults not seen by both exact oracles",
        trials=tuple(n.id for n in select(run.trials, arm=request.arm, workload="oracle")),
        detail={
            "missed": missed,
            "seen": [r.name for r in results if r.name not in missed],
            "delta_nats": {
                r.name: None if r.delta_nats is None else stats.round9(r.delta_nats)
                for r in results
            },
        },
    )


def fits_device_hit_share(run: RunNumbers, request: Request) -> Measurement:
    """Device hit tokens over prompt tokens where the working set fits, by the server's counter."""
    trials = run.valid_trials(request.arm, "fits_in_hbm", None)
    if not trials:
        return absent(request.name, Unit.RATIO, "no valid control cell")
    trial = trials[0]
    hits = trial.counters.get("device_hit_tokens")
    tokens = sum(r.prompt_tokens or 0 for r in trial.requests)
    if hits is None or not tokens:
        return absent(request.name, Unit.RATIO, "the device hit counter is absent")
    return Measurement(
        request.name,
        Unit.RATIO,
        stats.round9(hits / tokens),
        len(trial.requests),
        "device hit tokens / prompt tokens",
        trials=(trial.id,),
    )


# --- the steady window, described only --------------------------------------


def steady_throughput(trial: TrialNumbers, cycles: int) -> float | None:
    """Output tokens per second inside the window, each token credited to its own time.

    The window opens when the last user has finished its second cycle and closes when the first user
    finishes its last one: fixed by the plan, whatever the speed. None when it is empty.
    """
    done: dict[int, list[int]] = {}
    for record in sorted(trial.requests, key=lambda r: r.seq):
        if record.outcome is not Outcome.OK or record.done_ns is None:
            return None
        done.setdefault(record.user, []).append(record.done_ns)
    if not done or any(len(times) != cycles for times in done.values()):
        return None
    opens = max(times[1] for times in done.values())
    closes = min(times[-1] for times in done.values())
    if closes <= opens:
        return None
    if trial.token_times is None:
        return None
    tokens = trial.token_times.between(opens, closes)
    return stats.round9(tokens / ((closes - opens) / 1e9))


# Measures over waves of one level, and those that compare an arm with a baseline.
OF_WAVES = frozenset({"ttft_reduction", "wave_throughput_gain"})
COMPARING = OF_WAVES | {"oracle_first_token_excess"}

MEASURES: Mapping[str, Measure] = {
    "ttft_reduction": ttft_reduction,
    "wave_throughput_gain": wave_throughput_gain,
    "arrival_answers": arrival_answers,
    "arrival_round_trip_ratio": arrival_round_trip_ratio,
    "arrival_kv_size_ratio": arrival_kv_size_ratio,
    "oracle_exact_mismatches": oracle_exact_mismatches,
    "oracle_after_load_mismatches": oracle_after_load_mismatches,
    "oracle_first_token_excess": oracle_first_token_excess,
    "negative_controls_missed": negative_controls_missed,
    "fits_device_hit_share": fits_device_hit_share,
}


def unknown_measures(criteria: Iterable[CriterionSpec]) -> list[str]:
    """Problems of a criteria file that asks for what nobody computes; known before a run."""
    known = ", ".join(sorted(MEASURES))
    problems = []
    for spec in criteria:
        where = f"criteria.{spec.id}"
        if spec.measure not in MEASURES:
            problems.append(f"{where}.measure: found {spec.measure!r}; allowed: {known}")
        if spec.measure in COMPARING and spec.baseline is None:
            problems.append(f"{where}.baseline: found none; measure {spec.measure} compares arms")
        if spec.measure in OF_WAVES and not spec.per_level:
            problems.append(f"{where}.per_level: found false; waves of several levels do not mix")
    return problems
