"""Reads back what a server says it does: its metrics, its API and its log (`start_log`).

A key that cannot be read is left out; the judge treats it as unknown, never as equal.
"""

from __future__ import annotations

import contextlib
import math
import re
from typing import Any

import httpx

from harness.collectors.prometheus import Page
from harness.errors import ServerError
from harness.server.access import Access
from harness.server.start_log import from_log

_ERROR_LINE = re.compile(r"\b(ERROR|CRITICAL)\b|Error:|Traceback|error:")


def effective_configuration(
    access: Access, log: str, *, timeout_s: float = 30.0
) -> tuple[dict[str, Any], dict[str, str]]:
    """(effective configuration, versions) of a running server. Raises ServerError if silent.

    What its log, its API and its metrics state differently is the list of what they state: it
    equals neither another server's value nor the campaign's.
    """
    found = from_log(log)
    versions: dict[str, str] = {}
    try:
        version = access.get("/version", timeout_s=timeout_s)
        if version.status_code == 200 and isinstance(text := version.json().get("version"), str):
            versions["vllm"] = access.redacted(text)
        models = access.get("/v1/models", timeout_s=timeout_s)
        if models.status_code == 200:
            _add(found, _from_models(models.json(), access))
        metrics = access.get("/metrics", timeout_s=timeout_s)
        if metrics.status_code == 200:
            _add(found, from_metrics(metrics.text))
    except (httpx.HTTPError, ValueError, TypeError, AttributeError, LookupError) as error:
        raise ServerError(
            f"{access.base_url}: cannot read the configuration back: "
            f"{access.redacted(str(error)) or type(error).__name__}"
        ) from error
    return found, versions


def _from_models(answer: dict[str, Any], access: Access) -> dict[str, Any]:
    """Names of the served models, and the longest context where all tell the same."""
    entries = answer.get("data") or []
    found: dict[str, Any] = {}
    if entries:
        found["served_models"] = sorted(access.redacted(str(entry["id"])) for entry in entries)
    lengths = {entry.get("max_model_len") for entry in entries}
    if len(lengths) == 1 and type(length := lengths.pop()) is int:
        found["max_model_len"] = length
    return found


def _add(found: dict[str, Any], more: dict[str, Any]) -> None:
    """Takes in what another source states. One that states nothing takes nothing back."""
    for key, value in more.items():
        seen = found.get(key)
        found[key] = value if seen is None or seen == value else [seen, value]


def from_metrics(text: str) -> dict[str, Any]:
    """Block size, blocks, KV capacity in tokens and all else of vllm:cache_config_info.

    Of several engines: blocks and capacity are sums, ``engines`` their number, and what they state
    differently is the list of its values, which equals no plan. What one of them does not state is
    left out. Raises ValueError on a malformed page.
    """
    engines = _cache_labels(Page(text))
    if not engines:
        return {}
    blocks = [_count(labels.get("num_gpu_blocks")) for labels in engines]
    found: dict[str, Any] = {
        "engines": len(engines),
        "block_tokens": _agreed([_count(labels.get("block_size")) for labels in engines]),
        "device_blocks": _sum(blocks),
        "kv_capacity_tokens": _sum([_capacity_tokens(labels) for labels in engines]),
        "prefix_caching": _agreed([_scalar(e.get("enable_prefix_caching")) for e in engines]),
    }
    for label in sorted({label for labels in engines for label in labels} - _CACHE_OTHERWISE):
        found[f"cache.{label}"] = _agreed([_scalar(labels.get(label)) for labels in engines])
    return {key: value for key, value in found.items() if value is not None}


# Labels of vllm:cache_config_info that name the engine, or that have a key of their own above.
_IDENTITY = {"engine", "instance", "model_name"}
_CACHE_OTHERWISE = _IDENTITY | {
    "block_size",
    "enable_prefix_caching",
    "kv_cache_max_concurrency",
    "kv_cache_size_tokens",
    "num_gpu_blocks",
}


def _cache_labels(page: Page) -> list[dict[str, str]]:
    """The labels of each engine; where its series contradict each other, those they agree in."""
    engines: dict[tuple[str | None, ...], dict[str, str]] = {}
    for reading in page.readings("vllm:cache_config_info"):
        who = tuple(reading.labels.get(label) for label in sorted(_IDENTITY))
        seen = engines.setdefault(who, dict(reading.labels))
        for label in [name for name in seen if seen[name] != reading.labels.get(name)]:
            del seen[label]
    return list(engines.values())


def _capacity_tokens(labels: dict[str, str]) -> int | None:
    """Tokens that an engine can hold: as it states them, else its blocks times their size.

    The product is wrong where layers differ in what they keep (sliding windows, state spaces).
    """
    stated = _count(labels.get("kv_cache_size_tokens"))
    blocks, size = _count(labels.get("num_gpu_blocks")), _count(labels.get("block_size"))
    if stated is not None or blocks is None or size is None:
        return stated
    return blocks * size


def _count(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"[0-9]{1,18}", text) else None


def _sum(values: list[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _agreed(values: list[Any]) -> Any:
    """The value that all state; a list where they differ; None where one states none."""
    if any(value is None for value in values):
        return None
    distinct = [value for i, value in enumerate(values) if value not in values[:i]]
    return distinct[0] if len(distinct) == 1 else distinct


def _scalar(text: str | None) -> Any:
    """A label as the value it spells; None for none."""
    if text in (None, "None"):
        return None
    return {"True": True, "False": False}.get(text or "", _number(text or ""))


def _number(text: str) -> Any:
    if (count := _count(text)) is not None:
        return count
    with contextlib.suppress(ValueError):
        if math.isfinite(value := float(text)):
            return value
    return text


def error_lines(log: str, count: int = 15) -> str:
    """The last lines that look like errors, or simply the last lines."""
    lines = [line.rstrip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR_LINE.search(line)]
    return "\n".join(line[:300] for line in (errors or lines)[-count:]) or "(the log is empty)"
