"""Small campaigns for live tests: a two-layer model and 1,600-token sessions, a minute per arm.

Timing criteria of so small a model decide nothing; live tests look at validity, oracles and
reasons.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]

_HEAD = """\
format = 1
name = "{name}"
profile = "cpu-demo"
gates = {gates}
seed = 7

[model]
kind = "generated"

[model.architecture]
num_layers = 2
hidden_size = 256
intermediate_size = 512
num_attention_heads = 4
num_kv_heads = 2
dtype = "float32"

[server]
args = ["--enforce-eager", "--dtype", "float32", "--max-model-len", "2048"]
environment = {{ VLLM_CPU_KVCACHE_SPACE = "1" }}
block_tokens = 128
device_kv_tokens = 5632
cpu_cores = {cores}
ready_deadline_s = 420.0

[cold_recovery]
levels = {levels}
repetitions = 3
sessions = 12
prompt_tokens = 1600
output_tokens = 24
oracle_sessions = 4
steady_cycles = {steady_cycles}
fits_sessions = 3
"""

TIERED_DISK = {"host_pool_bytes": 16 * 2**20, "directory": "{tier_dir}", "reset_scope": "host"}
BUNDLED = ("KvgateTierConnector", "harness.connector.connector")


def campaign(
    name: str,
    arms: str,
    *,
    gates: tuple[str, ...] = ("g1", "g3"),
    levels: tuple[int, ...] = (1, 2),
    cores: int = 2,
    steady_cycles: int = 4,
) -> str:
    """A campaign text with these arm tables."""
    head = _HEAD.format(
        name=name,
        gates=json.dumps(gates),
        levels=list(levels),
        cores=cores,
        steady_cycles=steady_cycles,
    )
    return head + arms


def baseline(role: str) -> str:
    """The table of a baseline arm, named after its role."""
    declared = '["prefix_caching"]' if role == "recompute" else "[]"
    return f'\n[arms.{role}]\nrole = "{role}"\ndeclared = {declared}\n'


def tiered(
    name: str,
    *,
    medium: str = "disk",
    connector: tuple[str, str] | None = BUNDLED,
    config: dict[str, Any] | None = None,
    extra: str = "",
) -> str:
    """The table of a tiered arm; ``connector`` None: switched off."""
    text = f'\n[arms.{name}]\nrole = "tiered"\nmedium = "{medium}"\n'
    text += 'declared = ["connector", "connector_config"]\n'
    text += f"python_path = [{json.dumps(str(REPOSITORY))}]\n{extra}"
    if connector is None:
        return text
    text += f"\n[arms.{name}.kv_transfer]\n"
    text += f'kv_connector = "{connector[0]}"\nkv_connector_module_path = "{connector[1]}"\n'
    text += 'kv_role = "kv_both"\nkv_load_failure_policy = "recompute"\n'
    items = ", ".join(f"{k} = {json.dumps(v)}" for k, v in (config or TIERED_DISK).items())
    return text + f"kv_connector_extra_config = {{ {items} }}\n"
