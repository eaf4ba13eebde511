"""Turns a campaign's criteria into tests, one per criterion, arm and level.

Live (default): the campaign is run, sealed, and judged from disk. With ``--evidence RUN`` saved
evidence is judged; no server is needed. pytest is the runner, not the verdict: a criterion of a
selected gate is never skipped, and only PASS passes. The verdict file says which of STOP and
INCONCLUSIVE it was.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from rich.console import Console

from gates import plugin
from harness.campaign import arms
from harness.campaign.plan import Plan
from harness.campaign.sections import GATES
from harness.cli.console import ConsoleObserver
from harness.errors import HarnessError, PlanError
from harness.evidence import results
from harness.judge.signoff import criterion_ids
from harness.run.calibration import sized_plan
from harness.run.campaign_run import CampaignRun, clean_up_dead_runs
from harness.run.checking import saved_plan
from harness.run.judging import judge_directory
from harness.run.planning import checked_plan, require_able
from harness.verdicts import CriterionResult, SignOff
from reports.signoff import render_html


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """The options of `gates.plugin`, where the package is used without being installed."""
    if not pluginmanager.has_plugin(plugin.NAME):
        plugin.pytest_addoption(parser)


RecordProperty = Callable[[str, object], None]


@dataclass
class _Session:
    """What one pytest session judges; the live run happens once, when first asked for."""

    config: pytest.Config
    plan: Plan | None
    gates: list[str] = field(default_factory=list)
    signoff: SignOff | None = None
    run_path: Path | None = None

    def judged(self) -> SignOff:
        """The sign-off, after running the campaign when there is no evidence yet."""
        if self.signoff is None:
            evidence: Path | None = self.config.getoption("--evidence")
            self.run_path = evidence if evidence is not None else self._run_live()
            self.signoff = judge_directory(self.run_path)
            results.write_verdict(self.run_path, self.signoff)
            provenance = results.read_provenance(self.run_path)
            results.write_report(self.run_path, render_html(self.signoff, provenance))
        return self.signoff

    def _run_live(self) -> Path:
        home = arms.default_home()
        runs_root = self.config.getoption("--runs")
        plan, model_dir = checked_plan(
            self.config.getoption("--campaign"), home=home, gates=self.gates
        )
        with ConsoleObserver(Console(stderr=True)) as observer:
            clean_up_dead_runs(runs_root, observer.note)
            try:
                require_able(plan, home=home, runs_root=runs_root)
            except PlanError as error:  # as `kvgate run` would, before any trial
                pytest.exit(str(error), returncode=pytest.ExitCode.USAGE_ERROR)
            plan, model_dir, record = sized_plan(
                plan, model_dir, runs_root=runs_root, home=home, observer=observer
            )
            return CampaignRun(
                plan,
                runs_root=runs_root,
                home=home,
                model_dir=model_dir,
                observer=observer,
                calibration=record,
            ).execute()


_KEY: pytest.StashKey[_Session] = pytest.StashKey()


def pytest_configure(config: pytest.Config) -> None:
    """Reads the plan, which names the tests. Wrong input ends pytest with a usage error."""
    for gate in GATES:
        config.addinivalue_line("markers", f"{gate}: gate {gate[1:]} of a campaign")
    evidence: Path | None = config.getoption("--evidence")
    try:
        if evidence is not None:
            plan = saved_plan(evidence)
        else:
            plan, _model_dir = checked_plan(
                config.getoption("--campaign"), home=arms.default_home()
            )
    except HarnessError as error:
        raise pytest.UsageError(str(error)) from error
    config.stash[_KEY] = _Session(config, plan)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per criterion, arm and level of the module's gate."""
    if "criterion_id" in metafunc.fixturenames:
        plan = metafunc.config.stash[_KEY].plan
        gate = next(m.name for m in metafunc.definition.iter_markers() if m.name in GATES)
        # Nothing to name is a test that fails, never pytest's skip of an empty parameter set.
        ids = (criterion_ids(plan, gate) if plan is not None else []) or ["no_criterion"]
        metafunc.parametrize("criterion_id", ids, ids=ids)


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is left after ``-m`` decides which gates a live run runs."""
    names = {marker.name for item in session.items for marker in item.iter_markers()}
    session.config.stash[_KEY].gates = [gate for gate in GATES if gate in names]


@pytest.fixture(scope="session")
def signoff(pytestconfig: pytest.Config) -> SignOff:
    """The sign-off that every test of the session reads."""
    return pytestconfig.stash[_KEY].judged()


@pytest.fixture
def judge_criterion(signoff: SignOff, request: pytest.FixtureRequest) -> JudgeCriterion:
    """Asserts one criterion and writes value and bound into the JUnit XML."""
    properties = request.node.user_properties
    return JudgeCriterion(signoff, lambda name, value: properties.append((name, value)))


@dataclass
class JudgeCriterion:
    """Looks a criterion up in the sign-off; only PASS passes."""

    signoff: SignOff
    record: RecordProperty

    def __call__(self, criterion_id: str) -> None:
        found = [c for gate in self.signoff.gates for c in gate.criteria if c.id == criterion_id]
        if not found:
            reasons = [r for gate in self.signoff.gates for r in gate.reasons]
            self.record("verdict", self.signoff.verdict.value)
            lines = "\n".join(f"  {r.code.value}: {r.text}" for r in reasons)
            pytest.fail(f"{criterion_id}: not judged\n{lines}", pytrace=False)
        result = found[0]
        bound = str(result.bound)
        for name, value in (
            ("verdict", result.verdict.value),
            ("value", result.measurement.value),
            ("unit", result.measurement.unit.value),
            ("n", result.measurement.n),
            ("bound", bound),
        ):
            self.record(name, value)
        if result.missed:
            self.record("missed", ", ".join(map(str, result.missed)))
        if result.verdict.value != "PASS":
            pytest.fail(_message(result, bound), pytrace=False)

    def gate(self, name: str) -> None:
        """Asserts the verdict of a whole gate, which also covers a run that ended early."""
        gate = next((g for g in self.signoff.gates if g.gate == name), None)
        verdict = gate.verdict.value if gate else self.signoff.verdict.value
        self.record("verdict", verdict)
        if gate is None or verdict != "PASS":
            source = [gate] if gate else self.signoff.gates
            reasons = [r for g in source for r in g.reasons]
            lines = "\n".join(f"  {r.code.value}: {r.text}" for r in reasons)
            pytest.fail(f"{name}: {verdict if gate else 'NOT RUN'}\n{lines}", pytrace=False)


def _message(result: CriterionResult, bound: str) -> str:
    lines = [
        f"{result.id}: {result.verdict.value}, value {result.measurement.value}, bound {bound}"
    ]
    lines += [f"  {r.code.value}: {r.text} [{r.evidence}]" for r in result.reasons]
    return "\n".join(lines)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Names the verdict and its file after the tests."""
    session = config.stash.get(_KEY, None)
    if session is not None and session.signoff is not None and session.run_path is not None:
        path = os.path.relpath(session.run_path)
        terminalreporter.write_line(f"kvgate: {session.signoff.verdict.value}, run {path}")
