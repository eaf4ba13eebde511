"""Measurements, criteria and verdicts: from analysis to the judge, from the judge to the report.

Values only. `SignOff` is the content of a verdict file; it holds no path, host or time, so the same
evidence gives the same bytes anywhere.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from harness.records import Record, later

# Raise with every change that can alter a verdict on unchanged evidence (CHANGELOG, "Verdicts").
JUDGE_VERSION = "2"

# Gates that this version can run and judge; the others of the protocol do not exist yet.
GATES_BUILT: tuple[Literal["g1", "g3"], ...] = ("g1", "g3")


class Verdict(enum.Enum):
    """STOP beats INCONCLUSIVE beats PASS. NOT RUN: a gate that was not judged."""

    PASS = "PASS"
    STOP = "STOP"
    INCONCLUSIVE = "INCONCLUSIVE"
    NOT_RUN = "NOT RUN"

    @property
    def exit_code(self) -> int:
        """Exit code of the command line (docs/protocol.md, section 6)."""
        return {Verdict.PASS: 0, Verdict.STOP: 1}.get(self, 2)


def merge(verdicts: Iterable[Verdict]) -> Verdict:
    """Worst of several by the fixed order; nothing at all is NOT RUN, never PASS."""
    found = set(verdicts)
    for verdict in (Verdict.STOP, Verdict.INCONCLUSIVE, Verdict.NOT_RUN, Verdict.PASS):
        if verdict in found:
            return verdict
    return Verdict.NOT_RUN


class ReasonCode(enum.Enum):
    """Every reason a verdict can name. Meaning and remedy: `REASON_TEXTS`."""

    # what ended the run
    SERVER_UNUSABLE = "run.server_unusable"
    SERVER_ENDED = "run.server_ended"
    SERVER_SILENT = "run.server_silent"
    DISK_FULL = "run.disk_full"
    INTERRUPTED = "run.interrupted"
    HARNESS_DIED = "run.harness_died"
    HARNESS_FAILED = "run.harness_failed"
    # performance and oracle criteria
    BELOW_TARGET = "criterion.below_target"
    UNDECIDED = "criterion.undecided"
    REPETITION_MISSED = "criterion.repetition_missed"
    TOO_FEW_REPETITIONS = "criterion.too_few_repetitions"
    NO_MEASUREMENT = "criterion.no_measurement"
    OUTPUT_DIFFERS = "oracle.output_differs"
    REFERENCE_UNSTABLE = "oracle.reference_unstable"
    NOT_FROM_TIER = "oracle.not_from_tier"
    CONTROL_MISSED = "oracle.control_missed"
    NOISE_EXCEEDED = "oracle.noise_exceeded"
    # validity of a trial
    REQUESTS_FAILED = "trial.requests_failed"
    UNEQUAL_WORK = "trial.unequal_work"
    NOT_COLD = "trial.not_cold"
    NO_TIER_HITS = "trial.no_tier_hits"
    TIER_BYTES_MISMATCH = "trial.tier_bytes_mismatch"
    NOT_FROM_DISK = "trial.not_from_disk"
    WITNESSES_DISAGREE = "trial.witnesses_disagree"
    UNEXPECTED_HITS = "trial.unexpected_hits"
    LOAD_FAILURES = "trial.load_failures"
    PREEMPTED = "trial.preempted"
    SERVER_CHANGED = "trial.server_changed"
    ENGINE_RESET = "trial.engine_reset"
    ENGINE_VANISHED = "trial.engine_vanished"
    ENGINE_APPEARED = "trial.engine_appeared"
    CLIENT_SATURATED = "trial.client_saturated"
    NOT_STREAMED = "trial.not_streamed"
    NOT_WARM = "trial.not_warm"
    METRIC_ABSENT = "trial.metric_absent"
    TRIAL_INCOMPLETE = "trial.incomplete"
    # comparison of arms
    UNDECLARED_DIFFERENCE = "arms.undeclared_difference"
    UNEQUAL_COMPUTE = "arms.unequal_compute"
    UNEQUAL_SPEED = "arms.unequal_speed"
    UNEQUAL_CAPACITY = "arms.unequal_capacity"
    EFFECTIVE_UNKNOWN = "arms.effective_unknown"
    # arrival
    SERVER_NOT_READY = "arrival.server_not_ready"
    SERVER_UNREACHABLE = "arrival.server_unreachable"
    PORT_TAKEN = "arrival.port_taken"
    CONNECTOR_INEFFECTIVE = "arrival.connector_ineffective"
    KV_SIZE_DIFFERS = "arrival.kv_size_differs"
    # evidence and judge
    EVIDENCE_ALTERED = "evidence.altered"
    EVIDENCE_UNSEALED = "evidence.unsealed"
    EVIDENCE_MALFORMED = "evidence.malformed"
    EVIDENCE_IMPORTED = "evidence.imported"
    JUDGE_FAILED = "judge.failed"
    STOP_LOSS = "gate.stop_loss"
    GATE_NOT_REACHED = "gate.not_reached"
    TOO_MANY_INVALID = "gate.too_many_invalid"


@dataclass(frozen=True)
class ReasonText:
    """One sentence each: what the code says, and what to do about it."""

    meaning: str
    remedy: str


REASON_TEXTS: dict[ReasonCode, ReasonText] = {
    ReasonCode.SERVER_UNUSABLE: ReasonText(
        "A server could not be started or asked, for a reason outside the deployment.",
        "Do what the message says (interpreter, port, key, configuration); then run again.",
    ),
    ReasonCode.SERVER_ENDED: ReasonText(
        "The server, or its supervisor, ended by itself while the run needed it.",
        "See the last lines of server.log of the trial named; was it killed, or out of memory?",
    ),
    ReasonCode.SERVER_SILENT: ReasonText(
        "The server lived and stopped answering within its deadline.",
        "See server.log; a machine that is really that slow needs a longer deadline.",
    ),
    ReasonCode.DISK_FULL: ReasonText(
        "The disk for the evidence refused to be written, so the run ended there.",
        "Free space (`kvgate runs prune`) or give another directory with --runs; then go on.",
    ),
    ReasonCode.INTERRUPTED: ReasonText(
        "The operator interrupted the run.",
        "Go on with `kvgate run --resume RUN`, or run again.",
    ),
    ReasonCode.HARNESS_DIED: ReasonText(
        "The harness was killed; what it had recorded was sealed later.",
        "Go on with `kvgate run --resume RUN`, or run again.",
    ),
    ReasonCode.HARNESS_FAILED: ReasonText(
        "The harness itself failed; that is our defect.",
        "Report it with the run directory.",
    ),
    ReasonCode.BELOW_TARGET: ReasonText(
        "The measured value misses the target by more than the rule allows.",
        "The agreed effect is not delivered; compare the arm's hit tokens, bytes and bandwidth.",
    ),
    ReasonCode.UNDECIDED: ReasonText(
        "The value is too close to the target for this plan to decide.",
        "Run more repetitions, or reduce noise on the machine.",
    ),
    ReasonCode.REPETITION_MISSED: ReasonText(
        "At least one repetition does not reach what the rule asks of every repetition.",
        "Look at the trial of the named repetition; run again on a quieter machine.",
    ),
    ReasonCode.TOO_FEW_REPETITIONS: ReasonText(
        "Fewer valid repetitions than the decision rule needs.",
        "See the invalid trials of this cell; run the campaign again.",
    ),
    ReasonCode.NO_MEASUREMENT: ReasonText(
        "The evidence holds no measurement for this criterion.",
        "Run the missing arm or workload; a criterion without a measurement never passes.",
    ),
    ReasonCode.OUTPUT_DIFFERS: ReasonText(
        "Output restored from the tier differs from the exact reference: wrong KV came back.",
        "Stop using the tier. Look at the named sessions and at the connector's counters.",
    ),
    ReasonCode.REFERENCE_UNSTABLE: ReasonText(
        "A repeat of the reference at concurrency 1 differs from itself on this platform.",
        "Exactness is unavailable here; use a deterministic attention backend.",
    ),
    ReasonCode.NOT_FROM_TIER: ReasonText(
        "Too little of an oracle check's prompt came from the tier under test.",
        "Check the cold reset and the tier's capacity.",
    ),
    ReasonCode.CONTROL_MISSED: ReasonText(
        "A planted fault (negative control) was not detected, or was not planted.",
        "The oracle is blind on this model or platform; its silence proves nothing.",
    ),
    ReasonCode.NOISE_EXCEEDED: ReasonText(
        "Output under load differs from recompute by more than recompute differs from itself.",
        "Look at the exact oracles first; if they hold, measure the noise with more sessions.",
    ),
    ReasonCode.REQUESTS_FAILED: ReasonText(
        "Requests failed, were cut short or timed out.",
        "See error_kind and error_detail in requests.jsonl and the end of server.log.",
    ),
    ReasonCode.UNEQUAL_WORK: ReasonText(
        "Prompt or output tokens differ between the arms by more than 1 %.",
        "Both arms must answer the same requests in full.",
    ),
    ReasonCode.NOT_COLD: ReasonText(
        "Tokens came from the device cache although the wave had to be cold.",
        "Check the reset in events.jsonl; raise the working set.",
    ),
    ReasonCode.NO_TIER_HITS: ReasonText(
        "The tier restored fewer tokens than planned.",
        "Is the connector loaded, its directory writable, its capacity sufficient? See server.log.",
    ),
    ReasonCode.TIER_BYTES_MISMATCH: ReasonText(
        "Bytes restored by the connector are not hit tokens x KV bytes per token.",
        "Hits without bytes or bytes without hits: the counters cannot be trusted.",
    ),
    ReasonCode.NOT_FROM_DISK: ReasonText(
        "The operating system read fewer (or more) bytes from disk than the tier restored.",
        "The page cache or the host pool answered; use O_DIRECT or drop caches.",
    ),
    ReasonCode.WITNESSES_DISAGREE: ReasonText(
        "Two witnesses of the same fact disagree (server, connector, per-request usage).",
        "Do not use the numbers until the difference is explained.",
    ),
    ReasonCode.UNEXPECTED_HITS: ReasonText(
        "An arm that must not reuse KV shows cache hits or tier traffic.",
        "Check prefix caching and the connector configuration of the baseline.",
    ),
    ReasonCode.LOAD_FAILURES: ReasonText(
        "The connector failed to restore blocks during the trial.",
        "See the connector's log lines in server.log.",
    ),
    ReasonCode.PREEMPTED: ReasonText(
        "The scheduler preempted requests, so work was done twice.",
        "Give the device cache room for the wave, or declare it.",
    ),
    ReasonCode.SERVER_CHANGED: ReasonText(
        "The server restarted, lost a process or reset its counters during the trial.",
        "See server.log; an unplanned restart voids the trial.",
    ),
    ReasonCode.ENGINE_RESET: ReasonText(
        "Counters of one engine of the server began anew while those of another went on.",
        "An engine restarted amid the trial; see server.log, and run the campaign again.",
    ),
    ReasonCode.ENGINE_VANISHED: ReasonText(
        "An engine of the server was there when the trial began and is not on /metrics at its end.",
        "See server.log; keep the number of engines fixed while a campaign runs.",
    ),
    ReasonCode.ENGINE_APPEARED: ReasonText(
        "An engine is on /metrics that was not there when the trial began; its past is unknown.",
        "Start every engine before the campaign; do not scale a server under test.",
    ),
    ReasonCode.CLIENT_SATURATED: ReasonText(
        "The load client was too busy to time requests within its bounds.",
        "Stop other work on the machine, or add load workers.",
    ),
    ReasonCode.NOT_STREAMED: ReasonText(
        "Whole answers arrived at one moment, so the time of the first token is that of the last.",
        "A proxy or a stream interval holds tokens back; measure at the server itself.",
    ),
    ReasonCode.NOT_WARM: ReasonText(
        "The first measured wave was slower than the others by more than the warmth bound.",
        "Warm up with a full wave at the measured shape.",
    ),
    ReasonCode.METRIC_ABSENT: ReasonText(
        "A required metric was absent or could not be read; absent is never zero.",
        "See samples.jsonl; check /metrics and the versions.",
    ),
    ReasonCode.TRIAL_INCOMPLETE: ReasonText(
        "The trial ended early; what was recorded is kept.",
        "See the last events of the trial.",
    ),
    ReasonCode.UNDECLARED_DIFFERENCE: ReasonText(
        "The effective configurations of two arms differ in a key the campaign does not declare.",
        "Make the arms equal, or declare the difference in the campaign.",
    ),
    ReasonCode.UNEQUAL_COMPUTE: ReasonText(
        "The arms were given different compute (OpenMP threads, clocks, power).",
        "Set the same number of cores in every arm.",
    ),
    ReasonCode.UNEQUAL_SPEED: ReasonText(
        "The machine computed the same prompts faster under one arm than under the other.",
        "Noise: stop other work on the machine, look at clocks and power, and run again.",
    ),
    ReasonCode.UNEQUAL_CAPACITY: ReasonText(
        "Device KV capacity differs between the arms by more than 2 % and is not declared.",
        "Fix the number of device blocks in every arm.",
    ),
    ReasonCode.EFFECTIVE_UNKNOWN: ReasonText(
        "A configuration value that must be equal could not be read back from a server.",
        "See server.log and server.json of the arm.",
    ),
    ReasonCode.SERVER_NOT_READY: ReasonText(
        "The server never became ready or did not answer.",
        "See the last lines of server.log.",
    ),
    ReasonCode.SERVER_UNREACHABLE: ReasonText(
        "A server that somebody else runs could not be reached, or stopped answering.",
        "Look at that server and the way to it; `kvgate doctor` asks it again.",
    ),
    ReasonCode.PORT_TAKEN: ReasonText(
        "It cannot be shown that the server which answered is the one that was started.",
        "Stop the process that the message names, or leave server.port out; run again.",
    ),
    ReasonCode.CONNECTOR_INEFFECTIVE: ReasonText(
        "A forced store, evict, load round trip did not bring the KV back.",
        "The connector is absent, switched off or its medium is unusable; see server.log.",
    ),
    ReasonCode.KV_SIZE_DIFFERS: ReasonText(
        "KV bytes per token computed from the model differ from what the server allocated.",
        "Check KV dtype, tensor parallelism and the model's config.",
    ),
    ReasonCode.EVIDENCE_ALTERED: ReasonText(
        "Sealed evidence was changed, removed or added to.",
        "Restore the original files; altered evidence is never judged.",
    ),
    ReasonCode.EVIDENCE_UNSEALED: ReasonText(
        "The run or a trial was never sealed.",
        "The run was interrupted; run it again.",
    ),
    ReasonCode.EVIDENCE_MALFORMED: ReasonText(
        "An evidence file does not have the documented format.",
        "Judge with the version that wrote it.",
    ),
    ReasonCode.EVIDENCE_IMPORTED: ReasonText(
        "Imported figures are arithmetic on a published table; this criterion asks for more.",
        "Judge imported evidence in the profile `published`; measure to decide anything else.",
    ),
    ReasonCode.JUDGE_FAILED: ReasonText(
        "The judge itself failed; that is our defect.",
        "Report it with the run directory.",
    ),
    ReasonCode.STOP_LOSS: ReasonText(
        "An earlier gate was not met, so this gate was not run.",
        "Resolve the earlier gate, then retest.",
    ),
    ReasonCode.GATE_NOT_REACHED: ReasonText(
        "The run ended before this gate's trials.",
        "Run the campaign again.",
    ),
    ReasonCode.TOO_MANY_INVALID: ReasonText(
        "More of the measured trials are invalid than the profile allows.",
        "See why each of them is invalid.",
    ),
}


@dataclass(frozen=True)
class Reason(Record):
    """Why a verdict is what it is. ``evidence`` is a path inside the run directory."""

    code: ReasonCode
    text: str
    evidence: str = ""


class Unit(enum.Enum):
    """Unit of a measurement; ratios are 0..1 and shown as percent."""

    RATIO = "ratio"
    SECONDS = "s"
    TOKENS = "tokens"
    TOKENS_PER_SECOND = "tokens/s"
    BYTES = "bytes"
    COUNT = "count"
    NATS = "nats"


@dataclass(frozen=True)
class Compared(Record):
    """Both sides of a comparison of waves, in ``unit``; the numbers of the report's sentences.

    ``candidate`` and ``baseline`` are geometric means of the wave statistic over the paired
    repetitions, so that ``ratio`` = candidate / baseline is the one that the effect states;
    ``inverse`` is its reciprocal. ``required``: the candidate's value at the bound of a PASS.
    """

    unit: Unit
    candidate: float | str
    baseline: float
    ratio: float | str
    inverse: float
    required: float | None = later(None)


@dataclass(frozen=True)
class Measurement(Record):
    """A number computed from evidence, or the reason why there is none.

    ``n`` counts independent units (waves for wave statistics). ``low``/``high``: interval at
    ``confidence``. +infinity is stored as the string "inf". ``repetitions``: one value per
    repetition.
    """

    name: str
    unit: Unit
    value: float | str | None
    n: int
    estimator: str
    low: float | None = None
    high: float | None = None
    confidence: float | None = None
    repetitions: tuple[float | str, ...] = ()
    trials: tuple[str, ...] = ()
    detail: dict[str, Any] = field(default_factory=dict)
    compared: Compared | None = later(None)


def finite_or_inf(value: float) -> float | str:
    """JSON has no infinity: spells it "inf"."""
    return "inf" if math.isinf(value) else value


@dataclass(frozen=True)
class Bound(Record):
    """What a criterion asks. ``comparison``: ">=", "<=" or "=="; ``floor``: limit for PASS.

    The later fields are what the decision rule makes of it, so that what is shown is what was
    applied. ``each``: what every repetition has to reach for a PASS; ``each_stop``: every one of
    them at or below it is a STOP (both `large_effect`). ``low``: what the lower limit of the
    interval has to reach (`interval`). ``least_n``: units below which nothing is decided.
    """

    comparison: str
    target: float
    floor: float | None = None
    default_target: float | None = None  # the profile's own target where a campaign overrides it
    each: float | None = later(None)
    each_stop: float | None = later(None)
    low: float | None = later(None)
    least_n: int | None = later(None)

    def __str__(self) -> str:
        """The bound as it was applied: ">= 0.9 in every repetition (target 0.8)"."""
        if self.each is not None:
            return f">= {self.each:.9g} in every repetition (target {self.target:.9g})"
        text = f"{self.comparison} {self.target:.9g}"
        return text if self.low is None else f"{text}, lower limit >= {self.low:.9g}"


@dataclass(frozen=True)
class CriterionResult(Record):
    """One criterion at one level. ``level`` None: the criterion has no levels.

    ``missed``: numbers of the repetitions that did not reach ``bound.each``.
    """

    criterion: str
    gate: str
    title: str
    arm: str
    baseline: str | None
    level: int | None
    verdict: Verdict
    bound: Bound
    measurement: Measurement
    reasons: tuple[Reason, ...]
    decide: str
    rationale: str
    missed: tuple[int, ...] = later(())

    @property
    def id(self) -> str:
        """Readable id: ttft_reduction_vs_recompute[tiered_disk-c4]."""
        scope = self.arm if self.level is None else f"{self.arm}-c{self.level}"
        return f"{self.criterion}[{scope}]"


@dataclass(frozen=True)
class Check(Record):
    """One validity check of one trial, or of a pair of arms.

    ``applicable`` False: the evidence has nothing to check, which is neither passed nor failed.
    """

    name: str
    subject: str
    passed: bool
    found: str
    allowed: str
    reasons: tuple[Reason, ...] = ()
    applicable: bool = later(True)

    @property
    def failed(self) -> bool:
        """True when it was asked and not met."""
        return self.applicable and not self.passed


@dataclass(frozen=True)
class Finding(Record):
    """One value found that a reason rests on. ``places``: criteria, checks and gates naming it."""

    text: str
    evidence: str
    places: tuple[str, ...]


@dataclass(frozen=True)
class Consequence(Record):
    """A reason that merely follows from another one. ``verdict``: the gravest it stands under."""

    code: ReasonCode
    verdict: Verdict
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Cause(Record):
    """A reason that follows from no other, with what follows from it (docs/reasons.md).

    ``verdict``: the gravest that it or a consequence of it stands under.
    """

    code: ReasonCode
    verdict: Verdict
    findings: tuple[Finding, ...]
    consequences: tuple[Consequence, ...]


@dataclass(frozen=True)
class GateVerdict(Record):
    """Verdict of one gate with all its criteria."""

    gate: str
    verdict: Verdict
    criteria: tuple[CriterionResult, ...]
    reasons: tuple[Reason, ...]


@dataclass(frozen=True)
class Cell(Record):
    """What one arm showed at one level: the numbers of charts and tables, no judgement.

    TTFT in seconds, one entry per repetition (wave statistic) and one per request (pooled). Of
    more requests than a chart can show, ``ttft_s`` holds order statistics (docs/evidence.md).
    The last two are geometric means over the repetitions, as in `Compared`.
    """

    arm: str
    workload: str
    level: int
    repetitions: int
    ttft_s: tuple[float | str, ...]
    ttft_wave_s: tuple[float | str, ...]
    ttft_estimator: str
    throughput_tokens_per_s: tuple[float, ...]
    prompt_tokens: int
    tokens_by_source: dict[str, int | None]
    tier_read_bytes: int | None
    disk_read_bytes: int | None
    requests_ok: int
    requests: int
    valid: bool
    ttft_wave_s_mean: float | str | None = later(None)
    throughput_tokens_per_s_mean: float | None = later(None)


@dataclass(frozen=True)
class ArmSummary(Record):
    """One arm for the report: its part, medium and effective configuration.

    ``versions``: what its server said of itself ("vllm 0.32.0").
    """

    arm: str
    role: str
    medium: str | None
    argv: tuple[str, ...]
    effective: dict[str, Any]
    declared: tuple[str, ...]
    versions: tuple[str, ...] = later(())


@dataclass(frozen=True)
class SignOff(Record):
    """Content of ``verdicts/<judge-version>.json``; made of evidence, criteria and judge alone.

    ``causes``: why, the root cause of the verdict first; empty for a PASS with nothing to note.
    """

    judge_version: str
    campaign: str
    profile: str
    signable: bool
    label: str
    verdict: Verdict
    causes: tuple[Cause, ...]
    gates: tuple[GateVerdict, ...]
    checks: tuple[Check, ...]
    cells: tuple[Cell, ...]
    arms: tuple[ArmSummary, ...]
    differences: tuple[dict[str, Any], ...]
    plan: dict[str, Any]
    overrides: tuple[str, ...]
    not_tested: tuple[str, ...]
    evidence_digest: str | None
    criteria_digest: str
    format: int = 1
    model: str = later("")
    supplier: str = later("")
    customer: str = later("")
