"""Generates the small language model of CPU campaigns, byte for byte reproducible.

No weights are downloaded: the files are a function of (architecture, seed). Weights are drawn so
that the output depends on the whole context; a plain random initialisation repeats one token
whatever the KV holds, and every output oracle would pass on it (docs/adr/0004-generated-model.md).
Knows nothing of servers or campaigns.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

GENERATOR_VERSION = 1
_DTYPE_BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class ModelArchitecture:
    """A Qwen3 decoder. ``initializer_*``: standard deviations; ``*_gain`` scale single tensors."""

    hidden_size: int = 512
    intermediate_size: int = 1536
    num_layers: int = 8
    num_attention_heads: int = 8
    num_kv_heads: int = 4
    head_size: int = 64
    vocab_size: int = 512
    max_position: int = 16384
    dtype: str = "bfloat16"
    seed: int = 20260718
    initializer_std: float = 0.06
    lm_head_std: float = 0.2
    qk_norm_weight: float = 2.0
    o_proj_gain: float = 3.0

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of key and value of one token over all layers (cache in ``dtype``)."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_size * _DTYPE_BYTES[self.dtype]

    def check(self) -> None:
        """Raises ValueError for a decoder that cannot be: sizes, heads, vocabulary, dtype."""
        kinds: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,)}
        for f in fields(self):
            value: Any = getattr(self, f.name)
            kind = str(f.type)
            if type(value) not in kinds[kind]:
                raise ValueError(f"{f.name}: found {value!r}; allowed: {kind}")
            if f.name != "seed" and kind != "str" and not value > 0:
                raise ValueError(f"{f.name}: found {value!r}; allowed: above 0")
        if self.dtype not in _DTYPE_BYTES:
            raise ValueError(f"dtype: found {self.dtype!r}; allowed: {', '.join(_DTYPE_BYTES)}")
        if self.num_attention_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads: found {self.num_kv_heads}; allowed: a divisor of "
                f"num_attention_heads = {self.num_attention_heads}"
            )
        if self.vocab_size < 257:
            raise ValueError(f"vocab_size: found {self.vocab_size}; allowed: at least 257")

    @property
    def digest(self) -> str:
        """Names the generated files: the same digest means the same bytes."""
        text = json.dumps({"generator": GENERATOR_VERSION, **asdict(self)}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def ensure_model(architecture: ModelArchitecture, root: Path) -> Path:
    """Returns the model directory below ``root``, generating it first when it is not there.

    Atomic: the directory appears under its final name only when complete, so two runs may race.
    """
    target = root / f"qwen3-generated-{architecture.digest}"
    if (target / "model.safetensors").is_file():
        return target
    root.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=root, prefix=f".{target.name}."))
    partial.chmod(0o755)
    try:
        _write_model(architecture, partial)
        try:
            partial.rename(target)
        except OSError:
            if not (target / "model.safetensors").is_file():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _write_model(arch: ModelArchitecture, directory: Path) -> None:
    _write_safetensors(arch, directory / "model.safetensors")
    for name, content in (
        ("config.json", model_config(arch)),
        ("tokenizer.json", _tokenizer(arch)),
        ("tokenizer_config.json", _TOKENIZER_CONFIG),
        ("generation_config.json", {"eos_token_id": 256, "pad_token_id": 256}),
    ):
        (directory / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _write_safetensors(arch: ModelArchitecture, path: Path) -> None:
    """The safetensors format: header length (u64, little endian), JSON header, packed tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    buffers: list[bytes] = []
    offset = 0
    for name, array in _tensors(arch):
        data = _to_bytes(array, arch.dtype)
        end = offset + len(data)
        dtype = {"bfloat16": "BF16", "float32": "F32"}[arch.dtype]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [offset, end]}
        buffers.append(data)
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.writelines(buffers)


def _tensors(arch: ModelArchitecture) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    # RandomState, not Generator: numpy freezes its stream for ever (NEP 19), so the digest keeps
    # its promise.
    rng = np.random.RandomState(arch.seed % 2**32)
    hidden, heads, head = arch.hidden_size, arch.num_attention_heads, arch.head_size

    def normal(rows: int, columns: int, std: float) -> np.ndarray[Any, Any]:
        return (rng.standard_normal((rows, columns)) * std).astype(np.float32)

    def ones(size: int, value: float = 1.0) -> np.ndarray[Any, Any]:
        return np.full(size, value, dtype=np.float32)

    std = arch.initializer_std
    yield "model.embed_tokens.weight", normal(arch.vocab_size, hidden, std)
    for layer in range(arch.num_layers):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", ones(hidden)
        yield prefix + "self_attn.q_proj.weight", normal(heads * head, hidden, std)
        yield prefix + "self_attn.k_proj.weight", normal(arch.num_kv_heads * head, hidden, std)
        yield prefix + "self_attn.v_proj.weight", normal(arch.num_kv_heads * head, hidden, std)
        yield (
            prefix + "self_attn.o_proj.weight",
            normal(hidden, heads * head, std) * np.float32(arch.o_proj_gain),
        )
        yield prefix + "self_attn.q_norm.weight", ones(head, arch.qk_norm_weight)
        yield prefix + "self_attn.k_norm.weight", ones(head, arch.qk_norm_weight)
        yield prefix + "post_attention_layernorm.weight", ones(hidden)
        yield prefix + "mlp.gate_proj.weight", normal(arch.intermediate_size, hidden, std)
        yield prefix + "mlp.up_proj.weight", normal(arch.intermediate_size, hidden, std)
        yield prefix + "mlp.down_proj.weight", normal(hidden, arch.intermediate_size, std)
    yield "model.norm.weight", ones(hidden)
    yield "lm_head.weight", normal(arch.vocab_size, hidden, arch.lm_head_std)


def _to_bytes(array: np.ndarray[Any, Any], dtype: str) -> bytes:
    if dtype == "float32":
        return array.astype("<f4").tobytes()
    bits = array.astype("<f4").view("<u4")
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)  # round to nearest even, as hardware does
    return bytes((rounded >> 16).astype("<u2").tobytes())


def model_config(arch: ModelArchitecture) -> dict[str, Any]:
    """The generated model's config.json."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": arch.hidden_size,
        "intermediate_size": arch.intermediate_size,
        "num_hidden_layers": arch.num_layers,
        "num_attention_heads": arch.num_attention_heads,
        "num_key_value_heads": arch.num_kv_heads,
        "head_dim": arch.head_size,
        "vocab_size": arch.vocab_size,
        "max_position_embeddings": arch.max_position,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": arch.initializer_std,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": arch.dtype,
        "use_cache": True,
        "use_sliding_window": False,
        "eos_token_id": 256,
        "pad_token_id": 256,
    }


def _tokenizer(arch: ModelArchitecture) -> dict[str, Any]:
    """A byte-level tokenizer without merges: one token per byte, then <|end|>, then unused ids."""
    alphabet = _byte_alphabet()
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    for index in range(257, arch.vocab_size):
        vocabulary[f"<|unused{index}|>"] = index
    return {
        "version": "1.0",
        "added_tokens": [
            {
                "id": 256,
                "content": "<|end|>",
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": False,
        },
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": False,
        },
        "model": {"type": "BPE", "vocab": {**vocabulary, "<|end|>": 256}, "merges": []},
    }


def _byte_alphabet() -> list[str]:
    """The printable stand-in of each byte, as byte-level BPE defines it."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    stand_ins = dict(zip(printable, map(chr, printable), strict=True))
    shifted = 256
    for byte in range(256):
        if byte not in stand_ins:
            stand_ins[byte] = chr(shifted)
            shifted += 1
    return [stand_ins[byte] for byte in range(256)]


_TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": "<|end|>",
    "pad_token": "<|end|>",
    "model_max_length": 16384,
    "clean_up_tokenization_spaces": False,
    "chat_template": (
        "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    ),
}
