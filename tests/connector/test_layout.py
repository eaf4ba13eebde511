"""Finding and copying block images, on synthetic caches of every layout that vLLM has used."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from harness.connector.layout import BlockLayout, BlockRuns, CacheTensor, LayoutError, derive_runs

B, H, N, D = 6, 2, 4, 3  # blocks, heads, tokens per block, head size


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))


def _permuted(order: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of a [B, H, N, C] tensor that lies in memory in ``order``."""
    sizes = {"B": B, "H": H, "N": N, "C": 2 * D}
    strides, step = {}, 1
    for letter in reversed(order):
        strides[letter] = step
        step *= sizes[letter]
    return tuple(sizes[c] for c in "BHNC"), tuple(strides[c] for c in "BHNC")


BLOCK = H * N * 2 * D


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [
        # 0.32, block outermost within a layer
        (*_permuted("BHNC"), BlockRuns((0,), 2 * BLOCK, 2 * BLOCK)),
        (*_permuted("BNHC"), BlockRuns((0,), 2 * BLOCK, 2 * BLOCK)),
        # 0.32, heads outermost: one run per head
        (*_permuted("HBNC"), BlockRuns((0, B * BLOCK), BLOCK, BLOCK)),
        # 0.20, key plane then value plane: two runs
        (
            (2, B, H, N, D),
            _dense((2, B, H, N, D)),
            BlockRuns((0, B * BLOCK), BLOCK, BLOCK),
        ),
        # 0.20, key and value inside the block
        ((B, 2, N, H, D), _dense((B, 2, N, H, D)), BlockRuns((0,), 2 * BLOCK, 2 * BLOCK)),
        # two kernel blocks per manager block
        ((2 * B, N, D), _dense((2 * B, N, D)), BlockRuns((0,), 4 * N * D, 4 * N * D)),
        # pages padded at their end: the padding is not copied
        ((B, N, D), (100, D, 1), BlockRuns((0,), 200, 2 * N * D)),
        # as many tokens in a block as there are blocks: the first match counts
        ((B, B, D), _dense((B, B, D)), BlockRuns((0,), 2 * B * D, 2 * B * D)),
    ],
)
def test_runs(shape: tuple[int, ...], strides: tuple[int, ...], expected: BlockRuns) -> None:
    assert derive_runs(shape, strides, 2, B) == expected


def test_no_block_dimension() -> None:
    with pytest.raises(LayoutError, match="no dimension"):
        derive_runs((5, 7), (7, 1), 2, B)


def test_gaps_inside_a_block() -> None:
    with pytest.raises(LayoutError, match="gaps"):
        derive_runs((B, N, D), (N * D * 2, D * 2, 1), 2, B)


def test_split_blocks_that_do_not_touch() -> None:
    with pytest.raises(LayoutError, match="next to each other"):
        derive_runs((2 * B, N, D), (100, D, 1), 2, B)


def _cache(
    shape: tuple[int, ...], layers: int, *, shared: bool
) -> tuple[list[CacheTensor], list[np.ndarray[Any, Any]]]:
    rng = np.random.default_rng(1)
    size = int(np.prod(shape)) * 2
    whole = rng.integers(0, 256, size * layers, dtype=np.uint8)
    storages = (
        [whole] * layers if shared else [whole[i * size :][:size].copy() for i in range(layers)]
    )
    tensors = [
        CacheTensor(
            name=f"layer.{i}",
            storage=storages[i],
            offset_bytes=i * size if shared else 0,
            shape=shape,
            strides=_dense(shape),
            item_bytes=2,
            dtype="bfloat16",
        )
        for i in range(layers)
    ]
    views = [
        tensor.storage[tensor.offset_bytes :][:size].view(np.uint16).reshape(shape)
        for tensor in tensors
    ]
    return tensors, views


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("shape", "block_axis"), [((B, H, N, 2 * D), 0), ((2, B, H, N, D), 1)])
def test_image_is_the_layers_in_order(
    shape: tuple[int, ...], block_axis: int, shared: bool
) -> None:
    tensors, views = _cache(shape, 3, shared=shared)
    layout = BlockLayout(tensors, B)
    payload = np.zeros(layout.payload_bytes, dtype=np.uint8)
    layout.gather(4, payload)
    expected = b"".join(np.take(view, 4, axis=block_axis).tobytes() for view in views)
    assert payload.tobytes() == expected
    assert [layer["name"] for layer in layout.layers] == ["layer.0", "layer.1", "layer.2"]
    assert [layer["offset_bytes"] for layer in layout.layers] == [
        0, len(expected) // 3, 2 * len(expected) // 3
    ]  # fmt: skip


@pytest.mark.parametrize("shared", [True, False])
def test_scatter_writes_its_block_and_nothing_else(shared: bool) -> None:
    tensors, views = _cache((2, B, H, N, D), 2, shared=shared)
    layout = BlockLayout(tensors, B)
    payload = np.zeros(layout.payload_bytes, dtype=np.uint8)
    layout.gather(1, payload)
    before = [view.copy() for view in views]
    layout.scatter(payload, 3)
    for view, old in zip(views, before, strict=True):
        old[:, 3] = old[:, 1]
        assert np.array_equal(view, old)


def test_layers_that_share_a_cache_are_stored_once() -> None:
    tensors, _ = _cache((B, N, D), 2, shared=False)
    layout = BlockLayout([*tensors, tensors[0]], B)
    assert layout.payload_bytes == 2 * N * D * 2


@pytest.mark.parametrize("block_id", [-1, B])
def test_block_outside_the_cache_is_refused(block_id: int) -> None:
    layout = BlockLayout(_cache((B, N, D), 1, shared=False)[0], B)
    with pytest.raises(IndexError, match=str(block_id)):
        layout.scatter(np.zeros(layout.payload_bytes, dtype=np.uint8), block_id)


def test_layers_of_different_size_are_refused() -> None:
    small, _ = _cache((B, N, D), 1, shared=False)
    large, _ = _cache((B, N, 2 * D), 1, shared=False)
    with pytest.raises(LayoutError, match="differ"):
        BlockLayout(small + large, B)


def test_runs_outside_their_allocation_are_refused() -> None:
    (tensor,), _ = _cache((B, N, D), 1, shared=False)
    broken = CacheTensor("x", tensor.storage[:-1], 0, tensor.shape, tensor.strides, 2, tensor.dtype)
    with pytest.raises(LayoutError, match="outside"):
        BlockLayout([broken], B)


def test_no_tensors() -> None:
    with pytest.raises(LayoutError, match="no cache tensors"):
        BlockLayout([], B)
