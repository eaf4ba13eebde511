"""Are two arms comparable: declared differences only, equal compute, equal capacity? Pure."""

from __future__ import annotations

from collections.abc import Iterable

from harness.campaign.plan import Plan
from harness.records import ServerFacts, canonical_json
from harness.verdicts import Check, Reason, ReasonCode

# Keys that have a check of their own.
_OWN_CHECK = {"compute_threads", "kv_capacity_tokens", "device_blocks"}
# What may differ between arms undeclared, with all its parts, and why. Anything else that a server
# states is compared, whoever has heard of it or not.
MAY_DIFFER: dict[str, str] = {
    "args.port": "each server listens on its own",
    "args.kv_transfer_config": "an arm's role says whether it has one; held against the campaign",
    "args.num_gpu_blocks_override": "judged as capacity",
    "cache.num_gpu_blocks_override": "judged as capacity",
    "cache.kv_cache_memory_bytes": "judged as capacity",
    "cache.num_cpu_blocks": "judged as capacity",
    "compilation_config.cache_dir": "where compiled code lies, not what it does",
    "compilation_config.local_cache_dir": "where compiled code lies, not what it does",
    "compilation_config.debug_dump_path": "where compiled code lies, not what it does",
}
# Keys under which the same fact is told once more: compared as, and declared as, the second one.
SAME_AS: dict[str, str] = {
    "args.block_size": "block_tokens",
    "args.enable_chunked_prefill": "chunked_prefill",
    "args.enable_prefix_caching": "prefix_caching",
    "args.max_num_batched_tokens": "batched_tokens",
    "args.optimization_level": "compilation_config",
    "args.tensor_parallel_size": "tensor_parallel",
    "cache._block_size_resolved": "block_tokens",
    "cache.cache_dtype": "kv_cache_dtype",
    "cache.effective_attention_block_size": "block_tokens",
    "cache.user_specified_block_size": "block_tokens",
    "engines": "data_parallel_size",
}


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
    """Keys that two servers state differently, but for those that may differ undeclared.

    An argument is what was asked; where both servers also state what came of it, that is compared.
    """
    keys = {*one.effective, *other.effective}
    keys |= {f"version.{name}" for name in (*one.versions, *other.versions)}
    return [
        key
        for key in sorted(keys)
        if _spelt(effective_value(one, key)) != _spelt(effective_value(other, key))
        and not _covered(key, MAY_DIFFER)
        and not (key.startswith("args.") and all(_fact(key) in s.effective for s in (one, other)))
    ]


def is_declared(key: str, declared: Iterable[str]) -> bool:
    """A declared key stands for its parts (`compilation_config` for `compilation_config.mode`),
    and for the other keys that tell the same fact.
    """
    names = set(declared)
    return _covered(key, names) or _covered(_fact(key), names)


def _fact(key: str) -> str:
    """The key of the fact itself: an argument's own name, or what it is the same as."""
    for name, fact in SAME_AS.items():
        if _covered(key, (name,)):
            return fact
    return key.removeprefix("args.")


def _covered(key: str, names: Iterable[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _spelt(value: object) -> str:
    """A value as it stands in evidence, where 1 is not true."""
    return canonical_json(value)


def effective_value(server: ServerFacts, key: str) -> object:
    """A server's value of an effective key or of ``version.<name>``; None when it was not read."""
    kind, _, name = key.partition(".")
    return server.versions.get(name) if kind == "version" else server.effective.get(key)


def _declared_only(one: ServerFacts, other: ServerFacts, declared: set[str]) -> Check:
    keys = [
        key
        for key in differing_keys(one, other)
        if key not in _OWN_CHECK and not is_declared(key, declared)
    ]
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
