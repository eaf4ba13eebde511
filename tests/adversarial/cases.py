"""Each fault with what must be seen: a verdict with its reason, or a value."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from harness.records import RequestRecord
from harness.sim.faults import FaultName
from harness.sim.truth import TruthRecord, prompt_digest
from harness.stats import percentile
from harness.verdicts import ReasonCode, Verdict
from tests.adversarial.rehearsal import (
    CANDIDATE,
    POPULATE,
    SESSION_BLOCKS,
    WAVES,
    WAVES_OF_RECOMPUTE,
    Finished,
)
from workloads.prompts import token_ids

PASS, STOP, INCONCLUSIVE = Verdict.PASS, Verdict.STOP, Verdict.INCONCLUSIVE
SEED, VOCABULARY = 11, 512

# A value that must be seen: raises AssertionError, else says what was seen in words that are the
# same each time.
Look = Callable[[Finished], str]


@dataclass(frozen=True)
class Case:
    """``gate``: where the verdict is looked for. ``code`` None: no reason may be named.

    ``is_first``: the first check that failed must name it, before all that follows from it.
    """

    name: FaultName
    verdict: Verdict
    code: ReasonCode | None = None
    look: Look | None = None
    gate: str = "g3"
    arm: str = CANDIDATE
    fault: dict[str, Any] = field(default_factory=dict)
    is_first: bool = False

    @property
    def id(self) -> str:
        """Name of the test."""
        where = "" if self.arm == CANDIDATE else f"-in-{self.arm}"
        return f"{self.name.value}{where}"

    @property
    def expected(self) -> str:
        """For the table."""
        parts = [f"{self.gate.upper()} {self.verdict.value}"]
        first = " first" if self.is_first else ""
        parts += [f"`{self.code.value}`{first}"] if self.code else []
        parts += [(self.look.__doc__ or "").strip().rstrip(".")] if self.look else []
        return ", ".join(parts)


# --- values -------------------------------------------------------------------


def truth_is_told(run: Finished, arm: str = CANDIDATE) -> str:
    """TTFT and tokens as the simulator's own records."""
    pairs = matched(run, arm)
    for record, truth in pairs:
        assert record.token_ids == truth.token_ids, (record, truth)
    errors = [abs(ttft_error_s(record, truth)) for record, truth in pairs]
    # A prefill takes 70 ms here: a client that is fooled is off by nearly all of it.
    assert percentile(errors, 0.5) < 0.010, sorted(errors)
    assert percentile(errors, 0.9) < 0.050, sorted(errors)
    return "TTFT and tokens as the truth"


def matched(run: Finished, arm: str) -> list[tuple[RequestRecord, TruthRecord]]:
    """Requests of an arm beside what the server knows of them; every one has its partner."""
    records: dict[str, list[RequestRecord]] = {}
    for trial in run.trials(arm):
        recipes = {
            (schedule.phase, planned.seq): planned.prompt
            for schedule in trial.schedules
            for planned in schedule.requests
        }
        for record in trial.requests:
            digest = prompt_digest(token_ids(recipes[record.phase, record.seq]))
            records.setdefault(digest, []).append(record)
    truths: dict[str, list[TruthRecord]] = {}
    for truth in run.truth:
        truths.setdefault(truth.prompt_digest, []).append(truth)
    assert records.keys() == truths.keys()
    found = []
    for digest, own in records.items():
        own.sort(key=lambda r: r.sent_ns or 0)
        other = sorted(truths[digest], key=lambda t: t.received_ns)
        found += list(zip(own, other, strict=True))
    return found


def ttft_error_s(record: RequestRecord, truth: TruthRecord) -> float:
    """Measured TTFT minus the true one, in seconds."""
    assert record.ttft_s is not None
    assert truth.first_token_ns is not None
    return record.ttft_s - (truth.first_token_ns - truth.received_ns) / 1e9


def one_unit_per_wave(run: Finished) -> str:
    """requests of a wave share one fate, and n counts waves."""
    for trial in run.trials("recompute"):
        waves = [r.ttft_s for r in trial.requests if r.phase == "wave" and r.ttft_s is not None]
        if waves:
            assert min(waves) > 0.75 * max(waves), waves
    gate = next(g for g in run.signoff.gates if g.gate == "g3")
    result = next(c for c in gate.criteria if c.criterion == "ttft_reduction_vs_recompute")
    assert result.measurement.n == 3
    return "n = 3 waves, not 9 requests"


def memory_grows(run: Finished) -> str:
    """resident memory grows as injected (judged by G4 alone, which is not built)."""
    readings = [
        sample.value
        for trial in run.trials(CANDIDATE)
        for sample in trial.samples
        if (sample.source, sample.name) == ("process", "rss_bytes") and sample.value is not None
    ]
    leaked = len(run.truth) * 2**20
    # Two processes; the engine's is small and does not grow.
    growth = max(readings) - max(readings[:2])
    assert 0.5 * leaked < growth < 1.5 * leaked, (growth, leaked)
    return "growth of the resident memory is in the evidence"


def drift_is_measured(run: Finished) -> str:
    """each wave is slower than the one before."""
    waves = [
        percentile([r.ttft_s or math.inf for r in trial.requests if r.phase == "wave"], 0.5)
        for trial in run.trials(CANDIDATE)
        if trial.facts.workload == "cold_recovery"
    ]
    assert waves == sorted(waves), waves
    assert waves[-1] > 2 * waves[0], waves
    return "waves get slower"


# --- cases --------------------------------------------------------------------

_ONE_IN_THREE = {"from_request": WAVES, "every": 3}
_IN_WAVES = {"from_request": WAVES}


def _harmless(name: FaultName) -> Case:
    return Case(name, PASS, look=truth_is_told)


def _failing(name: FaultName) -> Case:
    return Case(name, INCONCLUSIVE, ReasonCode.REQUESTS_FAILED, fault=_ONE_IN_THREE)


def _invalid(name: FaultName, code: ReasonCode, **fault: Any) -> Case:
    return Case(name, INCONCLUSIVE, code, fault=fault or _IN_WAVES)


def _named_first(name: FaultName, code: ReasonCode, **fault: Any) -> Case:
    return Case(name, INCONCLUSIVE, code, fault=fault or _IN_WAVES, is_first=True)


CASES = (
    _harmless(FaultName.ROLE_CHUNK_EARLY),
    _harmless(FaultName.REASONING_CHANNEL),
    _harmless(FaultName.TOKENS_PER_CHUNK),
    _harmless(FaultName.USAGE_EVERY_CHUNK),
    _harmless(FaultName.COMMENT_PINGS),
    _harmless(FaultName.CRLF),
    _harmless(FaultName.NO_SPACE_AFTER_DATA),
    _harmless(FaultName.SPLIT_UTF8),
    _failing(FaultName.USAGE_MISSING),
    _failing(FaultName.USAGE_NULL),
    _failing(FaultName.TRUNCATED_STREAM),
    _failing(FaultName.ERROR_IN_200),
    _failing(FaultName.FINISH_REASON_ERROR),
    _failing(FaultName.EARLY_EOS),
    _failing(FaultName.WRONG_PROMPT_LENGTH),
    _failing(FaultName.GZIP),
    _failing(FaultName.STATUS_429),
    _failing(FaultName.STATUS_503),
    _failing(FaultName.RESET_ON_REUSED_CONNECTION),
    Case(
        FaultName.ERROR_IN_200,
        INCONCLUSIVE,
        ReasonCode.REQUESTS_FAILED,
        arm="recompute",
        fault={"from_request": WAVES_OF_RECOMPUTE, "every": 3},
    ),
    _invalid(FaultName.CACHED_TOKENS_NULL, ReasonCode.METRIC_ABSENT),
    _invalid(FaultName.BUFFERING_PROXY, ReasonCode.NOT_STREAMED),
    _invalid(FaultName.WARM_BETWEEN_CELLS, ReasonCode.NOT_COLD, from_request=POPULATE),
    _invalid(FaultName.HITS_WITHOUT_BYTES, ReasonCode.TIER_BYTES_MISMATCH),
    _invalid(FaultName.BYTES_WITHOUT_HITS, ReasonCode.NO_TIER_HITS),
    _invalid(FaultName.ZERO_HITS, ReasonCode.NO_TIER_HITS),
    Case(FaultName.ZERO_HITS, STOP, ReasonCode.CONNECTOR_INEFFECTIVE, gate="g1"),
    _invalid(FaultName.PAGE_CACHE, ReasonCode.NOT_FROM_DISK),
    _invalid(FaultName.TIER_FILLS_UP, ReasonCode.NO_TIER_HITS, value=float(7 * SESSION_BLOCKS)),
    Case(
        FaultName.WRONG_KV,
        STOP,
        ReasonCode.OUTPUT_DIFFERS,
        fault={"from_request": WAVES, "every": 9},
    ),
    _invalid(FaultName.COUNTERS_RENAMED, ReasonCode.METRIC_ABSENT),
    _invalid(FaultName.COUNTERS_ABSENT, ReasonCode.METRIC_ABSENT),
    _invalid(FaultName.COUNTERS_RESET, ReasonCode.SERVER_CHANGED),
    _invalid(FaultName.ENGINES_DOUBLED, ReasonCode.WITNESSES_DISAGREE),
    _named_first(FaultName.ENGINE_RESET, ReasonCode.ENGINE_RESET),
    _named_first(FaultName.ENGINE_VANISHED, ReasonCode.ENGINE_VANISHED, from_request=WAVES + 1),
    _named_first(FaultName.ENGINE_APPEARED, ReasonCode.ENGINE_APPEARED, from_request=WAVES + 1),
    _invalid(FaultName.COLD_ENGINE, ReasonCode.NOT_WARM, from_request=WAVES, to_request=WAVES + 3),
    Case(
        FaultName.COLD_ENGINE,
        INCONCLUSIVE,
        ReasonCode.NOT_WARM,
        arm="recompute",
        fault={
            "from_request": WAVES_OF_RECOMPUTE,
            "to_request": WAVES_OF_RECOMPUTE + 3,
            "value": 5.0,
        },
    ),
    Case(
        FaultName.CONVOY,
        PASS,
        look=one_unit_per_wave,
        arm="recompute",
        fault={"from_request": WAVES_OF_RECOMPUTE},
    ),
    _invalid(FaultName.STALL, ReasonCode.GATE_NOT_REACHED, from_request=WAVES + 1),
    Case(
        FaultName.DRIFT,
        INCONCLUSIVE,
        ReasonCode.REPETITION_MISSED,
        look=drift_is_measured,
        fault={"from_request": WAVES + 6, "to_request": WAVES + 15, "value": 4.0},
    ),
    Case(FaultName.LEAK, PASS, look=memory_grows),
    _invalid(FaultName.RESTART, ReasonCode.SERVER_CHANGED),
    _invalid(FaultName.MORE_COMPUTE, ReasonCode.UNEQUAL_COMPUTE),
)
