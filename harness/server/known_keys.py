"""Names of effective keys that servers of today state: to tell a misspelt one from a new one.

vLLM may state any key; those are compared all the same (docs/campaigns.md). Names of 0.20 and 0.32.
"""

from __future__ import annotations

# Keys by their own name in ``effective`` of server.json.
KNOWN_KEYS = frozenset(
    {
        "batched_tokens",
        "block_tokens",
        "chunked_prefill",
        "compute_threads",
        "connector",
        "connector_config",
        "data_parallel_size",
        "decode_context_parallel_size",
        "device_blocks",
        "device_config",
        "dtype",
        "enforce_eager",
        "engines",
        "kv_cache_dtype",
        "kv_capacity_tokens",
        "load_format",
        "max_model_len",
        "model",
        "pipeline_parallel_size",
        "prefix_caching",
        "quantization",
        "revision",
        "seed",
        "served_models",
        "skip_tokenizer_init",
        "speculative_config",
        "tensor_parallel",
        "tokenizer",
        "tokenizer_mode",
        "tokenizer_revision",
        "trust_remote_code",
    }
)
# Tables whose keys stand behind a dot, such as ``version.vllm``. What follows is vLLM's to name.
KNOWN_TABLES = frozenset(
    {
        "args",
        "cache",
        "compilation_config",
        "kernel_config",
        "observability_config",
        "override_neuron_config",
        "pooler_config",
        "speculative_config",
        "structured_outputs_config",
        "version",
    }
)
