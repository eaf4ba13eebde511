"""Two tensor-parallel workers on a real vLLM: each keeps its part of every block.

KVGATE_VLLM_PYTHON names a Python with vLLM. Exactness as in test_connector.py, against a device
prefix hit of a server with the same two workers.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .vllm_server import BLOCK_TOKENS, Answer, Server, prompt, serve, transfer

pytestmark = pytest.mark.live

BLOCKS = 8
SESSIONS = [prompt(session, BLOCKS) for session in range(3)]
TWO_WORKERS = ("--tensor-parallel-size", "2")
BINDING = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}


def _ask(server: Server) -> list[Answer]:
    return server.ask_all(SESSIONS)


def test_restores_are_exact_with_two_workers(model: Path, tmp_path: Path) -> None:
    if (os.cpu_count() or 1) < 2:
        pytest.skip("two workers need two cores")
    with serve(
        model, tmp_path / "reference.log", None, arguments=TWO_WORKERS, environment=BINDING
    ) as server:
        _ask(server)
        wanted = _ask(server)
    assert [answer.cached_tokens for answer in wanted] == [BLOCKS * BLOCK_TOKENS] * len(SESSIONS)

    extra = {
        "host_pool_bytes": 1 << 28, "directory": str(tmp_path / "tier"), "reset_scope": "host",
        "disk_reserve_bytes": 0,
    }  # fmt: skip
    for start in ("first", "second"):
        with serve(
            model, tmp_path / f"{start}.log", transfer(extra),
            arguments=TWO_WORKERS, environment=BINDING,
        ) as server:  # fmt: skip
            assert server.ready_line()["rank_count"] == 2
            if start == "first":
                _ask(server)
                server.wait_durable()
                server.reset(external=False)
                assert _ask(server) == wanted, "from host memory"
            server.reset(external=True)
            before = server.metric("kvgate:tier_hit_tokens_total", tier="disk")
            assert _ask(server) == wanted, "from disk"
            after = server.metric("kvgate:tier_hit_tokens_total", tier="disk")
            assert after - before == len(SESSIONS) * BLOCKS * BLOCK_TOKENS
            assert server.metric("kvgate:tier_load_failed_blocks_total") == 0
    files = [len(list((tmp_path / "tier").glob(f"*/r{rank}/*/*.kv"))) for rank in (0, 1)]
    assert files == [len(SESSIONS) * BLOCKS] * 2
