"""Every public architecture of the table, against bytes worked by hand; and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from harness.errors import PlanError
from harness.placement.cache import FORMATS, KVSize, Parallel
from harness.placement.layers import AttentionCache, read_model
from tests.placement.architectures import ARCHITECTURES, Architecture

BY_NAME = {row.name: row for row in ARCHITECTURES}


def size_of(name: str, cache_dtype: str = "bfloat16", **more: Any) -> KVSize:
    return KVSize(read_model(BY_NAME[name].config), cache_dtype, "bfloat16", **more)


@pytest.mark.parametrize("row", ARCHITECTURES, ids=lambda row: row.name)
def test_bytes_of_a_token(row: Architecture) -> None:
    size = size_of(row.name)
    assert size.unique_bytes_per_token == row.unique
    assert size.rank_bytes_per_token == size.ranks_total_bytes_per_token == row.unique
    assert size.state_bytes == row.state


@pytest.mark.parametrize("row", ARCHITECTURES, ids=lambda row: row.name)
def test_bytes_of_a_token_on_eight_ranks(row: Architecture) -> None:
    if row.total_tp8 is None:
        with pytest.raises(PlanError, match="do not share out evenly"):
            size_of(row.name, parallel=Parallel(tensor=8))
        return
    size = size_of(row.name, parallel=Parallel(tensor=8))
    assert size.ranks_total_bytes_per_token == row.total_tp8
    assert size.rank_bytes_per_token == row.total_tp8 // 8
    assert size.unique_bytes_per_token == row.unique


@pytest.mark.parametrize("row", ARCHITECTURES, ids=lambda row: row.name)
def test_what_a_long_session_grows_by(row: Architecture) -> None:
    size = size_of(row.name, drops_windows=True)
    assert size.session_bytes(50_001) - size.session_bytes(50_000) == row.growing


def test_the_published_session() -> None:
    """30,208 restored tokens of Qwen3-Coder-480B: published as 7.15 GiB."""
    size = size_of("Qwen3-Coder-480B", parallel=Parallel(tensor=8))
    session = size.session_bytes(30_208)
    assert session == 7_671_382_016
    assert round(session / 2**30, 3) == 7.145
    assert round(session / 2**30, 2) == 7.14  # the published 7.15 is rounded up
    # 16 tokens x 31,744 bytes of one rank: 496 KiB in 124 runs of 4 KiB.
    assert size.block_bytes == 507_904 == 124 * 4096


@pytest.mark.parametrize(
    ("name", "cache_dtype", "expected"),
    [
        # 1 byte instead of 2; the scales lie with the weights.
        ("Qwen3-Coder-480B", "fp8", 126_976),
        ("Qwen3-Coder-480B", "fp8_e5m2", 126_976),
        # 62 layers x 8 heads x 2 (K, V) x (128 bytes + a scale of 4)
        ("Qwen3-Coder-480B", "int8_per_token_head", 130_944),
        ("Qwen3-Coder-480B", "fp8_per_token_head", 130_944),
        # ... x (64 + 4)
        ("Qwen3-Coder-480B", "int4_per_token_head", 67_456),
        ("Qwen3-Coder-480B", "float32", 507_904),
        # 61 x 576; 61 x 656 with the packed latent
        ("DeepSeek-V3", "fp8", 35_136),
        ("DeepSeek-V3", "fp8_ds_mla", 40_016),
        # The indexer's 61 x 132 stay what they are.
        ("DeepSeek-V3.2", "fp8_ds_mla", 40_016 + 8_052),
    ],
)
def test_quantised_caches(name: str, cache_dtype: str, expected: int) -> None:
    assert size_of(name, cache_dtype).unique_bytes_per_token == expected


def test_a_quantised_cache_does_not_quantise_a_state() -> None:
    assert size_of("Qwen3-Next-80B-A3B", "fp8").state_bytes == 39_518_208


@pytest.mark.parametrize(
    ("name", "cache_dtype"),
    [
        ("Qwen3-8B", "nvfp4"),
        ("Qwen3-8B", "auto"),
        ("Qwen3-8B", "fp8_ds_mla"),
        ("DeepSeek-V3", "int8_per_token_head"),
    ],
)
def test_a_cache_type_that_is_not_modelled(name: str, cache_dtype: str) -> None:
    with pytest.raises(PlanError, match=f"--kv-cache-dtype: found '{cache_dtype}'"):
        _ = size_of(name, cache_dtype).unique_bytes_per_token


def test_groups_of_mamba_are_repeated_for_each_rank() -> None:
    """Eight groups on sixteen ranks: eight more, 2 x 8 x 128 x 3 elements of 2 bytes a layer."""
    one, many = (size_of("Nemotron-H-8B", parallel=Parallel(tensor=t)) for t in (1, 16))
    assert many.state_bytes - one.state_bytes == 24 * (2 * 8 * 128 * 3) * 2


def test_pipeline_stages_follow_vllm() -> None:
    """62 layers in 4 stages: 15, 16, 16, 15; 61 in 2: 31 and 30, as vLLM's rule gives."""
    size = size_of("Qwen3-Coder-480B", parallel=Parallel(tensor=8, pipeline=4))
    assert [len(stage) for stage in size.stages] == [15, 16, 16, 15]
    # The largest stage decides: 16 layers x 1 head x 256 elements x 2 bytes.
    assert size.rank_bytes_per_token == 16 * 256 * 2
    assert size.ranks_total_bytes_per_token == 253_952
    odd = size_of("DeepSeek-V3", parallel=Parallel(pipeline=2))
    assert [len(stage) for stage in odd.stages] == [31, 30]
    three = size_of("Qwen3-Coder-480B", parallel=Parallel(pipeline=3))
    assert [len(stage) for stage in three.stages] == [21, 21, 20]


# --- what is refused ---------------------------------------------------------


def problem_of(config: dict[str, Any]) -> str:
    with pytest.raises(PlanError) as error:
        read_model(config)
    (problem,) = error.value.problems
    return problem


def test_an_unknown_architecture_is_named_with_what_to_supply() -> None:
    problem = problem_of({**BY_NAME["Qwen3-8B"].config, "model_type": "brand_new"})
    assert problem.startswith("model.path: config.json model_type: found 'brand_new'; known: ")
    assert "qwen3_moe" in problem
    assert problem.endswith(
        "; state model.kv_bytes_per_token: bytes of one token in the device caches of all ranks "
        "together"
    )


@pytest.mark.parametrize("row", ARCHITECTURES, ids=lambda row: row.name)
def test_every_missing_key_is_named(row: Architecture) -> None:
    """Whatever key the reading rests on: taken away, it is named, or a documented default holds."""
    defaults = {
        # Only says how to read others, or is derived from heads and hidden size by transformers.
        "use_sliding_window", "new_decoder_architecture", "multi_query", "sliding_window",
        "full_attention_interval", "layer_types", "no_rope_layers",
    }  # fmt: skip
    text = row.config.get("text_config", row.config)
    nested = text is not row.config
    if text.get("model_type") == "llama":  # one KV head per head, as transformers has it
        defaults |= {"num_key_value_heads"}
    for key in sorted(set(text) - defaults - {"torch_dtype"}):
        less = {k: v for k, v in text.items() if k != key}
        config = {**row.config, "text_config": less} if nested else less
        named = (f"has no '{key}'", f"{key}: found ", "model_type: found 'gemma3'")
        problem = ""
        try:
            found = KVSize(read_model(config), "bfloat16", "bfloat16").unique_bytes_per_token
        except PlanError as error:
            found, problem = row.unique, str(error)
        # Not read at all (the hidden size beside a head size), equal by derivation, or refused.
        assert found == row.unique, key
        assert not problem or any(name in problem for name in (*named, "found 'llama4'")), key


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers: found 0"),
        ({"num_hidden_layers": "36"}, "num_hidden_layers: found '36'"),
        ({"head_dim": -1}, "head_dim: found -1"),
        ({"num_key_value_heads": True}, "num_key_value_heads: found True"),
        ({"torch_dtype": "int8"}, "torch_dtype: found 'int8'"),
        ({"torch_dtype": None}, "has no 'dtype'"),
        ({"layer_types": ["full_attention"]}, "layer_types: found"),
        ({"layer_types": ["sparse_attention"] * 36}, "layer_types: found 'sparse_attention'"),
        ({"sliding_window": 4096}, "sliding_window: found one without 'layer_types'"),
        ({"quantization_config": {"kv_cache_scheme": {"num_bits": 4}}}, "the KV scheme"),
    ],
)
def test_a_wrong_value_is_named(change: dict[str, Any], named: str) -> None:
    assert named in problem_of({**BY_NAME["Qwen3-8B"].config, **change})


def test_a_checkpoint_that_asks_for_an_8_bit_cache() -> None:
    scheme = {"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}}
    model = read_model({**BY_NAME["Qwen3-8B"].config, "quantization_config": scheme})
    assert model.cache_dtype == "fp8"
    assert read_model(BY_NAME["Qwen3-8B"].config).cache_dtype is None


def test_a_window_of_some_layers_only() -> None:
    model = read_model(BY_NAME["gpt-oss-120b"].config)
    assert model.layers[0] == (AttentionCache(8, 64, 64, window=128),)
    assert model.layers[1] == (AttentionCache(8, 64, 64),)


def test_gpt_oss_without_its_list_of_layers_alternates() -> None:
    config = {k: v for k, v in BY_NAME["gpt-oss-120b"].config.items() if k != "layer_types"}
    assert read_model(config) == read_model(BY_NAME["gpt-oss-120b"].config)


@pytest.mark.parametrize("cache_dtype", FORMATS)
def test_every_format_gives_a_whole_number_of_bytes(cache_dtype: str) -> None:
    name = "DeepSeek-V3" if cache_dtype == "fp8_ds_mla" else "Qwen3-8B"
    assert size_of(name, cache_dtype).unique_bytes_per_token > 0
