"""Public architectures: values of their config.json as facts, and right answers worked by hand.

``source``: whose config.json. ``unique``, ``total_tp8``: bytes of one token in a 16-bit cache, each
element once, and over eight tensor-parallel ranks (None: the heads do not share out). ``state``:
bytes of a sequence's states on one rank. ``growing``: bytes that a token of a long session adds
where blocks behind a window are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Architecture:
    name: str
    source: str
    config: dict[str, Any]
    unique: int
    total_tp8: int | None
    growing: int
    state: int = 0


def _config(
    kind: str, layers: int, heads: int, kv: int | None, hidden: int, **more: Any
) -> dict[str, Any]:
    config = {
        "model_type": kind, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv, "hidden_size": hidden, "torch_dtype": "bfloat16", **more,
    }  # fmt: skip
    return {key: value for key, value in config.items() if value is not None}


_QWEN3_NEXT = {
    "head_dim": 256, "full_attention_interval": 4, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
_NEMOTRON_H = {
    "head_dim": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128,
    "n_groups": 8, "conv_kernel": 4,
    "hybrid_override_pattern": "M-M-M-M*-" + "M-M-M-M-M*-" * 3 + "M-M-M-M-M-",
}  # fmt: skip
_JAMBA = {
    "attn_layer_period": 8, "attn_layer_offset": 4, "mamba_expand": 2, "mamba_d_conv": 4,
    "mamba_d_state": 16,
}  # fmt: skip
_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}

ARCHITECTURES = [
    # 2 x 62 x 8 x 128 x 2. Eight ranks keep one head each: nothing is kept twice.
    Architecture(
        "Qwen3-Coder-480B", "Qwen/Qwen3-Coder-480B-A35B-Instruct",
        _config("qwen3_moe", 62, 96, 8, 6144, head_dim=128, use_sliding_window=False),
        253_952, 253_952, 253_952,
    ),
    # 2 x 94 x 4 x 128 x 2. Four heads on eight ranks: each twice.
    Architecture(
        "Qwen3-235B-A22B", "Qwen/Qwen3-235B-A22B",
        _config("qwen3_moe", 94, 64, 4, 4096, head_dim=128), 192_512, 385_024, 192_512,
    ),
    # 2 x 48 x 4 x 128 x 2
    Architecture(
        "Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B",
        _config("qwen3_moe", 48, 32, 4, 2048, head_dim=128), 98_304, 196_608, 98_304,
    ),
    # 2 x 36 x 8 x 128 x 2
    Architecture(
        "Qwen3-8B", "Qwen/Qwen3-8B",
        _config("qwen3", 36, 32, 8, 4096, head_dim=128), 147_456, 147_456, 147_456,
    ),
    # 2 x 24 x 2 x (896 / 14) x 2. Fourteen heads cannot be split in eight. Its window is off.
    Architecture(
        "Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B-Instruct",
        _config("qwen2", 24, 14, 2, 896, sliding_window=32768, use_sliding_window=False),
        12_288, None, 12_288,
    ),
    # 2 x 32 x 32 x (4096 / 32) x 2: one KV head per head
    Architecture(
        "Llama-2-7B", "meta-llama/Llama-2-7b-hf",
        _config("llama", 32, 32, 32, 4096, torch_dtype="float16"), 524_288, 524_288, 524_288,
    ),
    # 2 x 32 x 8 x (4096 / 32) x 2
    Architecture(
        "Llama-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct",
        _config("llama", 32, 32, 8, 4096), 131_072, 131_072, 131_072,
    ),
    # 2 x 80 x 8 x (8192 / 64) x 2
    Architecture(
        "Llama-3.1-70B", "meta-llama/Llama-3.1-70B-Instruct",
        _config("llama", 80, 64, 8, 8192), 327_680, 327_680, 327_680,
    ),
    # 2 x 126 x 8 x (16384 / 128) x 2
    Architecture(
        "Llama-3.1-405B", "meta-llama/Llama-3.1-405B-Instruct",
        _config("llama", 126, 128, 8, 16384), 516_096, 516_096, 516_096,
    ),
    # 2 x 48 x 8 x 128 x 2. Every fourth layer is full, 12 of 48; the others see chunks of 8192.
    Architecture(
        "Llama-4-Scout", "meta-llama/Llama-4-Scout-17B-16E-Instruct",
        {
            "model_type": "llama4", "torch_dtype": "bfloat16",
            "text_config": _config(
                "llama4_text", 48, 40, 8, 5120, head_dim=128, attention_chunk_size=8192,
                no_rope_layers=[1, 1, 1, 0] * 12,
            ),
        },
        196_608, 196_608, 49_152,
    ),
    # 2 x 32 x 8 x (4096 / 32) x 2
    Architecture(
        "Mixtral-8x7B", "mistralai/Mixtral-8x7B-Instruct-v0.1",
        _config("mixtral", 32, 32, 8, 4096, sliding_window=None), 131_072, 131_072, 131_072,
    ),
    # The same sizes; all layers see 4096 tokens, so a long session does not grow.
    Architecture(
        "Mistral-7B-v0.1", "mistralai/Mistral-7B-v0.1",
        _config("mistral", 32, 32, 8, 4096, sliding_window=4096), 131_072, 131_072, 0,
    ),
    # 61 x (512 + 64) x 2: one latent, of which each of eight ranks keeps all.
    Architecture(
        "DeepSeek-V3", "deepseek-ai/DeepSeek-V3",
        _config("deepseek_v3", 61, 128, 128, 7168, **_LATENT), 70_272, 562_176, 70_272,
    ),
    # 61 x ((512 + 64) x 2 + 128 + 4): the indexer's key of 128 bytes and its scale beside it
    Architecture(
        "DeepSeek-V3.2", "deepseek-ai/DeepSeek-V3.2-Exp",
        _config("deepseek_v32", 61, 128, 128, 7168, index_head_dim=128, **_LATENT),
        78_324, 626_592, 78_324,
    ),
    # 27 x (512 + 64) x 2
    Architecture(
        "DeepSeek-V2-Lite", "deepseek-ai/DeepSeek-V2-Lite",
        _config("deepseek_v2", 27, 16, 16, 2048, **_LATENT), 31_104, 248_832, 31_104,
    ),
    # As DeepSeek-V3, with 64 heads
    Architecture(
        "Kimi-K2", "moonshotai/Kimi-K2-Instruct",
        _config("kimi_k2", 61, 64, 64, 7168, **_LATENT), 70_272, 562_176, 70_272,
    ),
    # 2 x 36 x 8 x 64 x 2; half of the layers see 128 tokens.
    Architecture(
        "gpt-oss-120b", "openai/gpt-oss-120b",
        _config(
            "gpt_oss", 36, 64, 8, 2880, head_dim=64, sliding_window=128,
            layer_types=["sliding_attention", "full_attention"] * 18,
        ),
        73_728, 73_728, 36_864,
    ),
    # 2 x 62 x 16 x 128 x 2; one full layer after five of 1024 tokens: 10 of 62.
    Architecture(
        "Gemma-3-27B", "google/gemma-3-27b-it",
        {
            "model_type": "gemma3", "torch_dtype": "bfloat16",
            "text_config": _config(
                "gemma3_text", 62, 32, 16, 5376, head_dim=128, sliding_window=1024,
                torch_dtype=None,
            ),
        },
        507_904, 507_904, 81_920,
    ),
    # 2 x 46 x 16 x 128 x 2; every second layer sees 4096 tokens.
    Architecture(
        "Gemma-2-27B", "google/gemma-2-27b-it",
        _config("gemma2", 46, 32, 16, 4608, head_dim=128, sliding_window=4096),
        376_832, 376_832, 188_416,
    ),
    # 2 x 32 x 32 x (3072 / 32) x 2; all layers see 2047 tokens.
    Architecture(
        "Phi-3-mini-4k", "microsoft/Phi-3-mini-4k-instruct",
        _config("phi3", 32, 32, 32, 3072, sliding_window=2047), 393_216, 393_216, 0,
    ),
    # 2 x 92 x 8 x 128 x 2
    Architecture(
        "GLM-4.5", "zai-org/GLM-4.5",
        _config("glm4_moe", 92, 96, 8, 5120, head_dim=128), 376_832, 376_832, 376_832,
    ),
    # 2 x 32 x 1 x (4544 / 71) x 2: one KV head. 71 heads cannot be split.
    Architecture(
        "Falcon-7B", "tiiuae/falcon-7b",
        _config("falcon", 32, 71, None, 4544, multi_query=True, new_decoder_architecture=False),
        8_192, None, 8_192,
    ),
    # Attention in 12 of 48 layers: 2 x 12 x 2 x 256 x 2; two heads on eight ranks: four times.
    # State of the other 36: 3 x (2 x 16 x 128 + 32 x 128) = 24,576 of the convolution and
    # 32 x 128 x 128 = 524,288 recurrent elements; x 2 bytes = 1,097,728.
    Architecture(
        "Qwen3-Next-80B-A3B", "Qwen/Qwen3-Next-80B-A3B-Instruct",
        _config("qwen3_next", 48, 16, 2, 2048, **_QWEN3_NEXT),
        24_576, 98_304, 24_576, 39_518_208,
    ),
    # Attention in 4 of 52 layers: 2 x 4 x 8 x 128 x 2. State of 24: 3 x (128 x 64 + 2 x 8 x 128) =
    # 30,720 elements x 2 bytes + 128 x 64 x 128 = 1,048,576 x 4 bytes = 4,255,744.
    Architecture(
        "Nemotron-H-8B", "nvidia/Nemotron-H-8B-Base-8K",
        _config("nemotron_h", 52, 32, 8, 4096, **_NEMOTRON_H),
        16_384, 16_384, 16_384, 102_137_856,
    ),
    # Attention in 4 of 32 layers. State of 28: 8192 x 3 + 8192 x 16 = 155,648 elements x 2 bytes.
    Architecture(
        "Jamba-v0.1", "ai21labs/Jamba-v0.1",
        _config("jamba", 32, 32, 8, 4096, **_JAMBA), 16_384, 16_384, 16_384, 8_716_288,
    ),
]  # fmt: skip
