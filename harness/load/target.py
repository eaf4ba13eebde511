"""Where requests go and what they carry. Pure: all is made before the barrier is released."""

from __future__ import annotations

import json
from dataclasses import dataclass
from urllib.parse import urlsplit

from harness.errors import LoadError
from harness.records import PlannedRequest, PromptRecipe, Record, Schedule
from workloads.prompts import token_ids

ENDPOINTS = ("completions",)
MAX_BODIES_BYTES = 2 * 2**30

# Digits of an id and its comma, for a vocabulary of at most 999,999.
_BYTES_PER_TOKEN = 7


@dataclass(frozen=True)
class Target(Record):
    """A server's address. ``base_url`` may carry a base path, with or without a final ``/v1``."""

    base_url: str
    model: str
    endpoint: str = "completions"
    api_key_env: str | None = None
    verify_tls: bool = True
    api_key_file: str | None = None

    def check(self) -> None:
        """Raises LoadError when the target cannot be used."""
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise LoadError(f"base_url {self.base_url!r}: expected http(s)://host[:port][/path]")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise LoadError(
                "base_url must hold no user, password, query or fragment; use api_key_env"
            )
        if self.endpoint not in ENDPOINTS:
            raise LoadError(
                f"endpoint {self.endpoint!r} is not one of {', '.join(ENDPOINTS)}: prompts are "
                "token ids, which the chat endpoint does not take"
            )

    @property
    def host_url(self) -> str:
        """Scheme and authority."""
        parts = urlsplit(self.base_url)
        return f"{parts.scheme}://{parts.netloc}"

    @property
    def completion_url(self) -> str:
        """Where requests are posted."""
        return f"{self._root}/v1/{self.endpoint}"

    @property
    def probe_url(self) -> str:
        """A cheap page that opens a connection; any answer will do."""
        return f"{self._root}/health"

    @property
    def _root(self) -> str:
        return self.base_url.rstrip("/").removesuffix("/v1").rstrip("/")


def check_size(schedule: Schedule) -> None:
    """Raises LoadError when the bodies of a schedule, all made beforehand, would not fit."""
    recipes = {request.prompt for request in schedule.requests}
    size_bytes = _BYTES_PER_TOKEN * sum(recipe.tokens for recipe in recipes)
    if size_bytes > MAX_BODIES_BYTES:
        raise LoadError(
            f"the prompts of {schedule.workload}/{schedule.phase} take about {size_bytes} bytes, "
            f"above the {MAX_BODIES_BYTES} allowed: split the schedule into several runs"
        )


def build_bodies(schedule: Schedule, model: str) -> dict[int, bytes]:
    """JSON body of each request by ``seq``; requests that ask the same share one object."""
    bodies: dict[int, bytes] = {}
    made: dict[tuple[PromptRecipe, int], bytes] = {}
    for request in schedule.requests:
        key = (request.prompt, request.output_tokens)
        if key not in made:
            made[key] = build_body(request, model, logprobs=schedule.logprobs)
        bodies[request.seq] = made[key]
    return bodies


def build_body(request: PlannedRequest, model: str, *, logprobs: bool) -> bytes:
    """Output length forced, greedy, streamed, usage and token ids asked for.

    ``logprobs`` 0 is the cheapest form that carries the sampled token's log probability: vLLM 0.32
    fills ``token_logprobs`` from the sampled token and lists no other (completion/serving.py,
    ``_create_completion_logprobs``).
    """
    count = request.output_tokens
    body = {
        "model": model,
        "prompt": token_ids(request.prompt),
        "max_tokens": count,
        "min_tokens": count,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    if logprobs:
        body["logprobs"] = 0
    return json.dumps(body, separators=(",", ":")).encode("ascii")
