"""A connector's directory made by hand, for the tests of `kvgate tier`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from harness.cli.main import main
from harness.connector.blockfile import BlockHeader, file_bytes, write_block
from harness.connector.keys import block_path, namespace_of
from harness.tier.upkeep import Checked, Outcome, check_files, plan_prune

NOW_NS = 1_800_000_000 * 10**9
DAY_S = 86400
PAYLOAD_BYTES = 5000
FILE_BYTES = file_bytes(PAYLOAD_BYTES)
FACTS: dict[str, Any] = {
    "namespace_version": 2,
    "versions": {"vllm": "0.32.0", "format": "1"},
    "platform": {"device": "cpu"},
    "weights": "ab" * 32,
    "quantization": "None",
    "model_dtype": "torch.bfloat16",
    "cache_dtype": "auto",
    "block_tokens": 16,
    "kv_heads": 8,
    "head_size": 128,
    "tensor_parallel_size": 1,
}


def add_namespace(root: Path, *, facts: dict[str, Any] = FACTS, **changes: Any) -> str:
    """A namespace without blocks; returns its name."""
    facts = {**facts, **changes}
    name = namespace_of(facts)
    config = {
        "format_version": 2,
        "namespace": name,
        "block_tokens": 16,
        "payload_bytes": PAYLOAD_BYTES,
        "run_bytes": 100,
        "layers": [{"name": f"l{i}"} for i in range(4)],
        "fingerprint": facts,
    }
    (root / name / "r0").mkdir(parents=True)
    (root / name / "config.json").write_text(json.dumps(config))
    return name


def add_block(
    root: Path, namespace: str, number: int, *, age_s: float = 0.0, rank: int = 0
) -> Path:
    """A whole block file, last used ``age_s`` ago."""
    key = number.to_bytes(16, "big")
    path = block_path(root, namespace, key, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_block(path, BlockHeader(namespace, key, 0, 0), bytes([number]) * PAYLOAD_BYTES)
    return aged(path, age_s)


def aged(path: Path, age_s: float) -> Path:
    """The file, last used ``age_s`` ago."""
    used_ns = NOW_NS - int(age_s * 1e9)
    os.utime(path, ns=(used_ns, used_ns), follow_symlinks=False)
    return path


def flip(path: Path, offset: int) -> None:
    """Changes one bit of the byte at ``offset``."""
    content = bytearray(path.read_bytes())
    content[offset] ^= 0x10
    path.write_bytes(content)


def checked(root: Path, **options: Any) -> list[Checked]:
    """Everything that is not fine."""
    options = {"namespaces": None, "delete": False, **options}
    results = list(check_files(root, options.pop("namespaces"), **options))
    return [result for result in results if result.outcome is not Outcome.FINE]


def pruned(root: Path, **options: Any) -> list[str]:
    """What a plan would remove: names of the files, without their suffix, in order."""
    plan = plan_prune(root, now_ns=NOW_NS, **options)
    return [entry.parts[-1].removesuffix(".kv").lstrip("0") for entry in plan.doomed]


def kvgate(*arguments: object) -> int:
    """Runs `kvgate tier`; returns the exit code."""
    return main(["tier", *map(str, arguments)])
