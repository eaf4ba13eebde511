"""Stand-ins for vLLM's configuration objects: same type names, same fields, no vLLM.

The fields are those that vLLM 0.32 or 0.20.1 has; the values those of a small model.
"""

from __future__ import annotations

from typing import Any


class Fields:
    """An object that is its attributes, as vLLM's configuration classes are."""

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)


class VllmConfig(Fields): ...


class ModelConfig(Fields): ...


class CacheConfig(Fields): ...


class ParallelConfig(Fields): ...


class SchedulerConfig(Fields): ...


class LoadConfig(Fields): ...


class CompilationConfig(Fields): ...


class KVTransferConfig(Fields): ...


class AttentionConfig(Fields): ...


class LoRAConfig(Fields): ...


class HfConfig(Fields): ...


class FullAttentionSpec(Fields): ...


# Where it lies in the tree: section of VllmConfig, and its type. "" is VllmConfig itself.
SECTIONS: dict[str, type[Fields]] = {
    "model_config": ModelConfig,
    "cache_config": CacheConfig,
    "parallel_config": ParallelConfig,
    "scheduler_config": SchedulerConfig,
    "load_config": LoadConfig,
    "compilation_config": CompilationConfig,
    "kv_transfer_config": KVTransferConfig,
    "attention_config": AttentionConfig,
    "lora_config": LoRAConfig,
}


def configuration(**changes: Any) -> VllmConfig:
    """A whole configuration. ``changes``: by path, with two underscores for each dot.

    A path below ``model_config__hf_config`` changes the text configuration too, as in vLLM where
    both are one object for a text model.
    """
    hf = HfConfig(
        _name_or_path="/models/m",
        model_type="qwen3",
        architectures=["Qwen3ForCausalLM"],
        num_hidden_layers=2,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        sliding_window=None,
        id2label={0: "LABEL_0", 1: "LABEL_1"},
    )
    config = VllmConfig(
        model_config=ModelConfig(
            model="/models/m",
            hf_config=hf,
            hf_text_config=hf,
            hf_config_path=None,
            hf_overrides={},
            tokenizer="/models/m",
            served_model_name="m",
            seed=0,
            dtype="bfloat16",
            quantization=None,
            max_model_len=4096,
            revision=None,
            code_revision=None,
            trust_remote_code=False,
            enforce_eager=True,
            multimodal_config=None,
            pooler_config=None,
        ),
        cache_config=CacheConfig(
            block_size=16,
            cache_dtype="auto",
            calculate_kv_scales=False,
            sliding_window=None,
            num_gpu_blocks=100,
            gpu_memory_utilization=0.9,
            enable_prefix_caching=True,
        ),
        parallel_config=ParallelConfig(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            enable_expert_parallel=False,
            rank=0,
            master_port=29501,
            worker_cls="vllm.v1.worker.cpu_worker.CPUWorker",
        ),
        scheduler_config=SchedulerConfig(max_num_batched_tokens=2048, max_num_seqs=128),
        load_config=LoadConfig(load_format="auto", download_dir=None),
        compilation_config=CompilationConfig(
            mode=0, backend="inductor", custom_ops=["all"], traced_files=set(), cache_dir=""
        ),
        kv_transfer_config=KVTransferConfig(
            kv_connector="KvgateTierConnector",
            engine_id="8b2c",
            kv_connector_extra_config={"host_pool_bytes": 1},
        ),
        attention_config=AttentionConfig(backend=None),
        lora_config=LoRAConfig(max_lora_rank=16),
        speculative_config=None,
        quant_config=None,
        weight_transfer_config=None,
        instance_id="1",
        additional_config={},
    )
    for path, value in changes.items():
        *above, last = path.split("__")
        owner: Any = config
        for step in above:
            owner = getattr(owner, step)
        setattr(owner, last, value)
    return config
