"""What a start-up log states, key by key: vLLM's lines of its arguments and of its configuration.

Both lines are Python representations on one line: `key=value, key=Name(key=value, ...)` and a
dictionary. They are taken apart into flat keys (`compilation_config.mode`) by their brackets and
quotes alone, so that a key nobody here has heard of is a key like any other. A line that was cut
tells the keys that are whole. Pure; guesses nothing.
"""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Iterator
from typing import Any

from harness.records import parse_json

# Keys of the configuration line that have another name in evidence, in campaigns and on pages.
# 0.20 and before wrote chunked_prefill_enabled.
_NAMES = {
    "chunked_prefill_enabled": "chunked_prefill",
    "enable_chunked_prefill": "chunked_prefill",
    "enable_prefix_caching": "prefix_caching",
    "max_num_batched_tokens": "batched_tokens",
    "max_seq_len": "max_model_len",
    "tensor_parallel_size": "tensor_parallel",
}
_CONFIGURATION = re.compile(r"Initializing an? (?:V\d+ )?LLM engine \([^)]*\) with config: (.*)")
_ARGUMENTS = re.compile(r"non-default args: (.*)")
_BATCHED_TOKENS = re.compile(r"max_num_batched_tokens=(\d+)")
_CORE_IDS = re.compile(r"local_rank=\d+, core ids=\[([\d, ]*)\]")
_TIER_READY = re.compile(r"kvgate tier ready: (\{.*\})")
_CONNECTOR = re.compile(r"Creating v1 connector with name: (\w+)")
# Arguments that make a connector; without any of them there is none.
_CONNECTOR_ARGUMENTS = ("args.kv_transfer_config", "args.kv_offloading_size")
# What no evidence may hold.
_SECRET = {"args.api_key", "args.hf_token", "args.ssl_keyfile_password"}
_OPENING, _CLOSING = "([{", ")]}"
_ENUM = re.compile(r"<([\w.]+): .*>")
_OBJECT = re.compile(r"([A-Za-z_][\w.]*)\((.*)\)", re.DOTALL)
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_DEPTH_MAX = 8


def from_log(log: str) -> dict[str, Any]:
    """Effective keys of a start-up log; what no line states is left out.

    ``connector``: the bundled one's by its own line, another by vLLM's, and ``none`` only where
    whole lines of arguments and configuration are there and ask for none: a log that was cut, or
    whose lines are not known, does not tell. What several engines state differently is a list.
    """
    log = log[: log.rfind("\n") + 1]  # a line without its end is being written, or was cut
    found: dict[str, Any] = {}
    stated = [dict(_line_items(text)) for text in _CONFIGURATION.findall(log)]
    for key in dict.fromkeys(key for line in stated for key in line):
        found[_NAMES.get(key, key)] = _merged([line[key] for line in stated if key in line])
    if match := _BATCHED_TOKENS.search(log):
        found.setdefault("batched_tokens", int(match.group(1)))
    asked = _ARGUMENTS.findall(log)
    for text in asked:
        for key, value in flattened("args", text.rstrip()):
            if key != "args":
                found[key] = "***" if key in _SECRET else value
    if cores := _CORE_IDS.findall(log):
        counts = [len([core for core in line.split(",") if core.strip()]) for line in cores]
        found["compute_threads"] = _merged(counts)
    is_whole = bool(stated) and any(text.rstrip().endswith("}") for text in asked)
    return found | _connector(log, found, is_whole=is_whole)


def _connector(log: str, found: dict[str, Any], *, is_whole: bool) -> dict[str, Any]:
    if ready := _TIER_READY.findall(log):
        with contextlib.suppress(ValueError):  # a line that another process wrote into
            return {"connector": "kvgate", "connector_config": parse_json(ready[-1])}
        return {"connector": "kvgate"}
    if name := _CONNECTOR.search(log):
        return {"connector": name.group(1)}
    asks = any(key.startswith(_CONNECTOR_ARGUMENTS) for key in found)
    return {"connector": "none"} if is_whole and not asks else {}


def _line_items(text: str) -> Iterator[tuple[str, Any]]:
    """Flat keys and values of `key=value, key=value`."""
    key = ""
    parts: list[tuple[str, str]] = []
    for item in split(text, ","):
        name, is_pair, value = item.strip().partition("=")
        if is_pair and re.fullmatch(r"\w+", name):
            key = name
            parts.append((key, value))
        elif key:  # a text without quotes may hold a comma
            parts[-1] = (key, f"{parts[-1][1]},{item}")
    for name, value in parts:
        yield from flattened(name, value)


def flattened(key: str, text: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """(flat key, value) of a value and of all that it holds. Values are plain JSON."""
    text = _ADDRESS.sub("", text.strip())
    holder = _OBJECT.fullmatch(text)
    if depth < _DEPTH_MAX and holder is not None:
        yield key, holder.group(1)
        for item in split(holder.group(2), ","):
            name, is_pair, value = item.strip().partition("=")
            if is_pair:
                yield from flattened(f"{key}.{name}", value, depth + 1)
    elif depth < _DEPTH_MAX and text.startswith("{") and len(text) > 2:
        # Of a dictionary that was cut, the items that are whole.
        yield key, "{...}"
        for item in split(text[1:-1] if text.endswith("}") else text[1:], ","):
            name, value = [*split(item, ":", count=1), ""][:2]
            if value:
                yield from flattened(f"{key}.{_text(name)}", value, depth + 1)
    else:
        yield key, _value(text)


def split(text: str, separator: str, count: int = 0) -> list[str]:
    """Parts of a text between separators outside of brackets and quotes, ``count`` cuts at most.

    A last part whose brackets or quotes never close was cut off and is left out.
    """
    parts, start, depth, quote = [], 0, 0, ""
    index = 0
    while index < len(text):
        char = text[index]
        if quote:
            if char == "\\":
                index += 1
            elif char == quote:
                quote = ""
        elif char in "'\"" and (index == 0 or text[index - 1] in " =([{,:"):
            quote = char
        elif char in _OPENING or (char == "<" and text[index + 1 : index + 2].isalpha()):
            depth += 1
        elif depth and (char in _CLOSING or char == ">"):
            depth -= 1
        elif char == separator and not depth:
            parts.append(text[start:index])
            start = index + 1
            if len(parts) == count:
                break
        index += 1
    rest = text[start:]
    if count and len(parts) == count:
        return [*parts, rest]
    return [*parts, rest] if rest.strip() and not depth and not quote else parts


def _value(text: str) -> Any:
    """A number, a truth, none or a text; a list is its text, which is compared as a whole."""
    if enum := _ENUM.fullmatch(text):
        return enum.group(1)
    with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
        value = ast.literal_eval(text)
        if value is None or isinstance(value, (bool, str)):
            return value
        if isinstance(value, int) and abs(value) < 2**63:
            return value
        if isinstance(value, float) and abs(value) < float("inf"):
            return value
    return text


def _text(text: str) -> str:
    value = _value(text.strip())
    return value if isinstance(value, str) else text.strip()


def _merged(values: list[Any]) -> Any:
    distinct = [value for index, value in enumerate(values) if value not in values[:index]]
    return distinct[0] if len(distinct) == 1 else distinct
