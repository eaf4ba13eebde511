"""A stand-in for vLLM, as a program: enough of its API for a campaign, and places to stop at.

Run by the wrapper that `drill.fake_python` writes, with vLLM's own arguments. Starts an "engine" of
its own, which maps a file of /dev/shm, and ends when that dies, as vLLM does. ``KVGATE_FAKE_DIR``
names a directory: the file ``hold`` in it says at which event to stop while it is there, ``held``
is written when that was reached.

Events: ``install_check``, ``start`` (engine up, not listening yet), ``completion`` (streamed ones,
counted from 0), ``any_completion`` (also the short ones between phases: no token comes any more),
``version`` (asked once per arm and once as each trial begins).
"""

from __future__ import annotations

import hashlib
import http.server
import json
import mmap
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

DIRECTORY = Path(os.environ["KVGATE_FAKE_DIR"])
MODEL = "kvgate-model"
METRICS = """\
vllm:cache_config_info{block_size="16",num_gpu_blocks="64",enable_prefix_caching="True"} 1.0
"""
_counts: dict[str, int] = {}
_lock = threading.Lock()
_engine: subprocess.Popen[bytes] | None = None


def reach(event: str) -> None:
    """Stops here while the hold says so."""
    with _lock:
        count = _counts.get(event, 0)
        _counts[event] = count + 1
    path = DIRECTORY / "hold"
    hold = json.loads(path.read_text()) if path.is_file() else {}
    if hold.get("event") == event and count >= hold.get("count", 0):
        engine = _engine.pid if _engine else 0
        partial = DIRECTORY / f"held.{os.getpid()}.{threading.get_ident()}"
        partial.write_text(json.dumps({"server": os.getpid(), "engine": engine, "argv": sys.argv}))
        partial.rename(DIRECTORY / "held")
        while path.is_file():  # a test that goes on removes it
            threading.Event().wait(0.02)


class Handler(http.server.BaseHTTPRequestHandler):
    """vLLM's API as far as the harness uses it."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/version":
            reach("version")
        pages: dict[str, str] = {
            "/health": "",
            "/version": json.dumps({"version": "0.32.0"}),
            "/v1/models": json.dumps({"data": [{"id": MODEL, "max_model_len": 2048}]}),
            "/metrics": METRICS,
        }
        self._answer(200 if self.path in pages else 404, pages.get(self.path, ""))

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path.startswith("/reset_prefix_cache"):
            self._answer(200, json.dumps({"success": True}))
        elif self.path != "/v1/completions":
            self._answer(404, "")
        else:
            self._complete(json.loads(content))

    def _complete(self, body: dict[str, Any]) -> None:
        count = body["max_tokens"]
        usage = {
            "prompt_tokens": len(body["prompt"]),
            "completion_tokens": count,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        reach("any_completion")
        if not body.get("stream"):
            self._answer(200, json.dumps({"choices": [{"text": "x"}], "usage": usage}))
            return
        reach("completion")
        seed = hashlib.sha256(json.dumps(body["prompt"]).encode()).digest()
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for index in range(count):
            choice = {
                "index": 0,
                "text": "x",
                "token_ids": [seed[index % 32]],
                "logprobs": {"token_logprobs": [-seed[index % 32] / 256]},
                "finish_reason": "length" if index == count - 1 else None,
            }
            self._event({"choices": [choice]})
        self._event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _event(self, content: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(content)}\n\n".encode())
        self.wfile.flush()

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        return


def run_engine(name: str) -> None:
    """Keeps a file of /dev/shm mapped until it is told to end or loses its parent's pipe."""
    path = Path("/dev/shm") / name

    def end(*_: object) -> None:
        path.unlink(missing_ok=True)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    with path.open("a+b") as file:
        file.truncate(4096)
        kept = mmap.mmap(file.fileno(), 4096)
    print("engine up", flush=True)
    threading.Event().wait()
    kept.close()


def main() -> None:
    if "--engine" in sys.argv:
        run_engine(sys.argv[2])
        return
    if "--install-check" in sys.argv:
        reach("install_check")
        print("True")
        return
    global _engine
    name = f"kvgate-drill-{os.environ['KVGATE_DRILL']}-{os.getpid()}"
    _engine = subprocess.Popen(
        [sys.executable, __file__, "--engine", name], stdout=subprocess.PIPE, start_new_session=True
    )
    assert _engine.stdout is not None
    _engine.stdout.readline()
    engine = _engine

    def end(*_: object) -> None:
        engine.terminate()
        engine.wait()
        os._exit(0)

    def watch() -> None:
        engine.wait()
        print("ERROR EngineDeadError: engine core died", flush=True)
        os._exit(1)

    signal.signal(signal.SIGTERM, end)
    # In other threads it stays blocked: a signal taken there would not wake this one, in which the
    # handler runs (it happens to a process that was stopped and goes on).
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=watch, daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    reach("start")
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    port = int(sys.argv[sys.argv.index("--port") + 1])
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    threading.Event().wait()


if __name__ == "__main__":
    main()
