"""Planted faults: what they change, and that attention must show each of them.

The second half computes a decoder like the generated one (`harness.campaign.generated_model`) in
numpy: RMS norms, rotary positions in the keys, grouped queries, softmax. It stands for the argument
of docs/adr/0017-visible-controls.md: what a fault does to the output is a matter of its kind, not
of the prompt.
"""

from __future__ import annotations

import struct
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from harness.campaign.generated_model import ModelArchitecture, _tensors
from harness.connector import blockfile
from harness.run.controls import Unplantable, planted, wrong_payloads
from workloads.cold_recovery import CONTROLS

Array = npt.NDArray[np.float32]


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


# Two layers of two elements each; the second layer is the "middle" one.
BLOCKS = [floats(1, 2, 3, 4), floats(5, 6, 7, 8)]
DONOR = [floats(11, 12, 13, 14), floats(15, 16, 17, 18)]


@pytest.mark.parametrize(
    ("control", "wrong"),
    [
        ("zeroed_block", floats(0, 0, 0, 0)),
        ("other_session", floats(15, 16, 17, 18)),
        ("swapped_layers", floats(7, 8, 5, 6)),
        ("zeroed_layer", floats(5, 6, 0, 0)),
        ("flipped_exponent", floats(5, 6, 7, 8 * 2.0**32)),
    ],
)
def test_each_fault_hits_the_last_block_alone(control: str, wrong: bytes) -> None:
    found = wrong_payloads(control, BLOCKS, donor=DONOR, layers=2, dtype="float32")
    assert found == {1: wrong}


@pytest.mark.parametrize(
    ("dtype", "before", "after"),
    [
        ("float32", floats(0.5, -3.0), floats(0.5, -3.0 * 2.0**32)),
        # bfloat16 is the upper half of float32: 0x4040 is 3.0, bit 12 is worth 2**32.
        ("bfloat16", bytes.fromhex("003f4040"), bytes.fromhex("003f4050")),
        ("float16", np.array([0.5, 3.0], "<f2").tobytes(), np.array([0.5, 768.0], "<f2").tobytes()),
    ],
)
def test_the_flipped_bit_makes_the_largest_element_larger(
    dtype: str, before: bytes, after: bytes
) -> None:
    found = wrong_payloads("flipped_exponent", [before], donor=[], layers=1, dtype=dtype)
    assert found == {0: after}
    difference = int.from_bytes(before, "little") ^ int.from_bytes(after, "little")
    assert difference.bit_count() == 1


@pytest.mark.parametrize(
    ("control", "payload", "layers", "dtype", "why"),
    [
        ("flipped_exponent", floats(1.9, 2.0**33), 1, "float32", "no element of the block is from"),
        ("flipped_exponent", floats(3.0), 1, "fp8_e4m3", "found dtype 'fp8_e4m3'"),
        ("swapped_layers", floats(3.0), 1, "float32", "found 1 layer"),
        ("swapped_layers", floats(3.0, 3.0), 2, "float32", "leaves the block as it is"),
        ("zeroed_block", floats(0.0), 1, "float32", "leaves the block as it is"),
    ],
)
def test_a_fault_that_would_not_show_is_not_planted(
    control: str, payload: bytes, layers: int, dtype: str, why: str
) -> None:
    with pytest.raises(Unplantable, match=why):
        wrong_payloads(control, [payload], donor=[payload], layers=layers, dtype=dtype)


def test_an_unknown_control_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown control 'x'; known: zeroed_block"):
        wrong_payloads("x", BLOCKS, donor=DONOR, layers=2, dtype="float32")


def test_files_are_wrong_with_a_valid_checksum_and_then_as_they_were(tmp_path: Path) -> None:
    files = [tmp_path / "0.kv", tmp_path / "1.kv"]
    for index, path in enumerate(files):
        header = blockfile.BlockHeader("00" * 16, bytes([index] * 16), 0, 0)
        blockfile.write_block(path, header, BLOCKS[index])
    before = [path.read_bytes() for path in files]
    with planted("zeroed_layer", files, donor=files, layers=2, dtype="float32"):
        assert blockfile.read_block(files[1])[1] == floats(5, 6, 0, 0)
        assert files[0].read_bytes() == before[0]
    assert [path.read_bytes() for path in files] == before


# --- what attention sees --------------------------------------------------------

ARCH = ModelArchitecture(
    hidden_size=64,
    intermediate_size=96,
    num_layers=4,
    num_attention_heads=4,
    num_kv_heads=2,
    head_size=16,
    vocab_size=300,
    dtype="float32",
)
# Three tokens after the last whole block, and an answer of eight: seven of them are computed upon.
BLOCK, COUNT, REST, ANSWER = 16, 6, 3, 8


class Decoder:
    """Prefill of a prompt, and the answer to its rest on KV that came from anywhere."""

    def __init__(self, seed: int) -> None:
        arch = ModelArchitecture(**{**ARCH.__dict__, "seed": seed})
        self.weights: dict[str, Any] = dict(_tensors(arch))

    def blocks(self, tokens: list[int]) -> list[bytes]:
        """The KV of all whole blocks, one image each: layers, each keys then values."""
        cached: list[list[Array]] = []
        self._forward(tokens, start=0, cached=[[]] * ARCH.num_layers, computed=cached)
        images = []
        for index in range(COUNT):
            part = slice(index * BLOCK, (index + 1) * BLOCK)
            images.append(b"".join(kv[:, :, part].tobytes() for [kv] in cached))
        return images

    def logprobs(self, tokens: list[int], images: list[bytes]) -> Array:
        """Log probabilities of each answered token; blocks restored, the rest computed."""
        shape = (ARCH.num_layers, 2, ARCH.num_kv_heads, BLOCK, ARCH.head_size)
        blocks = [np.frombuffer(image, np.float32).reshape(shape) for image in images]
        cached = [[np.concatenate([b[n] for b in blocks], axis=2)] for n in range(ARCH.num_layers)]
        start = BLOCK * COUNT
        return self._forward(tokens[start:], start=start, cached=cached, computed=[])

    def _forward(
        self, tokens: list[int], *, start: int, cached: list[list[Array]], computed: list[Any]
    ) -> Array:
        weights, heads, groups = self.weights, ARCH.num_attention_heads, ARCH.num_kv_heads
        hidden = weights["model.embed_tokens.weight"][tokens]
        positions = start + np.arange(len(tokens))
        for layer in range(ARCH.num_layers):
            name = f"model.layers.{layer}."
            normed = _rms(hidden)

            def project(kind: str, count: int, x: Array = normed, name: str = name) -> Array:
                flat = x @ weights[f"{name}self_attn.{kind}_proj.weight"].T
                return np.asarray(flat.reshape(len(tokens), count, ARCH.head_size).swapaxes(0, 1))

            query = _rotated(_rms(project("q", heads)) * 2, positions)
            fresh = np.stack(
                [_rotated(_rms(project("k", groups)) * 2, positions), project("v", groups)]
            )
            kv = np.concatenate([*cached[layer], fresh], axis=2)
            computed.append([kv])
            key, value = (np.repeat(part, heads // groups, axis=0) for part in kv)
            scores = query @ key.swapaxes(1, 2) / np.float32(ARCH.head_size**0.5)
            future = np.arange(kv.shape[2])[None, :] > positions[:, None]
            scores = np.where(future, -np.inf, scores)
            shares = np.exp(scores - scores.max(axis=2, keepdims=True))
            shares /= shares.sum(axis=2, keepdims=True)
            seen = (shares @ value).swapaxes(0, 1).reshape(len(tokens), -1)
            hidden = hidden + seen @ weights[f"{name}self_attn.o_proj.weight"].T
            normed = _rms(hidden)
            gate = normed @ weights[f"{name}mlp.gate_proj.weight"].T
            up = normed @ weights[f"{name}mlp.up_proj.weight"].T
            with np.errstate(over="ignore"):
                hidden = (
                    hidden
                    + (gate / (1 + np.exp(-gate)) * up) @ weights[f"{name}mlp.down_proj.weight"].T
                )
        logits = _rms(hidden[-ANSWER:]) @ weights["lm_head.weight"].T
        shifted = logits - logits.max(axis=1, keepdims=True)
        return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)), np.float32)


def _rms(x: Array) -> Array:
    return np.asarray(x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6), np.float32)


def _rotated(x: Array, positions: npt.NDArray[np.int64]) -> Array:
    half = x.shape[-1] // 2
    angles = positions[:, None] * 10000.0 ** (-np.arange(half) / half)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    one, other = x[..., :half], x[..., half:]
    return np.concatenate([one * cos - other * sin, other * cos + one * sin], axis=-1)


@cache
def session(seed: int) -> tuple[Decoder, list[int], list[bytes], list[bytes], Array]:
    """Decoder, prompt, its blocks, a donor's blocks, and the right answer."""
    decoder = Decoder(seed)
    rng = np.random.RandomState(seed)
    prompt, donor = (
        rng.randint(0, 256, BLOCK * COUNT + REST + ANSWER - 1).tolist() for _ in range(2)
    )
    right, others = decoder.blocks(prompt), decoder.blocks(donor)
    return decoder, prompt, right, others, decoder.logprobs(prompt, right)


SEEDS = range(100)
# What rounding of float32 does to a log probability here, in nats; far below what a fault must do.
ROUNDING_NATS, VISIBLE_NATS = 1e-3, 1e-2


def largest_change(seed: int, wrong: dict[int, bytes]) -> float:
    decoder, prompt, right, _others, expected = session(seed)
    images = [wrong.get(index, image) for index, image in enumerate(right)]
    found = decoder.logprobs(prompt, images)
    assert np.isfinite(found).all()
    return float(np.abs(found - expected).max())


def test_the_decoder_answers_the_same_from_restored_blocks_as_from_a_whole_prefill() -> None:
    decoder, prompt, _right, _others, expected = session(0)
    whole = decoder._forward(prompt, start=0, cached=[[]] * ARCH.num_layers, computed=[])
    assert np.abs(whole - expected).max() < ROUNDING_NATS


@pytest.mark.parametrize("control", CONTROLS)
def test_each_fault_shows_on_every_seed(control: str) -> None:
    changes = []
    for seed in SEEDS:
        _decoder, _prompt, right, others, _expected = session(seed)
        wrong = wrong_payloads(control, right, donor=others, layers=4, dtype="float32")
        changes.append(largest_change(seed, wrong))
    assert min(changes) > VISIBLE_NATS


def test_whole_blocks_exchanged_do_not_show_on_any_seed() -> None:
    """Why `swapped_blocks` was retired: keys hold their positions, and a sum knows no order."""
    for seed in SEEDS:
        right = session(seed)[2]
        assert largest_change(seed, {4: right[5], 5: right[4]}) < ROUNDING_NATS


def test_nor_do_blocks_exchanged_in_some_layers_only() -> None:
    """Each layer attends to its own keys and values: exchanged there, they are exchanged pairs."""
    for seed in SEEDS:
        right = session(seed)[2]
        half = len(right[4]) // 2
        wrong = {4: right[5][:half] + right[4][half:], 5: right[4][:half] + right[5][half:]}
        assert largest_change(seed, wrong) < ROUNDING_NATS
