"""The faults by name, and which requests or moments they hit. Pure."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from harness.records import Record


class FaultName(enum.Enum):
    """What can be wrong. Effect of each: `FAULT_TEXTS`."""

    # the stream, right in content
    ROLE_CHUNK_EARLY = "role_chunk_early"
    REASONING_CHANNEL = "reasoning_channel"
    TOKENS_PER_CHUNK = "tokens_per_chunk"
    USAGE_EVERY_CHUNK = "usage_every_chunk"
    COMMENT_PINGS = "comment_pings"
    CRLF = "crlf"
    NO_SPACE_AFTER_DATA = "no_space_after_data"
    SPLIT_UTF8 = "split_utf8"
    # the stream, wrong or unusable
    USAGE_MISSING = "usage_missing"
    USAGE_NULL = "usage_null"
    CACHED_TOKENS_NULL = "cached_tokens_null"
    TRUNCATED_STREAM = "truncated_stream"
    ERROR_IN_200 = "error_in_200"
    FINISH_REASON_ERROR = "finish_reason_error"
    EARLY_EOS = "early_eos"
    WRONG_PROMPT_LENGTH = "wrong_prompt_length"
    BUFFERING_PROXY = "buffering_proxy"
    GZIP = "gzip"
    # HTTP
    STATUS_429 = "status_429"
    STATUS_503 = "status_503"
    RESET_ON_REUSED_CONNECTION = "reset_on_reused_connection"
    # caches and tiers
    WARM_BETWEEN_CELLS = "warm_between_cells"
    HITS_WITHOUT_BYTES = "hits_without_bytes"
    BYTES_WITHOUT_HITS = "bytes_without_hits"
    ZERO_HITS = "zero_hits"
    PAGE_CACHE = "page_cache"
    TIER_FILLS_UP = "tier_fills_up"
    WRONG_KV = "wrong_kv"
    # counters
    COUNTERS_RENAMED = "counters_renamed"
    COUNTERS_ABSENT = "counters_absent"
    COUNTERS_RESET = "counters_reset"
    ENGINES_DOUBLED = "engines_doubled"
    ENGINE_RESET = "engine_reset"
    ENGINE_VANISHED = "engine_vanished"
    ENGINE_APPEARED = "engine_appeared"
    # time and processes
    COLD_ENGINE = "cold_engine"
    CONVOY = "convoy"
    STALL = "stall"
    DRIFT = "drift"
    LEAK = "leak"
    RESTART = "restart"
    MORE_COMPUTE = "more_compute"


FAULT_TEXTS: dict[FaultName, str] = {
    FaultName.ROLE_CHUNK_EARLY: "A chunk without a token is sent as soon as the request arrives.",
    FaultName.REASONING_CHANNEL: "The first half of the tokens comes in the reasoning channel.",
    FaultName.TOKENS_PER_CHUNK: "Each chunk carries `value` tokens (2).",
    FaultName.USAGE_EVERY_CHUNK: "Every chunk carries the usage so far.",
    FaultName.COMMENT_PINGS: "A comment line comes before each event, in a packet of its own.",
    FaultName.CRLF: "Lines end in CR LF.",
    FaultName.NO_SPACE_AFTER_DATA: "No space follows `data:`.",
    FaultName.SPLIT_UTF8: "Each event is sent in two packets, cut inside a character.",
    FaultName.USAGE_MISSING: "No usage chunk.",
    FaultName.USAGE_NULL: "The last chunk carries `usage: null`.",
    FaultName.CACHED_TOKENS_NULL: "Usage without the count of cached tokens.",
    FaultName.TRUNCATED_STREAM: "The connection closes after half the tokens.",
    FaultName.ERROR_IN_200: "An error object inside the 200 stream, then [DONE].",
    FaultName.FINISH_REASON_ERROR: "The stream ends with finish reason `error`.",
    FaultName.EARLY_EOS: "The answer ends after half the tokens, finish reason `stop`.",
    FaultName.WRONG_PROMPT_LENGTH: "Usage counts one prompt token less than were sent.",
    FaultName.BUFFERING_PROXY: "The whole answer is held back until its end.",
    FaultName.GZIP: "The stream is compressed though identity was asked for.",
    FaultName.STATUS_429: "Status 429.",
    FaultName.STATUS_503: "Status 503.",
    FaultName.RESET_ON_REUSED_CONNECTION: "A connection used before is reset instead of answered.",
    FaultName.WARM_BETWEEN_CELLS: "The reset says success and empties nothing; nothing is evicted.",
    FaultName.HITS_WITHOUT_BYTES: "Restores are counted as tokens but move no counted byte.",
    FaultName.BYTES_WITHOUT_HITS: "Restores are counted as bytes but not as tokens.",
    FaultName.ZERO_HITS: "Stores flow, lookups in the tier never hit.",
    FaultName.PAGE_CACHE: "The connector counts disk reads which the medium never saw.",
    FaultName.TIER_FILLS_UP: "After `value` blocks the tier stores nothing more and says nothing.",
    FaultName.WRONG_KV: "One restored block holds another session's KV.",
    FaultName.COUNTERS_RENAMED: "The tier's counters have other names.",
    FaultName.COUNTERS_ABSENT: "The tier's counters are not on the page.",
    FaultName.COUNTERS_RESET: "All counters start again at zero once; processes stay.",
    FaultName.ENGINES_DOUBLED: "The second engine repeats the first one's series.",
    FaultName.ENGINE_RESET: "Counters of one engine start again at zero once; the others go on.",
    FaultName.ENGINE_VANISHED: "The last engine is no longer on the page.",
    FaultName.ENGINE_APPEARED: "One more engine is on the page, with a past.",
    FaultName.COLD_ENGINE: "Steps take `value` times as long (20), as while compiling.",
    FaultName.CONVOY: "A first token waits `value` seconds (0.3) for others, then for all of them.",
    FaultName.STALL: "Nothing is computed any more; health and metrics answer.",
    FaultName.DRIFT: "Each request makes everything slower by `value` of the start (0.5).",
    FaultName.LEAK: "Each request leaves `value` bytes (1 MiB) behind.",
    FaultName.RESTART: "The engine process is replaced once: counters and device cache are gone.",
    FaultName.MORE_COMPUTE: "Twice the cores, half the prefill time.",
}


@dataclass(frozen=True)
class Fault(Record):
    """A fault and whom it hits.

    Requests are numbered from 0 in the order of arrival; those shorter than a block (the harness's
    one-token requests) have no number and are never hit. ``every``: one in so many, from
    ``from_request`` on. ``share``: of those, drawn from the seed. ``from_s``: simulated seconds
    since the start. ``value``: see `FAULT_TEXTS`.
    """

    name: FaultName
    from_request: int = 0
    to_request: int | None = None
    every: int = 1
    share: float = 1.0
    from_s: float = 0.0
    value: float | None = None


class Faults:
    """All faults of one server."""

    def __init__(self, faults: Iterable[Fault], *, seed: int) -> None:
        self._faults = {fault.name: fault for fault in faults}
        self._seed = seed

    def of_request(self, number: int | None, now_s: float) -> dict[FaultName, Fault]:
        """Those that hit a request."""
        if number is None:
            return {}
        return {n: f for n, f in self._faults.items() if self._hits(f, number, now_s)}

    def active(self, name: FaultName, arrived_count: int, now_s: float) -> Fault | None:
        """A fault of the server itself, which begins with the arrival of ``from_request``."""
        fault = self._faults.get(name)
        if fault is None or now_s < fault.from_s or arrived_count < fault.from_request:
            return None
        ended = fault.to_request is not None and arrived_count > fault.to_request
        return None if ended else fault

    def _hits(self, fault: Fault, number: int, now_s: float) -> bool:
        if number < fault.from_request or now_s < fault.from_s:
            return False
        if fault.to_request is not None and number >= fault.to_request:
            return False
        if (number - fault.from_request) % fault.every:
            return False
        return fault.share >= 1.0 or self._draw(fault.name, number) < fault.share

    def _draw(self, name: FaultName, number: int) -> float:
        text = f"{self._seed}/{name.value}/{number}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") / 2**64
