"""A small campaign file for tests: three arms, two levels, a tiny model."""

from __future__ import annotations

SMALL_CAMPAIGN = """\
format = 1
name = "small"
profile = "cpu-demo"
gates = ["g1", "g3"]
seed = 7

[model]
kind = "generated"

[model.architecture]
num_layers = 2
hidden_size = 64
intermediate_size = 64
num_attention_heads = 2
num_kv_heads = 1
head_size = 32
vocab_size = 512
dtype = "float32"

[server]
args = ["--dtype", "float32"]
block_tokens = 16
device_kv_tokens = 1024
cpu_cores = 2

[arms.tiered_disk]
role = "tiered"
medium = "disk"
declared = ["connector", "connector_config"]

[arms.tiered_disk.kv_transfer]
kv_connector = "KvgateTierConnector"

[arms.tiered_disk.kv_transfer.kv_connector_extra_config]
host_pool_bytes = 65536
directory = "{tier_dir}"
reset_scope = "host"

[arms.hbm_only]
role = "hbm_only"

[arms.recompute]
role = "recompute"
declared = ["prefix_caching"]

[cold_recovery]
levels = [1, 2]
repetitions = 3
sessions = 9
prompt_tokens = 328
output_tokens = 4
oracle_sessions = 8
steady_cycles = 3
fits_sessions = 3
"""


def edited(*changes: tuple[str, str]) -> str:
    """The small campaign with texts replaced; each must be there exactly once."""
    text = SMALL_CAMPAIGN
    for old, new in changes:
        assert text.count(old) == 1, f"{old!r} is there {text.count(old)} times"
        text = text.replace(old, new)
    return text
