"""Compares outputs: exact oracles (a) and (c), bounded oracle (b), negative controls. Pure.

Reference of the exact oracles: a device prefix hit at concurrency 1 on the arm without a
connector, same session, same number of cached tokens (docs/protocol.md, section 4).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from harness.analysis.numbers import TrialNumbers, select
from harness.records import Outcome, RequestRecord
from workloads.cold_recovery import CONTROL_SESSION, CONTROLS, RETIRED_CONTROLS


@dataclass(frozen=True)
class References:
    """Exact reference per session; ``unstable`` sessions differed from their own repeat."""

    by_session: Mapping[int, RequestRecord]
    unstable: tuple[int, ...]


@dataclass(frozen=True)
class Comparison:
    """Outputs compared with the reference. ``excluded`` says why an output was not counted."""

    compared: int
    differing: tuple[str, ...]
    excluded: tuple[str, ...]


def references(numbers: Iterable[TrialNumbers], arm: str) -> References:
    """References from an arm's populate trial: per session a prefill, a hit and its repeat."""
    by_session: dict[int, RequestRecord] = {}
    unstable = []
    for trial in select(numbers, arm=arm, workload="populate"):
        asked: dict[int, list[RequestRecord]] = {}
        for record in trial.phase("populate"):
            asked.setdefault(record.session, []).append(record)
        for session, records in asked.items():
            if len(records) != 3:
                continue
            _prefill, hit, repeat = records
            if not _usable(hit) or not _usable(repeat) or not hit.cached_tokens:
                continue
            if hit.cached_tokens != repeat.cached_tokens or not same_output(hit, repeat):
                unstable.append(session)
            else:
                by_session[session] = hit
    return References(by_session, tuple(sorted(unstable)))


def same_output(one: RequestRecord, other: RequestRecord) -> bool:
    """Bit-identical: token ids and log probabilities."""
    return one.token_ids == other.token_ids and one.logprobs == other.logprobs


def compare(records: Iterable[tuple[str, RequestRecord]], reference: References) -> Comparison:
    """Compares (trial id, record) pairs with the reference of their session."""
    compared, differing, excluded = 0, [], []
    for trial_id, record in records:
        name = f"{trial_id} {record.phase} session {record.session}"
        expected = reference.by_session.get(record.session)
        if expected is None:
            excluded.append(f"{name}: no reference")
        elif not _usable(record):
            excluded.append(f"{name}: request {record.outcome.value}")
        elif record.cached_tokens != expected.cached_tokens:
            excluded.append(
                f"{name}: {record.cached_tokens} cached tokens, reference {expected.cached_tokens}"
            )
        else:
            compared += 1
            if not same_output(record, expected):
                differing.append(name)
    return Comparison(compared, tuple(differing), tuple(excluded))


def _usable(record: RequestRecord) -> bool:
    return (
        record.outcome is Outcome.OK
        and bool(record.token_ids)
        and len(record.token_ids) == len(record.logprobs)
    )


@dataclass(frozen=True)
class FirstTokens:
    """First tokens of one set of requests against another: how many pairs, how different.

    ``delta_nats_max`` covers the log probability of the first token where it is the same token.
    """

    pairs: int
    disagreeing: int
    delta_nats_max: float


def first_tokens(
    records: Sequence[RequestRecord], baseline: Mapping[int, RequestRecord]
) -> FirstTokens:
    """Compares each record with the baseline's record of the same session."""
    pairs = disagreeing = 0
    delta = 0.0
    for record in records:
        other = baseline.get(record.session)
        if other is None or not _usable(record) or not _usable(other):
            continue
        pairs += 1
        if record.token_ids[0] != other.token_ids[0]:
            disagreeing += 1
        else:
            delta = max(delta, abs(record.logprobs[0] - other.logprobs[0]))
    return FirstTokens(pairs, disagreeing, delta)


@dataclass(frozen=True)
class ControlResult:
    """One planted fault: seen by oracle (a) when restored, by oracle (c) when asked again."""

    name: str
    seen_restored: bool
    seen_again: bool
    delta_nats: float | None


def control_results(
    numbers: Iterable[TrialNumbers], arm: str, reference: References
) -> tuple[list[ControlResult], bool | None]:
    """(results of the planted controls, whether the clean control matched; None: not asked)."""
    expected = reference.by_session.get(CONTROL_SESSION)
    results: list[ControlResult] = []
    clean: bool | None = None
    for trial in select(numbers, arm=arm, workload="oracle"):
        for name in ("clean", *CONTROLS, *RETIRED_CONTROLS):
            asked = trial.phase(f"control_{name}")
            if expected is None or len(asked) != 2 or not all(map(_usable, asked)):
                continue
            if any(r.cached_tokens != expected.cached_tokens for r in asked):
                continue  # not restored as a whole: neither a miss nor a detection
            seen = [not same_output(record, expected) for record in asked]
            if name == "clean":
                clean = not any(seen)
            else:
                same_token = asked[0].token_ids[0] == expected.token_ids[0]
                delta = abs(asked[0].logprobs[0] - expected.logprobs[0]) if same_token else None
                results.append(ControlResult(name, seen[0], seen[1], delta))
    return results, clean
