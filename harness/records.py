"""The values that pass between modules and lie in evidence files.

Frozen dataclasses with units in their names. Each goes to JSON and back unchanged (`to_json`,
`from_json`); reading is strict: an unknown or missing key or a wrong type raises `RecordError`.
Times are nanoseconds of the monotonic clock of the machine that ran the load. ``None`` means
absent, never zero. Knows no files.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import math
import types
import typing
from dataclasses import dataclass, field
from typing import Any, Self

EVIDENCE_FORMAT = 1


class RecordError(ValueError):
    """A JSON value does not have the shape of the record it should be."""


class Record:
    """Mixin of all records: strict JSON in both directions."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; tuples become lists and enums their value."""
        assert dataclasses.is_dataclass(self)
        return {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Raises RecordError naming the record and the key."""
        if not isinstance(value, dict):
            raise RecordError(f"{cls.__name__}: expected an object, found {type(value).__name__}")
        hints = _hints(cls)
        unknown = sorted(set(value) - set(hints))
        if unknown:
            raise RecordError(f"{cls.__name__}: unknown key {unknown[0]!r}")
        arguments = {}
        for f in dataclasses.fields(cls):  # type: ignore[arg-type]
            if f.name in value:
                arguments[f.name] = _typed(value[f.name], hints[f.name], f"{cls.__name__}.{f.name}")
            elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
                raise RecordError(f"{cls.__name__}: missing key {f.name!r}")
        return cls(**arguments)


_HINTS: dict[type, dict[str, Any]] = {}


def _hints(cls: type) -> dict[str, Any]:
    if cls not in _HINTS:
        _HINTS[cls] = typing.get_type_hints(cls)
    return _HINTS[cls]


def _plain(value: Any) -> Any:
    if isinstance(value, Record):
        return value.to_json()
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _typed(value: Any, hint: Any, where: str) -> Any:
    origin = typing.get_origin(hint)
    if hint is Any:
        return value
    if origin in (types.UnionType, typing.Union):
        options = typing.get_args(hint)
        if value is None and type(None) in options:
            return None
        for option in options:
            if option is not type(None):
                try:
                    return _typed(value, option, where)
                except RecordError:
                    continue
        raise RecordError(f"{where}: {value!r} is none of {hint}")
    if origin is tuple:
        if not isinstance(value, list):
            raise RecordError(f"{where}: expected a list, found {type(value).__name__}")
        item_hint = typing.get_args(hint)[0]
        return tuple(_typed(item, item_hint, where) for item in value)
    if origin is dict:
        if not isinstance(value, dict):
            raise RecordError(f"{where}: expected an object, found {type(value).__name__}")
        key_hint, item_hint = typing.get_args(hint)
        return {_typed(k, key_hint, where): _typed(v, item_hint, where) for k, v in value.items()}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        try:
            return hint(value)
        except ValueError as error:
            allowed = ", ".join(str(member.value) for member in hint)
            raise RecordError(f"{where}: {value!r} is not one of {allowed}") from error
    if isinstance(hint, type) and issubclass(hint, Record):
        return hint.from_json(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise RecordError(f"{where}: expected {hint.__name__}, found {value!r}")
    if hint is float and not math.isfinite(value):
        raise RecordError(f"{where}: expected a finite number, found {value!r}")
    return value


def parse_json(text: str) -> Any:
    """A JSON value. Stricter than `json.loads`: no NaN, no Infinity, no key twice.

    Raises ValueError.
    """
    return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_repeats)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [key for key, _ in pairs]
        raise ValueError(f"key {next(n for n in names if names.count(n) > 1)!r} appears twice")
    return found


def canonical_json(value: Any) -> str:
    """One spelling per value: sorted keys, no spaces, ASCII, no NaN. The input of every digest."""
    return json.dumps(
        _plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )


def digest(value: Any) -> str:
    """sha256 of the canonical JSON of a value."""
    return hashlib.sha256(canonical_json(value).encode("ascii")).hexdigest()


# --- what a workload plans --------------------------------------------------


@dataclass(frozen=True)
class PromptRecipe(Record):
    """Names a prompt without spelling out its ids; `workloads.prompts.token_ids` makes them.

    A prompt depends on (seed, session) alone, so every arm does the same work.
    """

    seed: int
    session: int
    tokens: int
    vocab_size: int


@dataclass(frozen=True)
class PlannedRequest(Record):
    """One request of a schedule. A user issues its requests one after the other, in `seq` order.

    ``planned_offset_ns`` counts from the release of the barrier; None: as soon as the user's
    previous request is done (closed loop).
    """

    seq: int
    user: int
    session: int
    turn: int
    prompt: PromptRecipe
    output_tokens: int
    planned_offset_ns: int | None = None


@dataclass(frozen=True)
class Schedule(Record):
    """Everything the load client needs to know; made before the first request is sent.

    ``phase`` names the part of the trial: warm_up, populate, wave, reask, steady, oracle, ...
    ``logprobs``: ask for token ids and the log probability of each sampled token.
    """

    workload: str
    phase: str
    requests: tuple[PlannedRequest, ...]
    logprobs: bool = True
    request_timeout_s: float = 600.0

    @property
    def users(self) -> int:
        """Number of users released together."""
        return len({request.user for request in self.requests})


# --- what the load client saw -----------------------------------------------


class Outcome(enum.Enum):
    """ok: complete and right in form. failed: surely not. unknown: sent, but its end not seen."""

    OK = "ok"
    FAILED = "failed"
    UNKNOWN = "unknown"


class ErrorKind(enum.Enum):
    """Why a request is not ok."""

    CONNECT = "connect"  # no connection
    RESET = "reset"  # closed before the first byte
    HTTP_STATUS = "http_status"  # not 2xx
    TRUNCATED = "truncated"  # the stream ended without its terminator or finish reason
    SERVER_ERROR = "server_error"  # an error object or an error finish reason inside a 200 stream
    MALFORMED = "malformed"  # the stream is not what the protocol allows
    EMPTY = "empty"  # no token at all
    SHORT = "short"  # fewer output tokens than were forced
    WRONG_PROMPT_LENGTH = "wrong_prompt_length"  # usage.prompt_tokens differs from what was sent
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"  # the harness stopped


@dataclass(frozen=True)
class RequestRecord(Record):
    """One request as it happened. Stamps are monotonic nanoseconds; None: never happened.

    TTFT is ``first_token_ns - sent_ns``: the first token of any channel, never the role chunk,
    headers or an empty delta (docs/protocol.md, section 5). Token counts come from ``usage``.
    ``token_ns[i]`` is when the chunk with ``token_counts[i]`` tokens arrived.
    """

    seq: int
    user: int
    session: int
    phase: str
    prompt_tokens_planned: int
    output_tokens_planned: int
    planned_ns: int
    outcome: Outcome
    sent_ns: int | None = None
    headers_ns: int | None = None
    first_event_ns: int | None = None
    first_token_ns: int | None = None
    last_token_ns: int | None = None
    done_ns: int | None = None
    error_kind: ErrorKind | None = None
    error_detail: str | None = None
    http_status: int | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    output_digest: str | None = None
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    token_ns: tuple[int, ...] = ()
    token_counts: tuple[int, ...] = ()

    @property
    def ttft_s(self) -> float | None:
        """Seconds from sending to the first token."""
        if self.first_token_ns is None or self.sent_ns is None:
            return None
        return (self.first_token_ns - self.sent_ns) / 1e9


# --- what the collectors and the orchestration saw --------------------------


@dataclass(frozen=True)
class MetricSample(Record):
    """One reading. ``value`` None: the source was asked and had no such series (see ``error``).

    ``mark`` names the moment in the trial (start, cold, wave_end, reask_end, ...); counters are
    read as differences between marks.
    """

    t_ns: int
    mark: str
    source: str
    name: str
    value: float | None
    labels: dict[str, str] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class Event(Record):
    """Something the orchestration did or noticed, with its details."""

    t_ns: int
    kind: str
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ProcessFacts(Record):
    """One process of the server tree. ``start_ticks`` tells a reused pid apart."""

    pid: int
    start_ticks: int
    name: str


@dataclass(frozen=True)
class ServerFacts(Record):
    """What was asked of a server and what it said it does.

    ``effective`` holds only what was read back (log, API): kv_capacity_tokens, block_tokens,
    connector, prefix_caching, compute_threads, vllm_version, ... A key that could not be read is
    absent.
    """

    arm: str
    kind: str
    argv: tuple[str, ...]
    environment: dict[str, str]
    effective: dict[str, Any]
    processes: tuple[ProcessFacts, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TrialFacts(Record):
    """Names a trial and carries the plan's figures that analysis needs to check it against."""

    index: int
    gate: str
    arm: str
    workload: str
    concurrency: int
    repetition: int
    attempt: int = 1
    figures: dict[str, Any] = field(default_factory=dict)
    format: int = EVIDENCE_FORMAT

    @property
    def id(self) -> str:
        """Directory name of the trial: 07-tiered_disk-cold_recovery-c4-r1."""
        name = f"{self.index:02d}-{self.arm}-{self.workload}-c{self.concurrency}-r{self.repetition}"
        return name if self.attempt == 1 else f"{name}-a{self.attempt}"
