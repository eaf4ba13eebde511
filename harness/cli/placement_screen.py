"""What `kvgate plan` shows of the placement: KV per session, what fits where, is a tier needed.

Words and units only; the numbers are `harness.campaign.placing`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from harness.campaign.placing import Placement, placement
from harness.campaign.plan import Plan
from harness.evidence.store import open_run
from harness.placement.cache import KVSize
from harness.placement.headroom import GIB, Capacity, Devices, Fits, kv_bytes_per_device

MIB = 2**20


def show_placement(
    plan: Plan, console: Console, reported_tokens: Mapping[str, int] | None = None
) -> None:
    """Prints the table and the finding. ``reported_tokens``: KV capacity that servers reported."""
    found = placement(plan.campaign, plan.model_config)
    table = Table(title="placement", show_header=False)
    for key, value in _rows(plan, found, reported_tokens or {}):
        table.add_row(key, escape(value))
    console.print(table)
    for line in findings(plan, found):
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def reported_capacity(run: Path | None) -> dict[str, int]:
    """KV capacity in tokens that each arm's server of a sealed run reported; absent where it is.

    Raises EvidenceError.
    """
    found: dict[str, int] = {}
    for trial in () if run is None else open_run(run).trials:
        tokens = trial.server.effective.get("kv_capacity_tokens") if trial.server else None
        if isinstance(tokens, int):
            found.setdefault(trial.facts.arm, tokens)
    return found


def findings(plan: Plan, found: Placement) -> Iterator[str]:
    """Whether the workload needs the tier, with the numbers. One that fits is no error."""
    work, kv = plan.campaign.cold_recovery, found.kv
    capacity = found.natural or found.configured
    if kv.size is None:
        yield f"placement: not computed: {kv.why_not}"
        return
    if capacity is None:
        yield (
            "placement: not known whether the working set fits in device memory; state "
            "[deployment], or server.device_kv_tokens"
        )
        return
    expected, largest = capacity.sessions(found.tokens)
    numbers = f"device memory holds {_range(expected, largest)} sessions of {found.tokens} tokens"
    match capacity.holds(work.sessions, found.tokens):
        case Fits.YES:
            yield (
                f"placement: {work.sessions} sessions probably fit: {numbers}. The working set "
                "does not need the tier, which can then only show what it costs: a finding, not "
                "an error"
            )
        case Fits.NO:
            yield (
                f"placement: {work.sessions} sessions do not fit: {numbers}, "
                f"{work.sessions / max(1, largest):.2f} x as many are asked for. What was pushed "
                "out is recomputed, or comes from the tier"
            )
        case Fits.CLOSE:
            yield (
                f"placement: too close to tell whether {work.sessions} sessions fit: {numbers}. "
                "The KV capacity that a running server reports decides (--capacity-from RUN)"
            )


def _rows(
    plan: Plan, found: Placement, reported_tokens: Mapping[str, int]
) -> Iterator[tuple[str, str]]:
    kv, work = found.kv, plan.campaign.cold_recovery
    if kv.size is None:
        yield "KV per token", f"{kv.bytes_per_token:,} bytes on all ranks, as stated"
        return
    yield "model", _model(kv.size)
    yield "KV per token", _per_token(kv.size) + _stated(kv.stated, kv.size)
    blocks, session = kv.size.session_blocks(found.tokens), kv.session_bytes(found.tokens)
    yield (
        "KV per session",
        f"{_bytes(session)} for {found.tokens:,} tokens, in {blocks:,} blocks of "
        f"{kv.size.page_tokens}",
    )
    if kv.size.state_bytes:
        yield "of it states", f"{_bytes(kv.size.state_bytes)}, whatever the length"
    if kv.size.has_windows and found.resident is not None:
        freed = found.resident.session_bytes(found.tokens)
        yield "without a connector", f"{_bytes(freed)} a session: blocks behind windows are freed"
    yield "working set", f"{work.sessions} sessions: {_bytes(work.sessions * session)}"
    if found.natural is not None and found.devices is not None:
        yield "device memory", _budget(found.devices, found.natural)
        yield "device KV", _capacity(found.natural, found.tokens)
        for level in work.levels:
            yield f"wave of {level}", f"{found.natural.holds(level, found.tokens)} in device KV"
    if found.configured is not None:
        yield "device KV, as configured", _capacity(found.configured, found.tokens)
    for arm in plan.campaign.arms.values():
        if arm.host_pool_bytes is not None:
            pool = arm.host_pool_bytes * kv.size.parallel.tensor
            yield (
                f"host pool of {arm.name}",
                f"{_bytes(pool)}: about {pool // session} sessions",
            )
    for name, tokens in reported_tokens.items():
        yield f"{name} reported", _reported(tokens, found)


def _model(size: KVSize) -> str:
    model = size.model
    local = sum(1 for cache in model.attention if cache.window or cache.chunk)
    parts = [f"{len(model.attention)} caches that grow"]
    if local:
        parts.append(f"{local} of them windows")
    if model.states:
        parts.append(f"{len(model.states)} states")
    return f"{model.model_type}: {len(model.layers)} layers, {', '.join(parts)}"


def _per_token(size: KVSize) -> str:
    unique, total = size.unique_bytes_per_token, size.ranks_total_bytes_per_token
    text = f"{unique:,} bytes ({size.cache_dtype})"
    if size.parallel.ranks > 1:
        text += f"; {size.rank_bytes_per_token:,} on a rank, {total:,} on all"
    return text + (f": {total / unique:g} copies" if total != unique else "")


def _stated(stated: int | None, size: KVSize) -> str:
    if stated is None:
        return ""
    agrees = stated == size.ranks_total_bytes_per_token
    return f"; stated: {stated:,}" + ("" if agrees else ", which differs and is used")


def _budget(devices: Devices, capacity: Capacity) -> str:
    ranks = capacity.size.parallel.ranks
    expected, largest = kv_bytes_per_device(devices, ranks)
    copies = f"; {capacity.copies} copies of the model" if capacity.copies > 1 else ""
    return (
        f"{devices.accelerators} x {devices.memory_bytes / GIB:g} GiB; each x "
        f"{devices.utilisation:g} - {devices.weights_bytes / ranks / GIB:.1f} weights: at most "
        f"{largest / GIB:.1f} GiB for KV; - {devices.reserve_bytes / GIB:.1f} reserve, "
        f"{devices.margin:.0%} margin: {expected / GIB:.1f} expected{copies}"
    )


def _capacity(capacity: Capacity, tokens: int) -> str:
    expected, largest = capacity.sessions(tokens)
    text = (
        f"{_range(expected, largest)} sessions; blocks: "
        f"{_range(capacity.expected_blocks, capacity.largest_blocks)}"
    )
    return text + (" of each copy" if capacity.copies > 1 else "")


def _range(expected: int, largest: int) -> str:
    return f"{largest:,}" if expected == largest else f"{expected:,} (at most {largest:,})"


def _reported(tokens: int, found: Placement) -> str:
    text = f"KV capacity {tokens:,} tokens"
    capacity = found.configured or found.natural
    if capacity is None:
        return text
    low = capacity.tokens(capacity.expected_blocks)
    high = capacity.tokens(capacity.largest_blocks)
    place = "as computed" if low <= tokens <= high else "NOT as computed"
    return f"{text}; {place}: {_range(low, high)}"


def _bytes(count: float) -> str:
    return f"{count / GIB:,.2f} GiB" if count >= GIB else f"{count / MIB:,.1f} MiB"
