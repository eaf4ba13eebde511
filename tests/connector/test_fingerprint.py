"""The namespace changes with everything that changes KV, and with nothing else."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.connector.fingerprint import FingerprintError, fingerprint, weights_digest
from harness.connector.keys import namespace_of


def _write_model(directory: Path, tensors: dict[str, bytes]) -> Path:
    directory.mkdir(exist_ok=True)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, content in tensors.items():
        header[name] = {
            "dtype": "BF16", "shape": [len(content) // 2],
            "data_offsets": [offset, offset + len(content)],
        }  # fmt: skip
        offset += len(content)
    text = json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(
        struct.pack("<Q", len(text)) + text + b"".join(tensors.values())
    )
    (directory / "config.json").write_text("{}")
    return directory


TENSORS = {"first": b"a" * 50_000, "middle": b"b" * 50_000, "last": b"c" * 50_000}


def _of(model: Path, **changes: Any) -> str:
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            hf_overrides=changes.get("hf_overrides", {}),
            hf_text_config=SimpleNamespace(rope_parameters=changes.get("rope")),
            seed=changes.get("seed", 0),
            quantization=None,
            dtype=changes.get("dtype", "bf16"),
            max_model_len=changes.get("max_model_len", 100),
        ),
        load_config=SimpleNamespace(load_format=changes.get("load_format", "auto")),
        cache_config=SimpleNamespace(cache_dtype=changes.get("cache_dtype", "auto")),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )
    spec = SimpleNamespace(block_size=changes.get("block_size", 16), num_kv_heads=1, head_size=8)
    facts = fingerprint(
        vllm_config=config,
        spec=spec,
        layers=[{"name": changes.get("layer", "l0")}],
        versions={"vllm": changes.get("version", "1")},
        platform={"amx": changes.get("amx", False)},
        model=model,
    )
    assert json.loads(json.dumps(facts)) == facts
    return namespace_of(facts)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return _write_model(tmp_path / "model", TENSORS)


@pytest.mark.parametrize(
    "changes",
    [
        {"hf_overrides": {"x": 1}},
        {"dtype": "fp16"},
        {"cache_dtype": "fp8"},
        {"block_size": 32},
        {"layer": "l1"},
        {"version": "2"},
        {"amx": True},
        {"load_format": "dummy"},
    ],
)
def test_what_changes_kv_changes_the_namespace(model: Path, changes: dict[str, Any]) -> None:
    assert _of(model, **changes) != _of(model)


def test_what_does_not_change_kv_does_not(model: Path) -> None:
    assert _of(model, max_model_len=200, seed=1) == _of(model)


def test_context_length_counts_only_with_dynamic_rope(model: Path) -> None:
    rope = {"rope_type": "dynamic"}
    assert _of(model, rope=rope, max_model_len=200) != _of(model, rope=rope)


def test_dummy_weights_follow_the_seed(model: Path) -> None:
    assert _of(model, load_format="dummy", seed=1) != _of(model, load_format="dummy")


def test_a_function_as_override_has_no_name(model: Path) -> None:
    with pytest.raises(FingerprintError, match="hf_overrides"):
        _of(model, hf_overrides=lambda config: config)


def test_weights_digest_is_independent_of_place(model: Path, tmp_path: Path) -> None:
    assert weights_digest(_write_model(tmp_path / "copy", TENSORS)) == weights_digest(model)


@pytest.mark.parametrize("name", list(TENSORS))
def test_one_changed_tensor_changes_the_digest(model: Path, tmp_path: Path, name: str) -> None:
    other = _write_model(tmp_path / "tuned", {**TENSORS, name: b"x" * 50_000})
    assert weights_digest(other) != weights_digest(model)


def test_a_single_file_model(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"gguf" * 5000)
    before = weights_digest(path)
    path.write_bytes(b"fugg" * 5000)
    assert weights_digest(path) != before


def test_a_model_without_weights_has_no_name(tmp_path: Path) -> None:
    with pytest.raises(FingerprintError, match="no weight files"):
        weights_digest(tmp_path)
