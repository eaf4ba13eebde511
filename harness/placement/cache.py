"""Bytes of KV: per token, per block and per session; on one rank, and over all of them.

Three figures of one token that differ as soon as there is more than one rank: ``unique`` (each
element once), ``rank`` (what a rank keeps) and ``ranks_total`` (all copies), which is what a
connector that runs in every worker stores and restores.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from harness.errors import PlanError
from harness.placement.layers import AttentionCache, CachedModel, Layer, StateCache


@dataclass(frozen=True)
class CacheFormat:
    """Bytes of one element, and of the scale that each key and value of a head carries."""

    element_bytes: float
    scale_bytes: int = 0
    latent_bytes: int | None = None


# By vLLM's --kv-cache-dtype. Scales of fp8 lie with the weights, one per layer; those per token and
# head lie in the cache (0.32.0: v1/attention/backends/triton_attn.py customize_spec). A latent of
# fp8_ds_mla has 656 bytes (layers/attention/mla_attention.py get_kv_cache_spec).
FORMATS: dict[str, CacheFormat] = {
    "float32": CacheFormat(4),
    "float": CacheFormat(4),
    "bfloat16": CacheFormat(2),
    "float16": CacheFormat(2),
    "half": CacheFormat(2),
    "fp8": CacheFormat(1),
    "fp8_e4m3": CacheFormat(1),
    "fp8_e5m2": CacheFormat(1),
    "fp8_per_token_head": CacheFormat(1, scale_bytes=4),
    "int8_per_token_head": CacheFormat(1, scale_bytes=4),
    "int4_per_token_head": CacheFormat(0.5, scale_bytes=4),
    "fp8_ds_mla": CacheFormat(1, latent_bytes=656),
}


@dataclass(frozen=True)
class Parallel:
    """How a model is spread: tensor-parallel ranks of each of ``pipeline`` stages."""

    tensor: int = 1
    pipeline: int = 1

    @property
    def ranks(self) -> int:
        """Devices that one copy of the model takes."""
        return self.tensor * self.pipeline


@dataclass(frozen=True)
class _Group:
    """Layers of a stage that share a table of blocks."""

    cache: AttentionCache | None  # None: states


@dataclass(frozen=True)
class KVSize:
    """The KV of a model in a deployment. Raises PlanError where the two do not go together.

    Attributes:
        cache_dtype, model_dtype: of the cache, a key of FORMATS; of what ``auto`` leaves to the
            model.
        block_tokens: of the device cache, as configured.
        drops_windows: the engine frees blocks behind a window or a chunk (vLLM's hybrid KV cache
            manager; a connector switches it off unless it supports it).
    """

    model: CachedModel
    cache_dtype: str
    model_dtype: str
    parallel: Parallel = Parallel()
    block_tokens: int = 16
    drops_windows: bool = False

    def __post_init__(self) -> None:
        tensor, pipeline = self.parallel.tensor, self.parallel.pipeline
        problems = []
        if self.cache_dtype not in FORMATS:
            known = ", ".join(FORMATS)
            raise PlanError(
                [
                    f"server.args: --kv-cache-dtype: found {self.cache_dtype!r}; known: {known}; "
                    "or state model.kv_bytes_per_token"
                ]
            )
        if self.model.attention_heads % tensor:
            problems.append(f"{self.model.attention_heads} attention heads")
        for cache in self.model.attention:
            larger, smaller = max(cache.kv_heads, tensor), min(cache.kv_heads, tensor)
            if not cache.replicated and larger % smaller:
                problems.append(f"{cache.kv_heads} KV heads")
        problems += [f"{s.heads} state heads" for s in self.model.states if s.heads % tensor]
        if problems:
            raise PlanError(
                [
                    f"tensor parallel: found {tensor}; the model has {problem}, which do not share "
                    "out evenly"
                    for problem in dict.fromkeys(problems)
                ]
            )
        if pipeline > len(self.model.layers):
            raise PlanError(
                [f"pipeline parallel: found {pipeline}; allowed: {len(self.model.layers)} layers"]
            )

    @property
    def unique_bytes_per_token(self) -> int:
        """Bytes of one token, each element once."""
        return sum(self._token_bytes(cache, tensor=1) for cache in self.model.attention)

    @cached_property
    def stages(self) -> tuple[tuple[Layer, ...], ...]:
        """Layers of each pipeline stage; what is left over goes to the last stages but one.

        vLLM 0.32.0: distributed/utils.py get_pp_indices, without VLLM_PP_LAYER_PARTITION.
        """
        layers, count = self.model.layers, self.parallel.pipeline
        sizes = [len(layers) // count] * count
        for i in range(2, len(layers) % count + 2):
            sizes[-i] += 1
        starts = [sum(sizes[:i]) for i in range(count)]
        return tuple(layers[s : s + n] for s, n in zip(starts, sizes, strict=True))

    @property
    def rank_bytes_per_token(self) -> int:
        """Bytes of one token on a rank of the stage that keeps most."""
        return max(sum(map(self._layer_token_bytes, stage)) for stage in self.stages)

    @property
    def ranks_total_bytes_per_token(self) -> int:
        """Bytes of one token on all ranks together, copies counted: what connectors move."""
        return self.parallel.tensor * sum(map(self._layer_token_bytes, self.model.layers))

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's states on all ranks together, whatever its length."""
        return self.parallel.tensor * sum(map(self._state_bytes, self.model.states))

    @property
    def has_windows(self) -> bool:
        """Whether some layers look back over a window or a chunk only."""
        return any(c.window or c.chunk for c in self.model.attention)

    def session_bytes(self, tokens: int) -> int:
        """Payload of a session of ``tokens`` tokens on all ranks together; no block is rounded."""
        attention = sum(
            self._token_bytes(c, tensor=self.parallel.tensor) * self._kept_tokens(c, tokens)
            for c in self.model.attention
        )
        return self.parallel.tensor * attention + self.state_bytes

    # --- the device cache of one rank: pages, blocks, pool ---------------------

    @cached_property
    def page_tokens(self) -> int:
        """Tokens of a block as it is allocated.

        Beside states it is raised until a layer's page holds a state (vLLM 0.32.0:
        platforms/interface.py _align_hybrid_block_size).
        """
        largest = max(map(self._state_bytes, self.model.states), default=0)
        if not largest:
            return self.block_tokens
        page = max(self._token_bytes(c, self.parallel.tensor) for c in self.model.attention)
        return self.block_tokens * math.ceil(largest / (self.block_tokens * page))

    @cached_property
    def block_bytes(self) -> int:
        """Bytes that one block takes on a rank of the largest stage, padding included."""
        return max(self._pool(stage)[0] for stage in self.stages)

    def session_blocks(
        self, tokens: int, *, in_flight_tokens: int | None = None, state_blocks: int = 1
    ) -> int:
        """Blocks of the pool that a session of ``tokens`` tokens holds on a device.

        ``in_flight_tokens``: what vLLM sets aside for a request instead, beside a window the tokens
        of a step that is not processed yet (``max_admission_blocks_per_request``).
        ``state_blocks``: of a group of states; 2 where prefix caching aligns them to blocks
        (``mamba_cache_mode = "align"``).
        """

        def held(group: _Group) -> int:
            if group.cache is None:
                return state_blocks
            return self._group_blocks(group.cache, tokens, in_flight_tokens)

        return max(sum(map(held, self._pool(stage)[1])) for stage in self.stages)

    @property
    def _drops(self) -> bool:
        # Layers that all have the same window stay windows without the hybrid manager as well
        # (0.32.0: v1/core/kv_cache_utils.py _promote_local_kv_cache_specs).
        alike = set(self.model.attention)
        return self.drops_windows or (len(alike) == 1 and not self.model.states)

    def _kept_tokens(self, cache: AttentionCache, tokens: int) -> int:
        kept = (cache.window or cache.chunk) if self._drops else None
        return tokens if kept is None else min(tokens, kept)

    def _layer_token_bytes(self, layer: Layer) -> int:
        attention = (c for c in layer if isinstance(c, AttentionCache))
        return sum(self._token_bytes(c, self.parallel.tensor) for c in attention)

    def _token_bytes(self, cache: AttentionCache, tensor: int) -> int:
        """Bytes of one token of a layer on a rank of ``tensor``."""
        if cache.fixed_bytes is not None:
            return cache.fixed_bytes
        kind = FORMATS[self.cache_dtype]
        if cache.replicated:
            if kind.scale_bytes:
                raise PlanError(
                    [f"--kv-cache-dtype: found {self.cache_dtype!r}; not modelled for a latent"]
                )
            latent = int((cache.head_size + cache.value_size) * kind.element_bytes)
            return latent if kind.latent_bytes is None else kind.latent_bytes
        if kind.latent_bytes is not None:
            raise PlanError(
                [f"--kv-cache-dtype: found {self.cache_dtype!r}; allowed for a latent (MLA) only"]
            )
        heads = max(1, cache.kv_heads // tensor)
        return heads * sum(
            int(size * kind.element_bytes) + kind.scale_bytes
            for size in (cache.head_size, cache.value_size)
        )

    def _state_bytes(self, state: StateCache) -> int:
        """Bytes of a layer's state on one rank."""
        tensor = self.parallel.tensor
        conv = state.conv
        if state.groups is not None and state.groups % tensor:
            conv += 2 * (tensor - state.groups) * state.group_state
        recurrent = FORMATS[state.recurrent_dtype or self.model_dtype].element_bytes
        return int(conv // tensor * FORMATS[self.model_dtype].element_bytes) + int(
            state.recurrent // tensor * recurrent
        )

    def _pool(self, stage: tuple[Layer, ...]) -> tuple[int, tuple[_Group, ...]]:
        """(bytes of a block, groups) of a stage's pool.

        Layers of one kind make one group, and a block holds a page of each. Layers of several kinds
        make groups of equal numbers of layers, which take turns in one pool of equal blocks
        (vLLM 0.32.0: v1/core/kv_cache_utils.py _get_kv_cache_groups_uniform_page_size).
        """
        found: Counter[AttentionCache | None] = Counter()
        pages = set()
        for cache in (c for layer in stage for c in layer):
            if isinstance(cache, StateCache):
                found[None] += 1
                continue
            kind = cache if self._drops else _without_window(cache)
            found[kind] += 1
            pages.add(self._token_bytes(kind, self.parallel.tensor) * self.page_tokens)
        if not found:
            return 0, ()
        if all(kind is not None and not (kind.window or kind.chunk) for kind in found):
            size = sum(
                self._token_bytes(kind, self.parallel.tensor) * self.page_tokens * count
                for kind, count in found.items()
                if kind is not None
            )
            # All grow alike: one group, however their pages differ.
            return size, (_Group(next(iter(found))),)
        if len(pages) > 1:
            raise PlanError(
                [
                    f"model.path: layers of {self.model.model_type!r} have pages of "
                    f"{sorted(pages)} bytes; a pool of several kinds is modelled for equal ones; "
                    "state model.kv_bytes_per_token"
                ]
            )
        smallest, largest = min(found.values()), max(found.values())
        size = largest if largest < 1.5 * smallest else smallest
        groups = [_Group(kind) for kind, count in found.items() for _ in range(-(-count // size))]
        page = pages.pop() if pages else max(map(self._state_bytes, self.model.states))
        return size * page, tuple(groups)

    def _group_blocks(
        self, cache: AttentionCache, tokens: int, in_flight_tokens: int | None
    ) -> int:
        block = self.page_tokens
        whole = -(-tokens // block)
        local = (cache.window or cache.chunk) if self._drops else None
        if local is None:
            return whole
        # Of a window the token itself is not kept beside those in flight; and as it rarely starts
        # where a block does, it takes one block more.
        kept, more = (local - 1, 1) if cache.window else (local, 0)
        if in_flight_tokens is not None:
            return -(-min(kept + in_flight_tokens, tokens) // block) + more
        return min(whole, -(-min(kept, tokens) // block) + more)


def _without_window(cache: AttentionCache) -> AttentionCache:
    return AttentionCache(
        cache.kv_heads,
        cache.head_size,
        cache.value_size,
        replicated=cache.replicated,
        fixed_bytes=cache.fixed_bytes,
    )
