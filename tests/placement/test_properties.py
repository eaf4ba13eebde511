"""Sizes against a cache that is laid out rank by rank, head by head."""

from __future__ import annotations

from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from harness.placement.cache import KVSize, Parallel
from harness.placement.layers import read_model

counts = st.sampled_from([1, 2, 3, 4, 6, 8])


def config_of(layers: int, heads: int, kv_heads: int, head_size: int) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_size,
        "dtype": "bfloat16",
    }


@given(
    layers=st.integers(1, 12), kv_heads=counts, group=counts, head_size=counts, tensor=counts,
    pipeline=st.integers(1, 4), block=st.sampled_from([1, 16, 128]), tokens=st.integers(1, 500),
)  # fmt: skip
def test_sizes_are_those_of_a_cache_laid_out(
    layers: int, kv_heads: int, group: int, head_size: int, tensor: int, pipeline: int, block: int,
    tokens: int,
) -> None:  # fmt: skip
    heads = kv_heads * group
    assume(heads % tensor == 0 and max(kv_heads, tensor) % min(kv_heads, tensor) == 0)
    assume(pipeline <= layers)
    size = KVSize(
        read_model(config_of(layers, heads, kv_heads, head_size)), "bfloat16", "bfloat16",
        parallel=Parallel(tensor, pipeline), block_tokens=block,
    )  # fmt: skip
    # A rank computes its share of the query heads, and keeps the KV heads that these read.
    kept = [{q // group for q in range(r * heads // tensor, (r + 1) * heads // tensor)}
            for r in range(tensor)]  # fmt: skip
    vector = 2 * head_size * 2  # a key and a value of 2 bytes an element
    stages = [len(stage) for stage in size.stages]
    assert sum(stages) == layers
    assert max(stages) - min(stages) <= 1
    assert size.unique_bytes_per_token == layers * kv_heads * vector
    assert size.ranks_total_bytes_per_token == layers * vector * sum(map(len, kept))
    assert size.rank_bytes_per_token == max(stages) * vector * max(map(len, kept))
    assert size.block_bytes == block * size.rank_bytes_per_token
    blocks = size.session_blocks(tokens)
    assert (blocks - 1) * block < tokens <= blocks * block
    assert size.session_bytes(tokens) == tokens * size.ranks_total_bytes_per_token
