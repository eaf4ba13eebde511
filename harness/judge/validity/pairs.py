"""Are two arms comparable: declared differences only, equal compute, equal capacity? Pure."""

from __future__ import annotations

from collections.abc import Iterable

from harness.campaign.plan import Plan
from harness.records import ServerFacts
from harness.verdicts import Check, Reason, ReasonCode

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
