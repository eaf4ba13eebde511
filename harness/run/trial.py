"""Runs one trial against a server that is up: sends the load, reads the counters, seals it all.

Each workload is one function; `WORKLOADS` is their registry. A trial decides nothing: it records
what was done and seen, and the judge reads it back from disk.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from harness import interrupts
from harness.campaign.plan import Plan
from harness.campaign.sections import Arm
from harness.collectors.process import read_processes, with_simulated_reads
from harness.collectors.prometheus import gauge_value, scrape
from harness.errors import HarnessError, LoadError, ServerError, ServerSilent, StorageError
from harness.evidence.store import TrialWriter, is_disk_full
from harness.load.driver import LoadClient
from harness.records import ErrorKind, Event, MetricSample, RequestRecord, Schedule, StopCause
from harness.run.controls import TierFiles, Unplantable, planted
from harness.run.endings import cause_of
from harness.server.managed import Server
from workloads import cold_recovery
from workloads.prompts import token_ids

DURABLE_DEADLINE_S = 120.0
RESET_DEADLINE_S = 60.0
# Above the deadlines of the requests themselves, which decide.
PHASE_SLACK_S = 60.0
# A sleep of the machine, not the difference between two readings of two clocks.
SUSPENDED_S_MAX = 0.5
_POKE_PROMPT = list(range(1, 9))

# How a request ends whose server is gone or hangs.
_LOST = frozenset(
    {
        ErrorKind.CONNECT,
        ErrorKind.RESET,
        ErrorKind.TRUNCATED,
        ErrorKind.TIMEOUT,
        ErrorKind.HTTP_STATUS,
        ErrorKind.SERVER_ERROR,
    }
)

Clock = Callable[[], int]
Progress = Callable[[str], None]


@dataclass
class TrialContext:
    """Everything a workload function works with."""

    plan: Plan
    arm: Arm
    server: Server
    load: LoadClient
    writer: TrialWriter
    tier_dir: Path | None
    tier_facts: dict[str, Any] | None
    progress: Progress
    log_start: int = 0
    clock: Clock = time.monotonic_ns

    @property
    def parameters(self) -> cold_recovery.Parameters:
        """The workload's parameters."""
        return workload_parameters(self.plan)

    # -- load -----------------------------------------------------------------

    def send(self, schedule: Schedule) -> tuple[RequestRecord, ...]:
        """Saves the schedule, sends it, saves the client's own witnesses."""
        self.server.check_alive()
        limit_s = self.plan.campaign.server.request_deadline_s
        schedule = replace(schedule, request_timeout_s=limit_s)
        self.writer.add_schedule(schedule)
        total = len(schedule.requests)
        longest = max(Counter(request.user for request in schedule.requests).values(), default=0)
        watch = Watch(self)

        def progressed(done: int, of: int) -> None:
            watch.progressed()
            self.progress(f"{schedule.phase} {done}/{of}")

        result = self.load.run(
            schedule,
            records_path=self.writer.requests_path(schedule.phase),
            deadline_s=limit_s * longest + PHASE_SLACK_S,
            on_progress=progressed,
            watch=watch,
        )
        t_ns = self.clock()
        self.writer.add_samples(
            MetricSample(
                t_ns, schedule.phase, "client", name, None if value is None else float(value)
            )
            for name, value in result.witness.to_json().items()
        )
        failed = [r for r in result.records if r.outcome.value != "ok"]
        self.event(
            "sent",
            phase=schedule.phase,
            requests=total,
            failed=len(failed),
            first_error=failed[0].error_detail if failed else None,
        )
        self._confirm_alive(failed)
        return result.records

    def _confirm_alive(self, failed: Sequence[RequestRecord]) -> None:
        """After a phase with lost requests: is it the server? Raises ServerError.

        Otherwise a hung server would be waited for again in every phase that follows.
        """
        kinds = {record.error_kind for record in failed}
        if kinds & _LOST:
            self.server.check_answers()
        if ErrorKind.TIMEOUT in kinds:
            self.poke()

    # -- counters -------------------------------------------------------------

    def event(self, kind: str, **detail: Any) -> None:
        """Records what was done."""
        self.writer.add_event(Event(self.clock(), kind, detail))

    def poke(self) -> None:
        """One request of one token, shorter than a block: makes the engine publish its statistics.

        vLLM hands connector statistics over with an engine step, so after the last one they are
        stale. Raises ServerError when the server is gone or gives no token within its deadline.
        """
        limit_s = self.plan.campaign.server.answer_deadline_s
        body = {
            "model": self.server.model,
            "prompt": _POKE_PROMPT,
            "max_tokens": 1,
            "temperature": 0,
        }
        try:
            access = self.server.access
            access.post("/v1/completions", timeout_s=limit_s, json=body).raise_for_status()
        except httpx.HTTPError as error:
            text = access.redacted(f"{type(error).__name__}: {error}")
            self.event("poke_failed", error=text[:300])
            self.server.check_answers()
            if isinstance(error, httpx.TimeoutException):
                raise ServerSilent(
                    f"arm {self.arm.name}: the server stopped answering: no token in "
                    f"{limit_s:g} s (allowed: server.answer_deadline_s); see server.log"
                ) from error

    def mark(self, mark: str) -> list[MetricSample]:
        """Reads all counters under the name of this moment."""
        self.poke()
        samples, page = self._scrape(mark)
        processes = read_processes(self.server.pids(), mark=mark)
        if self.arm.kind == "sim":
            processes = with_simulated_reads(processes, page)
        samples += processes
        self.writer.add_samples(samples)
        self.writer.add_text(f"metrics-{mark}.prom", page)
        return samples

    def _scrape(self, mark: str) -> tuple[list[MetricSample], str]:
        access, limit_s = self.server.access, self.plan.campaign.server.answer_deadline_s
        samples, page = scrape(
            self.server.base_url, mark=mark, get=lambda path: access.get(path, timeout_s=limit_s)
        )
        return samples, access.redacted(page)

    def wait_durable(self) -> None:
        """Waits until the connector's store backlog reads zero twice running; records how."""
        started = self.clock()
        zeros = 0
        while zeros < 2:
            self.poke()
            samples, _page = self._scrape("durable")
            name = "tier_store_backlog_blocks"
            self.writer.add_samples(s for s in samples if s.name == name)
            backlog, error = gauge_value(samples, name)
            waited_s = (self.clock() - started) / 1e9
            if backlog is None:
                self.event("durable", ok=False, error=error)
                return
            zeros = zeros + 1 if backlog == 0 else 0
            self.progress(f"waiting for stores, {backlog:.0f} blocks left")
            if waited_s > DURABLE_DEADLINE_S:
                self.event("durable", ok=False, error=f"backlog {backlog:g} after {waited_s:.0f} s")
                return
        self.event("durable", ok=True, waited_s=(self.clock() - started) / 1e9)

    def make_cold(self, *, host_pool: bool) -> None:
        """Empties the device cache, and the host pool when asked; reads the answer's content."""
        if not self.server.owned:
            self.event("cold", ok=False, error="a server of somebody else is never reset")
            return
        limit_s = self.plan.campaign.server.answer_deadline_s
        deadline = self.clock() + int(RESET_DEADLINE_S * 1e9)
        attempts = 0
        while True:
            attempts += 1
            try:
                response = self.server.access.post(
                    "/reset_prefix_cache",
                    timeout_s=limit_s,
                    params={"reset_external": str(host_pool).lower()},
                )
                answer: Any = (
                    response.json() if response.status_code == 200 else response.text[:300]
                )
            except (httpx.HTTPError, ValueError) as error:
                answer = f"{type(error).__name__}: {error}"[:300]
                self.server.check_answers()
            if isinstance(answer, dict) and answer.get("success") is True:
                self.event("cold", ok=True, attempts=attempts, host_pool=host_pool)
                return
            if self.clock() > deadline:
                self.event("cold", ok=False, attempts=attempts, error=f"reset answered {answer!r}")
                return
            self.poke()  # a step lets the engine release what it still holds

    def make_cold_for_arm(self) -> None:
        """Cold as the arm's medium asks; the baselines are never reset after populating."""
        if self.arm.role == "tiered":
            self.make_cold(host_pool=self.arm.medium == "disk")


class Watch:
    """Ends a phase in bounded time when the server died or hangs; asks it nothing while it works.

    Called about once a second while no request ends. A process that is gone is seen at once. After
    ``answer_deadline_s`` without an end /health is asked; where it answers though a request ran
    into its own deadline, one token is asked for.
    """

    def __init__(self, context: TrialContext) -> None:
        self._context = context
        server = context.plan.campaign.server
        self._answer_ns = int(server.answer_deadline_s * 1e9)
        self._request_ns = int(server.request_deadline_s * 1e9)
        self._moved_ns = self._asked_ns = context.clock()
        self._is_suspect = False

    def progressed(self) -> None:
        """A request ended."""
        now_ns = self._context.clock()
        self._is_suspect = now_ns - self._moved_ns >= 0.9 * self._request_ns
        self._moved_ns = self._asked_ns = now_ns

    def __call__(self) -> None:
        """Raises ServerError when there is nothing to wait for."""
        server = self._context.server
        if server.owned:
            server.check_alive()
        if self._is_suspect:
            self._is_suspect = False
            self._context.poke()
        now_ns = self._context.clock()
        if now_ns - self._asked_ns >= self._answer_ns:
            server.check_answers()
            self._asked_ns = self._context.clock()


def workload_parameters(plan: Plan) -> cold_recovery.Parameters:
    """The cold-recovery parameters of a plan."""
    work = plan.campaign.cold_recovery
    return cold_recovery.Parameters(
        seed=plan.campaign.seed,
        vocab_size=int(plan.model_config["vocab_size"]),
        levels=tuple(work.levels),
        repetitions=work.repetitions,
        sessions=work.sessions,
        prompt_tokens=work.prompt_tokens,
        output_tokens=work.output_tokens,
        oracle_sessions=work.oracle_sessions,
        steady_cycles=work.steady_cycles,
        fits_sessions=work.fits_sessions,
        round_ends=plan.round_ends,
    )


def run_trial(context: TrialContext) -> HarnessError | None:
    """Runs and seals one trial; returns what ended it early, None when nothing did.

    What goes wrong in the server under test becomes an event. Raises only what the harness itself
    did wrong, and KeyboardInterrupt; the trial is sealed all the same. Raises StorageError when the
    disk is full: the trial is left open, with all that was recorded, for the run to seal.
    """
    try:
        return _run_and_seal(context)
    except OSError as error:
        if not is_disk_full(error):
            raise
        raise StorageError(
            f"trial {context.writer.facts.id}: disk full while recording "
            f"({error.filename or context.writer.path}): {error.strerror}; what was recorded is "
            "kept and sealed; free space (`kvgate runs prune`) and run again"
        ) from error


def _run_and_seal(context: TrialContext) -> HarnessError | None:
    writer = context.writer
    context.event("trial_started", wall_ns=time.time_ns())
    writer.set_figures(trial_figures(context.plan, context.arm))
    failure: HarnessError | None = None
    try:
        writer.set_server(context.server.facts())
        suspended_ns = _suspended_ns()
        WORKLOADS[writer.facts.workload](context)
        slept_s = (_suspended_ns() - suspended_ns) / 1e9
        if slept_s > SUSPENDED_S_MAX:
            error = f"the machine was suspended for {slept_s:.1f} s; its times mean nothing"
            _end(context, error, StopCause.SUSPENDED)
        else:
            context.event("trial_ended", ok=True, wall_ns=time.time_ns())
    except (ServerError, LoadError) as error:
        failure = error
        _end(context, str(error), cause_of(error))
    except BaseException as error:
        if not is_disk_full(error):
            _end(context, f"{type(error).__name__}: {error}", cause_of(error))
            _seal(context)
        raise
    _seal(context)
    return failure


def _end(context: TrialContext, error: str, cause: StopCause) -> None:
    """Records that the trial ended early, and why."""
    context.event(
        "trial_ended", ok=False, error=error[:2000], cause=cause.value, wall_ns=time.time_ns()
    )


def _suspended_ns() -> int:
    """Time the machine slept since it was booted: the monotonic clock stands still meanwhile."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.clock_gettime_ns(time.CLOCK_MONOTONIC)


def _seal(context: TrialContext) -> None:
    with interrupts.shield():
        context.writer.add_text("server.log", context.server.log_text(context.log_start))
        context.writer.seal()


def trial_figures(plan: Plan, arm: Arm) -> dict[str, Any]:
    """The plan's figures that analysis checks this trial against."""
    return plan.figures(arm)


# --- workloads --------------------------------------------------------------


def arrival(context: TrialContext) -> None:
    """Does the server answer, and does a forced store, evict, load round trip bring KV back?"""
    session = [cold_recovery.ARRIVAL_SESSION]
    context.send(cold_recovery.sequence(context.parameters, "arrival_store", session))
    if context.arm.role != "tiered":
        return
    context.wait_durable()
    context.make_cold_for_arm()
    context.mark("cold")
    context.send(cold_recovery.sequence(context.parameters, "arrival_load", session))
    context.mark("loaded")


def populate(context: TrialContext) -> None:
    """Warms up, then asks every session once, one by one; the HBM arm also makes the reference."""
    parameters = context.parameters
    context.send(cold_recovery.warm_up(parameters))
    number = context.writer.facts.repetition
    sessions = list(cold_recovery.populated_sessions(parameters, number))
    if context.arm.role != "hbm_only":
        context.send(cold_recovery.sequence(parameters, "populate", sessions))
        if context.arm.role == "tiered":
            context.wait_durable()
        return
    # The exact reference of the oracles: each session asked again at once, answered from the
    # device cache, on a server without a connector. Asked twice: a reference that differs from
    # itself is none.
    order = [*sessions, *([cold_recovery.CONTROL_SESSION] if number == 1 else [])]
    thrice = [session for session in order for _ in range(3)]
    context.send(cold_recovery.sequence(parameters, "populate", thrice))


def cold_wave(context: TrialContext) -> None:
    """One measured wave from cold; tiered arms then ask each session again at concurrency 1."""
    facts, parameters = context.writer.facts, context.parameters
    sessions = cold_recovery.wave_sessions(parameters, facts.concurrency, facts.repetition)
    context.make_cold_for_arm()
    context.mark("cold")
    context.send(cold_recovery.wave(parameters, "wave", sessions))
    context.mark("wave_end")
    if context.arm.role == "tiered":
        context.send(cold_recovery.sequence(parameters, "reask", sessions, turn=1))
        context.mark("reask_end")


def steady(context: TrialContext) -> None:
    """Closed-loop users at the largest level; analysis discards the first two cycles."""
    context.make_cold_for_arm()
    context.mark("cold")
    context.send(cold_recovery.steady(context.parameters))
    context.mark("steady_end")


def oracle(context: TrialContext) -> None:
    """Exact oracle (a) at concurrency 1, then the negative controls where files can be reached."""
    parameters = context.parameters
    sessions = cold_recovery.oracle_sessions(parameters)
    context.make_cold_for_arm()
    context.mark("cold")
    context.send(cold_recovery.sequence(parameters, "oracle", sessions))
    context.mark("oracle_end")
    if context.arm.medium == "disk" and context.arm.kind == "sim":
        _simulated_controls(context)
    elif context.tier_dir is not None and context.arm.medium == "disk":
        _negative_controls(context)


def _negative_controls(context: TrialContext) -> None:
    parameters = context.parameters
    pair = [cold_recovery.CONTROL_SESSION, cold_recovery.DONOR_SESSION]
    schedule = cold_recovery.sequence(parameters, "control_populate", pair)
    context.send(schedule)
    context.wait_durable()
    if context.tier_facts is None:
        context.event("controls_impossible", error="the connector did not report itself")
        return
    files = TierFiles(context.tier_dir or Path(), context.tier_facts)
    try:
        control, donor = (files.of(token_ids(request.prompt)) for request in schedule.requests)
    except FileNotFoundError as error:
        context.event("controls_impossible", error=str(error))
        return
    config = context.plan.model_config
    layers = int(config["num_hidden_layers"])
    dtype = str(config.get("torch_dtype") or config.get("dtype"))
    # Without a planted fault the same path must match, else a miss and a hit look alike.
    _ask_control(context, "control_clean")
    for name in cold_recovery.CONTROLS:
        try:
            with planted(name, control, donor=donor, layers=layers, dtype=dtype):
                _ask_control(context, f"control_{name}")
        except Unplantable as error:  # one fault less is a fault that was missed
            context.event("control_not_planted", control=name, error=str(error))


def _simulated_controls(context: TrialContext) -> None:
    """The same faults in a simulated tier, which has no files: the server plants them itself."""
    pair = [cold_recovery.CONTROL_SESSION, cold_recovery.DONOR_SESSION]
    schedule = cold_recovery.sequence(context.parameters, "control_populate", pair)
    context.send(schedule)
    context.wait_durable()
    prompt, donor = (token_ids(request.prompt) for request in schedule.requests)
    limit_s = context.plan.campaign.server.answer_deadline_s

    def plant(name: str | None) -> bool:
        body = {"control": name, "prompt": prompt, "donor": donor}
        answer = context.server.access.post("/sim/plant", timeout_s=limit_s, json=body)
        if answer.status_code != 200:
            context.event("controls_impossible", error=answer.text[:300])
        return answer.status_code == 200

    _ask_control(context, "control_clean")
    for name in cold_recovery.CONTROLS:
        if plant(name):
            _ask_control(context, f"control_{name}")
    plant(None)


def _ask_control(context: TrialContext, phase: str) -> None:
    """Restores the control session from disk (oracle a), then asks it on the device (oracle c)."""
    context.make_cold(host_pool=True)
    twice: Sequence[int] = [cold_recovery.CONTROL_SESSION] * 2
    context.send(cold_recovery.sequence(context.parameters, phase, twice))


def fits_in_hbm(context: TrialContext) -> None:
    """Control cell: a working set that fits must be answered from the device cache."""
    parameters = context.parameters
    first = cold_recovery.FITS_SESSION
    sessions = list(range(first, first + parameters.fits_sessions))
    context.send(cold_recovery.sequence(parameters, "fits_populate", sessions))
    context.mark("cold")
    context.send(cold_recovery.sequence(parameters, "fits_read", sessions, turn=1))
    context.mark("fits_end")


WORKLOADS: dict[str, Callable[[TrialContext], None]] = {
    "arrival": arrival,
    "populate": populate,
    "cold_recovery": cold_wave,
    "steady": steady,
    "oracle": oracle,
    "fits_in_hbm": fits_in_hbm,
}
