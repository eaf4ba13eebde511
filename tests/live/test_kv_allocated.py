"""What the placement computes equals what a real vLLM on the CPU allocates, to block and token.

KVGATE_VLLM_PYTHON names a Python with vLLM. Tiny models of random weights, one engine each; the
attention kinds that the CPU backend runs. Not shown here: GPUs' own layouts, packed caches, more
than two ranks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.campaign.generated_model import ModelArchitecture, ensure_model, model_config
from harness.placement.cache import KVSize, Parallel
from harness.placement.headroom import GIB, server_tokens
from harness.placement.layers import read_model
from tests.live.vllm_server import BLOCK_TOKENS, prompt, serve, transfer, wait_until

pytestmark = pytest.mark.live

MIB = 2**20
KV_BYTES = 128 * MIB
MAX_MODEL_LEN = 4096
PROBE = Path(__file__).with_name("allocation_probe.py")


def _config(kind: str, architecture: str, **more: Any) -> dict[str, Any]:
    config = {
        "model_type": kind, "architectures": [architecture], "hidden_size": 256,
        "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 8192, "torch_dtype": "bfloat16", "rope_theta": 10000.0,
        "hidden_act": "silu", **more,
    }  # fmt: skip
    return {key: value for key, value in config.items() if value is not None}


_GEMMA_3 = _config(
    "gemma3_text", "Gemma3ForCausalLM", num_hidden_layers=7, sliding_window=512,
    sliding_window_pattern=6, hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=64,
    rope_local_base_freq=10000.0,
)  # fmt: skip
# Name -> config.json, arguments of LLM.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one KV head": (_config("llama", "LlamaForCausalLM", num_key_value_heads=1), {}),
    "8-bit cache": (_config("qwen3", "Qwen3ForCausalLM"), {"kv_cache_dtype": "fp8"}),
    "windows in all layers": (
        _config("mistral", "MistralForCausalLM", sliding_window=512),
        {},
    ),
    "windows in six of seven": (_GEMMA_3, {}),
    "windows that are kept": (_GEMMA_3, {"disable_hybrid_kv_cache_manager": True}),
    "latent": (
        _config(
            "deepseek_v2", "DeepseekV2ForCausalLM", head_dim=None, num_key_value_heads=4,
            kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128,
            n_routed_experts=2, n_shared_experts=1, first_k_dense_replace=4,
            moe_intermediate_size=128, num_experts_per_tok=1,
        ),
        {"block_size": 16},  # what the CPU's latent attention prefers
    ),
    "Mamba beside attention": (
        _config(
            "jamba", "JambaForCausalLM", head_dim=None, num_hidden_layers=8, attn_layer_period=4,
            attn_layer_offset=1, mamba_expand=2, mamba_d_conv=4, mamba_d_state=16,
            mamba_dt_rank=16, num_experts=1, num_experts_per_tok=1, expert_layer_period=2,
            expert_layer_offset=1, mamba_conv_bias=True, mamba_proj_bias=False,
        ),
        {},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def allocated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each engine allocated, by case."""
    root = tmp_path_factory.mktemp("models")
    results = root / "results.json"
    names = {case.replace(" ", "-"): case for case in CASES}
    for name, case in names.items():
        config, arguments = CASES[case]
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(config), encoding="utf-8")
        arguments = {
            "kv_cache_memory_bytes": KV_BYTES,
            "max_model_len": MAX_MODEL_LEN,
            "block_size": BLOCK_TOKENS,
            **arguments,
        }
        (root / name / "case.json").write_text(json.dumps(arguments), encoding="utf-8")
    argv = [os.environ["KVGATE_VLLM_PYTHON"], str(PROBE), str(results)]
    argv += [str(root / name) for name in names]
    log = root / "log"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would take the place of the argument
    with subprocess.Popen(
        [sys.executable, "-m", "harness.server.supervisor", str(log), "20", *argv],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as supervisor:  # fmt: skip
        assert supervisor.stdin is not None
        assert supervisor.stdout is not None
        try:
            pid = json.loads(supervisor.stdout.readline())["pid"]
            wait_until(lambda: results.exists() or not psutil.pid_exists(pid), "the results", 600.0)
        finally:
            supervisor.stdin.close()
            supervisor.stdout.read()
    assert results.exists(), log.read_text(errors="replace")[-3000:]
    found = json.loads(results.read_text(encoding="utf-8"))
    return {case: found[name] for name, case in names.items()}


@pytest.mark.parametrize("case", CASES)
def test_blocks_and_capacity_are_those_computed(case: str, allocated: dict[str, Any]) -> None:
    found = allocated[case]
    assert isinstance(found, dict), found
    config, arguments = CASES[case]
    size = KVSize(
        read_model(config),
        arguments.get("kv_cache_dtype", "bfloat16"),
        "bfloat16",
        block_tokens=arguments.get("block_size", BLOCK_TOKENS),
        drops_windows=not arguments.get("disable_hybrid_kv_cache_manager", False),
    )
    assert found["drops_windows"] is size.drops_windows
    assert found["block_tokens"] == size.page_tokens
    blocks = KV_BYTES // size.block_bytes
    assert found["blocks"] == blocks
    assert found["capacity_tokens"] == server_tokens(
        size,
        blocks=blocks,
        max_model_len=MAX_MODEL_LEN,
        in_flight_tokens=found["in_flight_tokens"],
        state_blocks=2 if found["mamba_cache_mode"] == "align" else 1,
    )


def test_two_ranks_that_keep_the_same_head(tmp_path: Path) -> None:
    """One KV head on two ranks: each keeps it whole. The bytes that the connector restores are
    tokens x bytes of all ranks together; its ready line tells those of one."""
    if (os.cpu_count() or 1) < 2:
        pytest.skip("two workers need two cores")
    architecture = ModelArchitecture(num_layers=2, num_kv_heads=1)
    size = KVSize(
        read_model(model_config(architecture)), "bfloat16", "bfloat16",
        parallel=Parallel(tensor=2), block_tokens=BLOCK_TOKENS,
    )  # fmt: skip
    assert size.ranks_total_bytes_per_token == 2 * size.unique_bytes_per_token
    blocks, sessions = 4, [prompt(session, 4) for session in range(2)]
    with serve(
        ensure_model(architecture, tmp_path),
        tmp_path / "log",
        transfer({"host_pool_bytes": 1 << 27}),
        arguments=("--tensor-parallel-size", "2"),
        environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    ) as server:
        ready = server.ready_line()
        assert ready["rank_count"] == 2
        assert ready["kv_bytes_per_token"] == size.rank_bytes_per_token
        server.ask_all(sessions)
        server.wait_durable()
        server.reset(external=False)
        server.ask_all(sessions)
        tokens = server.metric("kvgate:tier_hit_tokens_total", tier="host")
        assert tokens == len(sessions) * blocks * BLOCK_TOKENS
        restored = server.metric("kvgate:tier_read_bytes_total", tier="host")
        assert restored == tokens * size.ranks_total_bytes_per_token
        labels = next(
            dict(pairs) for name, pairs in server.metrics() if name == "vllm:cache_config_info"
        )
        assert int(labels["num_gpu_blocks"]) == GIB // size.block_bytes
        assert int(labels["kv_cache_size_tokens"]) == GIB // size.block_bytes * BLOCK_TOKENS
