"""What the server says of itself: the /metrics page in two dialects, and its start-up log. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.sim.config import SimConfig
from harness.sim.counters import ENGINE, SUMMED_GAUGES, SWITCHES, TIER, Counters, Key
from harness.sim.engine import SimModel

MARK = "SIMULATED by harness.sim: no vLLM, no model, no device"
DISK_WITNESS = "sim:disk_read_bytes_total"
# Not on the page of 0.20.1.
_SINCE_0_32 = ("vllm:prompt_tokens_by_source", "vllm:prompt_tokens_cached_by_source")


def metrics_page(
    config: SimConfig,
    counters: Counters,
    *,
    model_name: str,
    disk_read_bytes: int,
    shown: Sequence[int] | None = None,
    with_tier: bool = True,
    prefix: str = "kvgate:tier_",
) -> str:
    """The exposition page.

    ``shown``: whose counts each engine of the page has, None: its own. ``prefix``: what the tier's
    series are called instead.
    """
    lines = [f"# {MARK}"]
    blocks = list(_shares(config.device_blocks, config.engines))
    for engine, source in enumerate(range(config.engines) if shown is None else shown):
        own = {"engine": str(engine), "model_name": model_name}
        counts = counters.published.get(source, {})
        lines += _engine_lines(config, counts, own)
        if config.medium is not None and with_tier:
            tier = _tier_lines(counts, counters.gauges if engine == 0 else {}, own)
            lines += [line.replace("kvgate:tier_", prefix, 1) for line in tier]
            lines += [
                line.replace("kvgate:tier_", prefix, 1)
                for line in _gauge_lines(SWITCHES, counters.gauges, own)
            ]
        cache = {
            "block_size": str(config.block_tokens),
            "enable_prefix_caching": str(config.prefix_caching),
            "engine": str(engine),
            "num_gpu_blocks": str(blocks[source]),
        }
        lines.append(_line("vllm:cache_config_info", cache, 1))
    lines.append(_line(DISK_WITNESS, {}, disk_read_bytes))
    return "\n".join(lines) + "\n"


def _shares(count: int, parts: int) -> Iterator[int]:
    """Whole numbers that add up to a count, the first ones larger."""
    for index in range(parts):
        yield count // parts + (index < count % parts)


def _engine_lines(
    config: SimConfig, counts: Mapping[Key, int], own: dict[str, str]
) -> Iterator[str]:
    for series, parts in ENGINE.items():
        if "external" in series and config.medium is None:
            continue
        if series in _SINCE_0_32 and config.dialect == "0.20.1":
            continue
        yield from _counter_lines(counts, series, parts, own)


def _tier_lines(
    counts: Mapping[Key, int], gauges: Mapping[str, int], own: dict[str, str]
) -> Iterator[str]:
    for series, parts in TIER.items():
        yield from _counter_lines(counts, series, parts, own)
    yield from _gauge_lines(SUMMED_GAUGES, gauges, own)


def _gauge_lines(
    names: Sequence[str], gauges: Mapping[str, int], own: dict[str, str]
) -> Iterator[str]:
    for series in names:
        yield f"# TYPE {series} gauge"
        yield _line(series, own, gauges.get(series, 0))


def _counter_lines(
    counts: Mapping[Key, int], series: str, parts: tuple[str, ...], own: dict[str, str]
) -> Iterator[str]:
    yield f"# TYPE {series} counter"
    label = "tier" if series.startswith("kvgate:") else "source"
    for part in parts:
        labels = {**own, label: part} if part else own
        yield _line(f"{series}_total", labels, counts.get((series, part), 0))


def _line(series: str, labels: dict[str, str], value: float) -> str:
    shown = ",".join(f'{name}="{text}"' for name, text in sorted(labels.items()))
    return f"{series}{{{shown}}} {float(value)!r}" if shown else f"{series} {float(value)!r}"


def start_up_log(config: SimConfig, model: SimModel, *, model_path: str, pid: int) -> str:
    """The lines that `harness.server.facts` reads, in vLLM's words, after one that says so."""
    cores = ", ".join(str(core) for core in range(config.compute_threads))
    engine = f"(EngineCore pid={pid}) INFO"
    arguments: dict[str, Any] = {
        "model": model_path,
        "block_size": config.block_tokens,
        "num_gpu_blocks_override": config.device_blocks,
        "enable_prefix_caching": config.prefix_caching,
    }
    if config.medium is not None:
        arguments["kv_transfer_config"] = {"kv_connector": "KvgateTierConnector"}
    lines = [
        f"{MARK}; dialect of vLLM {config.dialect}",
        f"(APIServer pid={pid}) INFO [api_utils.py] non-default args: {arguments!r}",
        f"{engine} [core.py] Initializing a V1 LLM engine (v{config.dialect}) with config: "
        f"model={model_path!r}, dtype=torch.{model.dtype}, max_seq_len={model.max_model_len}, "
        f"tensor_parallel_size=1, data_parallel_size={config.engines}, enforce_eager=True, "
        "kv_cache_dtype=auto, device_config=sim, "
        f"enable_prefix_caching={config.prefix_caching}, enable_chunked_prefill=True, "
        f"max_num_batched_tokens={config.chunk_tokens}",
        f"{engine} [ompmultiprocessing.py] \tlocal_rank=0, core ids=[{cores}]",
    ]
    if config.medium is not None:
        ready = {
            "block_tokens": config.block_tokens,
            "direct_io": config.medium == "disk",
            "host_pool_bytes": config.host_pool_bytes,
            "kv_bytes_per_token": model.kv_bytes_per_token,
            "medium": config.medium,
            "simulated": True,
        }
        lines += [
            f"{engine} [factory.py] Creating v1 connector with name: KvgateTierConnector and "
            "engine_id: sim",
            f"{engine} [connector.py] kvgate tier ready: {json.dumps(ready, sort_keys=True)}",
        ]
    return "\n".join(lines) + "\n"
