"""What KV and output are in a simulation: functions of content, so that oracles mean something.

A block's payload stands for its KV: a few bytes per layer that follow from every token before it
and from the KV that was used to compute it. Output follows from the payloads in use; equal KV gives
equal output, any other KV different output. Pure; standard library only.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

LAYER_BYTES = 8
# Rounding between a cold and a cached prefill, in nats: far below what another KV does.
ROUNDING_NATS = 1e-5


@dataclass(frozen=True)
class Token:
    """A sampled token; ``logprob`` in nats."""

    id: int
    logprob: float

    @property
    def text(self) -> str:
        """Detokenized; holds a character of two bytes."""
        return f" ŧ{self.id}"


def block_keys(token_ids: Sequence[int], block_tokens: int) -> list[bytes]:
    """Chained hashes of the full blocks of a prompt: equal keys mean equal tokens from its start.

    Not the bundled connector's keys: the simulator must not share a mistake with what it tests.
    """
    keys = []
    parent = b"sim"
    for start in range(0, len(token_ids) - block_tokens + 1, block_tokens):
        parent = _digest(parent, _packed(token_ids[start : start + block_tokens]), size=16)
        keys.append(parent)
    return keys


def root_state(seed: int) -> bytes:
    """State before any token; ``seed`` stands for the weights."""
    return _digest(b"weights", str(seed).encode(), size=32)


def computed_payload(state: bytes, token_ids: Sequence[int], *, layers: int) -> bytes:
    """KV of a block, computed on what came before it."""
    size = layers * LAYER_BYTES
    return hashlib.shake_256(b"kv" + state + _packed(token_ids)).digest(size)


def next_state(state: bytes, payload: bytes) -> bytes:
    """State after using a block's KV, however it was obtained."""
    return _digest(state, payload, size=32)


def output_token(
    state: bytes, rest: Sequence[int], index: int, *, vocab_size: int, cached_tokens: int
) -> Token:
    """Token ``index`` of the answer.

    ``state`` is that of all whole blocks, ``rest`` the tokens after them. The rounding depends on
    how many tokens were cached and on nothing else: a tier restore equals a device hit bit for bit.
    """
    draw = hashlib.blake2b(state + _packed(rest) + struct.pack("<I", index), digest_size=16)
    number, fraction = struct.unpack("<QQ", draw.digest())
    shape = hashlib.blake2b(draw.digest() + struct.pack("<I", cached_tokens), digest_size=8)
    rounding = ROUNDING_NATS * (struct.unpack("<Q", shape.digest())[0] / 2**64)
    return Token(number % vocab_size, -(0.05 + 2.0 * fraction / 2**64 + rounding))


def damaged(
    control: str, payloads: Sequence[bytes], donor: Sequence[bytes], *, layers: int
) -> dict[int, bytes]:
    """Payloads with one planted fault, by index; the same five as `harness.run.controls` plants.

    Raises ValueError on an unknown control.
    """
    last = len(payloads) - 1
    payload = payloads[last]
    size = len(payload) // layers
    start = (layers // 2) * size
    if control == "zeroed_block":
        return {last: bytes(len(payload))}
    if control == "other_session":
        return {last: donor[last]}
    if control == "swapped_layers":
        before = payload[start - size : start]
        after = payload[start : start + size]
        return {last: payload[: start - size] + after + before + payload[start + size :]}
    if control == "zeroed_layer":
        return {last: payload[:start] + bytes(size) + payload[start + size :]}
    if control == "flipped_exponent":
        changed = bytearray(payload)
        changed[len(payload) // 2] ^= 0x20
        return {last: bytes(changed)}
    raise ValueError(f"unknown control {control!r}")


def _packed(token_ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def _digest(*parts: bytes, size: int) -> bytes:
    found = hashlib.blake2b(digest_size=size)
    for part in parts:
        found.update(part)
    return found.digest()
