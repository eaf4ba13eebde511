"""Live tests run real vLLM on the CPU; `kvgate setup` makes its environment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from harness.campaign.arms import default_home
from harness.campaign.generated_model import ModelArchitecture, ensure_model

# One variable names the interpreter for all live tests; the default is what `kvgate setup` made.
os.environ.setdefault("KVGATE_VLLM_PYTHON", str(default_home() / "vllm" / "bin" / "python"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A generated model of two layers. Fails without vLLM: who asks for live tests wants them."""
    python = Path(os.environ["KVGATE_VLLM_PYTHON"])
    if not python.is_file():
        pytest.fail(f"no vLLM at {python}; run `kvgate setup`, or set KVGATE_VLLM_PYTHON")
    return ensure_model(ModelArchitecture(num_layers=2), tmp_path_factory.mktemp("model"))
