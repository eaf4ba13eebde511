"""An arm is data: how one server configuration under comparison is launched. Pure; starts nothing.

`launch_spec` turns (campaign, arm, facts of this machine) into the exact argv and environment.
Nothing else in the project decides what a server is started with.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.campaign.sections import Arm, Campaign

# The only environment that reaches evidence and reports; everything else a server inherits stays
# private.
ENVIRONMENT_ALLOW_LIST = (
    "CUDA_VISIBLE_DEVICES",
    "HF_HUB_OFFLINE",
    "HIP_VISIBLE_DEVICES",
    "LD_PRELOAD",
    "OMP_NUM_THREADS",
    "PYTHONHASHSEED",
    "ROCR_VISIBLE_DEVICES",
    "VLLM_ATTENTION_BACKEND",
    "VLLM_CPU_KVCACHE_SPACE",
    "VLLM_CPU_OMP_THREADS_BIND",
    "VLLM_NO_USAGE_STATS",
    "VLLM_ROCM_USE_AITER",
    "VLLM_SERVER_DEV_MODE",
    "VLLM_USE_V2_MODEL_RUNNER",
)

SERVED_MODEL_NAME = "kvgate-model"


@dataclass(frozen=True)
class LaunchSpec:
    """What a managed server is started with. ``argv`` lacks the port, which is chosen at launch."""

    arm: str
    argv: tuple[str, ...]
    environment: dict[str, str]
    ready_deadline_s: float
    port: int | None = None
    kind: str = "vllm"

    def recorded_environment(self) -> dict[str, str]:
        """The allow-listed part, for evidence."""
        return {k: self.environment[k] for k in ENVIRONMENT_ALLOW_LIST if k in self.environment}


def vllm_python(campaign: Campaign, arm: Arm, home: Path) -> Path:
    """The interpreter of the arm's vLLM environment. ``auto``: the one `kvgate setup` made."""
    python = arm.python or campaign.server.python
    if python == "auto":
        override = os.environ.get("KVGATE_VLLM_PYTHON")
        return Path(override) if override else home / "vllm" / "bin" / "python"
    return Path(os.path.expandvars(os.path.expanduser(python)))


def launch_spec(
    campaign: Campaign,
    arm: Arm,
    *,
    home: Path,
    model_dir: Path,
    tier_dir: Path | None,
    import_path: Path,
    allowed_cores: Sequence[int],
    inherited: dict[str, str],
) -> LaunchSpec:
    """The exact command of an arm's server.

    ``import_path`` holds this package alone (`link_package`); ``inherited`` is the harness's own
    environment.
    """
    server = campaign.server
    argv = (
        _sim_argv(campaign, arm, model_dir=model_dir, allowed_cores=allowed_cores)
        if arm.kind == "sim"
        else _vllm_argv(campaign, arm, home=home, model_dir=model_dir, tier_dir=tier_dir)
    )
    environment = dict(inherited)
    environment |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # POST /reset_prefix_cache, which makes the device cold
        "PYTHONUNBUFFERED": "1",
    }
    cores = arm.cpu_cores or server.cpu_cores
    if cores is not None:
        # vLLM binds more OpenMP threads by itself when a connector is configured, which alone
        # halves TTFT: the binding is fixed in every arm and read back from the log.
        chosen = ",".join(str(core) for core in list(allowed_cores)[:cores])
        environment["VLLM_CPU_OMP_THREADS_BIND"] = chosen
    environment |= server.environment | arm.environment
    search = [str(import_path), *arm.python_path]
    if environment.get("PYTHONPATH"):
        search.append(environment["PYTHONPATH"])
    environment["PYTHONPATH"] = os.pathsep.join(search)
    return LaunchSpec(
        arm=arm.name,
        argv=tuple(argv),
        environment=environment,
        ready_deadline_s=server.ready_deadline_s,
        port=server.port,
        kind=arm.kind,
    )


def _vllm_argv(
    campaign: Campaign, arm: Arm, *, home: Path, model_dir: Path, tier_dir: Path | None
) -> list[str]:
    server = campaign.server
    argv = [
        str(vllm_python(campaign, arm, home)),
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(model_dir),
        "--served-model-name",
        SERVED_MODEL_NAME,
        "--host",
        "127.0.0.1",
        "--enable-prompt-tokens-details",
    ]
    if server.block_tokens is not None:
        argv += ["--block-size", str(server.block_tokens)]
    if server.device_kv_tokens is not None and server.block_tokens is not None:
        blocks = server.device_kv_tokens // server.block_tokens
        argv += ["--num-gpu-blocks-override", str(blocks)]
    argv += server.args
    if arm.role == "recompute":
        argv.append("--no-enable-prefix-caching")
    else:
        argv.append("--enable-prefix-caching")
    argv += arm.args
    if arm.kv_transfer is not None:
        config = _fill(arm.kv_transfer, {"{tier_dir}": str(tier_dir)})
        argv += ["--kv-transfer-config", json.dumps(config, sort_keys=True)]
    return argv


def _sim_argv(
    campaign: Campaign, arm: Arm, *, model_dir: Path, allowed_cores: Sequence[int]
) -> list[str]:
    """The command of a simulated server: one JSON, the campaign's ``sim`` tables first."""
    server = campaign.server
    cores = arm.cpu_cores or server.cpu_cores
    config: dict[str, Any] = {"seed": campaign.seed, **server.sim, **arm.sim}
    config["prefix_caching"] = arm.role != "recompute"
    config["compute_threads"] = len(list(allowed_cores)[:cores])
    config["medium"] = arm.medium
    if server.block_tokens is not None:
        config["block_tokens"] = server.block_tokens
        if server.device_kv_tokens is not None:
            config["device_blocks"] = server.device_kv_tokens // server.block_tokens
    return [
        sys.executable,
        "-m",
        "harness.sim",
        "--config",
        json.dumps(config, sort_keys=True),
        "--model",
        str(model_dir),
        "--served-model-name",
        SERVED_MODEL_NAME,
    ]


def link_package(directory: Path) -> Path:
    """A directory from which vLLM's processes can import ``harness`` and nothing else of ours.

    Our site-packages on their path would shadow vLLM's own dependencies.
    """
    directory.mkdir(parents=True, exist_ok=True)
    link = directory / "harness"
    if not link.exists():
        link.symlink_to(Path(__file__).resolve().parent.parent, target_is_directory=True)
    return directory


def _fill(value: Any, placeholders: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _fill(item, placeholders) for key, item in value.items()}
    if isinstance(value, list):
        return [_fill(item, placeholders) for item in value]
    if isinstance(value, str):
        for name, text in placeholders.items():
            value = value.replace(name, text)
    return value


def tier_root(configured: str) -> Path:
    """The directory on the medium under test, below which a run makes its own."""
    return Path(os.path.expandvars(configured)).expanduser().resolve()


def local_ranks(args: Sequence[str]) -> int:
    """Workers that vLLM starts on this machine for these arguments: tensor x data parallel."""
    ranks = 1
    for long, short in (("--tensor-parallel-size", "-tp"), ("--data-parallel-size", "-dp")):
        for at, text in enumerate(args):
            name, _, value = text.partition("=")
            if name.replace("_", "-") in (long, short):
                value = value or (args[at + 1] if at + 1 < len(args) else "")
                ranks *= int(value) if value.isdigit() else 1
    return ranks


def default_home() -> Path:
    """Where `kvgate setup` puts the vLLM environment and generated models.

    ``KVGATE_HOME``, else ``.kvgate`` in the working directory.
    """
    return Path(os.environ.get("KVGATE_HOME", ".kvgate")).resolve()


def allowed_cores() -> list[int]:
    """The cores this process may run on, in order."""
    return sorted(os.sched_getaffinity(0))


def python_version() -> str:
    """Version of the harness's own interpreter."""
    return ".".join(map(str, sys.version_info[:3]))
