"""What `kvgate doctor` makes of a machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.campaign.arms import vllm_python
from harness.campaign.generated_model import model_config
from harness.campaign.plan import Plan, make_plan
from harness.campaign.reading import load_campaign
from harness.connector.budget import MemoryBudget
from harness.run import doctor


def _plan(name: str) -> Plan:
    campaign, text = load_campaign(name)
    return make_plan(campaign, text, model_config=model_config(campaign.model.generated))


@pytest.mark.parametrize(
    ("text", "found", "fine"),
    [
        ("always [madvise] never\n", "madvise", True),
        ("[always] madvise never\n", "always", True),
        ("always madvise [never]\n", "never", False),
        (None, "unknown", False),
    ],
)
def test_large_pages(tmp_path: Path, text: str | None, found: str, fine: bool) -> None:
    setting = tmp_path / "enabled"
    if text is not None:
        setting.write_text(text)
    (finding,) = doctor._large_pages(_plan("cpu-demo"), setting)
    assert (finding.found, finding.fine, finding.required) == (found, fine, False)


def test_large_pages_are_for_tiers_of_real_servers(tmp_path: Path) -> None:
    assert not list(doctor._large_pages(_plan("sim-rehearsal"), tmp_path / "enabled"))


GIB = 2**30


def _memory(plan: Plan, monkeypatch: pytest.MonkeyPatch, *, is_cpu: bool = True) -> doctor.Finding:
    """What is found where two GiB are left in a container."""
    budget = MemoryBudget(2 * GIB, "limit 2147483648 of /sys/fs/cgroup/box")
    seen = doctor._Interpreter(True, "vllm is installed", is_cpu)
    monkeypatch.setattr(doctor, "memory_budget", lambda: budget)
    python = str(vllm_python(plan.campaign, next(iter(plan.campaign.arms.values())), HOME))
    return doctor._memory(plan, HOME, {python: seen})


HOME = Path("/home/of/kvgate")


def test_memory_is_the_containers_and_names_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = _memory(_plan("cpu-demo"), monkeypatch)
    assert finding.found == "2.0 GiB (limit 2147483648 of /sys/fs/cgroup/box)"
    # 4 GiB for the server, 1 GiB of pool, 140 MiB of KV in host memory.
    assert finding.needed == ">= 5.1 GiB for tiered_dram"
    assert not finding.fine


def test_device_memory_is_host_memory_on_a_cpu_server_only(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = _memory(_plan("cpu-demo"), monkeypatch, is_cpu=False)
    assert finding.needed == ">= 5.0 GiB for tiered_dram"


def test_servers_elsewhere_and_simulated_ones_take_no_kv_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    finding = _memory(_plan("sim-rehearsal"), monkeypatch)
    assert (finding.needed, finding.fine) == (">= 0.5 GiB for tiered_disk", True)


def test_pools_of_all_ranks_of_an_arm_count(monkeypatch: pytest.MonkeyPatch) -> None:
    campaign, text = load_campaign("cpu-demo")
    arm = campaign.arms["tiered_dram"]
    ranked = arm.model_copy(update={"args": ["--tensor-parallel-size", "2", "-dp=2"]})
    campaign = campaign.model_copy(update={"arms": {**campaign.arms, "tiered_dram": ranked}})
    plan = make_plan(campaign, text, model_config=model_config(campaign.model.generated))
    assert _memory(plan, monkeypatch).needed == ">= 8.1 GiB for tiered_dram"


def test_cores_are_bounded_by_a_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "cpu_budget", lambda: 1.5)
    monkeypatch.setattr(doctor, "allowed_cores", lambda: [0, 1, 2, 3])
    finding = doctor._cores(_plan("cpu-demo"))
    assert (finding.found, finding.fine) == ("1.5 (4 by affinity, the rest by a quota)", False)
