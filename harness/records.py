"""The values that pass between modules and lie in evidence files.

Frozen dataclasses with units in their names. Each goes to JSON and back unchanged (`to_json`,
`from_json`); reading is strict: an unknown or missing key or a wrong type raises `RecordError`.
Times are nanoseconds of the monotonic clock of the machine that ran the load. ``None`` means
absent, never zero. Knows no files.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import json
import math
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

EVIDENCE_FORMAT = 1


class StopCause(enum.Enum):
    """Why a run or a trial ended before its plan, as its seal or its last event says."""

    STOP_LOSS = "stop_loss"
    SERVER_UNREACHABLE = "server_unreachable"
    PORT_TAKEN = "port_taken"
    SERVER_NOT_READY = "server_not_ready"
    SERVER_ENDED = "server_ended"
    SERVER_SILENT = "server_silent"
    SERVER_UNUSABLE = "server_unusable"
    LOAD_FAILED = "load_failed"
    SUSPENDED = "suspended"
    DISK_FULL = "disk_full"
    INTERRUPTED = "interrupted"
    HARNESS_DIED = "harness_died"
    HARNESS_FAILED = "harness_failed"


# Causes that lie outside the system under test: nothing measured beside them may become STOP.
ENVIRONMENT = frozenset(
    {
        StopCause.SERVER_UNREACHABLE,
        StopCause.PORT_TAKEN,
        StopCause.SERVER_UNUSABLE,
        StopCause.LOAD_FAILED,
        StopCause.SUSPENDED,
        StopCause.DISK_FULL,
        StopCause.INTERRUPTED,
        StopCause.HARNESS_DIED,
        StopCause.HARNESS_FAILED,
    }
)


class RecordError(ValueError):
    """A JSON value does not have the shape of the record it should be."""


class Record:
    """Mixin of all records: strict JSON in both directions."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; tuples become lists and enums their value."""
        assert dataclasses.is_dataclass(self)
        return {
            f.name: _plain(getattr(self, f.name))
            for f in dataclasses.fields(self)
            if not (f.metadata.get(_LATER) and getattr(self, f.name) == f.default)
        }

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Raises RecordError naming the record and the key."""
        shape = _SHAPES.get(cls) or _SHAPES.setdefault(cls, _shape(cls))
        if not isinstance(value, dict):
            raise RecordError(f"{cls.__name__}: expected an object, found {type(value).__name__}")
        if value.keys() != shape.names:
            value = shape.completed(cls.__name__, value)
        return cls(*[read(value[name]) for name, read in shape.readers])


_LATER = "later"


def later(default: Any) -> Any:
    """A field that the first version of a format did not have.

    It is left out of the JSON at its default, so that values which do not use it keep their bytes,
    and may be missing when it is read. Every other key must be there.
    """
    return field(default=default, metadata={_LATER: True})


# Reads one JSON value or raises RecordError.
_Reader = Callable[[Any], Any]


@dataclass(frozen=True)
class _Shape:
    """How to read a record: made once per class, because a run holds millions of records."""

    names: frozenset[str]
    readers: tuple[tuple[str, _Reader], ...]
    defaults: dict[str, Any]

    def completed(self, record: str, value: dict[str, Any]) -> dict[str, Any]:
        """The value with later fields filled in. Raises RecordError on an unknown, missing key."""
        unknown = sorted(value.keys() - self.names)
        if unknown:
            raise RecordError(f"{record}: unknown key {unknown[0]!r}")
        missing = [n for n, _ in self.readers if n not in value and n not in self.defaults]
        if missing:
            raise RecordError(f"{record}: missing key {missing[0]!r}")
        return {**self.defaults, **value}


_SHAPES: dict[type, _Shape] = {}


def _shape(cls: Any) -> _Shape:
    hints = typing.get_type_hints(cls)
    fields = dataclasses.fields(cls)
    return _Shape(
        names=frozenset(f.name for f in fields),
        readers=tuple((f.name, _reader(hints[f.name], f"{cls.__name__}.{f.name}")) for f in fields),
        defaults={f.name: _plain(f.default) for f in fields if f.metadata.get(_LATER)},
    )


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


def _reader(hint: Any, where: str) -> _Reader:
    """A function that reads values of a type; ``where`` names the key in its errors."""
    origin = typing.get_origin(hint)
    if hint is Any:
        return functools.partial(_finite, where=where)
    if origin in (types.UnionType, typing.Union):
        return _union_reader(hint, where)
    if origin is tuple:
        return _list_reader(typing.get_args(hint)[0], where)
    if origin is dict:
        key, item = (_reader(part, where) for part in typing.get_args(hint))

        def read_dict(value: Any) -> Any:
            if not isinstance(value, dict):
                raise RecordError(f"{where}: expected an object, found {type(value).__name__}")
            return {key(k): item(v) for k, v in value.items()}

        return read_dict
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        members = {member.value: member for member in hint}
        allowed = ", ".join(str(name) for name in members)

        def read_enum(value: Any) -> Any:
            if not isinstance(value, str) or value not in members:
                raise RecordError(f"{where}: {value!r} is not one of {allowed}")
            return members[value]

        return read_enum
    if isinstance(hint, type) and issubclass(hint, Record):
        return hint.from_json
    return _scalar_reader(hint, where)


def _union_reader(hint: Any, where: str) -> _Reader:
    options = typing.get_args(hint)
    optional = type(None) in options
    readers = [_reader(option, where) for option in options if option is not type(None)]

    def read_union(value: Any) -> Any:
        if value is None and optional:
            return None
        for read in readers:
            try:
                return read(value)
            except RecordError:
                continue
        raise RecordError(f"{where}: {value!r} is none of {hint}")

    return read_union


def _list_reader(hint: Any, where: str) -> _Reader:
    read = _reader(hint, where)
    kinds = {hint}

    def all_fine(values: list[Any]) -> bool:
        if hint is int:
            return bool(min(values) >= -_INT_MAX and max(values) <= _INT_MAX)
        return all(map(math.isfinite, values))

    def read_list(value: Any) -> Any:
        if not isinstance(value, list):
            raise RecordError(f"{where}: expected a list, found {type(value).__name__}")
        # Token ids and stamps: all of one plain type, read without a call per item.
        if hint in (int, float) and set(map(type, value)) == kinds and all_fine(value):
            return tuple(value)
        return tuple([read(item) for item in value])

    return read_list


def _scalar_reader(hint: type, where: str) -> _Reader:
    def read_int(value: Any) -> Any:
        if type(value) is not int:
            raise RecordError(f"{where}: expected int, found {value!r}")
        if not -_INT_MAX <= value <= _INT_MAX:
            raise RecordError(f"{where}: expected an integer of 64 bits, found a larger one")
        return value

    def read_float(value: Any) -> Any:
        if type(value) is int and -_INT_MAX <= value <= _INT_MAX:
            return float(value)
        if type(value) is not float:
            raise RecordError(f"{where}: expected float, found {value!r}")
        if not math.isfinite(value):
            raise RecordError(f"{where}: expected a finite number, found {value!r}")
        return value

    def read_other(value: Any) -> Any:
        if type(value) is not hint:
            raise RecordError(f"{where}: expected {hint.__name__}, found {value!r}")
        return value

    return {int: read_int, float: read_float}.get(hint, read_other)


# Stamps are nanoseconds in 64 bits; a longer integer is damage, and floats cannot hold it.
_INT_MAX = 2**63 - 1
_DEPTH_MAX = 32


def _finite(value: Any, *, where: str, depth: int = 0) -> Any:
    """A free-form value as it is. Raises RecordError on what no verdict file could hold."""
    if isinstance(value, float) and not math.isfinite(value):
        raise RecordError(f"{where}: expected a finite number, found {value!r}")
    if type(value) is int and not -_INT_MAX <= value <= _INT_MAX:
        raise RecordError(f"{where}: expected an integer of 64 bits, found a larger one")
    if isinstance(value, (dict, list)):
        if depth == _DEPTH_MAX:
            raise RecordError(f"{where}: nested more than {_DEPTH_MAX} deep")
        for item in value.values() if isinstance(value, dict) else value:
            _finite(item, where=where, depth=depth + 1)
    return value


def parse_json(text: str) -> Any:
    """A JSON value. Stricter than `json.loads`: no NaN, no Infinity, no key twice.

    Raises ValueError.
    """
    try:
        return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_repeats)
    except RecursionError:
        raise ValueError("nested too deep") from None


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


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
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
