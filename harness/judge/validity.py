"""Is a trial's evidence good enough to count? Named checks, none of which looks at the candidate's
latency (docs/protocol.md, section 4). Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from harness import stats
from harness.analysis.numbers import TrialNumbers, select
from harness.campaign.criteria import ValidityBounds
from harness.campaign.plan import Plan
from harness.records import ServerFacts
from harness.verdicts import Check, Reason, ReasonCode

_COUNTED = ("cold_recovery", "steady", "oracle", "fits_in_hbm")


def trial_checks(trials: Sequence[TrialNumbers], bounds: ValidityBounds) -> list[Check]:
    """All checks of all measured trials."""
    checks = []
    for trial in trials:
        if trial.facts.workload in _COUNTED:
            checks += [check(trial, bounds) for check in _CHECKS]
            checks += [check(trial, bounds) for check in _BY_ROLE.get(trial.role, ())]
    return checks + list(_warmth(trials, bounds))


def invalid_trials(checks: Iterable[Check]) -> frozenset[str]:
    """Ids of trials with a failed check."""
    return frozenset(check.subject for check in checks if check.failed)


def imported_checks() -> list[Check]:
    """Every check by name, not applicable: a table of figures holds nothing to check."""
    names = [check.__name__ for check in _CHECKS]
    names += [check.__name__ for checks in _BY_ROLE.values() for check in checks]
    names += ["warm", "declared_differences", "equal_compute", "equal_capacity"]
    return [
        Check(
            name=name,
            subject="published table",
            passed=False,
            found="no requests, counters or server facts",
            allowed="not applicable",
            applicable=False,
        )
        for name in names
    ]


def _check(
    trial: TrialNumbers,
    name: str,
    *,
    found: str,
    allowed: str,
    fault: ReasonCode | None,
    file: str = "samples.jsonl",
    text: str = "",
) -> Check:
    evidence = f"trials/{trial.id}/{file}"
    reasons = (
        () if fault is None else (Reason(fault, text or f"{found}; allowed: {allowed}", evidence),)
    )
    return Check(name, trial.id, fault is None, found, allowed, reasons)


def _count(value: float | None, unit: str = "") -> str:
    return "absent" if value is None else f"{value:.10g}{unit}"


# --- every measured trial ---------------------------------------------------


def complete(trial: TrialNumbers, bounds: ValidityBounds) -> Check:
    """The trial ran to its end and recorded each request that its schedule planned."""
    recorded = len(trial.requests)
    all_there = bool(recorded) and recorded == trial.planned
    fine = trial.complete and all_there
    missing = f"{recorded} of {trial.planned} planned requests recorded"
    return _check(
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
    return _check(
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
    return _check(
        trial,
        "equal_work",
        found=f"{done} of {planned} tokens",
        allowed=f"within {bounds.equal_work_ratio_max:.0%}",
        fault=None if fine else ReasonCode.UNEQUAL_WORK,
        file="requests.jsonl",
    )


def server_unchanged(trial: TrialNumbers, bounds: ValidityBounds) -> Check:
    """Same processes at both marks and no counter went down.

    The processes of a server somebody else runs cannot be read; the report lists that as not
    tested.
    """
    resets, changed = trial.counters.resets, trial.processes_changed
    foreign = trial.server is not None and trial.server.kind == "url"
    if resets:
        found, fault = f"counters reset: {', '.join(resets)}", ReasonCode.SERVER_CHANGED
    elif changed:
        found, fault = "processes changed", ReasonCode.SERVER_CHANGED
    elif changed is None and not foreign:
        found, fault = "no process was read", ReasonCode.METRIC_ABSENT
    else:
        found, fault = "processes not ours" if changed is None else "same processes", None
    return _check(
        trial,
        "server_unchanged",
        found=found,
        allowed="same processes, no counter reset",
        fault=fault,
    )


def not_preempted(trial: TrialNumbers, bounds: ValidityBounds) -> Check:
    """The scheduler preempted nothing."""
    value = trial.counters.get("preemptions")
    fault = None if value == 0 else ReasonCode.PREEMPTED
    return _check(
        trial,
        "not_preempted",
        found=_count(value),
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
    return _check(
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
    return _check(
        trial,
        "streamed",
        found=f"{at_once} of {len(several)} answers at one moment",
        allowed="at most half",
        fault=ReasonCode.NOT_STREAMED if at_once > len(several) / 2 else None,
        file="requests.jsonl",
    )


# --- cold proof, tiered arms ------------------------------------------------


def made_cold(trial: TrialNumbers, bounds: ValidityBounds) -> Check:
    """The reset was done and answered success."""
    return _check(
        trial,
        "made_cold",
        found={True: "reset succeeded", False: "reset failed", None: "no reset recorded"}[
            trial.cold
        ],
        allowed="reset succeeded",
        fault=None if trial.cold else ReasonCode.NOT_COLD,
        file="events.jsonl",
    )


def device_cold(trial: TrialNumbers, bounds: ValidityBounds) -> Check:
    """No token of the wave came from the device cache (less than 1 % of the plan)."""
    value = trial.counters.get("device_hit_tokens")
    allowed = 0.01 * trial.planned_tier_tokens
    fault = None if value is not None and value <= allowed else ReasonCode.NOT_COLD
    return _check(
        trial,
        "device_cold",
        found=_count(value, " device hit tokens"),
        allowed=f"<= {allowed:.0f}",
        fault=ReasonCode.METRIC_ABSENT if value is None else fault,
    )


def restored_as_planned(trial: TrialNumbers, bounds: ValidityBounds) -> Check:
    """The server's external hits are the planned tokens within one block per request."""
    value = trial.counters.get("external_hit_tokens")
    planned = trial.planned_tier_tokens
    slack = trial.figure("block_tokens") * len(trial.requests)
    fine = value is not None and abs(value - planned) <= slack
    return _check(
        trial,
        "restored_as_planned",
        found=_count(value, " external hit tokens"),
        allowed=f"{planned} within {slack}",
        fault=_absent_or(value, None if fine else ReasonCode.NO_TIER_HITS),
    )


def from_the_medium(trial: TrialNumbers, bounds: ValidityBounds) -> Check:
    """Of the planned tokens, at least the allowed share came from the arm's own medium."""
    value = trial.counters.get(f"tier_hit_tokens/{trial.medium}")
    planned = trial.planned_tier_tokens
    fine = value is not None and value >= bounds.tier_share_min * planned
    other = trial.counters.total("tier_hit_tokens")
    wrong_tier = other is not None and other >= bounds.tier_share_min * planned
    fault = ReasonCode.NOT_FROM_DISK if wrong_tier else ReasonCode.NO_TIER_HITS
    return _check(
        trial,
        "from_the_medium",
        found=_count(value, f" tokens from {trial.medium}"),
        allowed=f">= {bounds.tier_share_min:.0%} of {planned}",
        fault=_absent_or(value, None if fine else fault),
    )


def witnesses_agree(trial: TrialNumbers, bounds: ValidityBounds) -> Check:
    """Server, connector and per-request usage tell the same tokens, to one block per request."""
    server = trial.counters.get("external_hit_tokens")
    connector = trial.counters.total("tier_hit_tokens")
    usage = trial.cached_tokens()
    slack = trial.figure("block_tokens") * len(trial.requests)
    values = [server, connector, usage]
    known = [value for value in values if value is not None]
    fine = len(known) == 3 and max(known) - min(known) <= slack
    found = f"server {_count(server)}, connector {_count(connector)}, usage {_count(usage)}"
    fault = ReasonCode.METRIC_ABSENT if len(known) < 3 else ReasonCode.WITNESSES_DISAGREE
    return _check(
        trial,
        "witnesses_agree",
        found=found,
        allowed=f"within {slack} tokens",
        fault=None if fine else fault,
    )


def bytes_match_tokens(trial: TrialNumbers, bounds: ValidityBounds) -> Check:
    """Bytes restored by the connector = hit tokens x KV bytes per token."""
    tokens = trial.counters.total("tier_hit_tokens")
    restored = trial.counters.total("tier_read_bytes")
    if tokens is None or restored is None:
        return _check(
            trial,
            "bytes_match_tokens",
            found=f"tokens {_count(tokens)}, bytes {_count(restored)}",
            allowed="both present",
            fault=ReasonCode.METRIC_ABSENT,
        )
    expected = tokens * trial.figure("kv_bytes_per_token")
    return _check(
        trial,
        "bytes_match_tokens",
        found=f"{restored:.0f} bytes",
        allowed=f"{expected:.0f} bytes",
        fault=None if restored == expected else ReasonCode.TIER_BYTES_MISMATCH,
    )


def read_from_disk(trial: TrialNumbers, bounds: ValidityBounds) -> Check:
    """Block device reads are 0.9 to 1.1 of the restored bytes (disk); a host pool reads none."""
    restored = trial.counters.get(f"tier_read_bytes/{trial.medium}")
    if trial.medium != "disk":
        value = trial.counters.get("tier_file_read_bytes")
        fault = None if value == 0 else ReasonCode.WITNESSES_DISAGREE
        return _check(
            trial,
            "read_from_disk",
            found=_count(value, " file bytes"),
            allowed="0: a host pool reads no files",
            fault=_absent_or(value, fault),
        )
    value = trial.disk_read_bytes
    low, high = bounds.disk_bytes_ratio_min, bounds.disk_bytes_ratio_max
    if value is None or restored is None or restored == 0:
        return _check(
            trial,
            "read_from_disk",
            found=f"disk {_count(value)}, restored {_count(restored)} bytes",
            allowed="both present and above 0",
            fault=ReasonCode.NOT_FROM_DISK if restored == 0 else ReasonCode.METRIC_ABSENT,
        )
    ratio = value / restored
    return _check(
        trial,
        "read_from_disk",
        found=f"{value:.0f} bytes = {ratio:.3f} of restored",
        allowed=f"{low:g} to {high:g}",
        fault=None if low <= ratio <= high else ReasonCode.NOT_FROM_DISK,
    )


def no_load_failures(trial: TrialNumbers, bounds: ValidityBounds) -> Check:
    """The connector failed to restore no block and verified all it read."""
    failed = trial.counters.get("tier_load_failed_blocks")
    unverified = trial.counters.get("tier_verify_failed_blocks")
    values = [failed, unverified]
    fine = all(value == 0 for value in values)
    missing = any(value is None for value in values)
    fault = ReasonCode.METRIC_ABSENT if missing else ReasonCode.LOAD_FAILURES
    return _check(
        trial,
        "no_load_failures",
        found=f"{_count(failed)} failed, {_count(unverified)} unverified blocks",
        allowed="0",
        fault=None if fine else fault,
    )


# --- baselines --------------------------------------------------------------


def no_hits(trial: TrialNumbers, bounds: ValidityBounds) -> Check:
    """Recompute: no cached token by any witness."""
    return _baseline_hits(trial, "no_hits", device_allowed=False)


def no_tier(trial: TrialNumbers, bounds: ValidityBounds) -> Check:
    """HBM only: device hits are its right, tier traffic is not."""
    return _baseline_hits(trial, "no_tier", device_allowed=True)


def _baseline_hits(trial: TrialNumbers, name: str, *, device_allowed: bool) -> Check:
    device = trial.counters.get("device_hit_tokens")
    external = trial.counters.get("external_hit_tokens")
    restored = trial.counters.total("tier_read_bytes")
    usage = trial.cached_tokens()
    connector = trial.connector
    found = (
        f"device {_count(device)}, external {_count(external)}, tier bytes {_count(restored)}, "
        f"usage {_count(usage)}"
    )
    # A server without a connector has no external or tier series; its own log is the witness then.
    quiet = connector == "none" and not external and not restored
    known = device is not None and usage is not None
    slack = trial.figure("block_tokens") * len(trial.requests)
    if device_allowed:
        agree = known and abs((device or 0) - (usage or 0)) <= slack
        fault = None if quiet and agree else ReasonCode.UNEXPECTED_HITS
    else:
        fault = None if quiet and device == 0 and usage == 0 else ReasonCode.UNEXPECTED_HITS
    return _check(
        trial,
        name,
        found=found,
        allowed="no tier, device = usage" if device_allowed else "0 everywhere",
        fault=fault if known else ReasonCode.METRIC_ABSENT,
    )


def _absent_or(value: float | None, fault: ReasonCode | None) -> ReasonCode | None:
    return ReasonCode.METRIC_ABSENT if value is None else fault


# --- across trials ----------------------------------------------------------


def _warmth(trials: Sequence[TrialNumbers], bounds: ValidityBounds) -> Iterator[Check]:
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
        yield _check(
            first,
            "warm",
            found=f"first wave {ratio:.2f} x the others",
            allowed=f"<= {bounds.warmth_ratio_max:g} x",
            fault=None if ratio <= bounds.warmth_ratio_max else ReasonCode.NOT_WARM,
            file="requests.jsonl",
        )


TrialCheck = Callable[[TrialNumbers, ValidityBounds], Check]

_CHECKS: tuple[TrialCheck, ...] = (
    complete,
    requests_ok,
    equal_work,
    server_unchanged,
    not_preempted,
    client_unsaturated,
    streamed,
)
_BY_ROLE: dict[str, tuple[TrialCheck, ...]] = {
    "tiered": (
        made_cold,
        device_cold,
        restored_as_planned,
        from_the_medium,
        witnesses_agree,
        bytes_match_tokens,
        read_from_disk,
        no_load_failures,
    ),
    "recompute": (no_hits,),
    "hbm_only": (no_tier,),
}


# --- pairs of arms ----------------------------------------------------------

# Effective keys that say nothing of how a server works, or that are judged by their own check.
_NOT_COMPARED = {"compute_threads", "kv_capacity_tokens", "device_blocks"}


def arm_checks(
    plan: Plan, servers: dict[str, ServerFacts], pairs: Iterable[tuple[str, str]]
) -> list[Check]:
    """Fairness of (candidate, baseline): declared differences only, equal compute, capacity."""
    checks = []
    for candidate, baseline in pairs:
        one, other = servers.get(candidate), servers.get(baseline)
        if one is None or other is None:
            continue  # the missing arm shows as a missing measurement
        declared = set(plan.campaign.arms[candidate].declared)
        declared |= set(plan.campaign.arms[baseline].declared)
        checks += [
            _declared_only(one, other, declared),
            _equal_compute(one, other, required=plan.campaign.server.cpu_cores is not None),
            _equal_capacity(one, other, declared, plan.profile.validity.capacity_ratio_max),
        ]
    return checks


def pair_name(candidate: str, baseline: str) -> str:
    """Subject of a check of two arms."""
    return f"{candidate} vs {baseline}"


def differing_keys(one: ServerFacts, other: ServerFacts) -> list[str]:
    """Effective keys and versions in which two servers differ."""
    keys = {*one.effective, *other.effective}
    keys |= {f"version.{name}" for name in (*one.versions, *other.versions)}
    return [k for k in sorted(keys) if effective_value(one, k) != effective_value(other, k)]


def effective_value(server: ServerFacts, key: str) -> object:
    """A server's value of an effective key or of ``version.<name>``; None when it was not read."""
    kind, _, name = key.partition(".")
    return server.versions.get(name) if kind == "version" else server.effective.get(key)


def _declared_only(one: ServerFacts, other: ServerFacts, declared: set[str]) -> Check:
    keys = [key for key in differing_keys(one, other) if key not in declared | _NOT_COMPARED]
    found = "; ".join(
        f"{key}: {effective_value(one, key)!r} vs {effective_value(other, key)!r}" for key in keys
    )
    return _pair_check(
        one,
        other,
        "declared_differences",
        found=found or "declared only",
        allowed=", ".join(sorted(declared)) or "none",
        fault=ReasonCode.UNDECLARED_DIFFERENCE if keys else None,
    )


def _equal_compute(one: ServerFacts, other: ServerFacts, *, required: bool) -> Check:
    values = one.effective.get("compute_threads"), other.effective.get("compute_threads")
    unknown = None in values
    fault = ReasonCode.EFFECTIVE_UNKNOWN if unknown and required else None
    if not unknown and values[0] != values[1]:
        fault = ReasonCode.UNEQUAL_COMPUTE
    return _pair_check(
        one,
        other,
        "equal_compute",
        found=f"compute threads {values[0]} vs {values[1]}",
        allowed="equal",
        fault=fault,
    )


def _equal_capacity(
    one: ServerFacts, other: ServerFacts, declared: set[str], ratio_max: float
) -> Check:
    left = one.effective.get("kv_capacity_tokens")
    right = other.effective.get("kv_capacity_tokens")
    fault = None
    if not isinstance(left, int) or not isinstance(right, int) or right <= 0:
        fault = ReasonCode.EFFECTIVE_UNKNOWN
    elif abs(left - right) / right > ratio_max and "kv_capacity_tokens" not in declared:
        fault = ReasonCode.UNEQUAL_CAPACITY
    return _pair_check(
        one,
        other,
        "equal_capacity",
        found=f"{left} vs {right} tokens",
        allowed=f"within {ratio_max:.0%}",
        fault=fault,
    )


def _pair_check(
    one: ServerFacts,
    other: ServerFacts,
    name: str,
    *,
    found: str,
    allowed: str,
    fault: ReasonCode | None,
) -> Check:
    reasons = (
        () if fault is None else (Reason(fault, f"{found}; allowed: {allowed}", "server.json"),)
    )
    return Check(name, pair_name(one.arm, other.arm), fault is None, found, allowed, reasons)
