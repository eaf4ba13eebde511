"""The arguments of vLLM that decide how large a KV cache is, read from an arm's command line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.errors import PlanError

# vLLM 0.32.0, engine/arg_utils.py. The last of several counts, as for argparse.
_NAMES = {
    "--tensor-parallel-size": "tensor_parallel",
    "-tp": "tensor_parallel",
    "--pipeline-parallel-size": "pipeline_parallel",
    "-pp": "pipeline_parallel",
    "--gpu-memory-utilization": "utilisation",
    "--kv-cache-dtype": "kv_cache_dtype",
    "--dtype": "dtype",
}
# They change what a token takes in ways that are not modelled.
_NOT_MODELLED = (
    "--decode-context-parallel-size",
    "-dcp",
    "--speculative-config",
    "--kv-cache-dtype-skip-layers",
)
_WHOLE = {*_NAMES, *_NOT_MODELLED}


@dataclass(frozen=True)
class EngineOptions:
    """What the arguments state, None: nothing. ``not_modelled``: one that no figure covers."""

    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    utilisation: float | None = None
    kv_cache_dtype: str | None = None
    dtype: str | None = None
    drops_windows: bool = True
    not_modelled: str | None = None


def engine_options(arguments: Sequence[str], *, where: str) -> EngineOptions:
    """Reads an argument list. Raises PlanError for a value that is none; ``where`` names it."""
    found: dict[str, str] = {}
    drops_windows, not_modelled = True, None
    for name, value in _pairs(arguments):
        if name in _NAMES:
            if value is None:
                raise PlanError([f"{where}: {name}: found nothing; a value is required"])
            found[_NAMES[name]] = value
        elif name == "--disable-hybrid-kv-cache-manager":
            drops_windows = False
        elif any(known.startswith(name) for known in _WHOLE - {name}) and name.startswith("--"):
            # argparse would take it for the whole.
            raise PlanError([f"{where}: found {name!r}, shortened; write the option out"])
        elif name in _NOT_MODELLED and value != "1":
            not_modelled = not_modelled or name
    return EngineOptions(
        tensor_parallel=_count(found.get("tensor_parallel"), f"{where}: --tensor-parallel-size"),
        pipeline_parallel=_count(
            found.get("pipeline_parallel"), f"{where}: --pipeline-parallel-size"
        ),
        utilisation=_share(found.get("utilisation"), f"{where}: --gpu-memory-utilization"),
        kv_cache_dtype=found.get("kv_cache_dtype"),
        dtype=found.get("dtype"),
        drops_windows=drops_windows,
        not_modelled=not_modelled,
    )


def _pairs(arguments: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """(option, value) of each option; vLLM takes underscores for hyphens in names."""
    for index, argument in enumerate(arguments):
        if not argument.startswith("-"):
            continue
        name, equals, value = argument.partition("=")
        following = arguments[index + 1 : index + 2]
        yield (
            name.replace("_", "-"),
            value if equals else (following[0] if following else None),
        )


def _count(text: str | None, where: str) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or not 0 < int(text) < 2**20:
        raise PlanError([f"{where}: found {text!r}; allowed: a positive integer"])
    return int(text)


def _share(text: str | None, where: str) -> float | None:
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise PlanError([f"{where}: found {text!r}; allowed: above 0 and up to 1"])
    return value
