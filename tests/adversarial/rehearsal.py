"""The smallest campaign over the simulator, with a fault in one arm; the other arms' evidence is
copied from one clean run of the same plan, seed and machine.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.campaign.generated_model import ensure_model
from harness.campaign.plan import Plan, make_plan
from harness.campaign.reading import parse_campaign, read_model_config
from harness.campaign.sections import Arm
from harness.evidence.store import TrialEvidence, open_run
from harness.records import TrialFacts
from harness.run.campaign_run import CampaignRun
from harness.run.judging import judge_directory
from harness.sim.truth import TruthRecord, read_truth
from harness.verdicts import SignOff

CANDIDATE = "tiered_disk"
# Numbers of the candidate's requests: 2 of the arrival, 3 of the warm-up, 9 of populate, then the
# waves. Each wave of 3 is followed by the same 3 asked again.
ARRIVAL, POPULATE, WAVES = 0, 5, 14
# The same in the baselines, which have one arrival request and ask nothing again.
WAVES_OF_RECOMPUTE = 13
SESSION_BLOCKS = 18

CAMPAIGN = """\
format = 1
name = "adversarial"
profile = "cpu-demo"
gates = ["g1", "g3"]
seed = 11

[model.architecture]
num_layers = 2
hidden_size = 64
intermediate_size = 64
num_attention_heads = 2
num_kv_heads = 1
head_size = 32
vocab_size = 512
dtype = "float32"

[server]
block_tokens = 16
device_kv_tokens = 944
cpu_cores = 1
ready_deadline_s = 30.0
request_deadline_s = 4.0
answer_deadline_s = 2.0

# Ten simulated seconds pass in one. A prefill takes 0.7; wave and answer outlast a heartbeat.
# Two engines count, so that every reading is one over engines.
[server.sim]
engines = 2
time_scale = 10.0
chunk_tokens = 320
prefill_tokens_per_s = 430.0
step_s = 0.001
decode_s = 0.03
host_pool_bytes = 1048576
disk_curve = [[1, 2e7], [3, 4e7]]
disk_write_bytes_per_s = 4e7

[arms.hbm_only]
kind = "sim"
role = "hbm_only"

[arms.recompute]
kind = "sim"
role = "recompute"
declared = ["prefix_caching"]

[arms.tiered_disk]
kind = "sim"
role = "tiered"
medium = "disk"
declared = ["connector", "connector_config"]

[cold_recovery]
levels = [3]
repetitions = 3
sessions = 9
prompt_tokens = 292
output_tokens = 4
oracle_sessions = 3
steady_cycles = 0
fits_sessions = 3

# Far below the demo's 0.80: these runs are short, and the machine has other work while it tests.
[criteria.ttft_reduction_vs_recompute]
target = 0.50

[criteria.ttft_reduction_vs_hbm_only]
target = 0.50
"""


def plan_with(model_root: Path, sim: dict[str, dict[str, Any]] | None = None) -> Plan:
    """The plan; ``sim``: further keys of an arm's simulated server."""
    campaign = parse_campaign(CAMPAIGN)
    model_dir = ensure_model(campaign.model.generated, model_root)
    lines = [CAMPAIGN]
    for arm, content in (sim or {}).items():
        lines.append(f"[arms.{arm}.sim]")
        lines += [f"{key} = {_toml(value)}" for key, value in content.items()]
    text = "\n".join(lines)
    return make_plan(parse_campaign(text), text, model_config=read_model_config(model_dir))


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return repr(value).replace("'", '"')


class Quiet:
    """An observer that keeps the notes, for the message of a test that fails."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def run_started(self, path: Path, trials: Sequence[TrialFacts]) -> None: ...

    def arm_started(self, arm: Arm) -> None: ...

    def trial_started(self, facts: TrialFacts) -> None: ...

    def progress(self, text: str) -> None: ...

    def trial_ended(self, facts: TrialFacts, duration_s: float) -> None: ...

    def note(self, text: str) -> None:
        self.notes.append(text)


class PartialRun(CampaignRun):
    """Runs one arm and takes the sealed trials of the others from a clean run of the same plan."""

    clean: Path
    only: str

    def _run_arm(self, arm: Arm, trials: Sequence[TrialFacts]) -> None:
        if arm.name == self.only:
            super()._run_arm(arm, trials)
            return
        for facts in trials:
            shutil.copytree(
                self.clean / "trials" / facts.id, self.writer.path / "trials" / facts.id
            )


@dataclasses.dataclass(frozen=True)
class Finished:
    """A judged run with the simulator's truth about the arm that was run."""

    path: Path
    signoff: SignOff
    truth: tuple[TruthRecord, ...]
    notes: tuple[str, ...]

    def trials(self, arm: str) -> list[TrialEvidence]:
        """Sealed trials of an arm."""
        return [trial for trial in open_run(self.path).trials if trial.facts.arm == arm]


def execute(
    directory: Path,
    *,
    model_root: Path,
    clean: Path | None = None,
    arm: str = CANDIDATE,
    faults: Sequence[dict[str, Any]] = (),
    **sim: Any,
) -> Finished:
    """Runs and judges. Without ``clean`` all arms are run, and the truth is the ``arm``'s."""
    truth_path = directory / "truth.jsonl"
    content: dict[str, Any] = {"truth_path": str(truth_path), **sim}
    if faults:
        content["faults"] = list(faults)
    plan = plan_with(model_root, {arm: content})
    observer = Quiet()
    kind: type[CampaignRun] = CampaignRun if clean is None else PartialRun
    run = kind(
        plan,
        runs_root=directory / "runs",
        home=directory,
        model_dir=ensure_model(plan.campaign.model.generated, model_root),
        observer=observer,
    )
    if isinstance(run, PartialRun):
        assert clean is not None
        run.clean, run.only = clean, arm
    path = run.execute()
    with truth_path.open(encoding="ascii") as lines:
        truth = tuple(read_truth(lines))
    return Finished(path, judge_directory(path), truth, tuple(observer.notes))
