"""What of vLLM's configuration cannot change a block's bytes, each with the reason. Pure data.

Everything that is not listed counts, also what a later vLLM adds: an unknown key costs a miss, a
key listed here in error would cost wrong answers. So a key is listed only when its reason holds for
every value, and when it differs between starts by itself or is commonly set otherwise; keys that
are merely harmless are not worth a line.

Rounding is no reason to count a key that only says how the same work is cut into steps, batches and
threads: one server mixes all of these within one prompt's blocks, with or without a tier. Which
kernels compute, compiled or not, in which precision, does count.
"""

from __future__ import annotations

from collections.abc import Mapping

# By reason: "Type.field" with the type's bare name; "*" for any type. Names are those of vLLM 0.32
# and 0.20.1; a name that one of them lacks is harmless.
IGNORED: Mapping[str, tuple[str, ...]] = {
    "a place; what lies there is digested (weights, JSON files, code, the configuration read)": (
        "ModelConfig.model",
        "ModelConfig.hf_config_path",
        "ModelConfig.revision",
        "ModelConfig.code_revision",
        "ModelConfig._hf_config_revision",
        "*._name_or_path",
        "*._commit_hash",
        "LoadConfig.download_dir",
    ),
    "a block's key is made of token ids; what made them from text comes before": (
        "ModelConfig.tokenizer",
        "ModelConfig.tokenizer_mode",
        "ModelConfig.tokenizer_revision",
        "ModelConfig.skip_tokenizer_init",
        "ModelConfig.renderer_num_workers",
    ),
    "chooses or checks tokens after the last hidden state; any token gives its KV": (
        "ModelConfig.max_logprobs",
        "ModelConfig.logprobs_mode",
        "ModelConfig.generation_config",
        "ModelConfig.override_generation_config",
        "ModelConfig.logits_processors",
        "ModelConfig.use_fp64_gumbel",
        "VllmConfig.structured_outputs_config",
        "VllmConfig.reasoning_config",
        "VllmConfig.watermark_config",
    ),
    "a name for clients, or what clients may ask for": (
        "ModelConfig.served_model_name",
        "ModelConfig.allowed_local_media_path",
        "ModelConfig.allowed_media_domains",
        "ModelConfig.hf_token",
    ),
    "reports; computes nothing": (
        "VllmConfig.observability_config",
        "VllmConfig.logging_config",
        "VllmConfig.profiler_config",
        "VllmConfig.kv_events_config",
        "LoadConfig.use_tqdm_on_load",
    ),
    "how many blocks there are and which are kept, not what is in one": (
        "CacheConfig.gpu_memory_utilization",
        "CacheConfig.num_gpu_blocks",
        "CacheConfig.num_cpu_blocks",
        "CacheConfig.num_gpu_blocks_override",
        "CacheConfig.kv_cache_memory_bytes",
        "CacheConfig.kv_cache_size_tokens",
        "CacheConfig.kv_cache_max_concurrency",
        "CacheConfig.enable_prefix_caching",
        "CacheConfig.prefix_caching_hash_algo",
        "CacheConfig.prefix_cache_retention_interval",
        "CacheConfig.hash_block_size",
        "KVTransferConfig.kv_connector_extra_config",  # of this tier: sizes, places, times
        "KVTransferConfig.kv_load_failure_policy",
    ),
    "when a request is computed and with which others": (
        "SchedulerConfig.max_num_seqs",
        "SchedulerConfig.max_num_active_seqs",
        "SchedulerConfig.max_num_queued_reqs",
        "SchedulerConfig.max_num_queued_tokens",
        "SchedulerConfig.policy",
        "SchedulerConfig.async_scheduling",
        "SchedulerConfig.stream_interval",
        "SchedulerConfig.watermark",
        "SchedulerConfig.scheduler_reserve_full_isl",
        "VllmConfig.shutdown_timeout",
    ),
    "which process this is and how the others are reached; each rank has its own files": (
        "VllmConfig.instance_id",
        "KVTransferConfig.engine_id",
        "KVTransferConfig.kv_ip",
        "KVTransferConfig.kv_port",
        "KVTransferConfig.kv_rank",
        "KVTransferConfig.kv_buffer_size",
        "ECTransferConfig.engine_id",
        "ECTransferConfig.ec_ip",
        "ECTransferConfig.ec_port",
        "ECTransferConfig.ec_rank",
        "ParallelConfig.rank",
        "ParallelConfig.node_rank",
        "ParallelConfig.master_addr",
        "ParallelConfig.master_port",
        "ParallelConfig.data_parallel_rank",
        "ParallelConfig.data_parallel_rank_local",
        "ParallelConfig.data_parallel_index",
        "ParallelConfig.data_parallel_master_ip",
        "ParallelConfig.data_parallel_master_port",
        "ParallelConfig.data_parallel_rpc_port",
        "ParallelConfig._data_parallel_master_port_list",
        "ParallelConfig._coord_store_port",
        "ParallelConfig._api_process_count",
        "ParallelConfig._api_process_rank",
        "ParallelConfig.placement_group",
        "ParallelConfig.numa_bind",
        "ParallelConfig.numa_bind_nodes",
        "ParallelConfig.numa_bind_cpus",
        "ParallelConfig.assigned_physical_gpu_ids",
        "ParallelConfig.distributed_timeout_seconds",
        "ParallelConfig.cpu_distributed_timeout_seconds",
    ),
    "a record of what compiling did, or where it is kept; the settings it follows from count": (
        "CompilationConfig.cache_dir",
        "CompilationConfig.local_cache_dir",
        "CompilationConfig.debug_dump_path",
        "CompilationConfig.compilation_time",
        "CompilationConfig.encoder_compilation_time",
        "CompilationConfig.traced_files",
        "CompilationConfig.enabled_custom_ops",
        "CompilationConfig.disabled_custom_ops",
        "CompilationConfig.static_forward_context",
        "CompilationConfig.static_all_moe_layers",
    ),
}
_NAMES = frozenset(name for names in IGNORED.values() for name in names)

# Variables with these beginnings choose kernels and instruction sets. All that are set count, but:
VARIABLE_PREFIXES = ("VLLM_", "ONEDNN_", "DNNL_", "ATEN_", "MKL_")
IGNORED_VARIABLES: Mapping[str, tuple[str, ...]] = {
    "a secret": ("VLLM_API_KEY",),
    "reports; computes nothing": (
        "VLLM_LOGGING_LEVEL",
        "VLLM_LOGGING_PREFIX",
        "VLLM_LOGGING_STREAM",
        "VLLM_LOGGING_CONFIG_PATH",
        "VLLM_LOGGING_COLOR",
        "VLLM_CONFIGURE_LOGGING",
        "VLLM_LOG_STATS_INTERVAL",
        "VLLM_DEBUG_LOG_API_SERVER_RESPONSE",
        "VLLM_NO_USAGE_STATS",
        "VLLM_DO_NOT_TRACK",
        "VLLM_USAGE_SOURCE",
        "VLLM_USAGE_STATS_SERVER",
        "VLLM_TRACE_FUNCTION",
        "ONEDNN_VERBOSE",
        "DNNL_VERBOSE",
        "MKL_VERBOSE",
    ),
    "a place of caches, sockets or other processes": (
        "VLLM_CACHE_ROOT",
        "VLLM_CONFIG_ROOT",
        "VLLM_ASSETS_CACHE",
        "VLLM_RPC_BASE_PATH",
        "VLLM_HOST_IP",
        "VLLM_LOOPBACK_IP",
        "VLLM_PORT",
        "VLLM_DIST_IDENT",  # vLLM sets it: a port
        "VLLM_DP_RANK",
        "VLLM_DP_RANK_LOCAL",
        "VLLM_DP_MASTER_IP",
        "VLLM_DP_MASTER_PORT",
        "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME",
    ),
    "how many blocks there are, how processes start, which doors the server opens": (
        "VLLM_CPU_KVCACHE_SPACE",
        "VLLM_WORKER_MULTIPROC_METHOD",
        "VLLM_ENABLE_V1_MULTIPROCESSING",
        "VLLM_SERVER_DEV_MODE",
        "VLLM_ENGINE_READY_TIMEOUT_S",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE",
        "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH",
    ),
    "how the same work is cut into threads": (
        "VLLM_CPU_OMP_THREADS_BIND",
        "VLLM_CPU_NUM_OF_RESERVED_CPU",
        "MKL_NUM_THREADS",
        "MKL_DYNAMIC",
    ),
}
_VARIABLES = frozenset(name for names in IGNORED_VARIABLES.values() for name in names)


def is_ignored(owner: type, field: str) -> bool:
    """Whether a field of an object of type ``owner`` cannot change a block's bytes. Pure."""
    return f"{owner.__name__}.{field}" in _NAMES or f"*.{field}" in _NAMES


def counted_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that can change a block's bytes. Pure."""
    return {
        name: text
        for name, text in environment.items()
        if name.startswith(VARIABLE_PREFIXES) and name not in _VARIABLES
    }
