"""HTTP/1.1 over asyncio streams: requests with a length, answers whole or in chunks.

By hand because a fault needs the wire: where a packet ends, a body cut in the middle, a reset.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlsplit

MAX_BODY_BYTES = 64 * 2**20
_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 429: "Too Many Requests"}


class Hangup(Exception):
    """The connection ends here; ``reset``: with a reset instead of an orderly close."""

    def __init__(self, *, reset: bool = False) -> None:
        super().__init__("hang up")
        self.reset = reset


@dataclass(frozen=True)
class HttpRequest:
    """One request. ``index``: how many came before it on the same connection.

    ``received_ns``: when its last byte was read, before other requests had their turn.
    """

    method: str
    path: str
    query: Mapping[str, str]
    body: bytes
    index: int
    received_ns: int


class HttpResponse:
    """The answer to one request: `whole`, or `start`, `write` and `end`."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    async def whole(self, status: int, body: bytes, content_type: str = "text/plain") -> None:
        """Status, length and body."""
        head = (
            f"HTTP/1.1 {status} {_REASONS.get(status, 'Status')}\r\nContent-Type: {content_type}"
            f"\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self._writer.write(head.encode("ascii") + body)
        await self._writer.drain()

    async def json(self, status: int, content: Any) -> None:
        """A JSON body."""
        body = json.dumps(content, ensure_ascii=False).encode()
        await self.whole(status, body, "application/json")

    async def start(self, headers: Mapping[str, str]) -> None:
        """Status 200 and headers of a body that comes in chunks."""
        lines = ["HTTP/1.1 200 OK", "Transfer-Encoding: chunked"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self._writer.write(("\r\n".join(lines) + "\r\n\r\n").encode("ascii"))
        await self._writer.drain()

    async def write(self, piece: bytes) -> None:
        """One chunk, handed to the system at once."""
        self._writer.write(f"{len(piece):x}\r\n".encode("ascii") + piece + b"\r\n")
        await self._writer.drain()

    async def end(self) -> None:
        """The last chunk."""
        self._writer.write(b"0\r\n\r\n")
        await self._writer.drain()


Handler = Callable[[HttpRequest, HttpResponse], Awaitable[None]]


class _StampedReader(asyncio.StreamReader):
    """Knows when bytes last came: a wave of requests is read long before the last is handled."""

    fed_ns = 0

    def feed_data(self, data: Any) -> None:
        """Called by the transport."""
        self.fed_ns = time.monotonic_ns()
        super().feed_data(data)


async def listen(handler: Handler, port: int) -> asyncio.Server:
    """Serves on the loopback from now on."""

    def protocol() -> asyncio.StreamReaderProtocol:
        reader = _StampedReader()

        async def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await _serve_connection(reader, writer, handler)

        return asyncio.StreamReaderProtocol(reader, serve)

    loop = asyncio.get_running_loop()
    return await loop.create_server(protocol, "127.0.0.1", port, backlog=4096)


async def _serve_connection(
    reader: _StampedReader, writer: asyncio.StreamWriter, handler: Handler
) -> None:
    """Answers the requests of a connection, one after the other, until either side ends it."""
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    index = 0
    try:
        while (request := await _read_request(reader, index)) is not None:
            await handler(request, HttpResponse(writer))
            index += 1
    except Hangup as hangup:
        if hangup.reset:
            # Nothing lingers: the system answers what is unread with a reset.
            linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()
    except (ConnectionError, asyncio.IncompleteReadError, ValueError):
        pass  # the client is gone, or speaks something else
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def _read_request(reader: _StampedReader, index: int) -> HttpRequest | None:
    """None when the client closed the connection. Raises ValueError on what is no request."""
    line = await reader.readline()
    if not line:
        return None
    method, target, _version = line.decode("ascii").split()
    length = 0
    while header := (await reader.readline()).decode("latin-1").strip():
        name, _, value = header.partition(":")
        if name.lower() == "content-length":
            length = int(value)
    if length > MAX_BODY_BYTES:
        raise ValueError(f"body of {length} bytes")
    body = await reader.readexactly(length)
    parts = urlsplit(target)
    query = dict(parse_qsl(parts.query))
    return HttpRequest(method, parts.path, query, body, index, reader.fed_ns)
