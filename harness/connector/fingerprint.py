"""Names everything that changes KV bytes. Standard library only; reads vLLM's configuration.

Two servers with equal fingerprints may read each other's files, so whatever can change a byte
belongs in here, and nothing that cannot (engine id, number of device blocks, ports).
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_SAMPLE_BYTES = 4096
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


class FingerprintError(ValueError):
    """The model's weights cannot be named, so its KV must not outlive the process."""


def weights_digest(model: Path) -> str:
    """Names a model's weights by a digest of its configuration and samples of every tensor.

    Samples, because whole weights take minutes to read. Two per tensor, because a merged fine-tune
    changes the projections and leaves the file's sizes, first and last bytes as they were.

    Raises:
        FingerprintError: no weight file is there.
    """
    digest = hashlib.sha256()
    files = [model] if model.is_file() else sorted(p for p in model.iterdir() if p.is_file())
    weights = [p for p in files if p.suffix in _WEIGHT_SUFFIXES]
    if not weights:
        raise FingerprintError(f"{model} has no weight files ({', '.join(_WEIGHT_SUFFIXES)})")
    for path in files:
        if path.suffix == ".json":
            digest.update(f"{path.name}\0".encode() + path.read_bytes())
    for path in weights:
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            for offset in _sample_offsets(path, size):
                digest.update(os.pread(file.fileno(), _SAMPLE_BYTES, offset))
    return digest.hexdigest()


def _sample_offsets(path: Path, size: int) -> Iterator[int]:
    if path.suffix != ".safetensors":
        yield from range(0, size, max(_SAMPLE_BYTES, size // 1024))
        return
    with path.open("rb") as file:
        (header_bytes,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(header_bytes))
    yield from range(0, 8 + header_bytes, _SAMPLE_BYTES)
    for name in sorted(header):
        if name != "__metadata__":
            start, end = header[name]["data_offsets"]
            yield 8 + header_bytes + start
            yield 8 + header_bytes + (start + end) // 2


def fingerprint(
    *,
    vllm_config: Any,
    spec: Any,
    layers: list[dict[str, Any]],
    versions: dict[str, str],
    platform: dict[str, Any],
    model: Path,
) -> dict[str, Any]:
    """The content of a namespace's name: JSON-compatible, equal exactly when block bytes agree.

    Args:
        spec: the single KV cache group's specification. layers: ``BlockLayout.layers``. versions:
        of vLLM and of this connector's format. platform: device type, attention backend,
        instruction set: what decides the order inside a block. model: directory or file of the
        weights.

    Raises:
        FingerprintError: something in effect has no stable name.
    """
    model_config, parallel = vllm_config.model_config, vllm_config.parallel_config
    overrides = getattr(model_config, "hf_overrides", None) or {}
    if callable(overrides):
        raise FingerprintError("hf_overrides is a function; its effect has no stable name")
    rope = getattr(getattr(model_config, "hf_text_config", None), "rope_parameters", None)
    return {
        "versions": versions,
        "platform": platform,
        "weights": weights_digest(model),
        "load_format": str(vllm_config.load_config.load_format),
        "model_seed": model_config.seed
        if "dummy" in str(vllm_config.load_config.load_format)
        else None,
        "quantization": str(model_config.quantization),
        "model_dtype": str(model_config.dtype),
        "cache_dtype": str(vllm_config.cache_config.cache_dtype),
        "hf_overrides": json.loads(json.dumps(overrides, default=str)),
        # Some rotary embeddings stretch with the configured length; only then does it change KV.
        "max_model_len": model_config.max_model_len if "dynamic" in str(rope) else None,
        "block_tokens": spec.block_size,
        "kv_heads": spec.num_kv_heads,
        "head_size": spec.head_size,
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "layers": layers,
    }
