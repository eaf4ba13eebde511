"""Were the requests answered as planned, by a server and to a client that were well? Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from harness import stats
from harness.analysis.numbers import TrialNumbers, select
from harness.campaign.criteria import ValidityBounds
from harness.judge.validity.checks import TrialCheck, shown, trial_check
from harness.verdicts import Check, ReasonCode


def complete(trial: TrialNumbers, bounds: ValidityBounds) -> Check:
    """The trial ran to its end and recorded each request that its schedule planned."""
    recorded = len(trial.requests)
    all_there = bool(recorded) and recorded == trial.planned
    fine = trial.complete and all_there
    missing = f"{recorded} of {trial.planned} planned requests recorded"
    return trial_check(
        trial,
        "complete",
        found="complete" if fine else trial.failure or ("" if all_there else missing) or "no end",
        allowed="complete",
        fault=None if fine else ReasonCode.TRIAL_INCOMPLETE,
        file="events.jsonl",
    )


def requests_ok(trial: TrialNumbers, bounds: ValidityBounds) -> Check:
    """Failed, truncated, short or timed-out requests stay below the allowed share."""
    failed, total = trial.failed, len(trial.requests)
    fine = bool(total) and len(failed) / total <= bounds.failed_share_max
    kinds = sorted({r.error_kind.value if r.error_kind else "unknown" for r in failed})
    detail = f" ({', '.join(kinds)})" if kinds else ""
    return trial_check(
        trial,
        "requests_ok",
        found=f"{len(failed)} of {total} failed{detail}",
        allowed=f"share <= {bounds.failed_share_max:g}",
        fault=None if fine else ReasonCode.REQUESTS_FAILED,
        file="requests.jsonl",
    )


def equal_work(trial: TrialNumbers, bounds: ValidityBounds) -> Check:
    """Prompt and output tokens as planned; every arm has the same plan, so arms are equal too."""
    planned = sum(r.prompt_tokens_planned + r.output_tokens_planned for r in trial.requests)
    done = sum((r.prompt_tokens or 0) + (r.completion_tokens or 0) for r in trial.requests)
    fine = bool(planned) and abs(done - planned) / planned <= bounds.equal_work_ratio_max
    return trial_check(
        trial,
        "equal_work",
        found=f"{done} of {planned} tokens",
        allowed=f"within {bounds.equal_work_ratio_max:.0%}",
        fault=None if fine else ReasonCode.UNEQUAL_WORK,
        file="requests.jsonl",
    )


def server_unchanged(trial: TrialNumbers, bounds: ValidityBounds) -> Check:
    """Same processes and engines at all marks, and no counter of an engine went down.

    The processes of a server somebody else runs cannot be read; the report lists that as not
    tested.
    """
    counted = (trial.counters, trial.reask_counters)
    vanished = dict.fromkeys(name for c in counted for name in c.vanished)
    appeared = dict.fromkeys(name for c in counted for name in c.appeared)
    resets = [text for c in counted for text in c.resets]
    changed = trial.processes_changed
    foreign = trial.server is not None and trial.server.kind == "url"
    fault: ReasonCode | None = None
    if vanished:
        found, fault = f"gone from /metrics: {', '.join(vanished)}", ReasonCode.ENGINE_VANISHED
    elif appeared:
        found, fault = f"new on /metrics: {', '.join(appeared)}", ReasonCode.ENGINE_APPEARED
    elif resets:
        found = f"counters reset: {'; '.join(resets[:3])}"
        found += f" and {len(resets) - 3} more" if len(resets) > 3 else ""
        whole = any(c.whole_reset for c in counted)
        fault = ReasonCode.SERVER_CHANGED if whole else ReasonCode.ENGINE_RESET
    elif changed:
        found, fault = "processes changed", ReasonCode.SERVER_CHANGED
    elif changed is None and not foreign:
        found, fault = "no process was read", ReasonCode.METRIC_ABSENT
    else:
        found = "processes not ours" if changed is None else "same processes"
    return trial_check(
        trial,
        "server_unchanged",
        found=found,
        allowed="same processes and engines, no counter reset",
        fault=fault,
    )


def not_preempted(trial: TrialNumbers, bounds: ValidityBounds) -> Check:
    """The scheduler preempted nothing."""
    value = trial.counters.get("preemptions")
    fault = None if value == 0 else ReasonCode.PREEMPTED
    return trial_check(
        trial,
        "not_preempted",
        found=shown(value),
        allowed="0",
        fault=ReasonCode.METRIC_ABSENT if value is None else fault,
    )


def client_unsaturated(trial: TrialNumbers, bounds: ValidityBounds) -> Check:
    """The load client kept up: heartbeat lag, send spread, processor share, requests in flight."""
    limits = (
        ("loop_lag_s_max", bounds.loop_lag_s_max),
        ("send_spread_s", bounds.send_spread_s_max),
        ("cpu_share", bounds.client_cpu_share_max),
    )
    needed = [*(name for name, _ in limits), "in_flight_max"]
    missing = [name for name in needed if trial.client.get(name) is None]
    over = [
        f"{name} {value:.3g} > {limit:g}"
        for name, limit in limits
        if (value := trial.client.get(name)) is not None and value > limit
    ]
    in_flight = trial.client.get("in_flight_max")
    expected = len({r.user for r in trial.requests})
    if in_flight is not None and in_flight != expected:
        over.append(f"in_flight_max {in_flight:g} instead of {expected}")
    found = ", ".join(over) or (f"{missing[0]} absent" if missing else "within bounds")
    fault = ReasonCode.CLIENT_SATURATED if over else None
    return trial_check(
        trial,
        "client_unsaturated",
        found=found,
        allowed=", ".join(f"{name} <= {limit:g}" for name, limit in limits),
        fault=ReasonCode.METRIC_ABSENT if missing else fault,
    )


def streamed(trial: TrialNumbers, bounds: ValidityBounds) -> Check:
    """Tokens of most answers arrived one after the other: nothing held an answer back."""
    several = [
        r for r in trial.requests if r.first_token_ns is not None and (r.completion_tokens or 0) > 1
    ]
    at_once = sum(r.first_token_ns == r.last_token_ns for r in several)
    return trial_check(
        trial,
        "streamed",
        found=f"{at_once} of {len(several)} answers at one moment",
        allowed="at most half",
        fault=ReasonCode.NOT_STREAMED if at_once > len(several) / 2 else None,
        file="requests.jsonl",
    )


def warmth(trials: Sequence[TrialNumbers], bounds: ValidityBounds) -> Iterator[Check]:
    """First measured wave of a level against the median of the others, alike in all arms."""
    cells = dict.fromkeys(
        (n.facts.arm, n.facts.concurrency) for n in trials if n.facts.workload == "cold_recovery"
    )
    for arm, level in cells:
        waves = [
            n for n in select(trials, arm=arm, workload="cold_recovery", level=level) if n.requests
        ]
        if len(waves) < 2:
            continue
        first, others = waves[0], waves[1:]
        statistic = stats.wave_statistic(first.ttft_s)[0]
        usual = stats.percentile([stats.wave_statistic(n.ttft_s)[0] for n in others], 0.5)
        ratio = statistic / usual if 0 < usual < math.inf else math.inf
        yield trial_check(
            first,
            "warm",
            found=f"first wave {ratio:.2f} x the others",
            allowed=f"<= {bounds.warmth_ratio_max:g} x",
            fault=None if ratio <= bounds.warmth_ratio_max else ReasonCode.NOT_WARM,
            file="requests.jsonl",
        )


REQUEST_CHECKS: tuple[TrialCheck, ...] = (
    complete,
    requests_ok,
    equal_work,
    server_unchanged,
    not_preempted,
    client_unsaturated,
    streamed,
)
