"""The peer in a real vLLM on the CPU: what it restores is exact, from its host tier and its files.

Reference: a device prefix hit on a server without connector with the same number of cached tokens,
one request at a time; token ids and log-probabilities must agree bit for bit.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live.vllm_server import (
    BLOCK_TOKENS,
    Answer,
    Server,
    prompt,
    serve,
    value,
    wait_until,
)

pytestmark = pytest.mark.live

SESSIONS = 2
BLOCKS = 16
PROMPTS = [prompt(session, BLOCKS) for session in range(SESSIONS)]
RESTORED = [BLOCKS * BLOCK_TOKENS] * SESSIONS
LAYERS, KV_HEADS, HEAD_SIZE = 2, 4, 64
# Keys and values in bfloat16.
RESTORED_BYTES = sum(RESTORED) * LAYERS * KV_HEADS * HEAD_SIZE * 2 * 2
LOADED = "vllm:kv_offload_load_bytes_total"
STORED = "vllm:kv_offload_store_bytes_total"
READ = "vllm:kv_offload_tiering_read_bytes_total"
WRITTEN = "vllm:kv_offload_tiering_write_bytes_total"
HOST_TIER = re.compile(r"/dev/shm/vllm_offload_\S+\.mmap$", re.MULTILINE)


@pytest.fixture(scope="module")
def reference(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    with serve(model, tmp_path_factory.mktemp("reference") / "server.log", None) as server:
        server.ask_all(PROMPTS)
        answers = server.ask_all(PROMPTS)
    assert [answer.cached_tokens for answer in answers] == RESTORED
    return answers


@contextlib.contextmanager
def _peer(model: Path, log: Path, files: Path) -> Iterator[Server]:
    """A server with the peer. Removes the host tier, which vLLM leaves behind after a signal."""
    config = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringOffloadingSpec",
            "spec_module_path": "harness.connector.peer",
            "cpu_bytes_to_use": 64 << 20,
            "secondary_tiers": [{"type": "fs", "root_dir": str(files)}],
        },
    }
    mapped: set[str] = set()
    try:
        with serve(model, log, config) as server:
            for process in server.processes():
                mapped |= set(HOST_TIER.findall(Path(f"/proc/{process.pid}/maps").read_text()))
            assert mapped
            yield server
    finally:
        for path in mapped:
            Path(path).unlink(missing_ok=True)


def _bytes(server: Server, name: str) -> float:
    """A counter after one more engine step; 0 while it has no series yet."""
    metrics = server.metrics()
    return value(metrics, name) if any(series == name for series, _ in metrics) else 0.0


def test_restores_are_exact_from_the_host_tier_and_from_files(
    model: Path, reference: list[Answer], tmp_path: Path
) -> None:
    files = tmp_path / "files"
    with _peer(model, tmp_path / "first.log", files) as server:
        first = server.ask_all(PROMPTS)
        assert [answer.cached_tokens for answer in first] == [0] * SESSIONS
        wait_until(lambda: _bytes(server, WRITTEN) == RESTORED_BYTES, "all blocks in files")
        assert _bytes(server, STORED) == RESTORED_BYTES

        server.reset(external=False)
        assert server.ask_all(PROMPTS) == reference
        assert _bytes(server, LOADED) == RESTORED_BYTES
        assert _bytes(server, READ) == 0

        server.reset(external=True)  # empties the host tier, keeps the files
        assert server.ask_all(PROMPTS) == reference
        assert _bytes(server, LOADED) == 2 * RESTORED_BYTES
        assert _bytes(server, READ) == RESTORED_BYTES

        # The control: wrong bytes in a file do arrive, and the answer shows it.
        for path in files.rglob("*.bin"):
            path.write_bytes(bytes(path.stat().st_size))
        server.reset(external=True)
        forged = server.ask_all(PROMPTS)
        assert [answer.cached_tokens for answer in forged] == RESTORED
        assert all(a.logprobs != r.logprobs for a, r in zip(forged, reference, strict=True))


def test_files_are_found_after_a_restart(
    model: Path, reference: list[Answer], tmp_path: Path
) -> None:
    files = tmp_path / "files"
    with _peer(model, tmp_path / "first.log", files) as server:
        server.ask_all(PROMPTS)
        wait_until(lambda: _bytes(server, WRITTEN) == RESTORED_BYTES, "all blocks in files")
    with _peer(model, tmp_path / "second.log", files) as server:
        assert server.ask_all(PROMPTS) == reference
        assert _bytes(server, READ) == RESTORED_BYTES
