"""A stand-in for vLLM's API server, as a program: MODE [DIRECTORY] ... --port PORT.

Writes its pid and those of its children into DIRECTORY/pids, so that a test can look for them after
everything else is gone. Modes: see `main`.
"""

from __future__ import annotations

import http.server
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

MODEL = "kvgate-model"
METRICS = """\
vllm:cache_config_info{block_size="16",num_gpu_blocks="10",enable_prefix_caching="True"} 1.0
"""


class Handler(http.server.BaseHTTPRequestHandler):
    """Health, version, models, metrics; /die ends the process with code 7."""

    ready = True
    model = MODEL

    def do_GET(self) -> None:
        if self.path == "/die":
            os._exit(7)
        pages: dict[str, tuple[int, str]] = {
            "/health": (200 if self.ready else 503, ""),
            "/version": (200, json.dumps({"version": "0.32.0"})),
            "/v1/models": (200, json.dumps({"data": [{"id": self.model, "max_model_len": 64}]})),
            "/metrics": (200, METRICS),
        }
        status, body = pages.get(self.path, (404, ""))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        return


class Web(http.server.ThreadingHTTPServer):
    """Of one's own, or sharing its port with whoever also asks for that."""

    def __init__(self, address: tuple[str, int], *, shares: bool = False) -> None:
        self.allow_reuse_port = shares
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, Handler)


def note(directory: Path, pid: int) -> None:
    with (directory / "pids").open("a") as file:
        file.write(f"{pid}\n")


def spawn_stubborn(directory: Path) -> None:
    """A grandchild in a session of its own that ignores SIGTERM, as a stuck worker would."""
    read, write = os.pipe()
    code = (
        "import os, signal, sys, threading; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "os.write(int(sys.argv[1]), b'x'); os.close(int(sys.argv[1])); threading.Event().wait()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(write)], start_new_session=True, pass_fds=[write]
    )
    os.close(write)
    os.read(read, 1)  # it ignores the signal from here on
    os.close(read)
    note(directory, child.pid)


def map_shared_memory(name: str) -> None:
    """Maps a file of /dev/shm for the life of the process, and never removes it."""
    path = Path("/dev/shm") / name
    with path.open("a+b") as file:
        file.truncate(4096)
        globals()["kept"] = mmap.mmap(file.fileno(), 4096)


def main() -> None:
    mode, directory, port = sys.argv[1], Path(sys.argv[2]), int(sys.argv[-1])
    note(directory, os.getpid())
    print("INFO starting, mode", mode, flush=True)
    if mode == "exits":
        print("ERROR no memory for the KV cache", flush=True)
        sys.exit(3)
    if mode == "never_ready":
        print("ERROR still loading weights", flush=True)
        Handler.ready = False
    if mode in ("grandchild", "all"):
        spawn_stubborn(directory)
    if mode in ("shared_memory", "all"):
        map_shared_memory(sys.argv[3])
    if mode == "ignores_sigterm":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    if mode == "never_listens":
        threading.Event().wait()
    if mode == "other_model":
        Handler.model = "another"
    # The wildcard of IPv6 takes connections of IPv4 as well.
    host = "::" if mode == "ipv6" else "127.0.0.1"
    server = Web((host, port), shares=mode == "shares_its_port")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    threading.Event().wait()


if __name__ == "__main__":
    main()
