"""Runs a campaign: one server per arm, its trials in order, everything sealed.

Judges nothing itself but the arrival gate, whose failure ends the run (stop-loss).
"""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import psutil

import harness
from harness import arms
from harness.analysis import measure_run
from harness.errors import ServerError
from harness.judge import judge_arrival
from harness.load.driver import LoadClient
from harness.model import ensure_model
from harness.plan import Arm, Campaign, Plan
from harness.records import Event, ServerFacts, TrialFacts
from harness.server.managed import ExternalServer, ManagedServer
from harness.store import RunWriter, TrialEvidence, TrialWriter
from harness.trial import TrialContext, run_trial, trial_figures
from harness.verdicts import Verdict


class Observer(Protocol):
    """Shows a person how a run is doing."""

    def run_started(self, path: Path, trials: Sequence[TrialFacts]) -> None: ...

    def arm_started(self, arm: Arm) -> None: ...

    def trial_started(self, facts: TrialFacts) -> None: ...

    def progress(self, text: str) -> None: ...

    def trial_ended(self, facts: TrialFacts, duration_s: float) -> None: ...

    def note(self, text: str) -> None: ...


def model_directory(campaign: Campaign, home: Path) -> Path:
    """The served model's directory; generates the model when the campaign says so."""
    if campaign.model.kind == "path":
        assert campaign.model.path is not None
        return Path(campaign.model.path).expanduser()
    return ensure_model(campaign.model.generated, home / "models")


class CampaignRun:
    """One execution of a plan. ``execute`` returns the sealed run directory, whatever happened."""

    def __init__(
        self, plan: Plan, *, runs_root: Path, home: Path, model_dir: Path, observer: Observer
    ) -> None:
        self.plan = plan
        self.home = home
        self.model_dir = model_dir
        self.observer = observer
        self.started = datetime.now(UTC)
        # Absolute: the connector refuses a relative directory, and servers may change theirs.
        self.writer = RunWriter(runs_root.resolve(), plan.campaign.name, self.started)
        self.stopped: str | None = None

    def execute(self) -> Path:
        """Runs all arms. Seals the run also after an interrupt, which is raised again."""
        trials = list(self.plan.trials())
        self.writer.write_plan(
            campaign=self.plan.campaign_text,
            criteria=self.plan.criteria_text,
            plan=self._plan_record(trials),
            provenance=provenance(self.started),
        )
        self.observer.run_started(self.writer.path, trials)
        try:
            for arm in self.plan.campaign.arms.values():
                self._run_arm(arm, [facts for facts in trials if facts.arm == arm.name])
                if self.stopped is not None:
                    break
        except KeyboardInterrupt:
            self.stopped = "interrupted by the operator"
            raise
        except BaseException as error:
            self.stopped = f"harness error: {type(error).__name__}: {error}"[:500]
            raise
        finally:
            shutil.rmtree(self.writer.path / "scratch", ignore_errors=True)
            ended = datetime.now(UTC).isoformat(timespec="seconds")
            self.writer.seal(ended=ended, stopped=self.stopped)
        return self.writer.path

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
        }

    def _run_arm(self, arm: Arm, trials: Sequence[TrialFacts]) -> None:
        self.observer.arm_started(arm)
        scratch = self.writer.scratch / arm.name
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
            leftovers = getattr(server, "leftovers", None)
            if leftovers:
                self.observer.note(f"{arm.name}: removed after the stop: {leftovers}")

    def _server(
        self, arm: Arm, scratch: Path, tier_dir: Path | None
    ) -> ManagedServer | ExternalServer:
        if arm.kind == "url":
            assert arm.url is not None
            return ExternalServer(arm.name, arm.url, arm.served_model or arms.SERVED_MODEL_NAME)
        spec = arms.launch_spec(
            self.plan.campaign,
            arm,
            home=self.home,
            model_dir=self.model_dir,
            tier_dir=tier_dir,
            import_path=arms.link_package(scratch / "import"),
            allowed_cores=arms.allowed_cores(),
            inherited=dict(os.environ),
        )
        return ManagedServer(spec, log_path=scratch / "server.log", progress=self.observer.progress)

    def _tier_directory(self, arm: Arm, scratch: Path) -> Path | None:
        """A directory of this run alone; a customer's existing tier content is never touched."""
        if arm.medium != "disk" or arm.kind != "vllm":
            return None
        if arm.tier_root is None:
            return scratch / "tier"
        root = arms.tier_root(arm.tier_root)
        return root / f"kvgate-{self.plan.campaign.name}-{self.writer.path.name}-{arm.name}"

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
        self.observer.trial_started(facts)
        started = time.monotonic()
        writer = self.writer.start_trial(facts)
        run_trial(
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
        if facts.gate == "g1":
            self._stop_loss(writer)
        if self.stopped is None:
            server.check_alive()  # a dead server ends the arm here, not amid the next trial

    def _stop_loss(self, writer: TrialWriter) -> None:
        """Judges the sealed arrival trial from disk; a gate that is not met stops the test."""
        evidence = TrialEvidence(writer.path, writer.facts)
        results = judge_arrival(self.plan, measure_run(self.plan, [evidence]))
        failed = [r for r in results if r.verdict is not Verdict.PASS]
        if failed and "g3" in self.plan.gates:
            self.stopped = "stop-loss: g1 not met: " + ", ".join(r.id for r in failed)
            self.observer.note(self.stopped)

    def _record_dead_server(
        self,
        arm: Arm,
        trials: Sequence[TrialFacts],
        server: ManagedServer | ExternalServer,
        error: ServerError,
    ) -> None:
        """Leaves sealed evidence of why the arm ended; later arms are not run."""
        self.stopped = f"arm {arm.name}: {type(error).__name__}"
        self.observer.note(str(error))
        done = {path.name for path in (self.writer.path / "trials").iterdir()}
        facts = next((f for f in trials if f.id not in done), None)
        if facts is None:
            return
        writer = self.writer.start_trial(facts)
        writer.add_event(Event(time.monotonic_ns(), "server_failed", {"error": str(error)[:4000]}))
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


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            lines = dict(line.split(":", 1) for line in file.read().split("\n\n")[0].splitlines())
        return next(v.strip() for k, v in lines.items() if k.strip() == "model name")
    except (OSError, StopIteration, ValueError):
        return platform.processor() or "unknown"
