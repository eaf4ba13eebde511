"""Runs a campaign: one server per arm, its trials in order, everything sealed.

Judges nothing itself but the arrival gate, whose failure ends the run (stop-loss). However a run
ends, it leaves sealed evidence and nothing else; what a killed harness could not do any more, the
next run does for it (`clean_up_dead_runs`).
"""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import psutil

import harness
from harness import interrupts
from harness.analysis.numbers import measure_run
from harness.campaign import arms
from harness.campaign.estimates import MIB, trial_bytes
from harness.campaign.plan import Plan, Round
from harness.campaign.sections import Arm
from harness.errors import HarnessError, PlanError, ServerError, StorageError
from harness.evidence.store import (
    BALLAST_BYTES,
    RunWriter,
    TrialEvidence,
    TrialWriter,
    is_disk_full,
)
from harness.judge.signoff import judge_arrival
from harness.load.driver import LoadClient
from harness.records import Event, ServerFacts, StopCause, TrialFacts
from harness.run.doctor import foreign_server
from harness.run.endings import cause_of
from harness.run.judging import still_undecided
from harness.run.ownership import SCRATCH, DeadRun, RunOwner, dead_runs
from harness.run.trial import TrialContext, run_trial, trial_figures
from harness.server.external import ExternalServer
from harness.server.managed import ManagedServer
from harness.verdicts import Verdict

HARNESS_DIED = "harness died"
# The end of a server's log that is kept for a trial whose harness died.
_LOG_TAIL_BYTES = MIB
# The next round takes about as long as the one before it, on a machine that is not always as fast.
_ROUND_TIME_MARGIN = 1.2


class Observer(Protocol):
    """Shows a person how a run is doing."""

    def run_started(self, path: Path, trials: Sequence[TrialFacts]) -> None: ...

    def arm_started(self, arm: Arm) -> None: ...

    def trial_started(self, facts: TrialFacts) -> None: ...

    def progress(self, text: str) -> None: ...

    def trial_ended(self, facts: TrialFacts, duration_s: float) -> None: ...

    def note(self, text: str) -> None: ...


class CampaignRun:
    """One execution of a plan. ``execute`` returns the sealed run directory, whatever happened.

    ``calibration``: what the plan's sizes rest on, for its record.
    Raises PlanError when the run directory cannot be made.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        runs_root: Path,
        home: Path,
        model_dir: Path,
        observer: Observer,
        calibration: dict[str, Any] | None = None,
    ) -> None:
        self.plan = plan
        self.calibration = calibration
        self.home = home
        self.model_dir = model_dir
        self.observer = observer
        self.started = datetime.now(UTC)
        try:
            # Absolute: the connector refuses a relative directory, and servers may change theirs.
            self.writer = RunWriter(runs_root.resolve(), plan.campaign.name, self.started)
        except OSError as error:
            raise PlanError(
                [
                    f"--runs: cannot make a run directory under {runs_root}: {error.strerror}; "
                    "allowed: a directory that can be written"
                ]
            ) from error
        self.stopped: str | None = None
        self.cause: StopCause | None = None
        self.looks: list[dict[str, Any]] = []
        self._started = time.monotonic()
        self._owner: RunOwner | None = None

    @property
    def owner(self) -> RunOwner:
        """What the run owns outside its evidence; there while it lasts."""
        assert self._owner is not None
        return self._owner

    def execute(self) -> Path:
        """Runs all arms. Seals the run also after an interrupt, which is raised again.

        A disk that fills up stops the run like a server that fails: what was recorded is sealed,
        and says why it ended. Raises StorageError when even the seal finds no room.
        """
        trials = list(self.plan.trials())
        with interrupts.handled(), self._prepared(trials):
            self.observer.run_started(self.writer.path, trials)
            if len(self.plan.rounds) > 1:
                first = len(self.plan.trials_by_round[1])
                self.observer.note(
                    f"{first} trials decide at {self.plan.rounds[0].repetitions[-1]} repetitions; "
                    f"the other {len(trials) - first} follow only for what is then undecided"
                )
            for one in self.plan.rounds:
                started = time.monotonic()
                self._run_round(one)
                if self.stopped is not None or not self._goes_on(one, started):
                    break
        return self.writer.path

    def _run_round(self, one: Round) -> None:
        trials = self.plan.trials_by_round[one.number]
        for name in one.arms:
            arm = self.plan.campaign.arms[name]
            self._run_arm(arm, [facts for facts in trials if facts.arm == name])
            if self.stopped is not None:
                return

    def _goes_on(self, one: Round, started: float) -> bool:
        """Whether the next look of the plan is taken; records why.

        The looks are fixed in the plan. All that is decided here is whether to stop at this one:
        when the judge finds nothing that more repetitions could decide, or when there is no time.
        """
        if one.number == len(self.plan.rounds) == 1:
            return False
        now = time.monotonic()
        taken_s, elapsed_s = now - started, now - self._started
        budget_s = self.plan.campaign.cold_recovery.time_budget_s
        left = still_undecided(self.plan, self.writer.path)
        ahead = self.plan.rounds[one.number :]
        if not left:
            then = "ended: nothing is left that more repetitions could decide"
        elif not ahead:
            then = "ended: this was the last look"
        elif budget_s is not None and elapsed_s + _ROUND_TIME_MARGIN * taken_s > budget_s:
            then = f"ended: another round does not fit the time budget of {budget_s:g} s"
        else:
            then = f"went on to the look at {ahead[0].repetitions[-1]} repetitions"
        self.looks.append(
            {
                "repetitions": one.repetitions[-1],
                "undecided": left,
                "elapsed_s": round(elapsed_s, 1),
                "then": then,
            }
        )
        names = f"; undecided: {', '.join(left)}" if left else ""
        self.observer.note(f"look at {one.repetitions[-1]} repetitions{names}; {then}")
        return then.startswith("went on")

    @contextmanager
    def _prepared(self, trials: Sequence[TrialFacts]) -> Iterator[None]:
        """Plan and lock are there; afterwards all is sealed and only evidence is left."""
        has_begun = False
        try:
            with interrupts.shield():
                self._begin(trials)
                has_begun = True
            yield
        except KeyboardInterrupt as error:
            name = getattr(error, "name", "SIGINT")
            how = "" if name == "SIGINT" else f" ({name})"
            self._stop(f"interrupted by the operator{how}", StopCause.INTERRUPTED)
            self.observer.note("interrupted; what was recorded is kept")
            raise
        except BaseException as error:
            is_storage = isinstance(error, StorageError) or is_disk_full(error)
            if not (is_storage and has_begun):
                self._stop(f"harness error: {type(error).__name__}: {error}", cause_of(error))
                raise
            self._stop(str(error).splitlines()[0], StopCause.DISK_FULL)
            self.observer.note(str(error))
        finally:
            if has_begun:
                with interrupts.shield():
                    self._end()

    def _stop(self, why: str, cause: StopCause) -> None:
        """The run ends here, for this reason."""
        self.stopped, self.cause = why[:500], cause

    def _begin(self, trials: Sequence[TrialFacts]) -> None:
        try:
            self._owner = RunOwner(self.writer.path)
            self.writer.reserve()
            self.writer.write_plan(
                campaign=self.plan.campaign_text,
                criteria=self.plan.criteria_text,
                plan=self._plan_record(trials),
                provenance=provenance(self.started) | _simulated(self.plan),
            )
        except OSError as error:
            # Nothing was recorded yet, and this directory is seconds old and ours.
            shutil.rmtree(self.writer.path, ignore_errors=True)
            if self._owner is not None:
                self._owner.close()
            raise StorageError(
                f"{self.writer.path}: the plan could not be saved: {error.strerror}; nothing was "
                f"started; needed: {BALLAST_BYTES // MIB} MiB and a plan; free space "
                "(`kvgate runs prune`) or give another directory with --runs"
            ) from error

    def _end(self) -> None:
        """Removes what is no evidence, which also makes room, then seals."""
        for left in self.owner.remove_directories():
            self.observer.note(f"could not remove {left}; it is the run's own, remove it by hand")
        logs = {arm: self._log_tail(arm) for arm in self.plan.campaign.arms}
        self.owner.clear_scratch()  # the ballast as well
        try:
            seal_run(self.writer, self.stopped, self.cause, logs.__getitem__, looks=self.looks)
        except OSError as error:
            self.owner.close()
            raise StorageError(
                f"{self.writer.path}: the run could not be sealed: {error.strerror}; trials that "
                "were sealed before are untouched; free space and start any run with the same "
                "--runs, which seals this one"
            ) from error
        self.owner.finish()

    def _log_tail(self, arm: str) -> str:
        return log_tail(self.writer.path / SCRATCH / arm / "server.log")

    def _plan_record(self, trials: Sequence[TrialFacts]) -> dict[str, Any]:
        campaign = self.plan.campaign
        return {
            "campaign": campaign.name,
            "profile": campaign.profile,
            "gates": list(self.plan.gates),
            "seed": campaign.seed,
            "sizes": asdict(self.plan.sizes)
            | {"working_set_ratio": self.plan.sizes.working_set_ratio},
            "model": {"config": self.plan.model_config},
            "trials": [facts.id for facts in trials],
            **({"calibration": self.calibration} if self.calibration else {}),
        }

    def _run_arm(self, arm: Arm, trials: Sequence[TrialFacts]) -> None:
        self.observer.arm_started(arm)
        scratch = self.writer.scratch / arm.name
        shutil.rmtree(scratch, ignore_errors=True)  # of an earlier round
        scratch.mkdir()
        tier_dir = self._tier_directory(arm, scratch)
        server = self._server(arm, scratch, tier_dir)
        try:
            with server:
                load_log = scratch / "load.log"
                with LoadClient(
                    base_url=server.base_url,
                    model=server.model,
                    log_path=load_log,
                    api_key_env=arm.api_key_env,
                    api_key_file=arm.api_key_file,
                    verify_tls=arm.verify_tls,
                ) as load:
                    tier_facts = server.facts().effective.get("connector_config")
                    log_start = 0  # the first trial of an arm keeps the start-up log
                    for facts in trials:
                        self._run_trial(arm, facts, server, load, tier_dir, tier_facts, log_start)
                        log_start = server.log_size()
                        if self.stopped is not None:
                            return
        except ServerError as error:
            self._record_dead_server(arm, trials, server, error)
        finally:
            if tier_dir is not None:
                shutil.rmtree(tier_dir, ignore_errors=True)
            self.owner.remove_directories()
            leftovers = getattr(server, "leftovers", None)
            if leftovers:
                self.observer.note(f"{arm.name}: removed after the stop: {leftovers}")

    def _server(
        self, arm: Arm, scratch: Path, tier_dir: Path | None
    ) -> ManagedServer | ExternalServer:
        if arm.kind == "url":
            return foreign_server(arm, self.plan.campaign.server.answer_deadline_s)
        keys = {other.api_key_env for other in self.plan.campaign.arms.values()}
        spec = arms.launch_spec(
            self.plan.campaign,
            arm,
            home=self.home,
            model_dir=self.model_dir,
            tier_dir=tier_dir,
            import_path=arms.link_package(scratch / "import"),
            allowed_cores=arms.allowed_cores(),
            # A key for somebody else's server is no business of ours.
            inherited={name: text for name, text in os.environ.items() if name not in keys},
        )
        return ManagedServer(
            spec,
            log_path=scratch / "server.log",
            progress=self.observer.progress,
            answer_deadline_s=self.plan.campaign.server.answer_deadline_s,
            on_tree=self.owner.note_server,
        )

    def _tier_directory(self, arm: Arm, scratch: Path) -> Path | None:
        """A directory of this run alone; a customer's existing tier content is never touched."""
        if arm.medium != "disk" or arm.kind != "vllm":
            return None
        if arm.tier_root is None:
            return scratch / "tier"
        root = arms.tier_root(arm.tier_root)
        path = root / f"kvgate-{self.plan.campaign.name}-{self.writer.path.name}-{arm.name}"
        try:
            self.owner.make_directory(path)
        except OSError as error:
            raise PlanError(
                [
                    f"arms.{arm.name}.tier_root: cannot make {path}: {error.strerror}; allowed: a "
                    "directory on the medium under test that can be written"
                ]
            ) from error
        return path

    def _run_trial(
        self,
        arm: Arm,
        facts: TrialFacts,
        server: ManagedServer | ExternalServer,
        load: LoadClient,
        tier_dir: Path | None,
        tier_facts: dict[str, Any] | None,
        log_start: int,
    ) -> None:
        self._check_space(facts.id)
        self.observer.trial_started(facts)
        started = time.monotonic()
        writer = self._start_trial(facts)
        failure = run_trial(
            TrialContext(
                plan=self.plan,
                arm=arm,
                server=server,
                load=load,
                writer=writer,
                tier_dir=tier_dir,
                tier_facts=tier_facts,
                progress=self.observer.progress,
                log_start=log_start,
            )
        )
        self.observer.trial_ended(facts, time.monotonic() - started)
        if failure is not None:
            self.observer.note(f"{facts.id}: {failure}")
            self._check_space(f"{facts.id} recorded all it had, and the next trial")
        if isinstance(failure, ServerError):
            self._stop(_named(arm, failure), cause_of(failure))
        elif facts.gate == "g1":
            self._stop_loss(writer)
        if self.stopped is None:
            server.check_alive()  # a dead server ends the arm here, not amid the next trial

    def _start_trial(self, facts: TrialFacts) -> TrialWriter:
        try:
            return self.writer.start_trial(facts)
        except OSError as error:
            raise StorageError(
                f"trial {facts.id}: cannot be started: {error.strerror}; trials before it are "
                "sealed; free space (`kvgate runs prune`) and run again"
            ) from error

    def _check_space(self, what: str) -> None:
        """Stops the run while what was recorded still fits, not amid a trial."""
        needed = trial_bytes(self.plan)
        free = shutil.disk_usage(self.writer.path).free
        if free < needed:
            raise StorageError(
                f"trial {what}: found {free / MIB:.1f} MiB free under {self.writer.path}; needed: "
                f"{needed / MIB:.1f} MiB for one trial; trials before it are sealed; free space "
                "(`kvgate runs prune`) and run again"
            )

    def _stop_loss(self, writer: TrialWriter) -> None:
        """Judges the sealed arrival trial from disk; a gate that is not met stops the test."""
        evidence = TrialEvidence(writer.path, writer.facts)
        results = judge_arrival(self.plan, measure_run([evidence]))
        failed = [r for r in results if r.verdict is not Verdict.PASS]
        if failed and "g3" in self.plan.gates:
            why = "stop-loss: g1 not met: " + ", ".join(r.id for r in failed)
            self._stop(why, StopCause.STOP_LOSS)
            self.observer.note(why)

    def _record_dead_server(
        self,
        arm: Arm,
        trials: Sequence[TrialFacts],
        server: ManagedServer | ExternalServer,
        error: ServerError,
    ) -> None:
        """Leaves sealed evidence of why the arm ended; later arms are not run."""
        self._stop(_named(arm, error), cause_of(error))
        self.observer.note(str(error))
        done = {path.name for path in (self.writer.path / "trials").iterdir()}
        facts = next((f for f in trials if f.id not in done), None)
        if facts is None:
            return
        writer = self._start_trial(facts)
        detail = {"error": str(error)[:4000], "cause": cause_of(error).value}
        writer.add_event(Event(time.monotonic_ns(), "server_failed", detail))
        spec = getattr(server, "spec", None)
        writer.set_server(
            ServerFacts(
                arm=arm.name,
                kind=arm.kind,
                argv=spec.argv if spec else (),
                environment=spec.recorded_environment() if spec else {},
                effective={},
            )
        )
        writer.add_text("server.log", server.log_text())
        writer.set_figures(trial_figures(self.plan, arm))
        writer.seal()


def _named(arm: Arm, error: HarnessError) -> str:
    """Why an arm ended, in one line without the log."""
    text = str(error).splitlines()[0].partition("; last lines of")[0]
    return text if text.startswith(f"arm {arm.name}") else f"arm {arm.name}: {text}"


def clean_up_dead_runs(runs_root: Path, note: Callable[[str], None]) -> None:
    """Does for runs whose harness died what it could not do any more, and says so.

    Their servers are ended, their scratch and tier directories removed, and what they recorded is
    sealed, so that it can be judged: INCONCLUSIVE. Live runs are never touched.
    """
    for dead in dead_runs(runs_root.resolve()):
        with interrupts.shield():
            _clean_up(dead, note)


def _clean_up(dead: DeadRun, note: Callable[[str], None]) -> None:
    done = dead.end()
    writer = RunWriter.resume(dead.path)
    name = f"{dead.path.parent.name}/{dead.path.name}"
    logs = {path.name: log_tail(path / "server.log") for path in (dead.path / SCRATCH).iterdir()}
    dead.clear_scratch()
    try:
        if writer.is_planned and not writer.is_sealed:
            opened = seal_run(
                writer, HARNESS_DIED, StopCause.HARNESS_DIED, lambda arm: logs.get(arm, "")
            )
            done.append(f"sealed what it recorded; ended amid {', '.join(opened) or 'no trial'}")
    except (OSError, HarnessError) as error:
        note(f"dead run {name}: cannot be sealed: {error}; look at {dead.path}")
        return
    dead.finish()
    note(f"dead run {name}: {'; '.join([*done, 'removed its scratch directory'])}")


def seal_run(
    writer: RunWriter,
    stopped: str | None,
    cause: StopCause | None,
    log_of: Callable[[str], str],
    *,
    looks: Sequence[dict[str, Any]] = (),
) -> list[str]:
    """Seals a run, its open trials first; returns their ids. Raises OSError."""
    opened = writer.seal_open_trials(
        stopped or "ended early", cause or StopCause.HARNESS_FAILED, log_of
    )
    ended = datetime.now(UTC).isoformat(timespec="seconds")
    writer.seal(ended=ended, stopped=stopped, cause=cause, looks=looks)
    return opened


def log_tail(path: Path) -> str:
    """The end of a server's log; empty when there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
            return file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""


def provenance(started: datetime) -> dict[str, str]:
    """Where and with what the run was made. Shown, never judged; holds no path and no host name."""
    memory_gib = psutil.virtual_memory().total / 2**30
    return {
        "started": started.isoformat(timespec="seconds"),
        "harness": harness.__version__,
        "python": arms.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _processor(),
        "cores": str(len(arms.allowed_cores())),
        "memory": f"{memory_gib:.1f} GiB",
    }


def _simulated(plan: Plan) -> dict[str, str]:
    """Marks a run in which an arm is no real server."""
    names = [arm.name for arm in plan.campaign.arms.values() if arm.kind == "sim"]
    return {"simulated": f"SIMULATED arms: {', '.join(names)}"} if names else {}


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            lines = dict(line.split(":", 1) for line in file.read().split("\n\n")[0].splitlines())
        return next(v.strip() for k, v in lines.items() if k.strip() == "model name")
    except (OSError, StopIteration, ValueError):
        return platform.processor() or "unknown"
