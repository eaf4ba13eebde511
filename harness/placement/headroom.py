"""What fits in the devices' memory: tokens and sessions, between two bounds.

    KV per device = memory x utilisation - weights / devices - activation reserve

Before a server has started nobody knows what activations, graphs and communication take. So two
figures are kept: ``largest``, with nothing set aside for them, which no server can exceed; and
``expected``, with the reserve and a margin. Between the two it is too close to tell beforehand, and
the server's own report decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from harness.errors import PlanError
from harness.placement.cache import KVSize

GIB = 2**30


@dataclass(frozen=True)
class Devices:
    """What there is. Sizes in bytes; ``weights_bytes``: of one copy of the model.

    Attributes:
        accelerators: devices of the machine; more than one copy's devices hold several copies.
        memory_bytes, reserve_bytes: of each device; what the driver reports, and what activations
            and graphs are expected to take.
        utilisation: share of the memory that the engine may use, 0..1.
        margin: share of the KV memory, 0..1, that ``expected`` leaves free.
    """

    accelerators: int
    memory_bytes: float
    utilisation: float
    weights_bytes: float
    reserve_bytes: float
    margin: float


class Fits(StrEnum):
    """Whether a working set fits in the device cache."""

    YES = "fits"
    NO = "does not fit"
    CLOSE = "too close to tell"


@dataclass(frozen=True)
class Capacity:
    """Blocks of one copy's device cache; ``expected`` <= ``largest``, equal where it is known."""

    size: KVSize
    expected_blocks: int
    largest_blocks: int
    copies: int = 1

    def tokens(self, blocks: int) -> int:
        """Tokens in so many blocks, where each block holds one table's tokens."""
        return blocks * self.size.page_tokens

    def sessions(self, tokens: int) -> tuple[int, int]:
        """How many sessions of ``tokens`` tokens all copies hold: (expected, at most).

        One block of each copy is vLLM's own: its null block.
        """
        held = self.size.session_blocks(tokens)
        expected, largest = (
            self.copies * (max(0, blocks - 1) // held)
            for blocks in (self.expected_blocks, self.largest_blocks)
        )
        return expected, largest

    def holds(self, sessions: int, tokens: int) -> Fits:
        """Whether so many sessions of ``tokens`` tokens fit at the same time."""
        expected, largest = self.sessions(tokens)
        if sessions <= expected:
            return Fits.YES
        return Fits.NO if sessions > largest else Fits.CLOSE


def kv_bytes_per_device(devices: Devices, ranks: int) -> tuple[float, float]:
    """(expected, at most) bytes for KV on each device. Raises PlanError when nothing is left."""
    if devices.accelerators % ranks:
        raise PlanError(
            [
                f"deployment.accelerators: found {devices.accelerators}; allowed: a multiple of "
                f"tensor x pipeline parallel = {ranks}"
            ]
        )
    usable, weights = devices.memory_bytes * devices.utilisation, devices.weights_bytes / ranks
    largest = usable - weights
    expected = (largest - devices.reserve_bytes) * (1 - devices.margin)
    if expected <= 0:
        raise PlanError(
            [
                f"deployment: found {usable / GIB:.1f} GiB usable per device - "
                f"{weights / GIB:.1f} weights - {devices.reserve_bytes / GIB:.1f} reserve: nothing "
                "is left for KV; more devices per copy, a smaller reserve, or smaller weights"
            ]
        )
    return expected, largest


def capacity(size: KVSize, devices: Devices) -> Capacity:
    """The device cache of a deployment. Raises PlanError, as above."""
    ranks = size.parallel.ranks
    expected, largest = kv_bytes_per_device(devices, ranks)
    return Capacity(
        size,
        expected_blocks=int(expected // size.block_bytes),
        largest_blocks=int(largest // size.block_bytes),
        copies=devices.accelerators // ranks,
    )


def known_capacity(size: KVSize, *, blocks: int) -> Capacity:
    """The device cache of a server whose number of blocks is given."""
    return Capacity(size, expected_blocks=blocks, largest_blocks=blocks)


def server_tokens(
    size: KVSize,
    *,
    blocks: int,
    max_model_len: int,
    in_flight_tokens: int,
    state_blocks: int = 1,
) -> int:
    """The tokens that vLLM prints as its KV cache size, from its blocks.

    Blocks over those that it sets aside for a request of the greatest length, times that length
    (0.32.0: v1/core/kv_cache_utils.py get_kv_cache_capacity).
    """
    held = size.session_blocks(
        max_model_len, in_flight_tokens=in_flight_tokens, state_blocks=state_blocks
    )
    return int(blocks / held * max_model_len)
