"""Sizes of a demonstration, chosen from a list by what a calibration measured. Pure.

A contrast between recomputing and restoring depends on the machine: a fast processor makes the one
cheap, a slow disk the other dear. Calibrated sizes make the same plan show the same thing on both
(docs/adr/0020-a-demo-that-decides.md).
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from dataclasses import asdict, dataclass
from typing import Any

from harness.campaign.sections import Campaign, ColdRecovery, Size

CALIBRATION_SUFFIX = "-calibration"
_CALIBRATION_SESSIONS = 4
_CALIBRATION_WAVES = 3
# Judging, reports, waits for durable blocks, one-token requests.
_ROUND_OVERHEAD_S = 40.0


@dataclass(frozen=True)
class Calibration:
    """Seconds, medians at concurrency 1, of the campaign's own sizes.

    ``prefill_s``, ``restore_s``, ``resident_s``: TTFT computed, restored from the medium, and
    answered from the device cache; ``start_s``: until the server was ready.
    """

    prefill_s: float
    restore_s: float
    resident_s: float
    start_s: float


@dataclass(frozen=True)
class Prediction:
    """What a size would show. ``contrast``: prefill over restore; ``round_s``: all arms once."""

    size: Size
    prefill_s: float
    restore_s: float
    round_s: float

    @property
    def contrast(self) -> float:
        """How many restores a prefill takes."""
        return self.prefill_s / self.restore_s

    def to_json(self) -> dict[str, Any]:
        """For the record of the plan."""
        figures = (self.prefill_s, self.restore_s, self.round_s, self.contrast)
        names = ("prefill_s", "restore_s", "round_s", "contrast")
        return {**self.size.model_dump(), **dict(zip(names, map(_rounded, figures), strict=True))}


def predict(campaign: Campaign, measured: Calibration, size: Size) -> Prediction:
    """Times of another size. What a resident hit costs stays; the rest grows with work and bytes.

    Work: floating-point operations of a prefill, by the model's own shapes. Bytes: of its KV.
    """
    own = own_size(campaign)
    fixed = min(measured.resident_s, measured.restore_s, measured.prefill_s)
    work = prefill_operations(campaign, size) / prefill_operations(campaign, own)
    share = size.num_layers * size.prompt_tokens / (own.num_layers * own.prompt_tokens)
    prefill_s = fixed + (measured.prefill_s - fixed) * work
    restore_s = fixed + (measured.restore_s - fixed) * share
    arms = len(campaign.arms)
    round_s = arms * measured.start_s + _prefills(campaign) * prefill_s + _ROUND_OVERHEAD_S
    return Prediction(size, prefill_s, restore_s, round_s)


def choose(campaign: Campaign, measured: Calibration) -> tuple[Prediction, list[Prediction]]:
    """The first size of the list that shows the contrast wanted in the time allowed, and all.

    Where none does: the clearest contrast that fits the time, or the shortest round of all.
    """
    sizing = campaign.sizing
    assert sizing is not None
    predictions = [predict(campaign, measured, size) for size in sizing.choices]
    fitting = [p for p in predictions if p.round_s <= sizing.round_s_max]
    if not fitting:
        return min(predictions, key=lambda p: p.round_s), predictions
    clear = [p for p in fitting if p.contrast >= sizing.contrast]
    return clear[0] if clear else max(fitting, key=lambda p: p.contrast), predictions


def own_size(campaign: Campaign) -> Size:
    """The size that the file itself has, which the calibration runs."""
    model = campaign.model.generated
    return Size(
        num_layers=model.num_layers,
        intermediate_size=model.intermediate_size,
        prompt_tokens=campaign.cold_recovery.prompt_tokens,
    )


def prefill_operations(campaign: Campaign, size: Size) -> float:
    """Multiplications and additions of one prefill: projections, attention and MLP per layer.

    2 per weight and token, and 4 per pair of query and earlier key and element of a head.
    """
    model = campaign.model.generated
    query = model.num_attention_heads * model.head_size
    cached = model.num_kv_heads * model.head_size
    weights = 2 * model.hidden_size * (query + cached) + 3 * model.hidden_size * (
        size.intermediate_size
    )
    per_token = 2 * weights + 4 * query * size.prompt_tokens / 2
    return float(size.num_layers * size.prompt_tokens * per_token)


def _prefills(campaign: Campaign) -> int:
    """Prefills of the first round, over all arms."""
    work = campaign.cold_recovery
    waves = sum(work.levels) * _round_repetitions(work) + work.steady_cycles * work.levels[-1]
    each = 1 + work.levels[-1] + work.sessions
    roles = [arm.role for arm in campaign.arms.values()]
    tiered = roles.count("tiered")
    return len(roles) * each + (len(roles) - tiered) * waves + work.fits_sessions + 2 * tiered


def _round_repetitions(work: ColdRecovery) -> int:
    return math.ceil(work.repetitions / 2) if work.restart == "look" else work.repetitions


def sized_text(text: str, campaign: Campaign, size: Size, *, why: str) -> str:
    """The campaign file with these sizes and without the choice, to be sealed and run again.

    Device cache and host pools grow and shrink with the KV of a session.
    """
    content = tomllib.loads(text)
    del content["sizing"]
    own, block = own_size(campaign), campaign.server.block_tokens or 16
    output = campaign.cold_recovery.output_tokens
    content["model"]["architecture"] |= {
        "num_layers": size.num_layers,
        "intermediate_size": size.intermediate_size,
    }
    content["cold_recovery"]["prompt_tokens"] = size.prompt_tokens

    def blocks(one: Size) -> int:
        return math.ceil((one.prompt_tokens + output) / block)

    tokens = content["server"].get("device_kv_tokens")
    if tokens is not None:
        held = math.ceil(tokens // block * blocks(size) / blocks(own))
        content["server"]["device_kv_tokens"] = held * block
    share = size.num_layers * size.prompt_tokens / (own.num_layers * own.prompt_tokens)
    for arm in content["arms"].values():
        extra = arm.get("kv_transfer", {}).get("kv_connector_extra_config", {})
        if "host_pool_bytes" in extra:
            extra["host_pool_bytes"] = math.ceil(extra["host_pool_bytes"] * share)
    return _toml(content, heading=why)


def calibration_text(text: str, campaign: Campaign) -> str:
    """A campaign that measures the calibration: the disk arm alone, a few sessions one by one."""
    content = tomllib.loads(text)
    del content["sizing"]
    name = next(
        (arm.name for arm in campaign.arms.values() if arm.medium == "disk"),
        next(arm.name for arm in campaign.arms.values() if arm.role == "tiered"),
    )
    content["name"] += CALIBRATION_SUFFIX
    content["gates"] = ["g3"]
    content["arms"] = {name: content["arms"][name]}
    work = content["cold_recovery"]
    content["cold_recovery"] = {
        "levels": [1],
        "repetitions": _CALIBRATION_WAVES,
        "sessions": _CALIBRATION_SESSIONS,
        "prompt_tokens": work["prompt_tokens"],
        "output_tokens": work["output_tokens"],
        "oracle_sessions": 0,
        "steady_cycles": 0,
        "fits_sessions": 0,
    }
    return _toml(
        content, heading="Measures how fast this machine computes and restores; no verdict."
    )


def calibration_record(
    measured: Calibration, chosen: Prediction, predictions: list[Prediction]
) -> dict[str, Any]:
    """What of a calibration is saved with the plan. Seconds."""
    return {
        "measured": {name: _rounded(value) for name, value in asdict(measured).items()},
        "predicted": [prediction.to_json() for prediction in predictions],
        "chosen": chosen.size.model_dump(),
    }


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


# --- TOML ---------------------------------------------------------------------

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def _toml(content: dict[str, Any], *, heading: str) -> str:
    """A TOML file of what `tomllib` read: values first, then tables. Comments are not kept."""
    lines = [f"# {line}" for line in heading.splitlines()]
    lines += _table(content, ())
    return "\n".join([*lines, ""])


def _table(content: dict[str, Any], path: tuple[str, ...]) -> list[str]:
    lines = ["", f"[{'.'.join(map(_key, path))}]"] if path else []
    tables = {key: value for key, value in content.items() if isinstance(value, dict)}
    lines += [f"{_key(k)} = {_value(v)}" for k, v in content.items() if k not in tables]
    for key, value in tables.items():
        lines += _table(value, (*path, key))
    return lines


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else json.dumps(name)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{_key(k)} = {_value(v)}' for k, v in value.items())} }}"
    return repr(value)
