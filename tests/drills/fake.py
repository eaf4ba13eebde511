"""Drills on the fake server: a tiny campaign, and a hold at an exact moment of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.drills.drill import Drill, wait_until

LIMIT_S = 60.0
FAKE = Path(__file__).with_name("fake_vllm.py")

# Requests before each moment: two of the warm-up, six of populate, then the waves.
PHASES: dict[str, dict[str, object]] = {
    "install check": {"event": "install_check"},
    "server start": {"event": "start"},
    "warm-up": {"event": "completion", "count": 1},
    "populate": {"event": "completion", "count": 4},
    "measure": {"event": "completion", "count": 8},
    "between trials": {"event": "version", "count": 2},
}

CAMPAIGN = """\
format = 1
name = "drill"
profile = "cpu-demo"
gates = ["g3"]
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
python = "{python}"
block_tokens = 16
device_kv_tokens = 1024
cpu_cores = 1
ready_deadline_s = {ready_s}
request_deadline_s = 120.0
answer_deadline_s = 2.0

[arms.tiered_disk]
role = "tiered"
medium = "disk"
tier_root = "{tier_root}"
declared = ["connector", "connector_config"]

[arms.tiered_disk.kv_transfer]
kv_connector = "KvgateTierConnector"

[arms.tiered_disk.kv_transfer.kv_connector_extra_config]
host_pool_bytes = 65536
directory = "{{tier_dir}}"
reset_scope = "host"

[arms.hbm_only]
role = "hbm_only"

[arms.recompute]
role = "recompute"
declared = ["prefix_caching"]

[cold_recovery]
levels = [1, 2]
repetitions = 3
sessions = 6
prompt_tokens = 488
output_tokens = 4
oracle_sessions = 1
steady_cycles = 0
fits_sessions = 1
"""


@dataclass(frozen=True)
class FakeSite:
    """A directory with a campaign whose vLLM is the fake one."""

    root: Path
    campaign: Path
    tier_root: Path

    def drill(self, hold: dict[str, object] | None, *arguments: str) -> Drill:
        """A run of the campaign that stops at the hold, None: that is not disturbed."""
        self.hold(hold)
        return Drill(self.root, self.campaign, environment(self.root), arguments)

    def hold(self, hold: dict[str, object] | None) -> None:
        """The server stops there from now on; None: nowhere."""
        for name in ("hold", "held"):
            (self.root / name).unlink(missing_ok=True)
        if hold is not None:
            (self.root / "hold").write_text(json.dumps(hold))

    def is_held(self) -> bool:
        """Whether the moment has come."""
        return (self.root / "held").is_file()

    def runs_left(self) -> Iterator[Path]:
        """Scratch directories that a run left."""
        yield from (self.root / "runs").glob("*/*/scratch")

    def release(self) -> None:
        """The held server goes on."""
        (self.root / "hold").unlink()

    def wait_held(self) -> None:
        """The moment has come."""
        wait_until(self.is_held, LIMIT_S, "the hold is reached")


def environment(root: Path) -> dict[str, str]:
    """What the fake server and the harness need to know."""
    return {"KVGATE_FAKE_DIR": str(root), "KVGATE_HOME": str(root / "home")}


def make_site(root: Path, *, ready_s: float = 6.0, text: str = CAMPAIGN) -> FakeSite:
    """Writes campaign, wrapper and an own tier root with somebody else's content."""
    root.mkdir(parents=True, exist_ok=True)
    tier_root = root / "tier"
    (tier_root / "theirs").mkdir(parents=True)
    (tier_root / "theirs" / "block").write_text("somebody else's")
    campaign = root / "drill.toml"
    campaign.write_text(text.format(python=fake_python(root), tier_root=tier_root, ready_s=ready_s))
    return FakeSite(root, campaign, tier_root)


def fake_python(root: Path) -> Path:
    """An "interpreter" that is asked whether vllm is installed, and then starts the fake server."""
    path = root / "python"
    path.write_text(
        "#!/bin/sh\n"
        f'if [ "$1" = "-c" ]; then exec "{sys.executable}" "{FAKE}" --install-check; fi\n'
        f'exec "{sys.executable}" "{FAKE}" "$@"\n'
    )
    path.chmod(0o755)
    return path
