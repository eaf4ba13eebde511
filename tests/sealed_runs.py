"""Builds sealed runs by hand: a clean one that passes, and copies with one thing wrong.

The numbers are made up but consistent: tokens, bytes and counters fit each other as on a real
server. A test changes one of them through `Doctor` and names the verdict that must follow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness.campaign.generated_model import ModelArchitecture, model_config
from harness.campaign.plan import Plan, make_plan
from harness.campaign.reading import load_campaign, parse_campaign
from harness.evidence.store import RunWriter, TrialWriter
from harness.records import (
    Event,
    MetricSample,
    Outcome,
    ProcessFacts,
    RequestRecord,
    Schedule,
    ServerFacts,
    StopCause,
    TrialFacts,
    canonical_json,
)
from harness.run.trial import workload_parameters
from workloads import cold_recovery

# Seconds of TTFT of one wave by arm; waves of C requests wait for each other where prefills are
# serial.
TTFT_S = {"recompute": 2.0, "hbm_only": 1.9, "tiered_dram": 0.05, "tiered_disk": 0.08}
PREFILL_S = 2.0  # of a session while populating, alike on every arm
DECODE_S = 0.4
STARTED = datetime(2026, 11, 30, 12, 0, 0, tzinfo=UTC)

RecordHook = Callable[[TrialFacts, RequestRecord], RequestRecord]


def _same_record(_facts: TrialFacts, record: RequestRecord) -> RequestRecord:
    return record


@dataclass
class Doctor:
    """What to falsify while a run is built. A hook sees the honest value and returns another."""

    record: RecordHook = _same_record
    counter: Callable[[TrialFacts, str, str, float], float | None] = lambda _f, _m, _n, value: value
    effective: Callable[[str, dict[str, Any]], dict[str, Any]] = lambda _arm, found: found
    event: Callable[[TrialFacts, Event], Event] = lambda _f, event: event
    process: Callable[[TrialFacts, str, float], float | None] = lambda _f, _name, value: value
    client: dict[str, float | None] = field(default_factory=dict)
    skip: Callable[[TrialFacts], bool] = lambda _facts: False
    stopped: str | None = None
    cause: StopCause | None = None


def demo_plan(text: str | None = None) -> Plan:
    """The plan of the bundled demo, or of a campaign text."""
    if text is None:
        campaign, text = load_campaign("cpu-demo")
    else:
        campaign = parse_campaign(text)
    architecture: ModelArchitecture = campaign.model.generated
    return make_plan(campaign, text, model_config=model_config(architecture))


def build_run(
    root: Path, doctor: Doctor | None = None, plan: Plan | None = None, *, rounds: int = 1
) -> Path:
    """A sealed run directory of the plan, honest but for what the doctor changes.

    ``rounds``: how many of the plan's were begun.
    """
    doctor, plan = doctor or Doctor(), plan or demo_plan()
    writer = RunWriter(root, plan.campaign.name, STARTED)
    begun = [facts for n in range(1, rounds + 1) for facts in plan.trials_by_round[n]]
    trials = [facts for facts in begun if not doctor.skip(facts)]
    writer.write_plan(
        campaign=plan.campaign_text,
        criteria=plan.criteria_text,
        plan={
            "gates": list(plan.gates),
            "model": {"config": plan.model_config},
            "trials": [facts.id for facts in trials],
        },
        provenance={"started": STARTED.isoformat()},
    )
    for facts in trials:
        _Trial(plan, facts, doctor).write(writer.start_trial(facts))
    writer.seal(ended=STARTED.isoformat(), stopped=doctor.stopped, cause=doctor.cause)
    return writer.path


class _Trial:
    """One trial's honest evidence."""

    def __init__(self, plan: Plan, facts: TrialFacts, doctor: Doctor) -> None:
        self.plan, self.facts, self.doctor = plan, facts, doctor
        self.arm = plan.campaign.arms[facts.arm]
        self.parameters = workload_parameters(plan)
        self.now = 1_000_000_000_000 * (facts.index + 1)
        self.counters: dict[str, float] = dict.fromkeys(
            (
                "device_hit_tokens",
                "external_hit_tokens",
                "preemptions",
                "tier_hit_tokens/host",
                "tier_hit_tokens/disk",
                "tier_read_bytes/host",
                "tier_read_bytes/disk",
                "tier_file_read_bytes",
                "tier_load_failed_blocks",
                "tier_verify_failed_blocks",
                "tier_store_backlog_blocks",
            ),
            0.0,
        )
        self.disk_read_bytes = 0.0

    def write(self, writer: TrialWriter) -> None:
        """Plays the workload and seals."""
        self.writer = writer
        writer.set_server(self._server())
        self._event("trial_started")
        getattr(self, f"_{self.facts.workload}")()
        self._event("trial_ended", ok=True)
        sizes, work = self.plan.sizes, self.plan.campaign.cold_recovery
        writer.set_figures(
            {
                "role": self.arm.role,
                "medium": self.arm.medium,
                "kv_bytes_per_token": sizes.kv_bytes_per_token,
                "block_tokens": sizes.block_tokens,
                "cached_tokens_per_session": sizes.cached_tokens_per_session,
                "prompt_tokens": work.prompt_tokens,
                "output_tokens": work.output_tokens,
            }
        )
        writer.seal()

    # -- workloads, as harness.run.trial runs them --------------------------------

    def _arrival(self) -> None:
        session = [cold_recovery.ARRIVAL_SESSION]
        self._send(cold_recovery.sequence(self.parameters, "arrival_store", session), cached=0)
        if self.arm.role == "tiered":
            self._cold_and_mark()
            self._restore(cold_recovery.sequence(self.parameters, "arrival_load", session))
            self._mark("loaded")

    def _populate(self) -> None:
        number = self.facts.repetition
        sessions = list(cold_recovery.populated_sessions(self.parameters, number))
        if self.arm.role != "hbm_only":
            self._send(cold_recovery.sequence(self.parameters, "populate", sessions), cached=0)
            return
        order = [*sessions, *([cold_recovery.CONTROL_SESSION] if number == 1 else [])]
        thrice = [session for session in order for _ in range(3)]
        schedule = cold_recovery.sequence(self.parameters, "populate", thrice)
        cached = self.plan.sizes.cached_tokens_per_session
        self._send(schedule, cached=lambda seq: 0 if seq % 3 == 0 else cached)

    def _cold_recovery(self) -> None:
        sessions = cold_recovery.wave_sessions(
            self.parameters, self.facts.concurrency, self.facts.repetition
        )
        self._cold_and_mark()
        self._restore(cold_recovery.wave(self.parameters, "wave", sessions))
        self._mark("wave_end")
        if self.arm.role == "tiered":
            schedule = cold_recovery.sequence(self.parameters, "reask", sessions, turn=1)
            tokens = self.plan.sizes.cached_tokens_per_session
            self._send(schedule, cached=tokens)
            self.counters["device_hit_tokens"] += tokens * len(sessions)
            self._mark("reask_end")

    def _steady(self) -> None:
        self._cold_and_mark()
        self._restore(cold_recovery.steady(self.parameters))
        self._mark("steady_end")

    def _oracle(self) -> None:
        self._cold_and_mark()
        sessions = cold_recovery.oracle_sessions(self.parameters)
        self._restore(cold_recovery.sequence(self.parameters, "oracle", sessions))
        self._mark("oracle_end")
        if self.arm.medium != "disk":
            return
        twice = [cold_recovery.CONTROL_SESSION] * 2
        for name in ("clean", *cold_recovery.CONTROLS):
            schedule = cold_recovery.sequence(self.parameters, f"control_{name}", twice)
            salt = 0 if name == "clean" else 1
            self._send(schedule, cached=self.plan.sizes.cached_tokens_per_session, salt=salt)

    def _fits_in_hbm(self) -> None:
        first = cold_recovery.FITS_SESSION
        sessions = list(range(first, first + self.parameters.fits_sessions))
        self._mark("cold")
        tokens = self.plan.sizes.cached_tokens_per_session
        schedule = cold_recovery.sequence(self.parameters, "fits_read", sessions, turn=1)
        self._send(schedule, cached=tokens)
        self.counters["device_hit_tokens"] += tokens * len(sessions)
        self._mark("fits_end")

    # -- pieces ---------------------------------------------------------------

    def _cold_and_mark(self) -> None:
        if self.arm.role == "tiered":
            self._event("cold", ok=True, attempts=1)
        self._mark("cold")

    def _restore(self, schedule: Schedule) -> None:
        """Sends; in tiered arms every session's whole blocks come from the arm's medium."""
        if self.arm.role != "tiered":
            self._send(schedule, cached=0)
            return
        tokens = self.plan.sizes.cached_tokens_per_session
        self._send(schedule, cached=tokens)
        total = tokens * len(schedule.requests)
        size = total * self.plan.sizes.kv_bytes_per_token
        self.counters["external_hit_tokens"] += total
        self.counters[f"tier_hit_tokens/{self.arm.medium}"] += total
        self.counters[f"tier_read_bytes/{self.arm.medium}"] += size
        if self.arm.medium == "disk":
            self.counters["tier_file_read_bytes"] += size
            self.disk_read_bytes += size

    def _send(
        self, schedule: Schedule, *, cached: int | Callable[[int], int], salt: int = 0
    ) -> None:
        self.writer.add_schedule(schedule)
        free_at: dict[int, int] = {}
        lines = []
        for planned in schedule.requests:
            hits = cached if isinstance(cached, int) else cached(planned.seq)
            sent = max(self.now, free_at.get(planned.user, 0))
            ttft = TTFT_S[self.facts.arm] if hits == 0 or schedule.phase == "wave" else 0.06
            if schedule.phase in ("wave", "steady") and self.arm.role != "tiered":
                ttft *= (schedule.users + 1) / 2
            if schedule.phase == "populate" and hits == 0:
                ttft = PREFILL_S
            first = sent + int(ttft * 1e9)
            last = first + int(DECODE_S * 1e9)
            free_at[planned.user] = last
            count = planned.output_tokens
            step = (last - first) // (count - 1)
            record = RequestRecord(
                seq=planned.seq,
                user=planned.user,
                session=planned.session,
                phase=schedule.phase,
                prompt_tokens_planned=planned.prompt.tokens,
                output_tokens_planned=count,
                planned_ns=sent,
                outcome=Outcome.OK,
                sent_ns=sent,
                headers_ns=sent + 1_000_000,
                first_event_ns=first,
                first_token_ns=first,
                last_token_ns=last,
                done_ns=last,
                http_status=200,
                finish_reason="length",
                prompt_tokens=planned.prompt.tokens,
                completion_tokens=count,
                cached_tokens=hits,
                token_ids=tuple((planned.session + salt + i) % 512 for i in range(count)),
                logprobs=tuple(-0.5 - (planned.session % 7) / 100 for _ in range(count)),
                token_ns=tuple(first + i * step for i in range(count)),
                token_counts=(1,) * count,
            )
            lines.append(self.doctor.record(self.facts, record))
        self.now = max(free_at.values()) + 1_000_000
        with self.writer.requests_path(schedule.phase).open("a", encoding="ascii") as file:
            file.writelines(canonical_json(line) + "\n" for line in lines)
        honest = {
            "loop_lag_s_max": 0.002,
            "loop_lag_s_p99": 0.002,
            "cpu_share": 0.05,
            "in_flight_max": float(schedule.users),
            "send_lag_s_max": 0.001,
            "send_spread_s": 0.001,
        }
        self.writer.add_samples(
            MetricSample(self.now, schedule.phase, "client", name, value)
            for name, value in (honest | self.doctor.client).items()
        )

    def _mark(self, mark: str) -> None:
        samples = []
        for key, value in self.counters.items():
            name, _, part = key.partition("/")
            if name.startswith("tier_") and self.arm.role != "tiered":
                seen: float | None = None
            else:
                seen = self.doctor.counter(self.facts, mark, key, value)
            labels = {"tier": part} if part else {}
            error = "absent from /metrics" if seen is None else None
            samples.append(MetricSample(self.now, mark, "prometheus", name, seen, labels, error))
        for name, value in (("disk_read_bytes", self.disk_read_bytes), ("start_time_s", 5.0)):
            seen = self.doctor.process(self.facts, f"{mark}/{name}", value)
            samples.append(MetricSample(self.now, mark, "process", name, seen, {"pid": "4242"}))
        self.writer.add_samples(samples)

    def _event(self, kind: str, **detail: Any) -> None:
        self.writer.add_event(self.doctor.event(self.facts, Event(self.now, kind, detail)))

    def _server(self) -> ServerFacts:
        effective: dict[str, Any] = {
            "block_tokens": self.plan.sizes.block_tokens,
            "kv_capacity_tokens": self.plan.campaign.server.device_kv_tokens,
            "compute_threads": 2,
            "dtype": "torch.float32",
            "prefix_caching": self.arm.role != "recompute",
            "connector": "none",
        }
        if self.arm.role == "tiered":
            effective["connector"] = "kvgate"
            effective["connector_config"] = {
                "kv_bytes_per_token": self.plan.sizes.kv_bytes_per_token,
                "namespace": "0" * 32,
                "block_tokens": self.plan.sizes.block_tokens,
            }
        return ServerFacts(
            arm=self.facts.arm,
            kind="vllm",
            argv=("python", "-m", "vllm.entrypoints.openai.api_server"),
            environment={"VLLM_CPU_OMP_THREADS_BIND": "0,1"},
            effective=self.doctor.effective(self.facts.arm, effective),
            processes=(ProcessFacts(4242, 1, "python"),),
            versions={"vllm": "0.32.0"},
        )


def replace_record(record: RequestRecord, **changes: Any) -> RequestRecord:
    """A record with some fields changed."""
    return dataclasses.replace(record, **changes)
