"""What an OpenAI completion stream says: text or chat chunks, folded one event at a time. Pure.

Judges nothing: `outcome.classify` does. The first token is the first of any channel (content,
reasoning, tool call), never a role chunk or an empty delta. Counts of tokens come from ``usage``
alone; what is absent stays None, and what was told stays told: a later usage without a count takes
nothing back.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, NoReturn

from harness.load.sse import ErrorEvent
from harness.records import digest

DONE = "[DONE]"

# Above the 500 of a record, which are cut after secrets were blotted out.
_DETAIL_CHARS = 4096


class _Malformed(ValueError):
    """An event is not what the protocol allows; never leaves this module."""


class CompletionStream:
    """The answer to one request, as far as it has come. Times are monotonic nanoseconds."""

    def __init__(self) -> None:
        self.event_count = 0
        self.first_event_ns: int | None = None
        self.first_token_ns: int | None = None
        self.last_token_ns: int | None = None
        self.token_ns: list[int] = []
        self.token_counts: list[int] = []
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.finish_reason: str | None = None
        self.has_usage = False
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.server_error: str | None = None
        self.malformed: str | None = None
        self.is_done = False
        self._text: list[str] = []

    @property
    def text(self) -> str:
        """All channels joined in the order of arrival."""
        return "".join(self._text)

    @property
    def output_digest(self) -> str | None:
        """sha256 of the token ids as canonical JSON when the server gave ids, else of the text."""
        if self.token_ids:
            return digest(self.token_ids)
        if self._text:
            return hashlib.sha256(self.text.encode("utf-8", "surrogatepass")).hexdigest()
        return None

    def fold(self, t_ns: int, event: str) -> None:
        """Takes in an event arrived at ``t_ns``. Never raises; a bad one sets ``malformed``."""
        self.event_count += 1
        if self.first_event_ns is None:
            self.first_event_ns = t_ns
        if self.malformed is not None:
            return
        try:
            self._fold(t_ns, event)
        except _Malformed as problem:
            self.mark_malformed(str(problem))

    def end(self, unfinished_event: str | None) -> None:
        """The stream is over; ``unfinished_event`` is what `SseParser.close` returned."""
        if isinstance(unfinished_event, ErrorEvent):
            self._fail(unfinished_event)
        elif unfinished_event is not None and unfinished_event.strip() == DONE:
            self.is_done = True

    def mark_malformed(self, problem: str) -> None:
        """Keeps the first problem; later events are counted but not read."""
        if self.malformed is None:
            self.malformed = problem[:_DETAIL_CHARS]

    def _fail(self, event: str) -> None:
        if self.server_error is None:
            self.server_error = event[:_DETAIL_CHARS] or "an error event without data"

    def _fold(self, t_ns: int, event: str) -> None:
        if isinstance(event, ErrorEvent):
            self._fail(event)
            return
        if not event.startswith("{"):
            stripped = event.strip()
            if stripped == DONE:
                self.is_done = True
            if stripped in (DONE, ""):
                return
        try:
            message = _DECODER.decode(event)
        except (ValueError, RecursionError) as error:
            raise _Malformed(f"event is not JSON ({error}): {event[:_DETAIL_CHARS]!r}") from error
        if not isinstance(message, dict):
            raise _Malformed(f"event is not an object: {event[:_DETAIL_CHARS]!r}")
        # An empty error object is an error too; only null and false say that there is none.
        if message.get("error") not in (None, False) or message.get("object") == "error":
            self._fail(event)
            return
        if self.is_done:
            raise _Malformed(f"event after {DONE}: {event[:_DETAIL_CHARS]!r}")
        usage = message.get("usage")
        if usage is not None:
            self._fold_usage(usage)
        for choice in _list(message.get("choices"), "choices"):
            if _object(choice, "choice").get("index", 0) == 0:
                self._fold_choice(t_ns, choice)

    def _fold_usage(self, usage: Any) -> None:
        usage = _object(usage, "usage")
        self.has_usage = True
        details = usage.get("prompt_tokens_details")
        details = {} if details is None else _object(details, "prompt_tokens_details")
        for name, holder in (
            ("prompt_tokens", usage),
            ("completion_tokens", usage),
            ("cached_tokens", details),
        ):
            if (told := _count(holder.get(name), name)) is not None:
                setattr(self, name, told)

    def _fold_choice(self, t_ns: int, choice: dict[str, Any]) -> None:
        finish_reason = choice.get("finish_reason")
        if finish_reason is not None:
            self.finish_reason = str(finish_reason)
        text = _text_of(choice)
        ids = _list(choice.get("token_ids"), "token_ids")
        for item in ids:
            if type(item) is not int:
                raise _Malformed(f"token id is not an integer: {item!r:.4096}")
        # Text without ids, after ids were seen, was held back by the detokenizer: no new token.
        count = len(ids) if ids or self.token_ids else int(bool(text))
        logprobs = choice.get("logprobs")
        if logprobs is not None:
            self.logprobs.extend(_logprobs_of(_object(logprobs, "logprobs")))
        self.token_ids.extend(ids)
        if text:
            self._text.append(text)
        if count:
            if self.first_token_ns is None:
                self.first_token_ns = t_ns
            self.last_token_ns = t_ns
            self.token_ns.append(t_ns)
            self.token_counts.append(count)


def _text_of(choice: dict[str, Any]) -> str:
    """Text of every channel of a completion choice or a chat delta."""
    text = choice.get("text")
    if isinstance(text, str):
        return text
    delta = _object(choice.get("delta") or {}, "delta")
    parts = [delta.get(name) for name in ("content", "reasoning_content", "reasoning")]
    for detail in _list(delta.get("reasoning_details"), "reasoning_details"):
        parts += [_object(detail, "reasoning detail").get(name) for name in ("text", "summary")]
    for call in _list(delta.get("tool_calls"), "tool_calls"):
        function = _object(_object(call, "tool call").get("function") or {}, "function")
        parts += [function.get(name) for name in ("name", "arguments")]
    return "".join(part for part in parts if isinstance(part, str))


def _logprobs_of(logprobs: dict[str, Any]) -> list[float]:
    """Log probability of each sampled token: completions and chat name them differently."""
    values = _list(logprobs.get("token_logprobs"), "token_logprobs")
    for item in _list(logprobs.get("content"), "logprobs.content"):
        values.append(_object(item, "logprob").get("logprob"))
    for value in values:
        if type(value) is not float and type(value) is not int:
            # vLLM writes a NaN as null.
            raise _Malformed(f"log probability of a sampled token is {value!r}")
    return [float(value) for value in values]


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _Malformed(f"{name} is not an object: {value!r:.4096}")
    return value


def _list(value: Any, name: str) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise _Malformed(f"{name} is not a list: {value!r:.4096}")
    return value


def _count(value: Any, name: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _Malformed(f"{name} is not a count: {value!r:.4096}")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


# Made once: json.loads with an argument makes a decoder for every event.
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
