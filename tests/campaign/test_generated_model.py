"""The generated model: reproducible bytes, a file format that others can read, safe to race for."""

from __future__ import annotations

import hashlib
import json
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from harness.campaign.generated_model import ModelArchitecture, ensure_model

SMALL = ModelArchitecture(
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_attention_heads=2,
    num_kv_heads=1,
    head_size=16,
    vocab_size=300,
    dtype="bfloat16",
    seed=7,
)
FILES = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
]


def digests(directory: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        for path in sorted(directory.iterdir())
    }


def header_of(directory: Path) -> tuple[dict[str, Any], bytes]:
    """Header and tensor bytes, read as the safetensors format describes."""
    content = (directory / "model.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def test_an_architecture_gives_the_same_bytes_on_every_machine(tmp_path: Path) -> None:
    # Golden: a change here changes every saved digest; raise GENERATOR_VERSION with it.
    assert digests(ensure_model(SMALL, tmp_path)) == {
        "config.json": "486b5c7e187a47b4",
        "generation_config.json": "1b48d9bae9375791",
        "model.safetensors": "4fb7f11b4de3bc20",
        "tokenizer.json": "5b99c594e97ba335",
        "tokenizer_config.json": "e2ebf71a23a821b4",
    }


def test_another_seed_gives_other_weights_and_the_same_shape(tmp_path: Path) -> None:
    one = ensure_model(SMALL, tmp_path)
    other = ensure_model(ModelArchitecture(**{**SMALL.__dict__, "seed": 8}), tmp_path)
    assert one != other
    assert digests(one)["model.safetensors"] != digests(other)["model.safetensors"]
    assert header_of(one)[0] == header_of(other)[0]
    assert digests(one)["config.json"] == digests(other)["config.json"]


def test_the_name_tells_architectures_apart() -> None:
    assert ModelArchitecture().digest != ModelArchitecture(num_layers=9).digest
    assert ModelArchitecture().digest == ModelArchitecture().digest


def test_tensors_lie_back_to_back_and_fill_the_file(tmp_path: Path) -> None:
    header, tensors = header_of(ensure_model(SMALL, tmp_path))
    assert header.pop("__metadata__") == {"format": "pt"}
    offset = 0
    for entry in header.values():
        begin, end = entry["data_offsets"]
        count = 1
        for extent in entry["shape"]:
            count *= extent
        assert entry["dtype"] == "BF16"
        assert (begin, end - begin) == (offset, 2 * count)
        offset = end
    assert offset == len(tensors)


def test_the_header_is_padded_to_eight_bytes(tmp_path: Path) -> None:
    content = (ensure_model(SMALL, tmp_path) / "model.safetensors").read_bytes()
    assert struct.unpack("<Q", content[:8])[0] % 8 == 0


def test_attention_tensors_have_the_shapes_of_the_config(tmp_path: Path) -> None:
    directory = ensure_model(SMALL, tmp_path)
    header, _tensors = header_of(directory)
    config = json.loads((directory / "config.json").read_text())
    assert header["model.layers.1.self_attn.q_proj.weight"]["shape"] == [2 * 16, 32]
    assert header["model.layers.1.self_attn.k_proj.weight"]["shape"] == [1 * 16, 32]
    assert header["lm_head.weight"]["shape"] == [300, 32]
    assert (config["num_hidden_layers"], config["num_key_value_heads"]) == (2, 1)
    assert (config["head_dim"], config["vocab_size"]) == (16, 300)


def test_a_16_bit_weight_is_the_32_bit_one_rounded(tmp_path: Path) -> None:
    _header, narrow = header_of(ensure_model(SMALL, tmp_path))
    wide_arch = ModelArchitecture(**{**SMALL.__dict__, "dtype": "float32"})
    _header, wide = header_of(ensure_model(wide_arch, tmp_path))
    assert len(wide) == 2 * len(narrow)
    for index in range(2000):
        (value,) = struct.unpack_from("<f", wide, 4 * index)
        (upper,) = struct.unpack_from("<H", narrow, 2 * index)
        (rounded,) = struct.unpack("<f", struct.pack("<I", upper << 16))
        assert abs(rounded - value) <= abs(value) / 256


def test_the_tokenizer_has_one_token_per_byte_and_fills_the_vocabulary(tmp_path: Path) -> None:
    tokenizer = json.loads((ensure_model(SMALL, tmp_path) / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(300))
    assert vocabulary["A"] == ord("A")
    assert vocabulary["<|end|>"] == 256


def test_a_model_that_is_there_is_not_made_again(tmp_path: Path) -> None:
    directory = ensure_model(SMALL, tmp_path)
    before = (directory / "model.safetensors").stat()
    assert ensure_model(SMALL, tmp_path) == directory
    assert (directory / "model.safetensors").stat().st_ino == before.st_ino


def test_threads_may_race_for_a_model(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: ensure_model(SMALL, tmp_path), range(8)))
    assert len(set(found)) == 1
    assert [p.name for p in tmp_path.iterdir()] == [found[0].name]
    assert sorted(p.name for p in found[0].iterdir()) == FILES


def test_processes_may_race_for_a_model(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from harness.campaign.generated_model import *; "
        "print(ensure_model(ModelArchitecture(num_layers=1, vocab_size=300), Path(sys.argv[1])))"
    )
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    outputs = {run.communicate()[0] for run in runs}
    assert [run.returncode for run in runs] == [0, 0, 0]
    assert len(outputs) == 1
    assert len(list(tmp_path.iterdir())) == 1


def test_a_failed_generation_leaves_nothing(tmp_path: Path) -> None:
    broken = ModelArchitecture(**{**SMALL.__dict__, "dtype": "int4"})
    with pytest.raises(KeyError):
        ensure_model(broken, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_default_architecture_is_sound() -> None:
    ModelArchitecture().check()
