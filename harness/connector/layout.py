"""Where a block's bytes lie in the device cache, and moving them. Needs numpy, not vLLM.

A block image is the concatenation of the block's contiguous runs, in layer order. Bytes inside a
block are opaque: the CPU attention kernels keep keys transposed within a block, so a token cannot
be cut out of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import numpy as np
import numpy.typing as npt

ByteArray = npt.NDArray[np.uint8]


class LayoutError(ValueError):
    """The cache's tensors cannot be copied block by block; the message says which and why."""


@dataclass(frozen=True)
class CacheTensor:
    """One layer's cache as it lies in memory.

    ``storage`` is the whole allocation as bytes; ``offset_bytes`` is the tensor's start in it.
    ``shape`` and ``strides`` count elements of ``item_bytes`` bytes.
    """

    name: str
    storage: ByteArray
    offset_bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int
    dtype: str


@dataclass(frozen=True)
class BlockRuns:
    """One layer's runs: block ``b`` has one at ``offset + b * stride_bytes`` per offset."""

    offsets: tuple[int, ...]
    stride_bytes: int
    run_bytes: int


def derive_runs(
    shape: Sequence[int], strides: Sequence[int], item_bytes: int, block_count: int
) -> BlockRuns:
    """Finds the runs of each block from a tensor's shape and strides (in elements). Pure.

    Block dimension: the first one whose size is a multiple of ``block_count`` (a multiple when one
    manager block is several kernel blocks). Every dimension outside it in memory gives one run per
    index.

    Raises:
        LayoutError: no such dimension, or bytes between the parts of a run.
    """
    dim = next((d for d, size in enumerate(shape) if size and size % block_count == 0), None)
    if dim is None:
        raise LayoutError(f"no dimension of shape {tuple(shape)} counts {block_count} blocks")
    ratio = shape[dim] // block_count
    others = [d for d in range(len(shape)) if d != dim and shape[d] > 1]
    outer = [d for d in others if strides[d] > strides[dim]]
    inner = sorted((d for d in others if strides[d] <= strides[dim]), key=lambda d: strides[d])
    dense = 1
    for d in inner:
        if strides[d] != dense:
            raise LayoutError(
                f"shape {tuple(shape)} with strides {tuple(strides)} has gaps inside a block"
            )
        dense *= shape[d]
    if ratio > 1 and strides[dim] != dense:
        raise LayoutError(f"kernel blocks of shape {tuple(shape)} do not lie next to each other")
    offsets = tuple(
        sum(index * strides[d] for index, d in zip(indices, outer, strict=True)) * item_bytes
        for indices in product(*(range(shape[d]) for d in outer))
    )
    return BlockRuns(offsets, ratio * strides[dim] * item_bytes, ratio * dense * item_bytes)


class BlockLayout:
    """Copies block images between the device cache and byte buffers.

    All runs have the same length; ``layers`` lists each layer's part of the image. Copies run on
    the caller's thread with numpy, which releases the interpreter lock; torch would start threads
    of its own.
    """

    def __init__(self, tensors: Sequence[CacheTensor], block_count: int) -> None:
        """Raises LayoutError when the tensors cannot be copied block by block."""
        if not tensors:
            raise LayoutError("no cache tensors were registered")
        self.block_count = block_count
        self.layers: list[dict[str, Any]] = []  # JSON-compatible: where each layer lies in an image
        starts: list[tuple[ByteArray, int]] = []
        shapes: set[tuple[int, int]] = set()
        seen: set[tuple[int, int]] = set()
        position = 0
        for tensor in tensors:
            identity = (tensor.storage.ctypes.data, tensor.offset_bytes)
            if identity in seen:  # layers that share one cache
                continue
            seen.add(identity)
            runs = derive_runs(tensor.shape, tensor.strides, tensor.item_bytes, block_count)
            starts += [(tensor.storage, tensor.offset_bytes + offset) for offset in runs.offsets]
            shapes.add((runs.stride_bytes, runs.run_bytes))
            size_bytes = runs.run_bytes * len(runs.offsets)
            self.layers.append(
                {
                    "name": tensor.name,
                    "offset_bytes": position,
                    "size_bytes": size_bytes,
                    "run_count": len(runs.offsets),
                    "dtype": tensor.dtype,
                }
            )
            position += size_bytes
        if len(shapes) != 1:
            raise LayoutError(
                f"layers differ in (block stride, run length) in bytes: {sorted(shapes)}"
            )
        stride_bytes, self.run_bytes = shapes.pop()
        self.payload_bytes = position
        self._image_shape = (len(starts), self.run_bytes)
        block_shape = (block_count, self.run_bytes)
        self._runs = [
            _strided(storage, start, block_shape, (stride_bytes, 1)) for storage, start in starts
        ]
        self._uniform = _one_view(starts, block_shape, stride_bytes)

    def gather(self, block_id: int, payload: ByteArray) -> None:
        """Copies device block ``block_id`` into ``payload``, ``(payload_bytes,) uint8``."""
        image = self._checked(block_id, payload)
        if self._uniform is not None:
            image[:] = self._uniform[block_id]
            return
        for row, view in zip(image, self._runs, strict=True):
            row[:] = view[block_id]

    def scatter(self, payload: ByteArray, block_id: int) -> None:
        """Copies ``payload`` into device block ``block_id``."""
        image = self._checked(block_id, payload)
        if self._uniform is not None:
            self._uniform[block_id] = image
            return
        for row, view in zip(image, self._runs, strict=True):
            view[block_id] = row

    def _checked(self, block_id: int, payload: ByteArray) -> ByteArray:
        # A negative index would silently address the cache's end.
        if not 0 <= block_id < self.block_count:
            raise IndexError(f"block {block_id}; the device cache has {self.block_count}")
        return payload.reshape(self._image_shape)


def _strided(
    storage: ByteArray, start: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> ByteArray:
    """A view of ``storage`` from byte ``start``, checked to stay inside it."""
    end = start + sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + 1
    if start < 0 or end > storage.size:
        raise LayoutError(f"bytes {start} to {end} lie outside an allocation of {storage.size}")
    return np.lib.stride_tricks.as_strided(storage[start:], shape, strides)


def _one_view(
    starts: Sequence[tuple[ByteArray, int]], block_shape: tuple[int, int], stride_bytes: int
) -> ByteArray | None:
    """One ``(block, run, byte)`` view over all runs, if they are evenly spaced in one allocation.

    One strided copy per block is about 15 % faster than one per run.
    """
    storage = starts[0][0]
    if any(other.ctypes.data != storage.ctypes.data for other, _ in starts):
        return None
    offsets = [start for _, start in starts]
    steps = {after - before for before, after in pairwise(offsets)}
    if len(steps) > 1 or min(steps, default=0) < 0:
        return None
    blocks, run_bytes = block_shape
    shape = (blocks, len(offsets), run_bytes)
    return _strided(storage, offsets[0], shape, (stride_bytes, steps.pop() if steps else 0, 1))
