"""What is sent of a token, and when: the quick way says the same, and lateness does not add up."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json

import pytest

from harness.sim.content import Token
from harness.sim.engine import Request
from harness.sim.server import SimServer
from harness.sim.stream import Shape
from tests.sim.rig import CONFIG, MODEL

MS = 1_000_000


@pytest.mark.parametrize("model", ["m", 'a "model" ŧ\\n'])
@pytest.mark.parametrize("token_ids", [True, False])
@pytest.mark.parametrize("logprobs", [True, False])
@pytest.mark.parametrize("token", [Token(0, -0.05), Token(511, -1e-5), Token(7, -2.0512345678)])
def test_the_quick_way_says_the_same(
    model: str, token_ids: bool, logprobs: bool, token: Token
) -> None:
    shape = Shape(model, "sim-3", False, token_ids, logprobs, True, "reasoning")
    text = json.dumps(shape.chunk([token]), ensure_ascii=False)
    assert shape.plain_event(token) == f"data: {text}\n\n".encode()


def test_a_step_begins_where_the_one_before_was_due(monkeypatch: pytest.MonkeyPatch) -> None:
    # Whoever sleeps is woken 7 ms late; a step that computes nothing but a token takes 110 ms.
    now_ns = 0
    yielded = asyncio.sleep

    async def sleep(seconds: float) -> None:
        nonlocal now_ns
        now_ns += round(seconds * 1e9) + 7 * MS
        await yielded(0)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    server = SimServer(CONFIG, MODEL, model_name="m", truth=None, monotonic_ns=lambda: now_ns)
    times: list[int] = []
    done = asyncio.Event()

    def take(_token: Token | None) -> None:
        times.append(now_ns)
        if len(times) == 5:
            done.set()

    async def play() -> None:
        server.engine.submit(Request([1, 2, 3, 4], 5, take), 0.0)
        driving = asyncio.create_task(server.drive())
        await done.wait()
        driving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await driving

    asyncio.run(play())
    assert [round((after - before) / MS) for before, after in itertools.pairwise(times)] == [
        110
    ] * 4
