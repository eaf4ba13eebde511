"""A completion as a stream of events, in every dialect and with every fault of the stream."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.sim.content import Token
from harness.sim.faults import Fault, FaultName
from harness.sim.http import Hangup, HttpResponse

# Made once: json.dumps with an argument makes an encoder for every event.
_ENCODER = json.JSONEncoder(ensure_ascii=False)


@dataclass(frozen=True)
class Usage:
    """Counts of tokens as they are told to the client."""

    prompt: int
    completion: int
    cached: int | None

    def to_json(self) -> dict[str, Any]:
        """OpenAI's shape; ``prompt_tokens_details`` null when the cached tokens are not told."""
        details = None if self.cached is None else {"cached_tokens": self.cached}
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": details,
        }


@dataclass(frozen=True)
class Shape:
    """What the client asked for. ``reasoning_field`` is called so in the server's version."""

    model: str
    request_id: str
    chat: bool
    token_ids: bool
    logprobs: bool
    usage: bool
    reasoning_field: str

    def chunk(
        self, tokens: Sequence[Token], *, finish: str | None = None, reasoning: bool = False
    ) -> dict[str, Any]:
        """One event's content with these tokens; none: the role chunk, or an empty one."""
        text = "".join(token.text for token in tokens)
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish}
        if reasoning:
            choice["delta"] = {self.reasoning_field: text}
        elif self.chat:
            choice["delta"] = {"content": text} if tokens else {"role": "assistant", "content": ""}
        else:
            choice["text"] = text
        if tokens and self.token_ids:
            choice["token_ids"] = [token.id for token in tokens]
        if tokens and self.logprobs:
            choice["logprobs"] = self._logprobs(tokens)
        return self.envelope([choice])

    def plain_event(self, token: Token) -> bytes:
        """What a completion without faults sends of a token that is not its last.

        The same bytes as of `chunk`, in a fifth of the time: with hundreds of streams the simulator
        would be late against its own model.
        """
        text = _ENCODER.encode(token.text)
        logprobs = f'{{"tokens": [{text}], "token_logprobs": [{token.logprob!r}]}}'
        ids = f', "token_ids": [{token.id}]' if self.token_ids else ""
        said = logprobs if self.logprobs else "null"
        return (
            f'data: {{"id": "{self.request_id}", "object": "text_completion", "model": '
            f'{_ENCODER.encode(self.model)}, "choices": [{{"index": 0, "logprobs": {said}, '
            f'"finish_reason": null, "text": {text}{ids}}}]}}\n\n'
        ).encode()

    def envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """What every event carries."""
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return {"id": self.request_id, "object": kind, "model": self.model, "choices": choices}

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any]:
        if self.chat:
            return {"content": [{"token": t.text, "logprob": t.logprob} for t in tokens]}
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
        }


@dataclass
class EventStream:
    """Writes events as one fault or dialect would have them on the wire."""

    response: HttpResponse
    faults: Mapping[FaultName, Fault]
    _held: bytearray = field(default_factory=bytearray)

    async def start(self) -> None:
        """Headers; a proxy that buffers sends not even those."""
        headers = {"Content-Type": "text/event-stream; charset=utf-8"}
        if FaultName.GZIP in self.faults:
            headers["Content-Encoding"] = "gzip"
        if FaultName.BUFFERING_PROXY not in self.faults:
            await self.response.start(headers)

    async def event(self, content: dict[str, Any] | str) -> None:
        """One event."""
        text = content if isinstance(content, str) else _ENCODER.encode(content)
        end = "\r\n" if FaultName.CRLF in self.faults else "\n"
        space = "" if FaultName.NO_SPACE_AFTER_DATA in self.faults else " "
        if FaultName.COMMENT_PINGS in self.faults:
            await self._send(f": ping{end}{end}".encode())
        raw = f"data:{space}{text}{end}{end}".encode()
        for piece in self._pieces(raw):
            await self._send(piece)

    async def end(self) -> None:
        """The end of the body, and of whatever was held back."""
        if FaultName.BUFFERING_PROXY in self.faults:
            await self.response.start({"Content-Type": "text/event-stream; charset=utf-8"})
            await self.response.write(bytes(self._held))
        elif FaultName.GZIP in self.faults:
            await self.response.write(gzip.compress(bytes(self._held), mtime=0))
        await self.response.end()

    def _pieces(self, raw: bytes) -> Iterator[bytes]:
        """Cut inside the first character of several bytes, where there is one."""
        cut = next((i for i, byte in enumerate(raw) if byte >= 0xC0), None)
        if FaultName.SPLIT_UTF8 not in self.faults or cut is None:
            yield raw
        else:
            yield raw[: cut + 1]
            yield raw[cut + 1 :]

    async def _send(self, piece: bytes) -> None:
        if {FaultName.BUFFERING_PROXY, FaultName.GZIP} & self.faults.keys():
            self._held += piece
        else:
            await self.response.write(piece)


class Answer:
    """The events of one answer, token by token."""

    def __init__(
        self, shape: Shape, stream: EventStream, usage: Callable[[], Usage], *, length: int
    ) -> None:
        """``usage`` so far; ``length``: tokens that will come."""
        self._shape, self._stream, self._usage, self._length = shape, stream, usage, length
        self._faults = stream.faults
        self._is_plain = not stream.faults and not shape.chat
        self._waiting: list[Token] = []
        self._sent = 0
        self._role_sent = False

    async def accepted(self) -> None:
        """The request has arrived; nothing is computed yet."""
        if FaultName.ROLE_CHUNK_EARLY in self._faults:
            await self._role()

    async def token(self, token: Token, *, finish: str | None) -> None:
        """One more token. Raises Hangup where a fault cuts the stream."""
        if self._is_plain and finish is None:
            await self._stream.response.write(self._shape.plain_event(token))
            return
        if self._shape.chat and not self._role_sent:
            await self._role()
        self._waiting.append(token)
        together = self._faults.get(FaultName.TOKENS_PER_CHUNK)
        size = 1 if together is None else int(together.value or 2)
        if len(self._waiting) < size and finish is None:
            return
        tokens, self._waiting = self._waiting, []
        reasoning = FaultName.REASONING_CHANNEL in self._faults and self._sent < self._length // 2
        if finish is not None and FaultName.FINISH_REASON_ERROR in self._faults:
            finish = "error"
        chunk = self._shape.chunk(tokens, finish=finish, reasoning=reasoning)
        if FaultName.USAGE_EVERY_CHUNK in self._faults:
            chunk["usage"] = self._usage().to_json()
        await self._stream.event(chunk)
        self._sent += len(tokens)
        if self._sent >= self._length // 2:
            await self._break()

    async def finish(self) -> None:
        """Usage, the terminator and the end of the body."""
        if self._shape.usage and FaultName.USAGE_MISSING not in self._faults:
            last = self._shape.envelope([])
            last["usage"] = (
                None if FaultName.USAGE_NULL in self._faults else self._usage().to_json()
            )
            await self._stream.event(last)
        await self._stream.event("[DONE]")
        await self._stream.end()

    async def _role(self) -> None:
        self._role_sent = True
        await self._stream.event(self._shape.chunk([]))

    async def _break(self) -> None:
        if FaultName.TRUNCATED_STREAM in self._faults:
            raise Hangup
        if FaultName.ERROR_IN_200 in self._faults:
            error = {"message": "EngineCore encountered an issue", "type": "InternalServerError"}
            await self._stream.event({"error": {**error, "code": 500}})
            await self._stream.event("[DONE]")
            await self._stream.end()
            raise Hangup
