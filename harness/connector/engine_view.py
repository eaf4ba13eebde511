"""How the tier reads vLLM's objects: whether it can serve them, and what it needs to know of them.

With connector.py (hooks) and device.py (memory) all that the tier knows of vLLM; the peer's modules
apart. Differences between versions are probed, not versioned.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

from harness.connector.fingerprint import FingerprintError
from harness.connector.scheduler import ScheduledRequest


def refusal(vllm_config: Any, kv_cache_config: Any) -> str:
    """Why the tier cannot serve this model or topology; empty when it can."""
    parallel = vllm_config.parallel_config
    groups = kv_cache_config.kv_cache_groups
    reasons: list[str] = []
    if len(groups) != 1:
        reasons.append(f"the model has {len(groups)} KV cache groups; exactly one is supported")
    else:
        spec = groups[0].kv_cache_spec
        if type(spec).__name__ != "FullAttentionSpec":
            reasons.append(
                f"its KV cache is {type(spec).__name__}; only full attention is supported"
            )
        for name in ("sliding_window", "attention_chunk_size", "non_causal"):
            if getattr(spec, name, None):
                reasons.append(f"its attention has {name}={getattr(spec, name)}")
    for name in (
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        if getattr(parallel, name, 1) > 1:
            reasons.append(f"{name} is {getattr(parallel, name)}; only 1 is supported")
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is not None and getattr(speculative, "method", "") != "ngram":
        reasons.append("a draft model keeps KV of its own, which is not restored")
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        reasons.append("calculate_kv_scales makes KV depend on the first request")
    return "; ".join(reasons)


def tensor_parallel_rank(vllm_config: Any) -> int:
    """This worker's tensor-parallel rank."""
    if vllm_config.parallel_config.tensor_parallel_size == 1:
        return 0
    from vllm.distributed import get_tensor_model_parallel_rank

    rank: int = get_tensor_model_parallel_rank()
    return rank


def local_rank_count(vllm_config: Any) -> int:
    """Workers that take their own pool from this machine's memory, data parallel ones included."""
    parallel = vllm_config.parallel_config
    ranks = getattr(parallel, "local_world_size", parallel.tensor_parallel_size)
    return int(ranks) * max(1, int(getattr(parallel, "data_parallel_size_local", 1)))


def reads_tier(request: Any) -> bool:
    """False for requests that must compute their whole prompt, as for its log-probabilities."""
    return not (
        getattr(request, "skip_reading_prefix_cache", False) or getattr(request, "resumable", False)
    )


def kv_cache_spec(kv_cache_config: Any) -> Any:
    """The specification of the only KV cache group."""
    return kv_cache_config.kv_cache_groups[0].kv_cache_spec


def weights_path(model_config: Any) -> Path:
    """The directory or file of the weights on this machine."""
    path = Path(model_config.model)
    if path.exists():
        return path
    import huggingface_hub  # vLLM brings it; nothing else here does

    found = huggingface_hub.try_to_load_from_cache(
        model_config.model, "config.json", revision=getattr(model_config, "revision", None)
    )
    if not isinstance(found, str):
        raise FingerprintError(
            f"the weights of {model_config.model} were not found on this machine"
        )
    return Path(found).parent


def extra_keys(
    request: Any, start: int, end: int, image_index: int
) -> tuple[tuple[Any, ...] | None, int]:
    """What a block's KV depends on beside tokens: images, LoRA adapter, salt, embeddings."""
    extra, next_index = generate_block_hash_extra_keys(request, start, end, image_index)
    if (lora := getattr(request, "lora_request", None)) is not None:
        # Not every version names the adapter's path, and a name can be given to another adapter.
        extra = (*(extra or ()), ("lora_path", lora.lora_path))
    return extra, next_index


def scheduled_requests(output: Any) -> Iterator[ScheduledRequest]:
    """The step's requests, from vLLM's two lists."""
    scheduled = output.num_scheduled_tokens
    for new in output.scheduled_new_reqs:
        yield ScheduledRequest(
            new.req_id,
            new.num_computed_tokens,
            scheduled.get(new.req_id, 0),
            new.block_ids[0],
            replaces_blocks=True,
        )
    cached = output.scheduled_cached_reqs
    for request_id, computed, block_ids in zip(
        cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
    ):
        yield ScheduledRequest(
            request_id,
            computed,
            scheduled.get(request_id, 0),
            block_ids[0] if block_ids else (),
            replaces_blocks=request_id in cached.resumed_req_ids,
        )
