"""From what happened to one request to its record: ok, failed or unknown, and why. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from harness.load.completion import CompletionStream
from harness.records import ErrorKind, Outcome, PlannedRequest, RequestRecord

DETAIL_CHARS = 500
ACCEPTED_FINISH_REASONS = ("stop", "length", "tool_calls")


class End(enum.Enum):
    """How the exchange ended on the wire."""

    COMPLETE = "complete"  # the HTTP message is whole
    CUT = "cut"  # lost after the first byte, or broken framing
    RESET = "reset"  # lost before the first byte
    NO_CONNECTION = "no_connection"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"


@dataclass
class Exchange:
    """One request on the wire, filled in as it goes. Times are monotonic nanoseconds.

    ``error_body`` is the beginning of the body of an answer that is not 2xx.
    """

    planned_ns: int
    sent_ns: int | None = None
    headers_ns: int | None = None
    done_ns: int | None = None
    http_status: int | None = None
    error_body: str = ""
    end: End = End.CANCELLED
    end_detail: str = "never sent"


def classify(
    planned: PlannedRequest, exchange: Exchange, stream: CompletionStream, *, logprobs: bool
) -> tuple[Outcome, ErrorKind | None, str | None]:
    """The first rule that applies, surest knowledge first.

    A server that said it failed has failed, even if the rest never came. ok needs all of: 2xx, at
    least one token, an accepted finish reason, the terminator, usage that equals the plan on both
    sides, and no error object (cases A05, A11, A12, E02).
    """
    fault = _server_fault(exchange, stream) or _wire_fault(exchange)
    if fault is not None:
        return fault
    problem = (
        _stream_fault(stream)
        or _usage_fault(planned, stream)
        or _id_fault(stream, logprobs=logprobs)
    )
    if problem is not None:
        return Outcome.FAILED, *problem
    return Outcome.OK, None, None


def record_of(
    planned: PlannedRequest,
    phase: str,
    exchange: Exchange,
    stream: CompletionStream,
    *,
    logprobs: bool,
    secret: str | None = None,
) -> RequestRecord:
    """The record of a request; its detail is cut to 500 characters, ``secret`` blotted out."""
    outcome, error_kind, detail = classify(planned, exchange, stream, logprobs=logprobs)
    if detail is not None:
        # Blotted out first: a cut through the secret would leave its beginning.
        detail = redacted(detail, secret)[:DETAIL_CHARS]
    return RequestRecord(
        seq=planned.seq,
        user=planned.user,
        session=planned.session,
        phase=phase,
        prompt_tokens_planned=planned.prompt.tokens,
        output_tokens_planned=planned.output_tokens,
        planned_ns=exchange.planned_ns,
        outcome=outcome,
        sent_ns=exchange.sent_ns,
        headers_ns=exchange.headers_ns,
        first_event_ns=stream.first_event_ns,
        first_token_ns=stream.first_token_ns,
        last_token_ns=stream.last_token_ns,
        done_ns=exchange.done_ns,
        error_kind=error_kind,
        error_detail=detail,
        http_status=exchange.http_status,
        finish_reason=stream.finish_reason,
        prompt_tokens=stream.prompt_tokens,
        completion_tokens=stream.completion_tokens,
        cached_tokens=stream.cached_tokens,
        output_digest=stream.output_digest,
        token_ids=tuple(stream.token_ids),
        logprobs=tuple(stream.logprobs),
        token_ns=tuple(stream.token_ns),
        token_counts=tuple(stream.token_counts),
    )


def redacted(text: str, secret: str | None) -> str:
    """The text without the secret."""
    return text.replace(secret, "***") if secret else text


_Fault = tuple[Outcome, ErrorKind, str]
_Problem = tuple[ErrorKind, str]


def _server_fault(exchange: Exchange, stream: CompletionStream) -> _Fault | None:
    status = exchange.http_status
    if status is not None and not 200 <= status < 300:
        return Outcome.FAILED, ErrorKind.HTTP_STATUS, f"status {status}: {exchange.error_body}"
    if stream.server_error is not None:
        return Outcome.FAILED, ErrorKind.SERVER_ERROR, stream.server_error
    if stream.malformed is not None:
        return Outcome.FAILED, ErrorKind.MALFORMED, stream.malformed
    return None


def _wire_fault(exchange: Exchange) -> _Fault | None:
    detail = exchange.end_detail
    # What was never sent has surely not been answered.
    unseen = Outcome.FAILED if exchange.sent_ns is None else Outcome.UNKNOWN
    match exchange.end:
        case End.COMPLETE:
            return None
        case End.NO_CONNECTION:
            return Outcome.FAILED, ErrorKind.CONNECT, detail
        case End.RESET:
            return Outcome.FAILED, ErrorKind.RESET, detail
        case End.CUT:
            return Outcome.FAILED, ErrorKind.TRUNCATED, detail
        case End.TIMEOUT:
            return unseen, ErrorKind.TIMEOUT, detail
        case End.CANCELLED:
            return unseen, ErrorKind.CANCELLED, detail


def _stream_fault(stream: CompletionStream) -> _Problem | None:
    reason = stream.finish_reason
    if reason is not None and reason not in ACCEPTED_FINISH_REASONS:
        return ErrorKind.SERVER_ERROR, f"finish reason {reason!r}"
    if stream.event_count == 0:
        return ErrorKind.EMPTY, "no event in the stream"
    if not stream.is_done:
        return ErrorKind.TRUNCATED, "the stream ended without [DONE]"
    if stream.first_token_ns is None:
        return ErrorKind.EMPTY, "no token in the stream"
    if reason is None:
        return ErrorKind.TRUNCATED, "the stream ended without a finish reason"
    return None


def _usage_fault(planned: PlannedRequest, stream: CompletionStream) -> _Problem | None:
    if stream.completion_tokens is None or stream.prompt_tokens is None:
        found = "incomplete" if stream.has_usage else "missing"
        return ErrorKind.MALFORMED, f"usage is {found} though it was asked for"
    if stream.completion_tokens < planned.output_tokens:
        return (
            ErrorKind.SHORT,
            f"{stream.completion_tokens} output tokens, {planned.output_tokens} forced",
        )
    if stream.completion_tokens > planned.output_tokens:
        return (
            ErrorKind.MALFORMED,
            f"{stream.completion_tokens} output tokens, above the {planned.output_tokens} allowed",
        )
    if stream.prompt_tokens != planned.prompt.tokens:
        return (
            ErrorKind.WRONG_PROMPT_LENGTH,
            f"usage says {stream.prompt_tokens} prompt tokens, {planned.prompt.tokens} were sent",
        )
    return None


def _id_fault(stream: CompletionStream, *, logprobs: bool) -> _Problem | None:
    """Ids and log probabilities feed the exact oracles: one per token, or none at all."""
    id_count, logprob_count = len(stream.token_ids), len(stream.logprobs)
    if id_count and id_count != stream.completion_tokens:
        return ErrorKind.MALFORMED, f"{id_count} token ids, usage says {stream.completion_tokens}"
    if logprobs and logprob_count and logprob_count != stream.completion_tokens:
        return (
            ErrorKind.MALFORMED,
            f"{logprob_count} log probabilities, usage says {stream.completion_tokens}",
        )
    return None
