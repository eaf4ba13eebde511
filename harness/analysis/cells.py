"""What one arm showed at one level: the numbers of charts and tables. Pure; judges nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

from harness import stats
from harness.analysis.measures import RunNumbers, steady_throughput
from harness.analysis.numbers import WAVES, TrialNumbers, select
from harness.records import Outcome
from harness.verdicts import Cell, finite_or_inf


def cells(run: RunNumbers, *, steady_cycles: int) -> tuple[Cell, ...]:
    """One cell per arm and level of the waves, and one per arm of the steady window."""
    found: dict[tuple[str, str, int], None] = {}
    for n in run.trials:
        if n.facts.workload in (*WAVES, "steady"):
            found[(n.facts.arm, n.facts.workload, n.facts.concurrency)] = None
    return tuple(_cell(run, arm, workload, level, steady_cycles) for arm, workload, level in found)


def _cell(run: RunNumbers, arm: str, workload: str, level: int, steady_cycles: int) -> Cell:
    trials = select(run.trials, arm=arm, workload=workload, level=level)
    waves = [n for n in trials if n.requests or n.is_imported]
    statistics = [found for n in waves if (found := n.wave_ttft) is not None]
    if workload == "steady":
        rates = [steady_throughput(n, steady_cycles) for n in waves]
    else:
        rates = [None if (rate := n.wave_throughput) is None else stats.round9(rate) for n in waves]
    requests = [r for n in trials for r in n.requests]
    prompt_tokens = sum(r.prompt_tokens or 0 for r in requests)
    return Cell(
        arm=arm,
        workload=workload,
        level=level,
        repetitions=len(trials),
        ttft_s=_shown([t for n in waves for t in n.ttft_s]),
        ttft_wave_s=tuple(finite_or_inf(stats.round9(value)) for value, _ in statistics),
        ttft_estimator=statistics[0][1] if statistics else "none",
        throughput_tokens_per_s=tuple(rate for rate in rates if rate is not None),
        prompt_tokens=prompt_tokens,
        tokens_by_source=_by_source(waves, prompt_tokens),
        tier_read_bytes=_of_tier(waves, [n.counters.total("tier_read_bytes") for n in waves]),
        disk_read_bytes=_sum([n.disk_read_bytes for n in waves]),
        requests_ok=sum(1 for r in requests if r.outcome is Outcome.OK),
        requests=len(requests),
        valid=bool(trials) and all(n.id in run.valid for n in trials),
        ttft_wave_s_mean=_geometric_mean([value for value, _ in statistics]),
        throughput_tokens_per_s_mean=_finite(_geometric_mean([r for r in rates if r is not None])),
    )


def _geometric_mean(values: Sequence[float]) -> float | str | None:
    """None on no values, or where one is not above 0."""
    if not values or any(not value > 0 for value in values):
        return None
    return finite_or_inf(stats.round9(stats.geometric_mean(values)))


def _finite(value: float | str | None) -> float | None:
    return None if isinstance(value, str) else value


# A chart shows no more dots than this; a verdict file should not be larger than its evidence.
MAX_SHOWN = 4096


def _shown(values: list[float]) -> tuple[float | str, ...]:
    """Every value in order; of more than MAX_SHOWN, as many order statistics, evenly spaced.

    The smallest and the largest are always among them, and so is every order of failures.
    """
    if len(values) > MAX_SHOWN:
        last = len(values) - 1
        ordered = sorted(values)
        values = [ordered[i * last // (MAX_SHOWN - 1)] for i in range(MAX_SHOWN)]
    return tuple(finite_or_inf(stats.round9(value)) for value in values)


def _by_source(trials: Sequence[TrialNumbers], prompt_tokens: int) -> dict[str, int | None]:
    """Prompt tokens by where their KV came from; None: no counter tells."""
    device = _sum([n.counters.get("device_hit_tokens") for n in trials])
    host = _of_tier(trials, [n.counters.get("tier_hit_tokens/host") for n in trials])
    disk = _of_tier(trials, [n.counters.get("tier_hit_tokens/disk") for n in trials])
    known = (device, host, disk)
    recomputed = (
        None
        if any(value is None for value in known)
        else prompt_tokens - sum(value for value in known if value is not None)
    )
    return {"device": device, "host": host, "disk": disk, "recomputed": recomputed}


def _of_tier(trials: Sequence[TrialNumbers], values: Sequence[float | None]) -> int | None:
    """A tier counter's sum; 0, not unknown, where the server's own log names no connector."""
    names = {n.connector for n in trials}
    return 0 if names == {"none"} else _sum(values)


def _sum(values: Sequence[float | None]) -> int | None:
    if not values or any(value is None for value in values):
        return None
    return int(math.fsum(value for value in values if value is not None))
