"""The API server: endpoints over the engine, the clock that drives it, and the engine's process."""

from __future__ import annotations

import array
import asyncio
import contextlib
import json
import math
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from harness.sim import content, pages
from harness.sim.config import SimConfig
from harness.sim.content import Token
from harness.sim.engine import Engine, Request, SimModel
from harness.sim.faults import Fault, FaultName, Faults
from harness.sim.http import Hangup, HttpRequest, HttpResponse
from harness.sim.stream import Answer, EventStream, Shape, Usage
from harness.sim.truth import TruthRecord, TruthWriter, prompt_digest

_LEAK_BYTES = 2**20
_RENAMED = "kvgate:storage_"
# Ends with its standard input, so it never outlives this process.
_ENGINE_PROCESS = (sys.executable, "-S", "-E", "-c", "import sys; sys.stdin.read()")


class EngineProcess:
    """The process that vLLM would compute in. Here it only exists, so that it can be replaced."""

    def __init__(self) -> None:
        self._process = self._start()

    def replace(self) -> None:
        """Ends it and starts another one."""
        self._process.kill()
        self._process.wait()
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(_ENGINE_PROCESS, stdin=subprocess.PIPE)


class SimServer:
    """Endpoints. `drive` is the engine's loop; both run on one event loop."""

    def __init__(
        self,
        config: SimConfig,
        model: SimModel,
        *,
        model_name: str,
        truth: TruthWriter | None,
        process: EngineProcess | None = None,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.config, self.model, self.model_name = config, model, model_name
        self.faults = Faults(config.faults, seed=config.seed)
        self.engine = Engine(config, model, self.faults)
        self._truth, self._process = truth, process
        self._monotonic_ns = monotonic_ns
        self._started_ns = monotonic_ns()
        self._arrived = asyncio.Event()
        self._leaked: list[bytearray] = []
        self._planted: dict[bytes, bytes] = {}
        self._once: set[FaultName] = set()
        self._routes = {
            ("GET", "/health"): self._health,
            ("GET", "/version"): self._version,
            ("GET", "/v1/models"): self._models,
            ("GET", "/metrics"): self._metrics,
            ("POST", "/tokenize"): self._tokenize,
            ("POST", "/reset_prefix_cache"): self._reset,
            ("POST", "/sim/plant"): self._plant,
            ("POST", "/v1/completions"): self._completions,
            ("POST", "/v1/chat/completions"): self._completions,
        }

    @property
    def now_s(self) -> float:
        """Simulated seconds since the start."""
        return (self._monotonic_ns() - self._started_ns) / 1e9 * self.config.time_scale

    async def drive(self) -> None:
        """Steps the engine for ever.

        A step begins where the one before was due to end: the time that this process takes to hand
        tokens out is no part of the model. What it is behind by more than a step is not made up.
        """
        due_s = self.now_s
        while True:
            self.engine.advance(self.now_s)
            duration = self.engine.begin_step(self.now_s)
            if duration is None:
                await self._wait(self.engine.next_event(self.now_s))
                due_s = self.now_s
                continue
            due_s = max(due_s + duration, self.now_s)
            await asyncio.sleep((due_s - self.now_s) / self.config.time_scale)
            self.engine.advance(self.now_s)
            self.engine.end_step(self.now_s)

    async def _wait(self, until_s: float) -> None:
        """Until something arrives, or a load or write ends."""
        left = (until_s - self.now_s) / self.config.time_scale
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._arrived.wait(), None if math.isinf(left) else left)
        self._arrived.clear()

    async def handle(self, request: HttpRequest, response: HttpResponse) -> None:
        """Answers one request."""
        route = self._routes.get((request.method, request.path))
        if route is None:
            await response.json(404, {"error": {"message": f"no {request.path}"}})
            return
        try:
            await route(request, response)
        except (LookupError, TypeError, ValueError) as error:
            await response.json(400, {"error": {"message": f"{type(error).__name__}: {error}"}})

    # -- pages ----------------------------------------------------------------

    async def _health(self, _request: HttpRequest, response: HttpResponse) -> None:
        await response.whole(200, b"")

    async def _version(self, _request: HttpRequest, response: HttpResponse) -> None:
        await response.json(200, {"version": self.config.dialect})

    async def _models(self, _request: HttpRequest, response: HttpResponse) -> None:
        entry = {"id": self.model_name, "object": "model", "owned_by": "harness.sim"}
        entry_full = {**entry, "max_model_len": self.model.max_model_len}
        await response.json(200, {"object": "list", "data": [entry_full]})

    async def _metrics(self, _request: HttpRequest, response: HttpResponse) -> None:
        tiers = self.engine.tiers
        page = pages.metrics_page(
            self.config,
            self.engine.counters,
            model_name=self.model_name,
            disk_read_bytes=0 if tiers is None else tiers.media["disk"].read_bytes,
            shown=self._shown_engines(),
            with_tier=self._active(FaultName.COUNTERS_ABSENT) is None,
            prefix=_RENAMED if self._active(FaultName.COUNTERS_RENAMED) else "kvgate:tier_",
        )
        await response.whole(200, page.encode(), "text/plain; version=0.0.4; charset=utf-8")

    def _shown_engines(self) -> list[int]:
        """Whose counts the page's engines have."""
        shown = list(range(self.config.engines))
        if self._active(FaultName.ENGINES_DOUBLED):
            shown = [0] * max(2, len(shown))
        if self._active(FaultName.ENGINE_VANISHED):
            shown.pop()
        if self._active(FaultName.ENGINE_APPEARED):
            shown.append(0)
        return shown

    async def _tokenize(self, request: HttpRequest, response: HttpResponse) -> None:
        ids = self._prompt_ids(json.loads(request.body))
        answer = {"count": len(ids), "max_model_len": self.model.max_model_len, "tokens": ids}
        await response.json(200, answer)

    async def _reset(self, request: HttpRequest, response: HttpResponse) -> None:
        external = request.query.get("reset_external", "false") == "true"
        done = self.engine.reset_prefix_cache(external=external, now_s=self.now_s)
        await response.json(200, {"success": done})

    async def _plant(self, request: HttpRequest, response: HttpResponse) -> None:
        """Negative controls: damages a stored session, or undoes that (``control`` null)."""
        wanted = json.loads(request.body)
        tiers = self.engine.tiers
        if tiers is None:
            raise ValueError("this arm has no tier")
        tiers.replace(self._planted)
        self._planted = {}
        if wanted["control"] is not None:
            keys, donor = (
                content.block_keys(wanted[name], self.config.block_tokens)
                for name in ("prompt", "donor")
            )
            right = list(tiers.stored(keys))
            wrong = content.damaged(
                wanted["control"], right, list(tiers.stored(donor)), layers=self.model.layers
            )
            self._planted = {keys[index]: right[index] for index in wrong}
            tiers.replace({keys[index]: payload for index, payload in wrong.items()})
        await response.json(200, {"planted": wanted["control"]})

    # -- completions ----------------------------------------------------------

    async def _completions(self, http: HttpRequest, response: HttpResponse) -> None:
        asked = json.loads(http.body)
        prompt = self._prompt_ids(asked)
        number = self._number(prompt)
        faults = self.faults.of_request(number, self.now_s)
        self._happen(faults)
        for name, status in ((FaultName.STATUS_429, 429), (FaultName.STATUS_503, 503)):
            if name in faults:
                await response.json(status, {"error": {"message": "overloaded", "code": status}})
                return
        if FaultName.RESET_ON_REUSED_CONNECTION in faults and http.index:
            raise Hangup(reset=True)
        limit = int(asked.get("max_tokens") or asked.get("max_completion_tokens") or 16)
        length = max(1, limit // 2) if FaultName.EARLY_EOS in faults else limit
        if problem := self._refused(prompt, limit):
            await response.json(400, {"error": {"message": problem, "code": 400}})
            return
        tokens: asyncio.Queue[Token | None] = asyncio.Queue()
        request = Request(prompt, length, tokens.put_nowait, number=number, faults=faults)
        submission = self._submit(request)
        seen = _Seen()
        try:
            if asked.get("stream"):
                await self._stream(asked, request, tokens, response, seen, length < limit)
            else:
                await self._whole(asked, request, tokens, response, seen)
        finally:
            if submission is not None:
                submission.cancel()
            self.engine.abandon(request)
            self._write_truth(request, http.received_ns, seen)

    def _submit(self, request: Request) -> asyncio.TimerHandle | None:
        """Gives the engine the request, at once or when its time in front of it is over."""
        config = self.config

        def submit() -> None:
            self.engine.submit(request, self.now_s)
            self._arrived.set()

        if request.number is None or not config.front_s:
            submit()
            return None
        draw = random.Random(f"{config.seed}/front/{request.number}")
        front_s = draw.lognormvariate(math.log(config.front_s), config.front_sigma)
        return asyncio.get_running_loop().call_later(front_s / config.time_scale, submit)

    def _number(self, prompt: Sequence[int]) -> int | None:
        if len(prompt) < self.config.block_tokens:
            return None
        self.engine.arrived_count += 1
        return self.engine.arrived_count - 1

    def _happen(self, faults: Mapping[FaultName, Fault]) -> None:
        """Faults that a request sets off in the server itself."""
        if FaultName.LEAK in faults:
            size = int(faults[FaultName.LEAK].value or _LEAK_BYTES)
            self._leaked.append(bytearray(b"\x01") * size)
        once = {FaultName.RESTART, FaultName.COUNTERS_RESET, FaultName.ENGINE_RESET}
        new = (faults.keys() & once) - self._once
        self._once |= new
        if FaultName.RESTART in new:
            if self._process is not None:
                self._process.replace()
            self.engine.restart()
        if FaultName.COUNTERS_RESET in new:
            self.engine.counters.reset()
        if FaultName.ENGINE_RESET in new:
            self.engine.counters.reset(self.config.engines - 1)

    def _refused(self, prompt: Sequence[int], length: int) -> str | None:
        if not prompt or len(prompt) + length > self.model.max_model_len:
            return f"{len(prompt)} + {length} tokens; allowed: {self.model.max_model_len}"
        needed = self.engine.blocks_needed(len(prompt), length)
        if needed > self.engine.device.block_count:
            return f"{needed} blocks; the device has {self.engine.device.block_count}"
        return None

    async def _stream(
        self,
        asked: dict[str, Any],
        request: Request,
        tokens: asyncio.Queue[Token | None],
        response: HttpResponse,
        seen: _Seen,
        is_cut: bool,
    ) -> None:
        stream = EventStream(response, request.faults)
        answer = Answer(
            self._shape(asked, request),
            stream,
            lambda: self._usage(request, len(seen.ids)),
            length=request.max_tokens,
        )
        await stream.start()
        await answer.accepted()
        while len(seen.ids) < request.max_tokens:
            token = await self._next(tokens, seen)
            is_last = len(seen.ids) == request.max_tokens
            finish = ("stop" if is_cut else "length") if is_last else None
            await answer.token(token, finish=finish)
        await answer.finish()

    async def _whole(
        self,
        asked: dict[str, Any],
        request: Request,
        tokens: asyncio.Queue[Token | None],
        response: HttpResponse,
        seen: _Seen,
    ) -> None:
        found = [await self._next(tokens, seen) for _ in range(request.max_tokens)]
        shape = self._shape(asked, request)
        answer = shape.chunk(found, finish="length")
        if shape.chat:
            answer["object"] = "chat.completion"
            choice = answer["choices"][0]
            choice["message"] = {"role": "assistant", **choice.pop("delta")}
        usage = self._usage(request, len(found)).to_json()
        await response.json(200, {**answer, "usage": usage})

    async def _next(self, tokens: asyncio.Queue[Token | None], seen: _Seen) -> Token:
        token = await tokens.get()
        if token is None:
            raise Hangup  # the engine died under the request
        seen.add(token, self._monotonic_ns())
        return token

    def _shape(self, asked: dict[str, Any], request: Request) -> Shape:
        reasoning = "reasoning_content" if self.config.dialect == "0.20.1" else "reasoning"
        return Shape(
            model=self.model_name,
            request_id=f"sim-{request.number}",
            chat="messages" in asked,
            token_ids=bool(asked.get("return_token_ids")),
            # 0 asks for the sampled token's alone.
            logprobs=asked.get("logprobs") is not None and asked["logprobs"] is not False,
            usage=bool((asked.get("stream_options") or {}).get("include_usage")),
            reasoning_field=reasoning,
        )

    def _usage(self, request: Request, completion: int) -> Usage:
        short = FaultName.WRONG_PROMPT_LENGTH in request.faults
        unknown = FaultName.CACHED_TOKENS_NULL in request.faults
        prompt_tokens = len(request.prompt) - int(short)
        return Usage(prompt_tokens, completion, None if unknown else request.cached_tokens)

    def _prompt_ids(self, asked: dict[str, Any]) -> list[int]:
        """Token ids as given; text as bytes, which is the generated model's tokenizer."""
        if "messages" in asked:
            lines = [f"{m['role']}: {m['content']}\n" for m in asked["messages"]]
            return list("".join([*lines, "assistant: "]).encode())
        prompt = asked["prompt"]
        if isinstance(prompt, str):
            return list(prompt.encode())
        try:
            # The quickest check of thousands of ids.
            return array.array("I", prompt).tolist()
        except (OverflowError, TypeError):
            raise ValueError("prompt: allowed: a text or token ids") from None

    def _write_truth(self, request: Request, received_ns: int, seen: _Seen) -> None:
        if self._truth is None or request.number is None:
            return
        per_token = self.model.kv_bytes_per_token
        sources = request.tokens_by_source
        self._truth.write(
            TruthRecord(
                number=request.number,
                prompt_digest=prompt_digest(request.prompt),
                prompt_tokens=len(request.prompt),
                received_ns=received_ns,
                first_token_ns=seen.times_ns[0] if seen.times_ns else None,
                last_token_ns=seen.times_ns[-1] if seen.times_ns else None,
                token_ids=tuple(seen.ids),
                tokens_by_source=dict(sources),
                bytes_by_tier={n: sources.get(n, 0) * per_token for n in ("host", "disk")},
                faults=tuple(sorted(name.value for name in request.faults)),
            )
        )

    def _active(self, name: FaultName) -> Fault | None:
        return self.faults.active(name, self.engine.arrived_count, self.now_s)


class _Seen:
    """Tokens of one answer as the engine gave them away."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.times_ns: list[int] = []

    def add(self, token: Token, t_ns: int) -> None:
        self.ids.append(token.id)
        self.times_ns.append(t_ns)
