"""A loopback HTTP server that behaves as badly as asked. Runs as a process of its own.

The first path segment names the behaviour: ``POST /<behaviour>/v1/completions``. ``GET /log`` tells
what was seen: one entry per completion with the monotonic times (ns) of its arrival and of each
token sent. Prints its port. Ends when standard input closes.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

FRAME_END = b"0\r\n\r\n"


class OddServer:
    """State of the server; one event loop, no locks."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        self.probes = 0
        self.in_flight = 0
        self.in_flight_max = 0
        self.authorizations: set[str] = set()
        self.gate = asyncio.Event()
        self.arrived = asyncio.Event()
        self.never = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self.answer(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request; False closes the connection."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        received_ns = time.monotonic_ns()
        method, path, _ = head.split("\r\n", 1)[0].split(" ")
        fields = dict(
            line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line
        )
        self.authorizations.add(fields.get("authorization", ""))
        body = await reader.readexactly(int(fields.get("content-length", 0)))
        if method == "GET":
            return await self.page(path, writer)
        behaviour = path.strip("/").split("/")[0]
        entry = self.note(behaviour, path, json.loads(body), received_ns, writer)
        self.in_flight += 1
        self.in_flight_max = max(self.in_flight_max, self.in_flight)
        try:
            name, _, argument = behaviour.partition("-")
            return bool(await getattr(self, f"do_{name}")(writer, entry, argument))
        finally:
            self.in_flight -= 1

    def note(
        self, behaviour: str, path: str, body: Any, received_ns: int, writer: asyncio.StreamWriter
    ) -> dict[str, Any]:
        entry = {
            "behaviour": behaviour,
            "path": path,
            "body": {**body, "prompt": body["prompt"][:8]},
            "prompt_tokens": len(body["prompt"]),
            "received_ns": received_ns,
            "token_ns": [],
            "peer": writer.get_extra_info("peername")[1],
        }
        self.entries.append(entry)
        self.arrived.set()
        return entry

    async def page(self, path: str, writer: asyncio.StreamWriter) -> bool:
        if path.endswith("/health"):
            self.probes += 1
        if path == "/open":
            self.gate.set()
        if path == "/arrival":
            await self.arrived.wait()
        log = {
            "entries": self.entries,
            "probes": self.probes,
            "in_flight_max": self.in_flight_max,
            "authorizations": sorted(self.authorizations),
        }
        body = json.dumps(log if path == "/log" else {}).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        return True

    async def head(self, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        await writer.drain()

    async def frame(self, writer: asyncio.StreamWriter, piece: bytes) -> None:
        writer.write(b"%x\r\n" % len(piece) + piece + b"\r\n")
        await writer.drain()

    async def event(self, writer: asyncio.StreamWriter, message: Any) -> None:
        await self.frame(writer, b"data: " + json.dumps(message).encode() + b"\n\n")

    async def token(self, writer: asyncio.StreamWriter, entry: dict[str, Any], index: int) -> None:
        is_last = index == entry["body"]["max_tokens"] - 1
        choice = {
            "index": 0,
            "text": f" t{index}",
            "token_ids": [index],
            "finish_reason": "length" if is_last else None,
        }
        if "logprobs" in entry["body"]:
            choice["logprobs"] = {"token_logprobs": [-0.5 * index], "tokens": [f" t{index}"]}
        entry["token_ns"].append(time.monotonic_ns())
        await self.event(writer, {"choices": [choice], "usage": None})

    async def tail(self, writer: asyncio.StreamWriter, entry: dict[str, Any]) -> bool:
        count = entry["body"]["max_tokens"]
        prompt = entry["prompt_tokens"]
        usage = {"prompt_tokens": prompt, "completion_tokens": count}
        await self.event(writer, {"choices": [], "usage": usage})
        await self.frame(writer, b"data: [DONE]\n\n")
        writer.write(FRAME_END)
        await writer.drain()
        return True

    async def do_good(self, writer: asyncio.StreamWriter, entry: dict[str, Any], ms: str) -> bool:
        """``good-20``: 20 ms before each token."""
        await self.head(writer)
        for index in range(entry["body"]["max_tokens"]):
            await asyncio.sleep(float(ms or 0) / 1000)
            await self.token(writer, entry, index)
        return await self.tail(writer, entry)

    async def do_pause(self, writer: asyncio.StreamWriter, entry: dict[str, Any], ms: str) -> bool:
        """The first token at once, the others after ``ms``."""
        await self.head(writer)
        await self.token(writer, entry, 0)
        await asyncio.sleep(float(ms) / 1000)
        for index in range(1, entry["body"]["max_tokens"]):
            await self.token(writer, entry, index)
        return await self.tail(writer, entry)

    async def do_gate(self, writer: asyncio.StreamWriter, entry: dict[str, Any], n: str) -> bool:
        """Nobody is answered before ``n`` requests are in flight together."""
        if self.in_flight == int(n):
            self.gate.set()
        await self.gate.wait()
        return await self.do_good(writer, entry, "")

    async def do_status(self, writer: asyncio.StreamWriter, entry: dict[str, Any], n: str) -> bool:
        """``status-429``, with a body that repeats the key it was sent."""
        body = b'{"error": "no, ' + " ".join(self.authorizations).encode() + b'"}'
        writer.write(b"HTTP/1.1 %d No\r\nContent-Length: %d\r\n\r\n" % (int(n), len(body)) + body)
        await writer.drain()
        return True

    async def do_reset(self, writer: asyncio.StreamWriter, entry: dict[str, Any], _: str) -> bool:
        """Not a byte."""
        writer.transport.abort()
        return False

    async def do_close(self, writer: asyncio.StreamWriter, entry: dict[str, Any], _: str) -> bool:
        """Not a byte either, but an orderly close."""
        return False

    async def do_cut(self, writer: asyncio.StreamWriter, entry: dict[str, Any], _: str) -> bool:
        """One token, then an orderly close inside the chunked body."""
        await self.head(writer)
        await self.token(writer, entry, 0)
        return False

    async def do_error(self, writer: asyncio.StreamWriter, entry: dict[str, Any], _: str) -> bool:
        """An error object inside a 200 stream, then [DONE]."""
        await self.head(writer)
        await self.token(writer, entry, 0)
        await self.event(writer, {"error": {"message": "engine died", "code": 500}})
        await self.frame(writer, b"data: [DONE]\n\n")
        writer.write(FRAME_END)
        return True

    async def do_hang(self, writer: asyncio.StreamWriter, entry: dict[str, Any], _: str) -> bool:
        """One token, then silence."""
        await self.head(writer)
        await self.token(writer, entry, 0)
        await self.never.wait()
        return False

    async def do_mute(self, writer: asyncio.StreamWriter, entry: dict[str, Any], _: str) -> bool:
        """Not even headers."""
        await self.never.wait()
        return False

    async def do_raw(self, writer: asyncio.StreamWriter, entry: dict[str, Any], _: str) -> bool:
        """No length and no chunks: the close ends the body (HTTP/1.0 style)."""
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
        usage = {"prompt_tokens": entry["prompt_tokens"], "completion_tokens": 1}
        choice = {"index": 0, "text": "x", "finish_reason": "length"}
        for message in ({"choices": [choice]}, {"choices": [], "usage": usage}):
            writer.write(b"data: " + json.dumps(message).encode() + b"\n\n")
        writer.write(b"data: [DONE]\n\n")
        await writer.drain()
        return False

    async def do_kept(self, writer: asyncio.StreamWriter, entry: dict[str, Any], _: str) -> bool:
        """A good answer, then the kept-alive connection is closed."""
        await self.do_good(writer, entry, "")
        return False


async def main() -> None:
    odd = OddServer()
    server = await asyncio.start_server(odd.serve, "127.0.0.1", 0, limit=2**24, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
