"""Live tests run real vLLM on the CPU; `kvgate setup` makes its environment."""

from __future__ import annotations

import os

from harness.arms import default_home

# One variable names the interpreter for all live tests; the default is what `kvgate setup` made.
os.environ.setdefault("KVGATE_VLLM_PYTHON", str(default_home() / "vllm" / "bin" / "python"))
