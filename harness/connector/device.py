"""Asks torch and the operating system about the device cache and this process."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from typing import Any

from harness.connector.layout import CacheTensor, LayoutError


def cache_tensors(kv_caches: Mapping[str, Any], layer_names: Sequence[str]) -> list[CacheTensor]:
    """Describes the registered tensors in the cache group's layer order.

    Raises:
        LayoutError: a layer is missing, is not one tensor, or is not in CPU memory.
    """
    import torch

    tensors: list[CacheTensor] = []
    for name in layer_names:
        tensor = kv_caches.get(name)
        if not isinstance(tensor, torch.Tensor):
            raise LayoutError(f"layer {name} registered {type(tensor).__name__}, not one tensor")
        if tensor.device.type != "cpu":
            raise LayoutError(
                f"layer {name} is on {tensor.device}; only CPU memory is supported yet"
            )
        storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        tensors.append(
            CacheTensor(
                name=name,
                storage=storage.numpy(),
                offset_bytes=tensor.storage_offset() * tensor.element_size(),
                shape=tuple(tensor.shape),
                strides=tuple(tensor.stride()),
                item_bytes=tensor.element_size(),
                dtype=str(tensor.dtype).removeprefix("torch."),
            )
        )
    return tensors


def platform_facts(vllm_config: Any, kv_cache_config: Any) -> dict[str, Any]:
    """What decides the order of bytes inside a block, for the fingerprint. JSON-compatible."""
    import torch

    # AMX, AVX-512 and plain vector kernels pack keys differently; which one runs follows from
    # these.
    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return {
        "device": "cpu",
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "amx": bool(has_amx()) if has_amx is not None else None,
        "attention_backends": _attention_backends(vllm_config, kv_cache_config),
        "kv_cache_layout": getattr(kv_cache_config, "kv_cache_layout", None),
    }


def allowed_cpus() -> frozenset[int]:
    """The CPUs this process was allowed before vLLM pinned its threads; empty when unknown.

    vLLM pins the worker's main thread to one core and new threads inherit that. The parent process
    is not pinned, so its mask is what an operator's taskset or container left.
    """
    try:
        return frozenset(os.sched_getaffinity(os.getppid()) | os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return frozenset(range(os.cpu_count() or 1))


def _attention_backends(vllm_config: Any, kv_cache_config: Any) -> list[str]:
    try:
        from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
    except ImportError:
        return ["unknown"]
    names = list(kv_cache_config.kv_cache_groups[0].layer_names)
    backends = get_current_attn_backends(vllm_config, names)
    return sorted(f"{backend.__module__}.{backend.__qualname__}" for backend in backends)
