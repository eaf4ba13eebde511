"""Reads from a model's config.json what each of its layers keeps in the device cache.

An architecture that is not listed is refused, not guessed: an unknown one that happens to carry the
usual keys may keep a latent, a window or a state instead. Keys are those of Hugging Face; what they
mean for the cache follows vLLM 0.32.0 (docs/placement.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from harness.errors import PlanError


@dataclass(frozen=True)
class AttentionCache:
    """Keys and values of one layer, in elements.

    Attributes:
        kv_heads: of the whole model, before tensor parallelism.
        head_size, value_size: elements of a head's key and value. Value size 0: one vector only.
        window: tokens a token sees, itself included; ``chunk``: tokens of a chunk that is attended
            to alone. None: all before it.
        replicated: a latent vector, of which every tensor-parallel rank holds all.
        fixed_bytes: bytes per token where the data type of the cache plays no part.
    """

    kv_heads: int
    head_size: int
    value_size: int
    window: int | None = None
    chunk: int | None = None
    replicated: bool = False
    fixed_bytes: int | None = None


@dataclass(frozen=True)
class StateCache:
    """The state of a linear-attention or Mamba layer: the same for any length of a sequence.

    Attributes:
        heads: the layer can be split over that many tensor-parallel ranks at most.
        conv: elements of the convolution's state, in the model's data type, over all ranks.
        recurrent: elements of the recurrent state over all ranks.
        recurrent_dtype: of the recurrent state; None: the model's.
        groups, group_state: a group of Mamba 2 is repeated for each rank beyond their number, and
            takes ``2 * group_state`` elements of ``conv``.
    """

    heads: int
    conv: int
    recurrent: int
    recurrent_dtype: str | None = None
    groups: int | None = None
    group_state: int = 0


Layer = tuple[AttentionCache | StateCache, ...]


@dataclass(frozen=True)
class CachedModel:
    """What a model keeps, layer by layer. ``dtype``: of its weights.

    ``cache_dtype``: of the cache, where the checkpoint asks for one.
    """

    model_type: str
    attention_heads: int
    layers: tuple[Layer, ...]
    dtype: str
    cache_dtype: str | None

    @property
    def attention(self) -> list[AttentionCache]:
        """The caches that grow with the sequence."""
        return [c for layer in self.layers for c in layer if isinstance(c, AttentionCache)]

    @property
    def states(self) -> list[StateCache]:
        """The caches that do not."""
        return [c for layer in self.layers for c in layer if isinstance(c, StateCache)]


def read_model(config: dict[str, Any]) -> CachedModel:
    """The caches of a model. Raises PlanError: architecture not known, a key missing or wrong."""
    text = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    reader = _Config({**text})
    kind = text.get("model_type", config.get("model_type"))
    if not isinstance(kind, str):
        raise _problem(f"has no 'model_type'; {SUPPLY}")
    if kind not in MODEL_TYPES:
        known = ", ".join(sorted(MODEL_TYPES))
        raise _problem(f"model_type: found {kind!r}; known: {known}; {STATE}")
    layers = MODEL_TYPES[kind](reader)
    if not any(layers):
        raise _problem(f"found no layer of {kind!r} that keeps a cache; {STATE}")
    return CachedModel(
        model_type=kind,
        attention_heads=reader.size("num_attention_heads"),
        layers=layers,
        dtype=_dtype(config, text),
        cache_dtype=_cache_dtype(config),
    )


STATE = (
    "state model.kv_bytes_per_token: bytes of one token in the device caches of all ranks together"
)
SUPPLY = f"add it there, or {STATE}"
_DTYPES = ("float32", "bfloat16", "float16")
_KV, _SIZE = "num_key_value_heads", "head_dim"
_NOTHING: frozenset[str] = frozenset()
_HEADS, _BOTH = frozenset({_KV}), frozenset({_KV, _SIZE})


def _problem(text: str) -> PlanError:
    return PlanError([f"model.path: config.json {text}"])


def _dtype(config: dict[str, Any], text: dict[str, Any]) -> str:
    for place in (config, text):
        for key in ("dtype", "torch_dtype"):
            name = place.get(key)
            if name is not None:
                if name not in _DTYPES:
                    raise _problem(f"{key}: found {name!r}; allowed: {', '.join(_DTYPES)}")
                return str(name)
    raise _problem("has no 'dtype' (formerly 'torch_dtype'); add it there, or --dtype to the args")


def _cache_dtype(config: dict[str, Any]) -> str | None:
    """The cache's type that the checkpoint asks for: ``kv_cache_scheme``, ``kv_cache_quant_algo``.

    vLLM follows it where --kv-cache-dtype is auto (0.32.0: layers/attention/attention.py,
    utils/torch_utils.py get_kv_cache_quant_algo_string).
    """
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict):
        return None
    scheme = quantization.get("kv_cache_scheme") or quantization.get("kv_cache_quant_algo")
    if scheme is None:
        return None
    bits = scheme.get("num_bits") if isinstance(scheme, dict) else None
    if bits == 8 or str(scheme).lower() == "fp8":
        return "fp8"
    raise _problem(
        f"quantization_config: found the KV scheme {scheme!r}; modelled: fp8; state "
        "--kv-cache-dtype in server.args, or model.kv_bytes_per_token"
    )


class _Config:
    """The keys of one (text) configuration, read strictly."""

    def __init__(self, keys: dict[str, Any]) -> None:
        self._keys = keys

    def get(self, key: str) -> Any:
        return self._keys.get(key)

    def size(self, *names: str, default: int | None = None) -> int:
        """A positive integer under one of ``names``."""
        for name in names:
            value = self._keys.get(name)
            if value is None:
                continue
            if type(value) is not int or not 0 < value < 2**31:
                raise _problem(f"{name}: found {value!r}; allowed: a positive integer")
            return value
        if default is None:
            raise _problem(f"has no {names[0]!r}; {SUPPLY}")
        return default

    def head_size(self) -> int:
        """``head_dim``, else the hidden size shared out among the heads."""
        if self._keys.get("head_dim") is not None:
            return self.size("head_dim")
        heads, hidden = self.size("num_attention_heads", "n_head"), self.size("hidden_size")
        if hidden % heads:
            raise _problem(f"hidden_size: found {hidden}; allowed: a multiple of {heads} heads")
        return hidden // heads

    def layer_types(self, count: int) -> list[str] | None:
        """``layer_types``, one for each layer; None where there are none."""
        found = self._keys.get("layer_types") or self._keys.get("layers_block_type")
        if found is None:
            return None
        if not isinstance(found, list) or len(found) != count:
            raise _problem(f"layer_types: found {found!r}; allowed: a list of {count} names")
        return [str(name) for name in found]


def _attention(
    config: _Config,
    *,
    stated: frozenset[str],
    window: int | None = None,
    chunk: int | None = None,
) -> AttentionCache:
    """``stated``: keys that config.json must have, because the architecture's own default is a
    number. Otherwise heads and head size follow from the attention heads and the hidden size."""
    heads = None if _KV in stated else config.size("num_attention_heads")
    kv_heads = config.size(_KV, default=heads)
    size = config.size(_SIZE) if _SIZE in stated else config.head_size()
    return AttentionCache(kv_heads, size, size, window=window, chunk=chunk)


def _layers_of(
    config: _Config, types: list[str], kinds: dict[str, AttentionCache | StateCache | None]
) -> tuple[Layer, ...]:
    unknown = sorted(set(types) - set(kinds))
    if unknown:
        raise _problem(f"layer_types: found {unknown[0]!r}; known: {', '.join(kinds)}; {STATE}")
    found = [kinds[name] for name in types]
    return tuple(() if cache is None else (cache,) for cache in found)


def _plain(
    stated: frozenset[str], *, window_key: bool = False
) -> Callable[[_Config], tuple[Layer, ...]]:
    """Attention of one kind in all layers, or as ``layer_types`` says."""

    def read(config: _Config) -> tuple[Layer, ...]:
        count = config.size("num_hidden_layers")
        types = config.layer_types(count)
        if types and set(types) != {"full_attention"}:
            return _mixed(config, types, stated)
        # Qwen keeps the key and switches it off; 0 means off as well.
        used = config.get("use_sliding_window") is not False and config.get("sliding_window")
        if used and not window_key:
            raise _problem(
                "sliding_window: found one without 'layer_types'; which layers use it is not "
                f"known; {STATE}"
            )
        window = config.size("sliding_window") if used else None
        return ((_attention(config, stated=stated, window=window),),) * count

    return read


def _mixed(config: _Config, types: list[str], stated: frozenset[str]) -> tuple[Layer, ...]:
    kinds: dict[str, AttentionCache | StateCache | None] = {
        "full_attention": _attention(config, stated=stated)
    }
    if "sliding_attention" in types:
        window = config.size("sliding_window")
        kinds["sliding_attention"] = _attention(config, stated=stated, window=window)
    if "chunked_attention" in types:
        chunk = config.size("attention_chunk_size")
        kinds["chunked_attention"] = _attention(config, stated=stated, chunk=chunk)
    return _layers_of(config, types, kinds)


def _interleaved(
    *, full_every: int, local: str = "sliding_attention", key: str = "sliding_window_pattern"
) -> Callable[[_Config], tuple[Layer, ...]]:
    """One layer of full attention in ``full_every``, the last of each round."""

    def read(config: _Config) -> tuple[Layer, ...]:
        count = config.size("num_hidden_layers")
        types = config.layer_types(count)
        if types is None:
            every = config.size(key, default=full_every)
            types = ["full_attention" if (i + 1) % every == 0 else local for i in range(count)]
        return _mixed(config, types, _BOTH)

    return read


def _llama4(config: _Config) -> tuple[Layer, ...]:
    count = config.size("num_hidden_layers")
    rope = config.get("no_rope_layers")
    if isinstance(rope, list) and len(rope) == count:  # 0: no rotary embedding, full attention
        types = ["chunked_attention" if uses else "full_attention" for uses in rope]
        return _mixed(config, types, _BOTH)
    return _interleaved(full_every=4, local="chunked_attention", key="no_rope_layer_interval")(
        config
    )


def _latent(config: _Config) -> tuple[Layer, ...]:
    """Multi-head latent attention: one vector of kv_lora_rank + qk_rope_head_dim per token."""
    size = config.size("kv_lora_rank") + config.size("qk_rope_head_dim")
    layer: Layer = (AttentionCache(1, size, 0, replicated=True),)
    return (layer,) * config.size("num_hidden_layers")


def _sparse_latent(config: _Config) -> tuple[Layer, ...]:
    """The same with an indexer: 8-bit keys and one 4-byte scale per 128 elements, per token."""
    size = config.size("index_head_dim")
    indexer = AttentionCache(1, size, 0, replicated=True, fixed_bytes=size + size // 128 * 4)
    return tuple((*layer, indexer) for layer in _latent(config))


def _multi_query(config: _Config) -> tuple[Layer, ...]:
    """Falcon: one key and value head, or ``num_kv_heads`` in the new decoder."""
    heads = config.size("num_attention_heads", "n_head")
    if config.get("new_decoder_architecture"):
        heads = config.size("num_kv_heads", "n_head_kv")
    elif config.get("multi_query") is not False:
        heads = 1
    size = config.head_size()
    count = config.size("num_hidden_layers", "n_layer")
    return ((AttentionCache(heads, size, size),),) * count


def _delta_net(config: _Config) -> tuple[Layer, ...]:
    """Gated DeltaNet beside full attention (Qwen3-Next)."""
    count = config.size("num_hidden_layers")
    every = config.size("full_attention_interval", default=4)
    types = config.layer_types(count) or [
        "full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(count)
    ]
    value_heads = config.size("linear_num_value_heads")
    key_size, value_size = config.size("linear_key_head_dim"), config.size("linear_value_head_dim")
    mixed = 2 * key_size * config.size("linear_num_key_heads") + value_size * value_heads
    state = StateCache(
        heads=value_heads,
        conv=(config.size("linear_conv_kernel_dim") - 1) * mixed,
        recurrent=value_heads * value_size * key_size,
    )
    return _layers_of(
        config,
        types,
        {"full_attention": _attention(config, stated=_BOTH), "linear_attention": state},
    )


def _nemotron_h(config: _Config) -> tuple[Layer, ...]:
    """Mamba 2, attention and layers without a cache: ``hybrid_override_pattern``, a character for
    each layer, or ``layers_block_type``, a name."""
    count = config.size("num_hidden_layers")
    pattern = config.get("hybrid_override_pattern")
    if pattern is None:
        names = {"mamba": "M", "attention": "*", "mlp": "-", "moe": "E"}
        types = config.layer_types(count) or []
        pattern = "".join(names.get(name, name) for name in types)
    if not isinstance(pattern, str) or len(pattern) != count or set(pattern) - set("M*-E"):
        raise _problem(
            f"hybrid_override_pattern: found {pattern!r}; allowed: {count} characters of 'M', "
            f"'*', '-' and 'E'; {STATE}"
        )
    heads = config.size("mamba_num_heads")
    head_size, state_size = config.size("mamba_head_dim"), config.size("ssm_state_size")
    groups, kept = config.size("n_groups"), config.size("conv_kernel") - 1
    state = StateCache(
        heads=heads,
        conv=kept * (heads * head_size + 2 * groups * state_size),
        recurrent=heads * head_size * state_size,
        recurrent_dtype=config.get("mamba_ssm_cache_dtype") or "float32",
        groups=groups,
        group_state=kept * state_size,
    )
    kinds: dict[str, AttentionCache | StateCache | None] = {
        "M": state,
        "*": _attention(config, stated=_BOTH),
        "-": None,
        "E": None,
    }
    return _layers_of(config, list(pattern), kinds)


def _jamba(config: _Config) -> tuple[Layer, ...]:
    """Mamba 1 with attention in one layer of ``attn_layer_period``."""
    count, period = config.size("num_hidden_layers"), config.size("attn_layer_period")
    offset = config.get("attn_layer_offset")
    if type(offset) is not int or not 0 <= offset < period:
        raise _problem(f"attn_layer_offset: found {offset!r}; allowed: 0 to {period - 1}")
    inner = config.size("mamba_expand") * config.size("hidden_size")
    state = StateCache(
        heads=inner,
        conv=inner * (config.size("mamba_d_conv") - 1),
        recurrent=inner * config.size("mamba_d_state"),
    )
    types = ["attention" if i % period == offset else "mamba" for i in range(count)]
    return _layers_of(
        config, types, {"attention": _attention(config, stated=_HEADS), "mamba": state}
    )


# model_type -> how its layers are read.
MODEL_TYPES: dict[str, Callable[[_Config], tuple[Layer, ...]]] = {
    **dict.fromkeys(
        ("llama", "cohere", "glm4", "gpt_neox", "granite", "granitemoe", "olmo", "olmo2", "olmoe",
         "opt", "phi"),
        _plain(_NOTHING),
    ),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen2_5_vl_text"), _plain(_HEADS)),
    **dict.fromkeys(
        ("qwen3", "qwen3_moe", "qwen3_vl_text", "qwen3_vl_moe_text", "gemma", "glm4_moe",
         "minimax_m2"),
        _plain(_BOTH),
    ),
    "phi3": _plain(_NOTHING, window_key=True),
    **dict.fromkeys(("mistral", "mixtral", "starcoder2"), _plain(_HEADS, window_key=True)),
    "gemma2": _interleaved(full_every=2),
    "gemma3_text": _interleaved(full_every=6),
    "gpt_oss": _interleaved(full_every=2),
    "llama4_text": _llama4,
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite"), _latent),
    "deepseek_v32": _sparse_latent,
    "falcon": _multi_query,
    "qwen3_next": _delta_net,
    "nemotron_h": _nemotron_h,
    "jamba": _jamba,
}  # fmt: skip
