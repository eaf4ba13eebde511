"""Negative controls: planted faults that the exact oracles must see.

A fault is planted where the tier would really break: in the block files on the medium, with a
fresh and valid checksum, so that the connector restores the wrong bytes in good faith. The only
harness module that knows the connector's file format (stdlib-only `blockfile` and `keys`;
docs/adr/0006-controls.md). Why each fault must show: docs/adr/0017-visible-controls.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness.connector import blockfile, keys
from workloads.cold_recovery import CONTROLS


class Unplantable(Exception):
    """A fault that would not show on this cache, or not be one; nothing was planted."""


class TierFiles:
    """The block files of a prompt in a tier directory of the bundled connector."""

    def __init__(self, directory: Path, tier_facts: dict[str, Any]) -> None:
        self._directory = directory
        self._namespace = str(tier_facts["namespace"])
        self._block_tokens = int(tier_facts["block_tokens"])

    def of(self, token_ids: Sequence[int]) -> list[Path]:
        """One path per full block. Raises FileNotFoundError naming the first that is missing."""
        paths = [
            keys.block_path(self._directory, self._namespace, key)
            for key in keys.chain_keys(self._namespace, token_ids, self._block_tokens)
        ]
        for path in paths:
            if not path.is_file():
                raise FileNotFoundError(f"no block file {path.name} in the tier directory")
        return paths


def wrong_payloads(
    control: str, payloads: Sequence[bytes], *, donor: Sequence[bytes], layers: int, dtype: str
) -> dict[int, bytes]:
    """What a planted fault makes of the block images of a session, by index of the block. Pure.

    All faults hit the last block, next to the tokens that are computed after the restore. Blocks
    are never exchanged as a whole: keys carry their positions, so attention does not see it.
    ``dtype``: of the cache's elements, as in config.json. Raises Unplantable, and ValueError for
    an unknown control.
    """
    last = len(payloads) - 1
    right = payloads[last]
    size, middle = len(right) // layers, layers // 2
    if control == "zeroed_block":
        wrong = bytes(len(right))
    elif control == "other_session":
        wrong = donor[last]
    elif control == "swapped_layers":
        if layers < 2:
            raise Unplantable(f"swapped_layers: found {layers} layer; needed: at least 2")
        parts = [right[i * size : (i + 1) * size] for i in range(layers)]
        parts[middle - 1], parts[middle] = parts[middle], parts[middle - 1]
        wrong = b"".join(parts)
    elif control == "zeroed_layer":
        wrong = right[: middle * size] + bytes(size) + right[(middle + 1) * size :]
    elif control == "flipped_exponent":
        wrong = _with_flipped_exponent(right, middle * size, (middle + 1) * size, dtype)
    else:
        raise ValueError(f"unknown control {control!r}; known: {', '.join(CONTROLS)}")
    if wrong == right:
        raise Unplantable(f"{control}: the fault leaves the block as it is")
    return {last: wrong}


@contextmanager
def planted(
    control: str, files: Sequence[Path], *, donor: Sequence[Path], layers: int, dtype: str
) -> Iterator[None]:
    """Plants one fault in the files of a session for the time of the block, then restores them.

    Raises Unplantable before anything was changed.
    """
    originals = [blockfile.read_block(path) for path in files]
    wrong = wrong_payloads(
        control,
        [payload for _header, payload in originals],
        donor=[blockfile.read_block(path)[1] for path in donor],
        layers=layers,
        dtype=dtype,
    )
    try:
        for index, payload in wrong.items():
            blockfile.write_block(files[index], originals[index][0], payload)
        yield
    finally:
        for index in wrong:
            blockfile.write_block(files[index], *originals[index])


@dataclass(frozen=True)
class _Float:
    """Little-endian floats. ``top``: highest exponent bit, set in values of 2 and more.

    ``raised``: the exponent bit that is flipped; clear in values from 2 up to ``below``.
    """

    word: str
    top: int
    raised: int
    below: float


_WIDE = 2.0**33
_FLOATS = {
    # The bit multiplies by 2**32: far above any rounding, and squares stay finite in float32.
    "float32": _Float("<u4", 1 << 30, 1 << 28, _WIDE),
    "bfloat16": _Float("<u2", 1 << 14, 1 << 12, _WIDE),
    "float16": _Float("<u2", 1 << 14, 1 << 13, 2.0**9),  # by 2**8
}


def _with_flipped_exponent(payload: bytes, start: int, end: int, dtype: str) -> bytes:
    """One exponent bit flipped in the largest element between two offsets, so that it grows.

    A flip that makes an element smaller takes one token's share out of a sum over thousands, which
    rounding can hide; one that makes it larger by 2**32 (float16: 2**8) cannot be hidden.
    """
    kind = _FLOATS.get(dtype)
    if kind is None:
        raise Unplantable(f"flipped_exponent: found dtype {dtype!r}; known: {', '.join(_FLOATS)}")
    words = np.frombuffer(
        payload, dtype=kind.word, offset=start, count=(end - start) // _size(kind)
    )
    magnitudes = words & (2 * kind.top - 1)
    # The order of positive floats is that of their bits.
    usable = (magnitudes & kind.top != 0) & (magnitudes & (kind.top - kind.raised) == 0)
    if not usable.any():
        raise Unplantable(
            f"flipped_exponent: no element of the block is from 2 to {kind.below:g}; a flipped bit "
            "would vanish in rounding"
        )
    index = int(np.argmax(np.where(usable, magnitudes, 0)))
    changed = bytearray(payload)
    position = start + index * _size(kind)
    word = int(words[index]) ^ kind.raised
    changed[position : position + _size(kind)] = word.to_bytes(_size(kind), "little")
    return bytes(changed)


def _size(kind: _Float) -> int:
    return np.dtype(kind.word).itemsize
