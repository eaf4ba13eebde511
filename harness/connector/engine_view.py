"""How the tier reads vLLM's objects: whether it can serve them, and what it needs to know of them.

With connector.py (hooks) and device.py (memory) all that the tier knows of vLLM; the peer's modules
apart. Differences between versions are probed, not versioned.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

from harness.connector.fingerprint import FingerprintError
from harness.connector.scheduler import ScheduledRequest

_REMOTE_CODE = "transformers_modules."
_NAMED_BY_VERSION = frozenset({"vllm", "torch", "transformers", *sys.stdlib_module_names})


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


def computing_versions() -> dict[str, Any]:
    """Versions of the packages that compute KV: vLLM's, what it builds on, and its plugins."""
    groups = [name for name in importlib.metadata.entry_points().groups if name.startswith("vllm.")]
    plugins = {
        entry.dist.name: entry.dist.version
        for group in groups
        for entry in importlib.metadata.entry_points(group=group)
        if entry.dist is not None
    }
    named = ("torch", "transformers")
    return {**{name: importlib.metadata.version(name) for name in named}, "plugins": plugins}


def code_in_use(vllm_config: Any) -> list[tuple[str, str]]:
    """Names and digests of the modules that compute KV and belong to no package with a version.

    They are the model's own code (``trust_remote_code``), classes registered from outside vLLM, and
    the workers' classes; each with the source that this process imported it from.

    Raises:
        FingerprintError: the model's class is unknown, or a module's source cannot be found.
    """
    from vllm.model_executor.model_loader.utils import get_model_architecture

    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    try:
        model_class, _ = get_model_architecture(model)
    except Exception as error:
        raise FingerprintError(f"the model's class cannot be found again: {error}") from error
    classes = {*model_class.__mro__, type(model.hf_config), type(model.hf_text_config)}
    modules = {each.__module__ for each in classes}
    modules |= {name for name in sys.modules if name.startswith(_REMOTE_CODE)}
    for worker in (parallel.worker_cls, getattr(parallel, "worker_extension_cls", "")):
        modules.add(worker.rpartition(".")[0] if isinstance(worker, str) else worker.__module__)
    found = []
    for module in modules:
        if module.partition(".")[0] not in _NAMED_BY_VERSION and module:
            name = module.rpartition(".")[2] if module.startswith(_REMOTE_CODE) else module
            if (source := _source(module)) is not None:
                found.append((name, hashlib.sha256(source.read_bytes()).hexdigest()))
    return sorted(found)


def _source(module: str) -> Path | None:
    """Where a module was imported from; None for a package without code of its own."""
    if (loaded := sys.modules.get(module)) is not None:
        if loaded.__file__ is None and hasattr(loaded, "__path__"):
            return None
        origin = loaded.__file__
    elif module.startswith(_REMOTE_CODE):  # its classes came here as values, without an import
        from transformers.utils.hub import HF_MODULES_CACHE

        origin = f"{HF_MODULES_CACHE}/{module.replace('.', '/')}.py"
    else:
        origin = None
    if origin is None or not Path(origin).is_file():
        raise FingerprintError(f"the source of module {module}, which computes KV, was not found")
    return Path(origin)


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
