"""An engine on a clock of its own: time passes only by steps, loads and writes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from harness.sim.config import SimConfig
from harness.sim.content import Token
from harness.sim.engine import Engine, Request, SimModel
from harness.sim.faults import Fault, Faults

# 10 bytes of KV per token: a block of 4 tokens has 40.
MODEL = SimModel(
    layers=2, vocab_size=512, kv_bytes_per_token=10, max_model_len=4096, dtype="float32"
)
CONFIG = SimConfig(
    block_tokens=4,
    device_blocks=101,
    chunk_tokens=100,
    prefill_tokens_per_s=100.0,
    step_s=0.01,
    decode_s=0.1,
    host_pool_bytes=4000,
    load_latency_s=0.0,
    host_curve=((1.0, 800.0),),
    disk_curve=((1.0, 80.0),),
    disk_write_bytes_per_s=400.0,
)


@dataclasses.dataclass
class Answer:
    """Tokens of one request with the simulated seconds at which they left."""

    request: Request
    tokens: list[Token] = dataclasses.field(default_factory=list)
    times_s: list[float] = dataclasses.field(default_factory=list)
    given_up: bool = False


class Rig:
    """See the module."""

    def __init__(self, *faults: Fault, **changes: Any) -> None:
        config = dataclasses.replace(CONFIG, faults=faults, **changes)
        self.engine = Engine(config, MODEL, Faults(faults, seed=config.seed))
        self.faults = self.engine.faults
        self.now_s = 0.0

    def ask(self, prompt: Sequence[int], output: int = 1) -> Answer:
        """Submits a request now."""
        number = self.engine.arrived_count
        self.engine.arrived_count += 1
        faults = self.faults.of_request(number, self.now_s)
        answer = Answer(Request(prompt, output, lambda _token: None, number, faults))

        def take(token: Token | None) -> None:
            if token is None:
                answer.given_up = True
                return
            answer.tokens.append(token)
            answer.times_s.append(round(self.now_s, 6))

        answer.request.on_token = take
        self.engine.submit(answer.request, self.now_s)
        return answer

    def settle(self) -> None:
        """Lets everything happen that can happen without another request."""
        while True:
            self.engine.advance(self.now_s)
            duration = self.engine.begin_step(self.now_s)
            if duration is None:
                next_s = self.engine.next_event(self.now_s)
                if math.isinf(next_s):
                    return
                self.now_s = max(self.now_s, next_s)
                continue
            self.now_s += duration
            self.engine.advance(self.now_s)
            self.engine.end_step(self.now_s)

    def run(self, prompt: Sequence[int], output: int = 1) -> Answer:
        """Asks and settles."""
        answer = self.ask(prompt, output)
        self.settle()
        return answer

    def make_cold(self, *, external: bool = True) -> None:
        """Resets; must succeed."""
        assert self.engine.reset_prefix_cache(external=external, now_s=self.now_s)

    def count(self, series: str, part: str = "") -> int:
        """A counter as published."""
        published = self.engine.counters.published.values()
        return sum(counts.get((series, part), 0) for counts in published)
