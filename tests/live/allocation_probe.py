"""Run by vLLM's own Python: starts an engine per model directory, notes what it allocated.

    python allocation_probe.py RESULTS DIRECTORY...

Each directory holds a config.json and a case.json: arguments of ``LLM``. Weights are random. Knows
nothing of kvgate.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def allocated(directory: Path) -> dict[str, object]:
    """Blocks, block size and capacity in tokens of an engine over that model."""
    from vllm import LLM

    case = json.loads((directory / "case.json").read_text(encoding="utf-8"))
    llm = LLM(
        model=str(directory),
        load_format="dummy",
        enforce_eager=True,
        skip_tokenizer_init=True,
        **case,
    )
    config = llm.llm_engine.vllm_config
    cache, scheduler = config.cache_config, config.scheduler_config
    found = {
        "blocks": cache.num_gpu_blocks,
        "block_tokens": cache.block_size,
        "capacity_tokens": cache.kv_cache_size_tokens,
        "mamba_cache_mode": cache.mamba_cache_mode,
        "drops_windows": not scheduler.disable_hybrid_kv_cache_manager,
        "in_flight_tokens": config.max_in_flight_tokens,
    }
    llm.llm_engine.engine_core.shutdown()
    return found


def main() -> None:
    """Writes one object, by directory name, when all are done; an error is its text."""
    results, *directories = map(Path, sys.argv[1:])
    found: dict[str, object] = {}
    for directory in directories:
        try:
            found[directory.name] = allocated(directory)
        except Exception as error:  # what vLLM says of a model is the result
            found[directory.name] = f"{type(error).__name__}: {error}"
    partial = results.with_suffix(".partial")
    partial.write_text(json.dumps(found), encoding="utf-8")
    partial.rename(results)


if __name__ == "__main__":
    main()
