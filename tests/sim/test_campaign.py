"""Simulated arms in a campaign: how they are launched, refused, and marked in every sign-off."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from harness.campaign import arms
from harness.campaign.generated_model import model_config
from harness.campaign.plan import Plan, make_plan
from harness.campaign.reading import load_campaign, parse_campaign
from harness.errors import PlanError
from harness.judge.signoff import judge_run
from harness.run.trial import trial_figures
from harness.sim.config import parse_config


def rehearsal() -> Plan:
    campaign, text = load_campaign("sim-rehearsal")
    return make_plan(campaign, text, model_config=model_config(campaign.model.generated))


def edited(old: str, new: str) -> str:
    """The rehearsal with a text replaced behind the head of its second arm, or before any arm."""
    _campaign, text = load_campaign("sim-rehearsal")
    head, arm, rest = text.partition("[arms.tiered_dram]")
    if old in rest:
        return head + arm + rest.replace(old, new, 1)
    assert old in head
    return head.replace(old, new, 1) + arm + rest


def launch(plan: Plan, arm: str) -> arms.LaunchSpec:
    return arms.launch_spec(
        plan.campaign,
        plan.campaign.arms[arm],
        home=Path("home"),
        model_dir=Path("model"),
        tier_dir=None,
        import_path=Path("import"),
        allowed_cores=(0, 1, 2),
        inherited={},
    )


def test_an_arm_is_launched_with_one_configuration() -> None:
    plan = rehearsal()
    spec = launch(plan, "tiered_dram")
    assert spec.kind == "sim"
    assert spec.argv[:4] == (sys.executable, "-m", "harness.sim", "--config")
    config = parse_config(json.loads(spec.argv[4]))
    assert config.medium == "host"
    assert config.host_pool_bytes == 33554432  # the arm's own, over the one all arms share
    assert (config.block_tokens, config.device_blocks) == (16, 104)
    assert config.compute_threads == 2
    assert config.prefix_caching


def test_recompute_caches_nothing() -> None:
    assert not parse_config(json.loads(launch(rehearsal(), "recompute").argv[4])).prefix_caching


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        pytest.param('kind = "sim"', "", "sim", id="a sim table for a real server"),
        pytest.param("time_scale", "time_scales", "time_scales", id="an unknown key"),
        pytest.param(
            'kind = "sim"', 'kind = "sim"\nargs = ["--x"]', "args", id="arguments for vLLM"
        ),
    ],
)
def test_a_campaign_that_cannot_be_simulated_is_refused(old: str, new: str, named: str) -> None:
    with pytest.raises(PlanError) as refused:
        parse_campaign(edited(old, new))
    assert any(named in problem for problem in refused.value.problems)


def test_a_simulation_is_never_signable_whatever_the_profile_says() -> None:
    plan = rehearsal()
    profile = plan.profile.model_copy(update={"signable": True, "label": "acceptance test"})
    signable = Plan(
        plan.campaign, plan.campaign_text, profile, plan.criteria_text, plan.model_config, ("g1",)
    )
    signoff = judge_run(signable, [], plan_record={}, stopped=None, evidence_digest="")
    assert not signoff.signable
    assert signoff.label == "SIMULATED, not signable"
    assert any("tiered_disk: a simulated server" in text for text in signoff.not_tested)


def test_the_figures_of_a_trial_say_that_it_was_simulated() -> None:
    plan = rehearsal()
    assert trial_figures(plan, plan.campaign.arms["hbm_only"])["simulated"] is True
