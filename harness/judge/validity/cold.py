"""Where did the tokens come from: the cold proof of tiered arms and of baselines. Pure."""

from __future__ import annotations

from harness.analysis.numbers import TrialNumbers
from harness.campaign.criteria import ValidityBounds
from harness.judge.validity.checks import TrialCheck, absent_or, shown, trial_check
from harness.verdicts import Check, ReasonCode


def made_cold(trial: TrialNumbers, bounds: ValidityBounds) -> Check:
    """The reset was done and answered success."""
    return trial_check(
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
    return trial_check(
        trial,
        "device_cold",
        found=shown(value, " device hit tokens"),
        allowed=f"<= {allowed:.0f}",
        fault=ReasonCode.METRIC_ABSENT if value is None else fault,
    )


def restored_as_planned(trial: TrialNumbers, bounds: ValidityBounds) -> Check:
    """The server's external hits are the planned tokens within one block per request."""
    value = trial.counters.get("external_hit_tokens")
    planned = trial.planned_tier_tokens
    slack = trial.figure("block_tokens") * len(trial.requests)
    fine = value is not None and abs(value - planned) <= slack
    return trial_check(
        trial,
        "restored_as_planned",
        found=shown(value, " external hit tokens"),
        allowed=f"{planned} within {slack}",
        fault=absent_or(value, None if fine else ReasonCode.NO_TIER_HITS),
    )


def from_the_medium(trial: TrialNumbers, bounds: ValidityBounds) -> Check:
    """Of the planned tokens, at least the allowed share came from the arm's own medium."""
    value = trial.counters.get(f"tier_hit_tokens/{trial.medium}")
    planned = trial.planned_tier_tokens
    fine = value is not None and value >= bounds.tier_share_min * planned
    other = trial.counters.total("tier_hit_tokens")
    wrong_tier = other is not None and other >= bounds.tier_share_min * planned
    fault = ReasonCode.NOT_FROM_DISK if wrong_tier else ReasonCode.NO_TIER_HITS
    return trial_check(
        trial,
        "from_the_medium",
        found=shown(value, f" tokens from {trial.medium}"),
        allowed=f">= {bounds.tier_share_min:.0%} of {planned}",
        fault=absent_or(value, None if fine else fault),
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
    found = f"server {shown(server)}, connector {shown(connector)}, usage {shown(usage)}"
    fault = ReasonCode.METRIC_ABSENT if len(known) < 3 else ReasonCode.WITNESSES_DISAGREE
    return trial_check(
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
        return trial_check(
            trial,
            "bytes_match_tokens",
            found=f"tokens {shown(tokens)}, bytes {shown(restored)}",
            allowed="both present",
            fault=ReasonCode.METRIC_ABSENT,
        )
    expected = tokens * trial.figure("kv_bytes_per_token")
    return trial_check(
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
        return trial_check(
            trial,
            "read_from_disk",
            found=shown(value, " file bytes"),
            allowed="0: a host pool reads no files",
            fault=absent_or(value, fault),
        )
    value = trial.disk_read_bytes
    low, high = bounds.disk_bytes_ratio_min, bounds.disk_bytes_ratio_max
    if value is None or restored is None or restored == 0:
        return trial_check(
            trial,
            "read_from_disk",
            found=f"disk {shown(value)}, restored {shown(restored)} bytes",
            allowed="both present and above 0",
            fault=ReasonCode.NOT_FROM_DISK if restored == 0 else ReasonCode.METRIC_ABSENT,
        )
    ratio = value / restored
    return trial_check(
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
    return trial_check(
        trial,
        "no_load_failures",
        found=f"{shown(failed)} failed, {shown(unverified)} unverified blocks",
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
        f"device {shown(device)}, external {shown(external)}, tier bytes {shown(restored)}, "
        f"usage {shown(usage)}"
    )
    # A server without a connector has no external or tier series; its own log is the witness then,
    # and a log that does not tell is none.
    quiet = connector in ("none", None) and not external and not restored
    known = device is not None and usage is not None
    slack = trial.figure("block_tokens") * len(trial.requests)
    if device_allowed:
        agree = known and abs((device or 0) - (usage or 0)) <= slack
        fault = None if quiet and agree else ReasonCode.UNEXPECTED_HITS
    else:
        fault = None if quiet and device == 0 and usage == 0 else ReasonCode.UNEXPECTED_HITS
    if fault is None and connector is None:
        found += "; the log does not tell whether there is a connector"
        fault = ReasonCode.EFFECTIVE_UNKNOWN
    return trial_check(
        trial,
        name,
        found=found,
        allowed="no tier, device = usage" if device_allowed else "0 everywhere",
        fault=fault if known else ReasonCode.METRIC_ABSENT,
    )


CHECKS_BY_ROLE: dict[str, tuple[TrialCheck, ...]] = {
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
