"""From a campaign and its model to the KV of each arm, and to what the devices hold. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from harness.campaign.engine_options import EngineOptions, engine_options
from harness.campaign.sections import Arm, Campaign
from harness.errors import PlanError
from harness.placement.cache import KVSize, Parallel
from harness.placement.headroom import GIB, Capacity, Devices, capacity, known_capacity
from harness.placement.layers import STATE, read_model

DEFAULT_BLOCK_TOKENS = 16


@dataclass(frozen=True)
class ArmKV:
    """The KV of one arm's server.

    Attributes:
        size: computed; None where ``model.kv_bytes_per_token`` stands in for what is not modelled.
        stated: that key.
        why_not: what kept it from being computed.
    """

    size: KVSize | None
    stated: int | None
    why_not: str | None = None

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token on all ranks together: what the bundled connector's counters sum."""
        if self.stated is not None:
            return self.stated
        assert self.size is not None
        return self.size.ranks_total_bytes_per_token

    def session_bytes(self, tokens: int) -> int:
        """Bytes of a session on all ranks together, states included."""
        if self.stated is not None or self.size is None:
            return tokens * self.bytes_per_token
        return self.size.session_bytes(tokens)


def arm_kv(campaign: Campaign, arm: Arm, model_config: dict[str, Any]) -> ArmKV:
    """The KV of an arm. Raises PlanError: not known, not modelled and not stated, contradictory."""
    options = arm_options(campaign, arm)
    parallel = arm_parallel(campaign, arm, options)
    stated = campaign.model.kv_bytes_per_token
    try:
        size = _size(campaign, arm, options, parallel, model_config)
    except PlanError as error:
        if stated is None:
            raise
        return ArmKV(None, stated, "; ".join(error.problems))
    return ArmKV(size, stated)


def candidate(campaign: Campaign) -> Arm:
    """The arm whose sizes a plan shows: the first tiered one."""
    arms = list(campaign.arms.values())
    return next((arm for arm in arms if arm.role == "tiered"), arms[0])


def arm_options(campaign: Campaign, arm: Arm) -> EngineOptions:
    """What an arm's arguments say; nothing for a server that vLLM's arguments do not start."""
    if arm.kind != "vllm":
        return EngineOptions()
    where = f"arms.{arm.name}: server.args and args"
    return engine_options([*campaign.server.args, *arm.args], where=where)


def arm_parallel(campaign: Campaign, arm: Arm, options: EngineOptions) -> Parallel:
    """Tensor and pipeline parallelism, by the arguments and by [deployment], which must agree."""
    deployment, sizes, problems = campaign.deployment, [], []
    for key, flag in (
        ("tensor_parallel", "--tensor-parallel-size"),
        ("pipeline_parallel", "--pipeline-parallel-size"),
    ):
        stated = None if deployment is None else getattr(deployment, key)
        given = getattr(options, key)
        # A server that is started without the argument has one rank, whatever else is written.
        runs = 1 if given is None and arm.kind == "vllm" else given
        if stated is not None and runs is not None and stated != runs:
            found = f"{flag} {given}" if given is not None else f"no {flag}, which means 1"
            problems.append(
                f"deployment.{key}: found {stated}; arms.{arm.name} is started with {found}"
            )
        sizes.append(stated or runs or 1)
    if problems:
        raise PlanError(problems)
    return Parallel(*sizes)


def _size(
    campaign: Campaign,
    arm: Arm,
    options: EngineOptions,
    parallel: Parallel,
    model_config: dict[str, Any],
) -> KVSize:
    if options.not_modelled is not None:
        raise PlanError(
            [f"arms.{arm.name}: args: found {options.not_modelled}, not modelled; {STATE}"]
        )
    asked = options.dtype if options.dtype not in (None, "auto") else None
    model = read_model(model_config if asked is None else {**model_config, "dtype": _name(asked)})
    # vLLM serves a float32 checkpoint in 16 bit unless told otherwise (0.32.0: config/model.py
    # _resolve_auto_dtype); the simulated server takes the checkpoint's word.
    halved = asked is None and model.dtype == "float32" and arm.kind != "sim"
    model_dtype = "bfloat16" if halved else model.dtype
    cache = options.kv_cache_dtype
    if cache in (None, "auto"):
        cache = model.cache_dtype or model_dtype
    return KVSize(
        model,
        str(cache),
        model_dtype,
        parallel=parallel,
        block_tokens=campaign.server.block_tokens or DEFAULT_BLOCK_TOKENS,
    )


def _name(dtype: str) -> str:
    return {"half": "float16", "float": "float32"}.get(dtype, dtype)


@dataclass(frozen=True)
class Placement:
    """Where a campaign's sessions fit.

    Attributes:
        kv: of the candidate's server.
        resident: the same with blocks behind windows freed, as an engine without connector does.
        tokens: of a session, prompt and answer.
        devices, natural: by [deployment]: what there is and what it holds. None: not stated.
        configured: by server.device_kv_tokens: what the measured servers are given. None likewise.
    """

    kv: ArmKV
    resident: KVSize | None
    tokens: int
    devices: Devices | None
    natural: Capacity | None
    configured: Capacity | None


def placement(campaign: Campaign, model_config: dict[str, Any]) -> Placement:
    """The placement of a campaign. Raises PlanError."""
    arm = candidate(campaign)
    options = arm_options(campaign, arm)
    kv, work, server = arm_kv(campaign, arm, model_config), campaign.cold_recovery, campaign.server
    resident = kv.size and replace(kv.size, drops_windows=options.drops_windows)
    devices = _devices(campaign, options)
    natural = configured = None
    if devices is not None and resident is not None:
        natural = capacity(resident, devices)
    if server.device_kv_tokens is not None and resident is not None:
        blocks = server.device_kv_tokens // (server.block_tokens or DEFAULT_BLOCK_TOKENS)
        configured = known_capacity(resident, blocks=blocks)
    tokens = work.prompt_tokens + work.output_tokens
    return Placement(kv, resident, tokens, devices, natural, configured)


def _devices(campaign: Campaign, options: EngineOptions) -> Devices | None:
    stated = campaign.deployment
    if stated is None:
        return None
    used, given = stated.utilisation, options.utilisation
    if used is not None and given is not None and used != given:
        raise PlanError(
            [
                f"deployment.utilisation: found {used:g}; the server is started with "
                f"--gpu-memory-utilization {given:g}"
            ]
        )
    share = used if used is not None else given
    if share is None:
        # Its default differs between versions (0.90 in 0.20.1, 0.92 in 0.32.0).
        raise PlanError(
            [
                "deployment.utilisation: found none; state it, or --gpu-memory-utilization in "
                "server.args: the default differs between versions of vLLM"
            ]
        )
    return Devices(
        accelerators=stated.accelerators,
        memory_bytes=stated.memory_gib * GIB,
        utilisation=share,
        weights_bytes=stated.weights_gib * GIB,
        reserve_bytes=stated.activation_reserve_gib * GIB,
        margin=stated.margin,
    )
