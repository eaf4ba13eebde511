"""Somebody else's server: key, base path and TLS work, and the key is found nowhere afterwards."""

from __future__ import annotations

import http.server
import json
import os
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from harness.evidence.results import read_verdict
from harness.evidence.store import open_run
from harness.verdicts import ReasonCode, Verdict
from tests.drills.drill import REPOSITORY

KEY = "sk-planted-7c1f0a9be2d84"
BASE = "/tenant/a"

CAMPAIGN = """\
format = 1
name = "foreign"
profile = "cpu-demo"
gates = ["g1"]
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
answer_deadline_s = 5.0

[arms.theirs]
kind = "url"
role = "tiered"
medium = "host"
url = "{url}"
served_model = "{model}"
{key}
{tls}

[cold_recovery]
levels = [1]
repetitions = 3
sessions = 3
prompt_tokens = 488
output_tokens = 4
oracle_sessions = 1
steady_cycles = 0
fits_sessions = 1
"""


class Echo(http.server.BaseHTTPRequestHandler):
    """Asks for the key on every page, and shows it wherever it can: the worst of servers."""

    protocol_version = "HTTP/1.1"
    seen: list[tuple[str, str | None]]
    models = json.dumps({"data": [{"id": "theirs", "max_model_len": 2048}]})
    dies_at_completion = False

    def do_GET(self) -> None:
        pages: dict[str, Any] = {
            "/health": "",
            "/version": json.dumps({"version": f"1 {self.headers.get('Authorization')}"}),
            "/v1/models": self.models,
            "/metrics": f'echo{{key="{self.headers.get("Authorization")}"}} 1.0\n',
        }
        self._answer(pages)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.dies_at_completion:
            self.close_connection = True
            self.server.socket.close()
            return
        self._answer({})

    def _answer(self, pages: dict[str, Any]) -> None:
        key = self.headers.get("Authorization")
        self.seen.append((self.path, key))
        page = pages.get(self.path.removeprefix(BASE))
        status = 200 if page is not None else 400
        if key != f"Bearer {KEY}":
            status = 401
        body = page if status == 200 else json.dumps({"error": f"you sent {key}", "path": "x"})
        self.send_response(status, f"you sent {key}")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Echo", str(key))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        return


@contextmanager
def server(
    certificate: Path | None = None, **changed: Any
) -> Iterator[tuple[str, list[tuple[str, str | None]]]]:
    seen: list[tuple[str, str | None]] = []
    handler = type("Handler", (Echo,), {"seen": seen, **changed})
    web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        web.socket = context.wrap_socket(web.socket, server_side=True)
    thread = threading.Thread(target=web.serve_forever, daemon=True)
    thread.start()
    scheme = "http" if certificate is None else "https"
    try:
        yield f"{scheme}://127.0.0.1:{web.server_address[1]}{BASE}/v1", seen
    finally:
        web.shutdown()
        web.server_close()
        thread.join()


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """Signed by nobody."""
    path = tmp_path / "certificate.pem"
    made = subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(path), "-out", str(tmp_path / "public.pem")),
        ],
        capture_output=True,
    )
    assert made.returncode == 0, made.stderr
    path.write_text(path.read_text() + (tmp_path / "public.pem").read_text())
    return path


def run(
    root: Path,
    url: str,
    *,
    key: str = 'api_key_env = "PLANTED_KEY"',
    tls: str = "",
    secret: str,
    model: str = "theirs",
) -> subprocess.CompletedProcess[str]:
    (root / "foreign.toml").write_text(CAMPAIGN.format(url=url, key=key, tls=tls, model=model))
    command = [sys.executable, "-m", "harness", "run", "foreign.toml", "--runs", "runs"]
    return subprocess.run(
        command,
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
        env={
            **os.environ,
            "KVGATE_HOME": str(root / "home"),
            "PYTHONPATH": str(REPOSITORY),
            "PLANTED_KEY": secret,
        },
    )


def assert_key_is_nowhere(root: Path, result: subprocess.CompletedProcess[str]) -> None:
    assert KEY not in result.stdout + result.stderr
    files = [path for path in (root / "runs").rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []


def the_run(root: Path) -> Path:
    (path,) = (root / "runs" / "foreign").iterdir()
    return path


@pytest.mark.parametrize("source", ["variable", "file"])
def test_the_key_reaches_every_page_and_is_found_nowhere(source: str, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(f"{KEY}\n")
    key = {
        "variable": 'api_key_env = "PLANTED_KEY"',
        "file": f'api_key_file = "{tmp_path / "key"}"',
    }[source]
    with server() as (url, seen):
        result = run(tmp_path, url, key=key, secret=KEY if source == "variable" else "unused")
    assert result.returncode == 1, result.stderr  # the arrival gate: its requests are refused
    assert {path for path, _key in seen} >= {
        f"{BASE}/v1/models",
        f"{BASE}/version",
        f"{BASE}/metrics",
        f"{BASE}/health",
        f"{BASE}/v1/completions",
    }
    assert {key for _path, key in seen} == {f"Bearer {KEY}"}
    assert_key_is_nowhere(tmp_path, result)
    (trial,) = open_run(the_run(tmp_path)).trials
    # The server's own words are kept, without the key.
    details = [record.error_detail for record in trial.requests]
    assert all("you sent Bearer ***" in (detail or "") for detail in details)
    assert trial.server is not None
    assert trial.server.versions == {"vllm": "1 Bearer ***"}


def test_what_cannot_be_done_there_is_listed_as_not_tested(tmp_path: Path) -> None:
    with server() as (url, _seen):
        run(tmp_path, url, secret=KEY)
    signoff = read_verdict(the_run(tmp_path))
    assert "theirs: run by somebody else; no restart, reset, log or process counters" in (
        signoff.not_tested
    )
    (trial,) = open_run(the_run(tmp_path)).trials
    cold = [event.detail for event in trial.events if event.kind == "cold"]
    assert [event["error"] for event in cold] == ["a server of somebody else is never reset"]


@pytest.mark.parametrize(
    ("tls", "reached"), [("verify_tls = false", True), ("verify_tls = true", False)]
)
def test_tls_is_verified_unless_the_campaign_says_otherwise(
    tls: str, reached: bool, certificate: Path, tmp_path: Path
) -> None:
    with server(certificate) as (url, seen):
        result = run(tmp_path, url, tls=tls, secret=KEY)
    paths = {path for path, _key in seen}
    assert (f"{BASE}/v1/completions" in paths) is reached
    if reached:
        assert_key_is_nowhere(tmp_path, result)
    else:
        assert KEY not in result.stdout + result.stderr
        assert result.returncode == 64
        assert "does not answer: ConnectError" in result.stderr
        assert "CERTIFICATE_VERIFY_FAILED" in result.stderr
        assert "set verify_tls = false" in result.stderr


def doctor(root: Path) -> subprocess.CompletedProcess[str]:
    """The same questions, in a table."""
    return subprocess.run(
        [sys.executable, "-m", "harness", "doctor", "foreign.toml"],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
        env={
            **os.environ,
            "KVGATE_HOME": str(root / "home"),
            "PYTHONPATH": str(REPOSITORY),
            "PLANTED_KEY": KEY,
            "COLUMNS": "1000",
        },
    )


def assert_refused_before_any_trial(
    root: Path, result: subprocess.CompletedProcess[str], found: str
) -> None:
    assert (result.returncode, found in result.stderr) == (64, True), result.stderr
    assert "Traceback" not in result.stderr
    assert not (root / "runs").exists()


def test_a_key_that_is_refused_is_named_before_any_trial(tmp_path: Path) -> None:
    with server() as (url, _seen):
        result = run(tmp_path, url, secret="another-key")
    assert_refused_before_any_trial(
        tmp_path,
        result,
        "refuses us with status 401; check api_key_env or api_key_file of the arm",
    )


def test_a_closed_port_is_named_before_any_trial(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        result = run(tmp_path, url, secret=KEY)
        examined = doctor(tmp_path)
    found = f"arm theirs: {url} does not answer: ConnectError: "
    assert_refused_before_any_trial(tmp_path, result, found)
    assert (examined.returncode, found in examined.stdout) == (64, True), examined.stdout


def test_a_model_that_is_not_served_is_named_with_the_nearest(tmp_path: Path) -> None:
    with server() as (url, _seen):
        result = run(tmp_path, url, secret=KEY, model="their")
        examined = doctor(tmp_path)
    found = "serves no model their; allowed, by its /v1/models: theirs; did you mean theirs?"
    assert_refused_before_any_trial(tmp_path, result, found)
    assert (examined.returncode, found in examined.stdout) == (64, True), examined.stdout


def test_a_page_that_is_no_list_of_models_is_named(tmp_path: Path) -> None:
    with server(models="<html>") as (url, _seen):
        result = run(tmp_path, url, secret=KEY)
    assert_refused_before_any_trial(tmp_path, result, "found '<html>'; allowed: a list of models")


def test_a_server_that_dies_during_the_run_proves_nothing(tmp_path: Path) -> None:
    with server(dies_at_completion=True) as (url, _seen):
        result = run(tmp_path, url, secret=KEY)
    assert result.returncode == 2, result.stdout
    signoff = read_verdict(the_run(tmp_path))
    (ready,) = (c for c in signoff.gates[0].criteria if c.criterion == "server_ready")
    assert ready.verdict is Verdict.INCONCLUSIVE
    assert [reason.code for reason in ready.reasons] == [ReasonCode.SERVER_UNREACHABLE]
    assert "did not answer" not in result.stdout


@pytest.mark.parametrize(
    ("key", "secret", "found"),
    [
        ('api_key_env = "PLANTED_KEY"', "", "variable PLANTED_KEY: found nothing"),
        ('api_key_env = "PLANTED_KEY"', "né", "found characters that no header can carry"),
        ('api_key_file = "/nonexistent/key"', "", "/nonexistent/key: cannot be read"),
    ],
)
def test_a_missing_key_is_told_before_anything_starts(
    key: str, secret: str, found: str, tmp_path: Path
) -> None:
    result = run(tmp_path, "http://127.0.0.1:9/v1", key=key, secret=secret)
    assert result.returncode == 64
    assert "API key: " in result.stderr
    assert found in result.stderr
    assert not (tmp_path / "runs").exists()
