"""The figures of a plan: KV bytes, blocks and working set, derived from the model and the file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from harness.errors import PlanError


def kv_bytes_per_token(config: dict[str, Any], dtype_bytes: int | None = None) -> int:
    """Bytes of key and value per token from a model's own config.json (MHA and GQA, one rank).

    2 x layers x KV heads x head size x bytes. Raises PlanError when the config lacks what it takes.
    """
    try:
        layers = config["num_hidden_layers"]
        heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        name = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")
    except KeyError as error:
        raise PlanError(
            [f"model.path: config.json has no {error}; required to compute the KV size"]
        ) from error
    except (TypeError, ZeroDivisionError, AttributeError) as error:
        raise PlanError(
            [f"model.path: config.json: cannot compute the KV size: {error}"]
        ) from error
    for what, value in (("layers", layers), ("KV heads", heads), ("head size", head_size)):
        if type(value) is not int or not 0 < value < 2**31:
            raise PlanError([f"model.path: config.json: {what}: found {value!r}; allowed: above 0"])
    size = dtype_bytes or {"float32": 4, "bfloat16": 2, "float16": 2}.get(name, 2)
    return int(2 * layers * heads * head_size * size)


@dataclass(frozen=True)
class Sizes:
    """Figures of a plan, all derived. Tokens and bytes; ``None``: not fixed by the campaign."""

    kv_bytes_per_token: int
    block_tokens: int
    session_blocks: int
    session_kv_bytes: int
    working_set_bytes: int
    device_kv_bytes: int | None
    cached_tokens_per_session: int

    @property
    def working_set_ratio(self) -> float | None:
        """Working set over device KV capacity."""
        if self.device_kv_bytes is None:
            return None
        return self.working_set_bytes / self.device_kv_bytes
