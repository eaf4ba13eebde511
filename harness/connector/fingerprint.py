"""Names everything that changes KV bytes. Standard library only; reads vLLM's configuration.

Two servers with equal fingerprints read each other's files. So the configuration is taken whole, as
vLLM holds it after every override, default and correction; ``ignored`` lists what cannot change a
byte, with the reasons. What has no stable name is refused: a miss costs time, a hit under another
configuration a wrong answer.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from harness.connector.canonical import UnnamedError, canonical
from harness.connector.ignored import counted_variables, is_ignored
from harness.connector.keys import NAMESPACE_VERSION

_SAMPLE_BYTES = 4096
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
# They make token ids, of which keys are made, or choose tokens. Every other JSON file counts:
# quantisation, image processing and adapters have theirs.
_TEXT_FILES = frozenset(
    {
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "chat_template.json",
        "generation_config.json",
    }
)
# Those that read the weights from the model's files; others may have them from anywhere.
_LOAD_FORMATS = frozenset(
    {
        "auto",
        "bitsandbytes",
        "dummy",
        "fastsafetensors",
        "gguf",
        "hf",
        "instanttensor",
        "mistral",
        "npcache",
        "pt",
        "runai_streamer",
        "runai_streamer_sharded",
        "safetensors",
        "sharded_state",
    }
)


class FingerprintError(ValueError):
    """The configuration or the weights cannot be named, so no KV may outlive the process."""


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
        if path.suffix == ".json" and path.name not in _TEXT_FILES:
            digest.update(f"{path.name}\0".encode() + path.read_bytes())
    for path in weights:
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            for offset in _sample_offsets(path, size):
                digest.update(os.pread(file.fileno(), _SAMPLE_BYTES, offset))
    return digest.hexdigest()


def code_digest(model: Path) -> str:
    """Names the Python files of a model's directory, whether they are in use or not.

    With ``trust_remote_code`` they compute the KV. Empty when there are none.
    """
    files = [] if model.is_file() else sorted(model.rglob("*.py"))
    digest = hashlib.sha256()
    for path in files:
        content = path.read_bytes()
        digest.update(f"{path.relative_to(model).as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest() if files else ""


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
    versions: dict[str, Any],
    platform: dict[str, Any],
    model: Path,
    code: Iterable[tuple[str, str]] = (),
    environment: Mapping[str, str],
) -> dict[str, Any]:
    """The content of a namespace's name. JSON-compatible; equal only when block bytes agree.

    ``configuration`` is all of vLLM's but what ``ignored`` lists. The keys on the first level that
    repeat some of it are those that ``kvgate tier`` shows.

    Args:
        spec: the single KV cache group's specification. layers: ``BlockLayout.layers``. versions:
        of vLLM, of what it computes with, and of this connector's format. platform: device type,
        attention backend, instruction set: what decides the order inside a block. model: directory
        or file of the weights. code: names and digests of modules in use that no version names.
        environment: of this process; only what can choose kernels is used.

    Raises:
        FingerprintError: something in effect has no stable name.
    """
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        raise FingerprintError(
            "weight_transfer_config is set: weights may be replaced while serving, and files would "
            "bear the name of those the server was started with; serve without "
            "--weight-transfer-config to keep files"
        )
    load_format = str(vllm_config.load_config.load_format)
    if load_format not in _LOAD_FORMATS:
        raise FingerprintError(
            f"load_format {load_format!r} may read weights from elsewhere than {model}; files are "
            f"kept with one of {', '.join(sorted(_LOAD_FORMATS))}"
        )
    try:
        configuration = canonical(vllm_config, name="vllm_config", ignores=is_ignored)
        cache = canonical(spec, name="kv_cache_spec")
    except UnnamedError as error:
        raise FingerprintError(
            f"no other process could give this configuration the same name: {error}; files are "
            "kept only without it"
        ) from error
    model_config = vllm_config.model_config
    return {
        "namespace_version": NAMESPACE_VERSION,
        "versions": versions,
        "platform": platform,
        "weights": weights_digest(model),
        "model_code": code_digest(model),
        "code": [list(pair) for pair in sorted(code)],
        "environment": counted_variables(environment),
        "configuration": configuration,
        "cache": cache,
        "quantization": str(model_config.quantization),
        "model_dtype": str(model_config.dtype),
        "cache_dtype": str(vllm_config.cache_config.cache_dtype),
        "block_tokens": spec.block_size,
        "kv_heads": spec.num_kv_heads,
        "head_size": spec.head_size,
        "tensor_parallel_size": vllm_config.parallel_config.tensor_parallel_size,
        "layers": layers,
    }
