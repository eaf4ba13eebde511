"""What a restart of a real vLLM may find in the directory: only what its own configuration wrote.

Three servers with the same weights, one directory. The last one reads another configuration
(``--hf-config-path``): its keys are turned twice as slowly, so KV of the others is wrong for it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from .vllm_server import BLOCK_TOKENS, Answer, Metrics, prompt, serve, transfer, value

pytestmark = pytest.mark.live

BLOCKS = 4
PROMPTS = [prompt(session, BLOCKS) for session in range(3)]
TOKENS = len(PROMPTS) * BLOCKS * BLOCK_TOKENS


def _stretched(model: Path, directory: Path) -> Path:
    """A directory with the model's configuration but for a linear rope factor of 2."""
    directory.mkdir()
    config = json.loads((model / "config.json").read_text())
    theta = config.pop("rope_theta")
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": theta}
    (directory / "config.json").write_text(json.dumps({**config, "rope_parameters": rope}))
    shutil.copy(model / "generation_config.json", directory)
    return directory


def test_a_restart_finds_only_what_its_own_configuration_wrote(model: Path, tmp_path: Path) -> None:
    extra = {"host_pool_bytes": 64 << 20, "directory": str(tmp_path / "tier")}
    other = _stretched(model, tmp_path / "other")

    def run(name: str, *arguments: str) -> tuple[dict[str, object], list[Answer], Metrics]:
        log = tmp_path / f"{name}.log"
        with serve(model, log, transfer(extra), arguments=arguments) as server:
            answers = server.ask_all(PROMPTS)
            server.wait_durable()
            return server.ready_line(), answers, server.metrics()

    first, computed, _ = run("first")
    plain, restored, metrics = run("plain")
    assert (plain["namespace"], plain["disk_blocks_found"]) == (
        first["namespace"],
        TOKENS // BLOCK_TOKENS,
    )
    assert value(metrics, "kvgate:tier_hit_tokens_total", tier="disk") == TOKENS
    assert [a.cached_tokens for a in restored] == [BLOCKS * BLOCK_TOKENS] * len(PROMPTS)
    assert _first_tokens(restored) == _first_tokens(computed)

    changed, recomputed, metrics = run("changed", "--hf-config-path", str(other))
    assert changed["disk_enabled"]
    assert changed["namespace"] != first["namespace"]
    assert changed["disk_blocks_found"] == 0
    assert [a.cached_tokens for a in recomputed] == [0] * len(PROMPTS)
    assert value(metrics, "kvgate:tier_hit_tokens_total") == 0
    # The control: with the other factor the same prompts do give something else.
    pairs = zip(recomputed, computed, strict=True)
    assert all(a.logprobs[0] != b.logprobs[0] for a, b in pairs)
    print(f"plain restart: {plain['disk_blocks_found']} blocks found; other configuration: 0")


def _first_tokens(answers: Sequence[Answer]) -> list[int]:
    return [answer.token_ids[0] for answer in answers]
