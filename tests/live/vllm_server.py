"""A real vLLM server for the connector's live tests: start, ask, look, reset, kill.

KVGATE_VLLM_PYTHON names a Python with vLLM. Everything here talks to the server from outside: over
HTTP, through its files and by signals. It runs under the harness's supervisor, so that nothing of
it outlives the tests, however these end.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

REPOSITORY = Path(__file__).resolve().parents[2]
BLOCK_TOKENS = 128
START_TIMEOUT_S = 600.0
STOP_GRACE_S = 20.0
WAIT_S = (
    120.0  # for things that happen by themselves; the tests fail after it, they never pass on it
)
CONNECTOR = ("KvgateTierConnector", "harness.connector.connector")

Metrics = Mapping[tuple[str, tuple[tuple[str, str], ...]], float]


@dataclass(frozen=True)
class Answer:
    """What one request returned; equality is exact."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached_tokens: int


def is_close(answer: Answer, wanted: Answer, *, noise: float = 0.5) -> bool:
    """Right up to rounding: the first token, its log-probability within a prefill's noise."""
    return (
        answer.token_ids[0] == wanted.token_ids[0]
        and abs(answer.logprobs[0] - wanted.logprobs[0]) < noise
    )


def prompt(session: int, blocks: int, *, rest: int = 16) -> list[int]:
    """The token ids of a session: ``blocks`` full KV blocks and a ``rest`` that is never cached."""
    draw = random.Random(1000 + session)
    return [draw.randrange(256) for _ in range(blocks * BLOCK_TOKENS + rest)]


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
    """Polls; raises AssertionError naming ``what`` when it never comes true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"never came true: {what}"
        time.sleep(0.02)


class Server:
    """A vLLM server in its own process group, and the few questions the tests ask it.

    ``pid``: of the API server, and the number of the group.
    """

    def __init__(self, pid: int, port: int, log: Path) -> None:
        self.pid = pid
        self.log = log
        limits = httpx.Limits(max_connections=64, max_keepalive_connections=64)
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300, limits=limits)
        self._pids = frozenset(p.pid for p in self.processes())

    def close(self) -> None:
        """Closes the connections to the server; the server itself goes on."""
        self._client.close()

    def set_timeout(self, timeout_s: float) -> None:
        """How long an answer may take from now on."""
        self._client.timeout = httpx.Timeout(timeout_s)

    def processes(self) -> list[psutil.Process]:
        """The API server, the engine and the workers."""
        main = psutil.Process(self.pid)
        return [main, *main.children(recursive=True)]

    def is_alive(self) -> bool:
        """Whether it answers /health and every process that it started with is still there."""
        try:
            here = {p.pid for p in self.processes() if _is_running(p)}
        except psutil.NoSuchProcess:
            return False
        return here >= self._pids and self._client.get("/health").status_code == 200

    def ask(self, token_ids: list[int], output_tokens: int = 16) -> Answer:
        """One greedy completion of exactly ``output_tokens`` tokens."""
        response = self._client.post("/v1/completions", json=_body(token_ids, output_tokens))
        response.raise_for_status()
        body = response.json()
        choice = body["choices"][0]
        return Answer(
            tuple(choice["token_ids"]),
            tuple(choice["logprobs"]["token_logprobs"]),
            # vLLM 0.20 leaves the details out when nothing was cached.
            (body["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0),
        )

    def ask_all(
        self, prompts: Iterable[list[int]], concurrency: int = 1, output_tokens: int = 16
    ) -> list[Answer]:
        """Answers in order of the prompts, ``concurrency`` at a time."""
        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(lambda p: self.ask(p, output_tokens), prompts))

    def ask_and_leave(self, token_ids: list[int], *, leave: Callable[[], bool]) -> None:
        """Sends a request and closes the connection, unanswered, once ``leave`` comes true."""
        content = json.dumps({**_body(token_ids, 64), "stream": True}).encode()
        with socket.create_connection(("127.0.0.1", self._client.base_url.port or 80)) as client:
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                b"Content-Type: application/json\r\n"
                + f"Content-Length: {len(content)}\r\n\r\n".encode()
                + content
            )
            wait_until(leave, "the moment to leave")

    def metrics(self, *, step: bool = True) -> Metrics:
        """All series; with ``step`` after one more engine step, with which statistics travel."""
        if step:
            self.ask([1, 2, 3], output_tokens=1)
        text = self._client.get("/metrics").text
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): float(sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def metric(self, name: str, *, step: bool = True, **labels: str) -> float:
        """The sum of all series of a name that carry ``labels``."""
        return value(self.metrics(step=step), name, **labels)

    def reset(self, *, external: bool) -> None:
        """Empties the device cache and, with ``external``, what reset_scope says.

        A reset is refused while blocks move; then it is tried again, an engine step later.
        """

        def is_done() -> bool:
            if self.try_reset(external=external):
                return True
            self.ask([1, 2, 3], output_tokens=1)
            return False

        wait_until(is_done, "a reset that succeeds")

    def try_reset(self, *, external: bool) -> bool:
        """One try of the same; whether it was done."""
        query = "?reset_external=true" if external else ""
        reply = self._client.post(f"/reset_prefix_cache{query}").json()
        return bool(reply == {"success": True})

    def wait_durable(self) -> None:
        """Returns when nothing waits to be written."""
        wait_until(lambda: not self.metric("kvgate:tier_store_backlog_blocks"), "an empty backlog")

    def ready_line(self) -> dict[str, Any]:
        """What the connector said about itself at start."""
        marker = "kvgate tier ready: "
        for line in self.log.read_text(errors="replace").splitlines():
            if marker in line:
                ready: dict[str, Any] = json.loads(line.split(marker, 1)[1])
                return ready
        raise AssertionError(f"no line with {marker!r} in {self.log}")

    def kill(self) -> None:
        """SIGKILL to the whole group, as a power switch would; returns when all are gone.

        What only they had of shared memory goes too: a power switch would not leave it either.
        """
        group = self.processes()
        shared = {path for process in group for path in _shared_memory(process)}
        os.killpg(self.pid, signal.SIGKILL)
        # Some stay zombies for a while, which do nothing any more.
        wait_until(lambda: not any(_is_running(process) for process in group), "the group is gone")
        for path in shared:
            path.unlink(missing_ok=True)


def value(metrics: Metrics, name: str, **labels: str) -> float:
    """The sum of all series of a name that carry ``labels``; KeyError when there is none."""
    found = [
        number
        for (series, pairs), number in metrics.items()
        if series == name and labels.items() <= dict(pairs).items()
    ]
    if not found:
        raise KeyError(f"{name} {labels} is not on /metrics")
    return sum(found)


def transfer(extra: Mapping[str, Any], connector: tuple[str, str] = CONNECTOR) -> dict[str, Any]:
    """``--kv-transfer-config`` of a connector, given as class and module."""
    return {
        "kv_connector": connector[0],
        "kv_connector_module_path": connector[1],
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": dict(extra),
    }


@contextlib.contextmanager
def serve(
    model: Path,
    log: Path,
    transfer_config: Mapping[str, Any] | None,
    *,
    device_blocks: int | None = None,
    arguments: Iterable[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Starts a server, waits until it is ready, and ends its whole process group."""
    port = _free_port()
    argv = [
        os.environ["KVGATE_VLLM_PYTHON"], "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(model), "--served-model-name", "m",
        "--host", "127.0.0.1", "--port", str(port),
        "--enforce-eager", "--dtype", "bfloat16", "--max-model-len", "4096",
        "--enable-prompt-tokens-details", *arguments,
    ]  # fmt: skip
    if device_blocks is not None:
        argv += ["--num-gpu-blocks-override", str(device_blocks)]
    if transfer_config is not None:
        argv += ["--kv-transfer-config", json.dumps(transfer_config)]
    variables = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # With a connector vLLM would bind other threads than without; the results must be
        # comparable.
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
        "PYTHONPATH": str(REPOSITORY),
        **(environment or {}),
    }
    log.unlink(missing_ok=True)  # the supervisor appends
    with subprocess.Popen(
        [sys.executable, "-m", "harness.server.supervisor", str(log), str(STOP_GRACE_S), *argv],
        env=variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as supervisor:
        assert supervisor.stdin is not None
        assert supervisor.stdout is not None
        try:
            started = json.loads(supervisor.stdout.readline())
            _wait_ready(started["pid"], port, log)
            with contextlib.closing(Server(started["pid"], port, log)) as server:
                yield server
        finally:
            supervisor.stdin.close()  # stop
            told = [json.loads(line) for line in supervisor.stdout]
    assert told[-1]["event"] == "stopped"
    assert not told[-1]["left"], "processes outlive the server"


def _is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _shared_memory(process: psutil.Process) -> list[Path]:
    with contextlib.suppress(psutil.NoSuchProcess):
        paths = [Path(mapped.path) for mapped in process.memory_maps()]
        return [path for path in paths if path.parent == Path("/dev/shm") and path.exists()]
    return []


def _body(token_ids: list[int], output_tokens: int) -> dict[str, Any]:
    return {
        "model": "m",
        "prompt": token_ids,
        "max_tokens": output_tokens,
        "min_tokens": output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "logprobs": 1,
        "return_token_ids": True,
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_ready(pid: int, port: int, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and psutil.pid_exists(pid):
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"http://127.0.0.1:{port}/health", timeout=2).status_code == 200:
                return
        time.sleep(0.5)
    raise AssertionError(f"no server:\n{log.read_text(errors='replace')[-3000:]}")
