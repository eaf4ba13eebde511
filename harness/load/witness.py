"""What shows whether the client itself was the bottleneck. Pure; sets no bounds, the judge does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from harness.records import PlannedRequest, Record, RequestRecord, Schedule


@dataclass(frozen=True)
class ClientWitness(Record):
    """One run of the load client, from the release of the barrier to the last request's end.

    Of several workers, ``loop_lag_s_*``, ``cpu_share`` and ``heartbeat_count`` are the worst one's.

    ``loop_lag_s_*``: how late a 10 ms heartbeat came, nearest rank; None below one heartbeat.
    ``cpu_share``: processor seconds of the worker per second, 1.0 is one core.
    ``send_lag_s_max``: longest wait of a sent request between its planned and its real send time.
    ``send_spread_s``: between the first and the last send of those planned for the release itself.
    """

    loop_lag_s_max: float | None
    loop_lag_s_p99: float | None
    cpu_share: float
    in_flight_max: int
    send_lag_s_max: float | None
    send_spread_s: float | None
    duration_s: float
    heartbeat_count: int


def merged(
    parts: Sequence[ClientWitness], schedule: Schedule, records: Sequence[RequestRecord]
) -> ClientWitness:
    """The witness of one run by several workers; a single one's is returned as it is.

    A saturated worker taints its requests however idle the others are, so the worst counts, and
    what one worker did not measure nobody did. What is about all requests together is computed from
    all records: neither the largest spread of a worker nor the sum of each one's most requests in
    flight would be true.
    """
    if len(parts) == 1:
        return parts[0]
    return ClientWitness(
        loop_lag_s_max=_worst([part.loop_lag_s_max for part in parts]),
        loop_lag_s_p99=_worst([part.loop_lag_s_p99 for part in parts]),
        cpu_share=max(part.cpu_share for part in parts),
        in_flight_max=in_flight_max(records),
        send_lag_s_max=send_lag_s_max(records),
        send_spread_s=send_spread_s(schedule, records),
        duration_s=max(part.duration_s for part in parts),
        heartbeat_count=min(part.heartbeat_count for part in parts),
    )


def _worst(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return max(known) if len(known) == len(values) else None


def in_flight_max(records: Sequence[RequestRecord]) -> int:
    """Most requests sent and not yet done at one moment."""
    # At the same nanosecond an end counts before a start.
    changes = sorted(
        change
        for r in records
        if r.sent_ns is not None and r.done_ns is not None
        for change in ((r.sent_ns, 1), (r.done_ns, -1))
    )
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def nearest_rank(values: Sequence[float], ratio: float) -> float | None:
    """The value at rank ceil(ratio x n); None of nothing."""
    return sorted(values)[math.ceil(ratio * len(values)) - 1] if values else None


def send_lag_s_max(records: Sequence[RequestRecord]) -> float | None:
    """Seconds; None when nothing was sent."""
    lags = [r.sent_ns - r.planned_ns for r in records if r.sent_ns is not None]
    return max(lags) / 1e9 if lags else None


def send_spread_s(schedule: Schedule, records: Sequence[RequestRecord]) -> float | None:
    """Seconds; None when no request planned for the release was sent."""
    planned = released_together(schedule.requests)
    sent = [r.sent_ns for r in records if r.seq in planned and r.sent_ns is not None]
    return (max(sent) - min(sent)) / 1e9 if sent else None


def released_together(requests: Sequence[PlannedRequest]) -> set[int]:
    """Sequence numbers of those that should leave the moment the barrier is released."""
    first: dict[int, PlannedRequest] = {}
    for request in sorted(requests, key=lambda item: item.seq):
        first.setdefault(request.user, request)
    return {r.seq for r in first.values() if not r.planned_offset_ns}
