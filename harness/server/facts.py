"""Reads back what a server says it does: its metrics, its API and its log. Guesses nothing.

A key that cannot be read is left out; the judge treats it as unknown, never as equal.
"""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any

import httpx

from harness.collectors.prometheus import parse_families
from harness.errors import ServerError
from harness.server.access import Access

# Lines of vLLM's log (0.20.1 and 0.32.0) and what they tell. `(\w+ pid=..)` prefixes are skipped.
_LOG_FACTS: tuple[tuple[str, str], ...] = (
    ("dtype", r"with config: .*?\bdtype=([\w.]+)"),
    ("kv_cache_dtype", r"with config: .*?\bkv_cache_dtype=(\w+)"),
    ("prefix_caching", r"with config: .*?\benable_prefix_caching=(True|False)"),
    ("chunked_prefill", r"with config: .*?\benable_chunked_prefill=(True|False)"),
    ("enforce_eager", r"with config: .*?\benforce_eager=(True|False)"),
    ("tensor_parallel", r"with config: .*?\btensor_parallel_size=(\d+)"),
    ("max_model_len", r"with config: .*?\bmax_seq_len=(\d+)"),
    ("batched_tokens", r"max_num_batched_tokens=(\d+)"),
)
_CORE_IDS = re.compile(r"local_rank=\d+, core ids=\[([\d, ]*)\]")
_TIER_READY = re.compile(r"kvgate tier ready: (\{.*\})")
_ERROR_LINE = re.compile(r"\b(ERROR|CRITICAL)\b|Error:|Traceback|error:")


def effective_configuration(
    access: Access, log: str, *, timeout_s: float = 30.0
) -> tuple[dict[str, Any], dict[str, str]]:
    """(effective configuration, versions) of a running server. Raises ServerError if silent."""
    effective: dict[str, Any] = from_log(log)
    versions: dict[str, str] = {}
    try:
        version = access.get("/version", timeout_s=timeout_s)
        if version.status_code == 200:
            versions["vllm"] = access.redacted(str(version.json().get("version")))
        models = access.get("/v1/models", timeout_s=timeout_s)
        if models.status_code == 200 and models.json().get("data"):
            effective["max_model_len"] = models.json()["data"][0].get("max_model_len")
        metrics = access.get("/metrics", timeout_s=timeout_s)
        if metrics.status_code == 200:
            effective |= from_metrics(metrics.text)
    except (httpx.HTTPError, ValueError, TypeError, AttributeError, LookupError) as error:
        raise ServerError(
            f"{access.base_url}: cannot read the configuration back: "
            f"{access.redacted(str(error)) or type(error).__name__}"
        ) from error
    return effective, versions


def from_metrics(text: str) -> dict[str, Any]:
    """Block size, blocks, KV capacity in tokens and prefix caching, from vllm:cache_config_info."""
    found: dict[str, Any] = {}
    for name, labels, _value in parse_families(text):
        if name == "vllm:cache_config_info":
            if labels.get("block_size", "").isdigit():
                found["block_tokens"] = int(labels["block_size"])
            if labels.get("num_gpu_blocks", "").isdigit():
                found["device_blocks"] = int(labels["num_gpu_blocks"])
            if labels.get("enable_prefix_caching") in ("True", "False"):
                found["prefix_caching"] = labels["enable_prefix_caching"] == "True"
    if "block_tokens" in found and "device_blocks" in found:
        found["kv_capacity_tokens"] = found["block_tokens"] * found["device_blocks"]
    return found


def from_log(log: str) -> dict[str, Any]:
    """What the start-up log tells; `connector` is the bundled one's own line, else absent."""
    found: dict[str, Any] = {}
    for key, pattern in _LOG_FACTS:
        match = re.search(pattern, log)
        if match:
            text = match.group(1)
            found[key] = {"True": True, "False": False}.get(
                text, int(text) if text.isdigit() else text
            )
    cores = _CORE_IDS.findall(log)
    if cores:
        found["compute_threads"] = len([c for c in cores[0].split(",") if c.strip()])
    ready = _TIER_READY.findall(log)
    if ready:
        found["connector"] = "kvgate"
        with contextlib.suppress(ValueError):  # a line that another process wrote into
            found["connector_config"] = json.loads(ready[-1])
    elif log:
        name = re.search(r"Creating v1 connector with name: (\w+)", log)
        found["connector"] = name.group(1) if name else "none"
    return found


def error_lines(log: str, count: int = 15) -> str:
    """The last lines that look like errors, or simply the last lines."""
    lines = [line.rstrip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR_LINE.search(line)]
    return "\n".join(line[:300] for line in (errors or lines)[-count:]) or "(the log is empty)"
