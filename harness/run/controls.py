"""Negative controls: planted faults that the exact oracles must see.

A fault is planted where the tier would really break: in the block files on the medium, with a
fresh and valid checksum, so that the connector restores the wrong bytes in good faith. The only
harness module that knows the connector's file format (stdlib-only `blockfile` and `keys`;
docs/adr/0006-controls.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.connector import blockfile, keys
from workloads.cold_recovery import CONTROLS


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


@contextmanager
def planted(
    control: str, files: Sequence[Path], *, donor: Sequence[Path], layers: int, itemsize: int
) -> Iterator[None]:
    """Plants one fault in the files of a session for the time of the block, then restores them."""
    middle = len(files) // 2
    touched = [files[middle], files[middle + 1]] if control == "swapped_blocks" else [files[middle]]
    originals = [blockfile.read_block(path) for path in touched]
    payloads = [payload for _header, payload in originals]
    if control == "zeroed_block":
        wrong = [bytes(len(payloads[0]))]
    elif control == "other_session":
        wrong = [blockfile.read_block(donor[middle])[1]]
    elif control == "swapped_blocks":
        wrong = [payloads[1], payloads[0]]
    elif control == "zeroed_layer":
        size = len(payloads[0]) // layers
        start = (layers // 2) * size
        wrong = [payloads[0][:start] + bytes(size) + payloads[0][start + size :]]
    elif control == "flipped_exponent":
        wrong = [_flip_exponent_bit(payloads[0], itemsize)]
    else:
        raise ValueError(f"unknown control {control!r}; known: {', '.join(CONTROLS)}")
    try:
        for path, (header, _payload), payload in zip(touched, originals, wrong, strict=True):
            blockfile.write_block(path, header, payload)
        yield
    finally:
        for path, (header, payload) in zip(touched, originals, strict=True):
            blockfile.write_block(path, header, payload)


def _flip_exponent_bit(payload: bytes, itemsize: int) -> bytes:
    """Flips the second-highest exponent bit of one element in the middle (little endian floats).

    bfloat16 and float32 share sign and exponent in their highest bytes; bit 6 of the highest byte
    is the top exponent bit, which would make infinities of most values, so the one below is taken.
    """
    element = len(payload) // itemsize // 2
    position = element * itemsize + itemsize - 1
    changed = bytearray(payload)
    changed[position] ^= 0x20
    return bytes(changed)
