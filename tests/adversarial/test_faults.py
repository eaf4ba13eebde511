"""Every fault is seen: through HTTP, load client, collectors, sealing, analysis and judge."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.sim.faults import FAULT_TEXTS, FaultName
from harness.verdicts import ReasonCode, SignOff, Verdict
from tests.adversarial.cases import CASES, Case, truth_is_told
from tests.adversarial.rehearsal import CANDIDATE, Finished, execute
from tests.adversarial.table import Row

pytestmark = pytest.mark.adversarial

DOCS = Path(__file__).resolve().parents[2] / "docs"


def codes(signoff: SignOff) -> list[ReasonCode]:
    """Every reason named in the gates, worst gate first as they come."""
    found = [r.code for gate in signoff.gates for r in gate.reasons]
    found += [r.code for gate in signoff.gates for c in gate.criteria for r in c.reasons]
    return list(dict.fromkeys(found))


def verdict_of(signoff: SignOff, gate: str) -> Verdict:
    return next(g.verdict for g in signoff.gates if g.gate == gate)


def why(run: Finished) -> str:
    """For the message of a failed test."""
    gates = run.signoff.gates
    texts = [r.text for gate in gates for c in gate.criteria for r in c.reasons]
    texts += [r.text for gate in gates for r in gate.reasons]
    return "\n".join([*run.notes, *texts, str(run.path)])


def test_clean_control_passes(clean: Finished, seen: list[Row]) -> None:
    assert clean.signoff.verdict is Verdict.PASS, why(clean)
    assert codes(clean.signoff) == []
    told = truth_is_told(clean)
    seen.append(Row(None, CANDIDATE, "PASS, truth is told", f"PASS, {told}"))


def test_simulated_evidence_says_so_and_is_never_signable(clean: Finished) -> None:
    assert not clean.signoff.signable
    assert clean.signoff.label.startswith("SIMULATED")
    for trial in clean.trials(CANDIDATE):
        assert trial.server is not None
        assert trial.server.kind == "sim"
        assert trial.facts.figures["simulated"] is True


@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
def test_fault_is_seen(
    case: Case, tmp_path: Path, model_root: Path, clean: Finished, seen: list[Row]
) -> None:
    fault = {"name": case.name.value, **case.fault}
    run = execute(tmp_path, model_root=model_root, clean=clean.path, arm=case.arm, faults=[fault])
    found = codes(run.signoff)
    assert verdict_of(run.signoff, case.gate) is case.verdict, why(run)
    if case.code is None:
        assert found == [], why(run)
    else:
        assert case.code in found, why(run)
    if case.is_first:
        failed = next(check for check in run.signoff.checks if check.failed)
        assert failed.reasons[0].code is case.code, why(run)
    parts = [f"{case.gate.upper()} {case.verdict.value}"]
    first = " first" if case.is_first else ""
    parts += [f"`{case.code.value}`{first}"] if case.code else []
    parts += [case.look(run)] if case.look else []
    seen.append(Row(case.name, case.arm, case.expected, ", ".join(parts)))


def test_every_fault_has_a_case_a_text_and_a_row() -> None:
    page = (DOCS / "faults.md").read_text(encoding="utf-8")
    assert {case.name for case in CASES} == set(FaultName) == set(FAULT_TEXTS)
    assert [name.value for name in FaultName if f"| `{name.value}` |" not in page] == []
