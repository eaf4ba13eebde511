"""The connector in a real vLLM on the CPU: minutes. KVGATE_VLLM_PYTHON names a Python with vLLM.

Exactness is shown against a device prefix hit on a server without connector, with the same number
of cached tokens and one request at a time: then token ids and log-probabilities must agree bit for
bit. A comparison with a full prefill would not do; its kernels see other shapes and round
differently. Not shown here: GPUs, tensor parallelism, LoRA, images, preemption.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from harness.connector.blockfile import read_block, write_block
from harness.connector.keys import block_path, chain_keys
from harness.model import ModelArchitecture, ensure_model

pytestmark = pytest.mark.live

REPOSITORY = Path(__file__).resolve().parents[2]
BLOCK_TOKENS = 128
SESSIONS = 4
PROMPT_TOKENS = 16 * BLOCK_TOKENS + 16
RESTORED_TOKENS = 16 * BLOCK_TOKENS
START_TIMEOUT_S = 240.0


@dataclass(frozen=True)
class Answer:
    """What one request returned; equality is exact."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached_tokens: int


class Server:
    """A vLLM server in its own process group, and the few questions these tests ask it."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process = process
        self.log = log
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300)

    def close(self) -> None:
        """Closes the connections to the server; the server itself goes on."""
        self._client.close()

    def ask(self, prompt: list[int], output_tokens: int = 16) -> Answer:
        """One greedy completion of exactly ``output_tokens`` tokens."""
        response = self._client.post(
            "/v1/completions",
            json={
                "model": "m",
                "prompt": prompt,
                "max_tokens": output_tokens,
                "min_tokens": output_tokens,
                "ignore_eos": True,
                "temperature": 0,
                "logprobs": 1,
                "return_token_ids": True,
            },
        )
        response.raise_for_status()
        body = response.json()
        choice = body["choices"][0]
        return Answer(
            tuple(choice["token_ids"]),
            tuple(choice["logprobs"]["token_logprobs"]),
            body["usage"]["prompt_tokens_details"]["cached_tokens"],
        )

    def metric(self, name: str, **labels: str) -> float:
        """A series after one more engine step: statistics travel with steps only."""
        self.ask([1, 2, 3], output_tokens=1)
        text = self._client.get("/metrics").text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    return float(sample.value)
        raise AssertionError(f"{name} {labels} is not on /metrics")

    def reset(self, *, external: bool) -> None:
        """Empties the device cache and, with ``external``, what reset_scope says."""
        query = "?reset_external=true" if external else ""
        reply = self._client.post(f"/reset_prefix_cache{query}").json()
        assert reply == {"success": True}

    def wait_durable(self) -> None:
        """Returns when nothing waits to be written."""
        deadline = time.monotonic() + 60
        while self.metric("kvgate:tier_store_backlog_blocks"):
            assert time.monotonic() < deadline, "the backlog never drained"
            time.sleep(0.05)

    def ready_line(self) -> dict[str, Any]:
        """What the connector said about itself at start."""
        marker = "kvgate tier ready: "
        for line in self.log.read_text(errors="replace").splitlines():
            if marker in line:
                ready: dict[str, Any] = json.loads(line.split(marker, 1)[1])
                return ready
        raise AssertionError(f"no line with {marker!r} in {self.log}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def serve(model: Path, log: Path, transfer: dict[str, Any] | None) -> Iterator[Server]:
    """Starts a server, waits until it is ready, and ends its whole process group."""
    port = _free_port()
    argv = [
        os.environ["KVGATE_VLLM_PYTHON"], "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(model), "--served-model-name", "m",
        "--host", "127.0.0.1", "--port", str(port),
        "--enforce-eager", "--dtype", "bfloat16", "--max-model-len", "4096",
        "--enable-prompt-tokens-details",
    ]  # fmt: skip
    if transfer is not None:
        argv += ["--kv-transfer-config", json.dumps(transfer)]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # With a connector vLLM would bind other threads than without; the results must be
        # comparable.
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
        "PYTHONPATH": str(REPOSITORY),
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            argv, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        _wait_ready(process, port, log)
        with contextlib.closing(Server(process, port, log)) as server:
            yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)


def _wait_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"http://127.0.0.1:{port}/health", timeout=2).status_code == 200:
                return
        time.sleep(0.5)
    raise AssertionError(f"no server:\n{log.read_text(errors='replace')[-3000:]}")


def _transfer(
    extra: dict[str, Any],
    name: str = "KvgateTierConnector",
    module: str = "harness.connector.connector",
) -> dict[str, Any]:
    return {
        "kv_connector": name,
        "kv_connector_module_path": module,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def _prompt(session: int) -> list[int]:
    draw = random.Random(1000 + session)
    return [draw.randrange(256) for _ in range(PROMPT_TOKENS)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if "KVGATE_VLLM_PYTHON" not in os.environ:
        pytest.skip("KVGATE_VLLM_PYTHON names no Python with vLLM")
    return ensure_model(ModelArchitecture(num_layers=2), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    """Each session's answer from the device prefix cache of a server without connector."""
    with serve(model, tmp_path_factory.mktemp("reference") / "server.log", None) as server:
        for session in range(SESSIONS):
            server.ask(_prompt(session))
        answers = [server.ask(_prompt(session)) for session in range(SESSIONS)]
    assert [answer.cached_tokens for answer in answers] == [RESTORED_TOKENS] * SESSIONS
    return answers


def _ask_all(server: Server) -> list[Answer]:
    return [server.ask(_prompt(session)) for session in range(SESSIONS)]


def _close(answer: Answer, wanted: Answer) -> bool:
    """Right up to rounding: the first token, its log-probability within a prefill's noise."""
    return (
        answer.token_ids[0] == wanted.token_ids[0]
        and abs(answer.logprobs[0] - wanted.logprobs[0]) < 0.5
    )


def test_restores_are_exact_from_host_and_disk_and_survive_a_restart(
    model: Path, reference: list[Answer], tmp_path: Path
) -> None:
    transfer = _transfer(
        {
            "host_pool_bytes": 64 << 20,
            "directory": str(tmp_path / "tier"),
            "reset_scope": "host",
        }
    )
    tokens = SESSIONS * RESTORED_TOKENS
    with serve(model, tmp_path / "first.log", transfer) as server:
        ready = server.ready_line()
        assert ready["block_tokens"] == BLOCK_TOKENS
        assert ready["disk_enabled"]
        for session in range(SESSIONS):
            assert server.ask(_prompt(session)).cached_tokens == 0
        server.wait_durable()
        assert server.metric("kvgate:tier_dropped_store_blocks_total") == 0
        written = server.metric("kvgate:tier_write_bytes_total", tier="disk")
        assert written == tokens * ready["kv_bytes_per_token"]

        server.reset(external=False)
        assert _ask_all(server) == reference
        assert server.metric("kvgate:tier_hit_tokens_total", tier="host") == tokens
        assert server.metric("kvgate:tier_hit_tokens_total", tier="disk") == 0

        server.reset(external=True)
        assert server.metric("kvgate:tier_host_used_bytes") == 0
        assert _ask_all(server) == reference
        assert server.metric("kvgate:tier_hit_tokens_total", tier="disk") == tokens
        assert server.metric("kvgate:tier_read_bytes_total", tier="disk") == written
        assert server.metric("kvgate:tier_file_read_bytes_total") == (
            tokens // BLOCK_TOKENS * ready["slot_bytes"]
        )
        assert server.metric("vllm:prompt_tokens_cached_by_source_total", source="disk") == tokens

        # Restored under load, then asked again one by one while the blocks are on the device.
        for external in (False, True):
            server.reset(external=external)
            with ThreadPoolExecutor(SESSIONS) as pool:
                answers = list(pool.map(server.ask, map(_prompt, range(SESSIONS))))
            assert [answer.cached_tokens for answer in answers] == [RESTORED_TOKENS] * SESSIONS
            assert _ask_all(server) == reference
        assert server.metric("kvgate:tier_load_failed_blocks_total") == 0
        assert server.metric("kvgate:tier_load_seconds_count") == 4 * SESSIONS
        # Nothing that was loaded was stored again.
        assert server.metric("kvgate:tier_write_bytes_total", tier="host") == written

    with serve(model, tmp_path / "second.log", transfer) as server:
        assert server.ready_line()["disk_blocks_found"] == tokens // BLOCK_TOKENS
        assert _ask_all(server) == reference
        assert server.metric("kvgate:tier_hit_tokens_total", tier="disk") == tokens

        # A damaged file costs a recomputation from its block on, and is written again.
        namespace = ready["namespace"]
        keys = chain_keys(namespace, _prompt(0), BLOCK_TOKENS)
        path = block_path(tmp_path / "tier", namespace, keys[5])
        header, payload = read_block(path)
        content = bytearray(path.read_bytes())
        content[5000] ^= 0x10
        path.write_bytes(content)
        server.reset(external=True)
        assert _close(server.ask(_prompt(0)), reference[0])
        assert server.metric("kvgate:tier_verify_failed_blocks_total") == 1
        assert server.metric("kvgate:tier_load_failed_blocks_total") == 1
        server.wait_durable()
        assert path.exists()

        # The control: wrong bytes with a right checksum do arrive, and the answer shows it.
        header, payload = read_block(block_path(tmp_path / "tier", namespace, keys[8]))
        write_block(block_path(tmp_path / "tier", namespace, keys[8]), header, bytes(len(payload)))
        server.reset(external=True)
        forged = server.ask(_prompt(0))
        assert forged.cached_tokens == RESTORED_TOKENS
        assert forged.logprobs != reference[0].logprobs
        assert server.metric("kvgate:tier_load_failed_blocks_total") == 1


def test_host_only_without_a_usable_directory(
    model: Path, reference: list[Answer], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    transfer = _transfer(
        {"host_pool_bytes": 64 << 20, "directory": str(tmp_path / "file" / "tier")}
    )
    with serve(model, tmp_path / "server.log", transfer) as server:
        assert not server.ready_line()["disk_enabled"]
        assert "event=disk_tier_off" in (tmp_path / "server.log").read_text(errors="replace")
        assert server.metric("kvgate:tier_disk_enabled") == 0
        _ask_all(server)
        server.reset(external=False)
        assert _ask_all(server) == reference
        server.reset(external=True)
        assert server.ask(_prompt(0)).cached_tokens == 0


def test_the_wrong_session_double_is_noticed(
    model: Path, reference: list[Answer], tmp_path: Path
) -> None:
    transfer = _transfer(
        {"host_pool_bytes": 64 << 20}, "WrongSessionConnector", "tests.doubles.wrong_session"
    )
    with serve(model, tmp_path / "server.log", transfer) as server:
        _ask_all(server)
        server.reset(external=False)
        answers = _ask_all(server)
    assert [answer.cached_tokens for answer in answers] == [RESTORED_TOKENS] * SESSIONS
    assert all(a.logprobs != r.logprobs for a, r in zip(answers, reference, strict=True))
