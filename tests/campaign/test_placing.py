"""From campaign and config.json to the KV of an arm and to what the devices hold."""

from __future__ import annotations

import re
from typing import Any

import pytest

from harness.campaign.engine_options import EngineOptions, engine_options
from harness.campaign.generated_model import ModelArchitecture, model_config
from harness.campaign.placing import placement
from harness.campaign.plan import Plan, make_plan
from harness.campaign.reading import load_campaign, parse_campaign
from harness.errors import PlanError
from harness.placement.headroom import Fits
from tests.campaign_text import edited
from tests.placement.architectures import ARCHITECTURES

CONFIGS = {row.name: row.config for row in ARCHITECTURES}
TP8 = '"--tensor-parallel-size", "8"'
MACHINE = """
[deployment]
accelerators = 8
memory_gib = 192.0
weights_gib = 450.0
utilisation = 0.9
tensor_parallel = 8

[cold_recovery]"""


def text_of(args: str = "", deployment: str = "", model: str = "") -> str:
    return edited(
        ('"--dtype", "float32"', args),
        ("device_kv_tokens = 1024\n", ""),
        ("\n[cold_recovery]", deployment or "\n[cold_recovery]"),
        ('kind = "generated"\n', f'kind = "generated"\n{model}\n'),
    )


def plan_of(config: dict[str, Any], **changes: str) -> Plan:
    text = text_of(**changes)
    config = {**config, "vocab_size": 1000}
    return make_plan(parse_campaign(text), text, model_config=config, label="my.toml")


def problems_of(config: dict[str, Any], **changes: str) -> list[str]:
    """Without the lines, which tests/cli/test_invalid_campaigns.py is about."""
    with pytest.raises(PlanError) as error:
        plan_of(config, **changes)
    return [re.sub(r"^my\.toml:[0-9]+: ", "my.toml: ", each) for each in error.value.problems]


def bytes_per_token(config: dict[str, Any], **changes: str) -> int:
    plan = plan_of(config, **changes)
    found = {plan.figures(arm)["kv_bytes_per_token"] for arm in plan.campaign.arms.values()}
    assert found == {plan.sizes.kv_bytes_per_token}
    return int(found.pop())


# --- the figure that trials are checked against ------------------------------


def test_the_figure_is_that_of_all_ranks_together() -> None:
    """Every worker of the bundled connector counts its own bytes, copies included."""
    assert bytes_per_token(CONFIGS["Qwen3-235B-A22B"]) == 192_512
    assert bytes_per_token(CONFIGS["Qwen3-235B-A22B"], args=TP8) == 385_024
    assert bytes_per_token(CONFIGS["DeepSeek-V3"], args=TP8) == 562_176


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ("", 147_456),
        ('"--dtype", "float32"', 294_912),
        ('"--dtype=half"', 147_456),
        ('"--kv-cache-dtype", "fp8"', 73_728),
        ('"--kv_cache_dtype=fp8_e4m3"', 73_728),
        ('"--kv-cache-dtype", "auto"', 147_456),
        ('"--kv-cache-dtype", "fp8", "--kv-cache-dtype", "auto"', 147_456),
        ('"-tp", "8"', 147_456),
    ],
)
def test_the_arguments_decide(args: str, expected: int) -> None:
    assert bytes_per_token(CONFIGS["Qwen3-8B"], args=args) == expected


def test_a_float32_checkpoint_is_served_in_16_bit_unless_told_otherwise() -> None:
    architecture = ModelArchitecture(dtype="float32")
    config = model_config(architecture)
    assert bytes_per_token(config) == architecture.kv_bytes_per_token // 2
    assert bytes_per_token(config, args='"--dtype", "float32"') == architecture.kv_bytes_per_token
    plan = make_plan(*load_campaign("sim-rehearsal"), model_config=config)
    assert plan.sizes.kv_bytes_per_token == architecture.kv_bytes_per_token


def test_the_generated_model_agrees_with_its_config() -> None:
    for dtype in ("float32", "bfloat16"):
        architecture = ModelArchitecture(dtype=dtype)
        found = bytes_per_token(model_config(architecture), args=f'"--dtype", "{dtype}"')
        assert found == architecture.kv_bytes_per_token


def test_states_are_part_of_a_session() -> None:
    sizes = plan_of(CONFIGS["Qwen3-Next-80B-A3B"]).sizes
    assert sizes.kv_bytes_per_token == 24_576
    assert sizes.session_kv_bytes == 328 * 24_576 + 39_518_208
    assert sizes.working_set_bytes == 9 * sizes.session_kv_bytes


# --- what is not known -------------------------------------------------------

UNKNOWN = {**CONFIGS["Qwen3-8B"], "model_type": "brand_new"}


def test_an_unknown_architecture_is_named_with_what_to_supply() -> None:
    (problem,) = problems_of(UNKNOWN)
    assert problem.startswith("my.toml: model.path: config.json model_type: found 'brand_new'")
    assert "state model.kv_bytes_per_token" in problem


def test_what_it_asks_for_is_enough() -> None:
    plan = plan_of(UNKNOWN, model="kv_bytes_per_token = 4096")
    assert plan.sizes.kv_bytes_per_token == 4096
    assert plan.sizes.session_kv_bytes == 328 * 4096
    found = placement(plan.campaign, plan.model_config)
    assert found.resident is None
    assert "brand_new" in str(found.kv.why_not)


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_attention_heads", "hidden_size"])
def test_a_missing_key_is_named(key: str) -> None:
    config = {k: v for k, v in CONFIGS["Llama-3.1-8B"].items() if k != key}
    (problem,) = problems_of(config)
    assert problem.startswith(f"my.toml: model.path: config.json has no '{key}'; add it there, or")


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ('"--kv-cache-dtype", "nvfp4"', "--kv-cache-dtype: found 'nvfp4'; known: "),
        ('"--speculative-config", "{}"', "found --speculative-config, not modelled"),
        ('"-dcp", "2"', "found -dcp, not modelled"),
        ('"--tensor-parallel-size", "x"', "--tensor-parallel-size: found 'x'"),
        ('"--tensor-parallel-size"', "--tensor-parallel-size: found nothing"),
        ('"--tensor-parallel", "8"', "found '--tensor-parallel', shortened"),
        ('"-tp", "3"', "tensor parallel: found 3; the model has 32 attention heads"),
        ('"--dtype", "int8"', "dtype: found 'int8'"),
        ('"--gpu-memory-utilization", "90"', "--gpu-memory-utilization: found '90'"),
    ],
)
def test_arguments_that_no_figure_covers(args: str, named: str) -> None:
    assert any(named in problem for problem in problems_of(CONFIGS["Qwen3-8B"], args=args))


def test_a_context_of_one_rank_is_none() -> None:
    found = engine_options(["--decode-context-parallel-size", "1"], where="x")
    assert found == EngineOptions()


# --- devices -----------------------------------------------------------------


def test_the_published_deployment() -> None:
    plan = plan_of(CONFIGS["Qwen3-Coder-480B"], args=TP8, deployment=MACHINE)
    found = placement(plan.campaign, plan.model_config)
    assert found.natural is not None
    assert found.natural.sessions(30_208) == (109, 130)
    assert found.natural.holds(34, 30_208) is Fits.YES
    assert found.natural.holds(243, 30_208) is Fits.NO
    assert found.configured is None


def test_tensor_parallel_is_read_from_the_arguments() -> None:
    without = MACHINE.replace("tensor_parallel = 8\n", "")
    plan = plan_of(CONFIGS["Qwen3-Coder-480B"], args=TP8, deployment=without)
    natural = placement(plan.campaign, plan.model_config).natural
    assert natural is not None
    assert natural.size.parallel.tensor == 8


@pytest.mark.parametrize(
    ("args", "found"),
    [
        ('"-tp", "4"', "--tensor-parallel-size 4"),
        ("", "no --tensor-parallel-size, which means 1"),
    ],
)
def test_a_contradiction_is_refused(args: str, found: str) -> None:
    problems = problems_of(CONFIGS["Qwen3-Coder-480B"], args=args, deployment=MACHINE)
    assert problems == [
        f"my.toml: deployment.tensor_parallel: found 8; arms.{arm} is started with {found}"
        for arm in ("tiered_disk", "hbm_only", "recompute")
    ]


def test_utilisation_has_no_default_of_ours() -> None:
    without = MACHINE.replace("utilisation = 0.9\n", "")
    (problem,) = problems_of(CONFIGS["Qwen3-Coder-480B"], args=TP8, deployment=without)
    assert "deployment.utilisation: found none" in problem
    given = f'{TP8}, "--gpu-memory-utilization", "0.9"'
    plan_of(CONFIGS["Qwen3-Coder-480B"], args=given, deployment=without)
    (problem,) = problems_of(
        CONFIGS["Qwen3-Coder-480B"], args=given.replace("0.9", "0.8"), deployment=MACHINE
    )
    assert "utilisation: found 0.9; the server is started with --gpu-memory-utilization 0.8" in (
        problem
    )


def test_weights_that_leave_no_room() -> None:
    heavy = MACHINE.replace("450.0", "1380.0")
    (problem,) = problems_of(CONFIGS["Qwen3-Coder-480B"], args=TP8, deployment=heavy)
    assert "172.8 GiB usable per device - 172.5 weights - 8.0 reserve" in problem


def test_a_reduced_device_cache_is_known_to_the_block() -> None:
    campaign, text = load_campaign("cpu-demo")
    plan = make_plan(campaign, text, model_config=model_config(campaign.model.generated))
    found = placement(plan.campaign, plan.model_config)
    assert found.configured is not None
    # 140 blocks; 4,160 + 8 tokens take 33: four sessions, and 16 are asked for.
    assert found.configured.sessions(found.tokens) == (4, 4)
    assert found.configured.holds(16, found.tokens) is Fits.NO
