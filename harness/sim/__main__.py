"""`python -m harness.sim --config JSON --model DIRECTORY --port PORT`: serves until it is ended."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.records import parse_json
from harness.sim.config import SimConfig, parse_config
from harness.sim.engine import SimModel
from harness.sim.faults import FaultName
from harness.sim.http import listen
from harness.sim.pages import start_up_log
from harness.sim.server import EngineProcess, SimServer
from harness.sim.truth import TruthWriter

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def read_model(directory: Path) -> SimModel:
    """From config.json, computed here anew: the harness checks its own figure against this one."""
    found: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    heads = found.get("num_key_value_heads") or found["num_attention_heads"]
    head_size = found.get("head_dim") or found["hidden_size"] // found["num_attention_heads"]
    dtype = str(found.get("torch_dtype", "bfloat16"))
    elements = 2 * found["num_hidden_layers"] * heads * head_size
    return SimModel(
        layers=found["num_hidden_layers"],
        vocab_size=found["vocab_size"],
        kv_bytes_per_token=elements * _DTYPE_BYTES[dtype],
        max_model_len=found["max_position_embeddings"],
        dtype=dtype,
    )


async def _serve(config: SimConfig, model: SimModel, model_name: str, port: int) -> None:
    truth = None if config.truth_path is None else TruthWriter(Path(config.truth_path))
    server = SimServer(config, model, model_name=model_name, truth=truth, process=EngineProcess())
    async with await listen(server.handle, port):
        await server.drive()


def main(arguments: list[str]) -> None:
    """Prints the start-up log, then serves."""
    parser = argparse.ArgumentParser(prog="harness.sim", description=__doc__)
    parser.add_argument("--config", required=True, help="SimConfig as JSON")
    parser.add_argument("--model", required=True, type=Path, help="directory with a config.json")
    parser.add_argument("--served-model-name", default="kvgate-model")
    parser.add_argument("--port", required=True, type=int)
    given = parser.parse_args(arguments)
    config = parse_config(parse_json(given.config))
    if any(fault.name is FaultName.MORE_COMPUTE for fault in config.faults):
        config = replace(config, compute_threads=2 * config.compute_threads)
    model = read_model(given.model)
    print(start_up_log(config, model, model_path=str(given.model), pid=0), end="", flush=True)
    asyncio.run(_serve(config, model, given.served_model_name, given.port))


if __name__ == "__main__":
    main(sys.argv[1:])
