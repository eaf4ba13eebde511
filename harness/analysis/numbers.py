"""The numbers of one trial: measured requests, counter differences, witnesses. Pure."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from harness import stats
from harness.analysis.counters import Counters, counter_deltas
from harness.evidence.store import TrialEvidence
from harness.records import (
    Event,
    MetricSample,
    Outcome,
    RecordError,
    RequestRecord,
    ServerFacts,
    StopCause,
    TrialFacts,
)

# Measured phase of each workload, and the marks between which its counters are read.
MEASURED: Mapping[str, tuple[str, str, str]] = {
    "arrival": ("arrival_load", "cold", "loaded"),
    "cold_recovery": ("wave", "cold", "wave_end"),
    "steady": ("steady", "cold", "steady_end"),
    "oracle": ("oracle", "cold", "oracle_end"),
    "fits_in_hbm": ("fits_read", "cold", "fits_end"),
    "published_table": ("", "published", "published"),
}
# Workload of a point that was imported from a published table: no requests, one reading per column.
PUBLISHED = "published_table"
# Workloads whose trials are the waves that performance criteria compare.
WAVES = ("cold_recovery", PUBLISHED)


@dataclass(frozen=True)
class TokenTimes:
    """When the tokens of a trial arrived: ``counts[i]`` of them at ``t_ns[i]``, in no order."""

    t_ns: array[int]
    counts: array[int]

    def between(self, opens_ns: int, closes_ns: int) -> int:
        """Tokens after one stamp and up to the other."""
        pairs = zip(self.t_ns, self.counts, strict=True)
        return sum(count for t_ns, count in pairs if opens_ns < t_ns <= closes_ns)


@dataclass(frozen=True)
class TrialNumbers:
    """What one trial shows. Token counts in tokens, times in seconds; None: not in the evidence.

    ``planned``: measured requests of the schedule. Requests of a steady window come without their
    outputs; ``token_times`` has the arrivals instead. ``failure``: what ended the trial early, and
    ``cause`` its name, which older evidence lacks.
    """

    facts: TrialFacts
    server: ServerFacts | None
    requests: tuple[RequestRecord, ...]
    all_requests: tuple[RequestRecord, ...]
    counters: Counters
    reask_counters: Counters
    disk_read_bytes: float | None
    processes_changed: bool | None
    client: Mapping[str, float | None]
    cold: bool | None
    complete: bool
    failure: str | None
    planned: int | None = None
    published: Mapping[str, float] = field(default_factory=dict)
    token_times: TokenTimes | None = None
    cause: StopCause | None = None

    @property
    def id(self) -> str:
        """The trial's id."""
        return self.facts.id

    @property
    def role(self) -> str:
        """Role of the arm."""
        return str(self.facts.figures.get("role"))

    @property
    def medium(self) -> str | None:
        """Medium of a tiered arm."""
        found = self.facts.figures.get("medium")
        return None if found is None else str(found)

    @property
    def connector(self) -> str | None:
        """Name of the connector by the server's own log, "none" for none; None: not read back."""
        found = self.server.effective.get("connector") if self.server else None
        return found if isinstance(found, str) else None

    def figure(self, name: str) -> int:
        """A figure of the plan. Raises KeyError."""
        return int(self.facts.figures[name])

    @property
    def planned_tier_tokens(self) -> int:
        """Tokens that a tiered arm restores in the measured phase: whole blocks of each prompt."""
        return len(self.requests) * self.figure("cached_tokens_per_session")

    def phase(self, name: str) -> tuple[RequestRecord, ...]:
        """Requests of one phase, in order."""
        return tuple(r for r in self.all_requests if r.phase == name)

    @property
    def failed(self) -> tuple[RequestRecord, ...]:
        """Measured requests that are not ok."""
        return tuple(r for r in self.requests if r.outcome is not Outcome.OK)

    @property
    def ttft_s(self) -> tuple[float, ...]:
        """TTFT of each measured request; +infinity where it failed."""
        return tuple(_ttft(r) for r in self.requests)

    @property
    def is_imported(self) -> bool:
        """True for a point of a published table: it has readings, and no requests."""
        return self.facts.workload == PUBLISHED

    @property
    def wave_ttft(self) -> tuple[float, str] | None:
        """Wave statistic of TTFT in seconds and its estimator; None where a table has none."""
        if self.is_imported:
            value = self.published.get("ttft_s_p50")
            return None if value is None else (value, "p50 as published")
        return stats.wave_statistic(self.ttft_s) if self.requests else None

    @property
    def wave_throughput(self) -> float | None:
        """Output tokens of ok requests over the time from first send to last end; tokens/s.

        None where a published table has none.
        """
        if self.is_imported:
            return self.published.get("throughput_tokens_per_s")
        sent = [r.sent_ns for r in self.requests if r.sent_ns is not None]
        done = [r.done_ns for r in self.requests if r.done_ns is not None]
        tokens = sum(r.completion_tokens or 0 for r in self.requests if r.outcome is Outcome.OK)
        if not sent or not done or max(done) <= min(sent):
            return 0.0
        return tokens / ((max(done) - min(sent)) / 1e9)

    def cached_tokens(self) -> int | None:
        """Sum of per-request cached tokens; None when any request lacks the figure."""
        values = [r.cached_tokens for r in self.requests]
        if not values or any(value is None for value in values):
            return None
        return sum(value for value in values if value is not None)


def _ttft(record: RequestRecord) -> float:
    value = record.ttft_s
    return value if record.outcome is Outcome.OK and value is not None else math.inf


def measure_run(trials: Sequence[TrialEvidence]) -> tuple[TrialNumbers, ...]:
    """The numbers of every trial, in order. Raises EvidenceError on malformed evidence."""
    return tuple(trial_numbers(trial) for trial in trials)


def trial_numbers(evidence: TrialEvidence) -> TrialNumbers:
    """Reads one sealed trial."""
    facts = evidence.facts
    phase, start, end = MEASURED.get(facts.workload, ("", "", ""))
    samples = evidence.samples_at({phase, start, end, "wave_end", "reask_end"})
    events = evidence.events
    if any(s.source == "process" and "pid" not in s.labels for s in samples):
        raise RecordError(f"trials/{facts.id}/samples.jsonl: a process reading without its pid")
    requests, token_times = _requests(evidence)
    planned = evidence.planned_requests()
    ended = _last(events, "trial_ended")
    early = _last(events, "server_failed")
    if early is None and ended is not None and not ended.detail.get("ok"):
        early = ended
    return TrialNumbers(
        facts=facts,
        server=evidence.server,
        requests=tuple(r for r in requests if r.phase == phase),
        all_requests=requests,
        counters=counter_deltas(samples, start, end),
        reask_counters=counter_deltas(samples, "wave_end", "reask_end"),
        disk_read_bytes=_disk_read_bytes(samples, start, end),
        processes_changed=_processes_changed(samples, start, end),
        client={s.name: s.value for s in samples if s.source == "client" and s.mark == phase},
        cold=None if (cold := _last(events, "cold")) is None else bool(cold.detail.get("ok")),
        complete=ended is not None and bool(ended.detail.get("ok")),
        failure=None if early is None else str(early.detail.get("error")),
        planned=planned[phase] if phase else None,
        published={
            s.name: s.value
            for s in samples
            if facts.workload == PUBLISHED and s.source == PUBLISHED and s.value is not None
        },
        token_times=token_times,
        cause=_cause(facts.id, early),
    )


def _requests(
    evidence: TrialEvidence,
) -> tuple[tuple[RequestRecord, ...], TokenTimes | None]:
    """All requests by phase and number; a steady window's without outputs, which it never needs."""
    if evidence.facts.workload != "steady":
        return evidence.requests, None
    times = TokenTimes(array("q"), array("q"))
    records = []
    for record, t_ns, counts in evidence.stream_requests():
        records.append(record)
        if record.phase == "steady":
            times.t_ns.extend(t_ns)
            times.counts.extend(counts)
    records.sort(key=attrgetter("phase", "seq"))
    return tuple(records), times


def _cause(trial: str, early: Event | None) -> StopCause | None:
    """The name of what ended a trial early; None where its evidence does not say."""
    value = None if early is None else early.detail.get("cause")
    try:
        return None if value is None else StopCause(value)
    except ValueError as error:
        raise RecordError(f"trials/{trial}/events.jsonl: cause: {error}") from error


def _process_values(samples: Iterable[MetricSample], mark: str, name: str) -> dict[str, float]:
    return {
        s.labels["pid"]: s.value
        for s in samples
        if s.source == "process" and s.mark == mark and s.name == name and s.value is not None
    }


def _disk_read_bytes(samples: Iterable[MetricSample], start: str, end: str) -> float | None:
    samples = list(samples)
    first = _process_values(samples, start, "disk_read_bytes")
    last = _process_values(samples, end, "disk_read_bytes")
    if not first or first.keys() != last.keys():
        return None
    return math.fsum(last[pid] - first[pid] for pid in first)


def _processes_changed(samples: Iterable[MetricSample], start: str, end: str) -> bool | None:
    """None: no process was read at either mark, which is not the same as no change."""
    samples = list(samples)
    first = _process_values(samples, start, "start_time_s")
    last = _process_values(samples, end, "start_time_s")
    return first != last if first or last else None


def _last(events: Iterable[Event], kind: str) -> Event | None:
    found = None
    for event in events:
        if event.kind == kind:
            found = event
    return found


def select(
    numbers: Iterable[TrialNumbers],
    *,
    arm: str | None = None,
    workload: str | None = None,
    level: int | None = None,
) -> list[TrialNumbers]:
    """Trials of an arm, workload and level, in order."""
    return [
        n
        for n in numbers
        if (arm is None or n.facts.arm == arm)
        and (workload is None or n.facts.workload == workload)
        and (level is None or n.facts.concurrency == level)
    ]


def tier_facts(numbers: TrialNumbers) -> Mapping[str, Any]:
    """What the bundled connector said of itself; empty when it said nothing."""
    found = (numbers.server.effective if numbers.server else {}).get("connector_config")
    return found if isinstance(found, dict) else {}
