"""How truly the load client stamps: its times against the send times of a loopback server.

Both sides read the same monotonic clock. Prints, per concurrency, in milliseconds: how long after
the client's send stamp the server read the request (transport, and the server's own lag), how long
after the server's send the client stamped the first token and any token; then what a run() costs
besides its requests.

Run: python -m benchmarks.load_client [concurrency ...]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from harness.load.driver import LoadClient, LoadResult
from harness.load.witness import nearest_rank
from harness.records import Outcome, PlannedRequest, PromptRecipe, Schedule
from workloads.prompts import token_ids

TOKEN_MS = 20
OUTPUT_TOKENS = 64
PROMPT_TOKENS = 2000
TURNS = 4
SERVER = Path(__file__).resolve().parents[1] / "tests" / "load" / "odd_server.py"


def schedule(users: int, turns: int, output_tokens: int, seed: int) -> Schedule:
    """Closed loop, all users released together."""
    return Schedule(
        "benchmark",
        "wave",
        tuple(
            PlannedRequest(
                seq=turn * users + user,
                user=user,
                session=turn * users + user,
                turn=turn,
                prompt=PromptRecipe(seed, turn * users + user, PROMPT_TOKENS, 50_000),
                output_tokens=output_tokens,
            )
            for turn in range(turns)
            for user in range(users)
        ),
    )


def compare(plan: Schedule, result: LoadResult, entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Errors in milliseconds, p50/p99/max by nearest rank."""
    truth = {tuple(entry["body"]["prompt"]): entry for entry in entries}
    arrival: list[float] = []
    first: list[float] = []
    every: list[float] = []
    for request, record in zip(plan.requests, result.records, strict=True):
        assert record.outcome is Outcome.OK, record
        entry = truth[tuple(token_ids(request.prompt)[:8])]
        sent = entry["token_ns"]
        lags = [(own - true) / 1e6 for own, true in zip(record.token_ns, sent, strict=True)]
        arrival.append((entry["received_ns"] - (record.sent_ns or 0)) / 1e6)
        first.append(lags[0])
        every += lags
    wave = sum(request.turn == 0 for request in plan.requests)
    return {
        "sent to read by the server, first wave": spread(arrival[:wave]),
        "sent to read by the server, later": spread(arrival[wave:]),
        "first token stamp lag, first wave": spread(first[:wave]),
        "first token stamp lag, later": spread(first[wave:]),
        "any token stamp lag": spread(every),
    }


def spread(values: list[float]) -> str:
    """p50/p99/max."""
    ranks = (nearest_rank(values, ratio) for ratio in (0.5, 0.99, 1.0))
    return "/".join(f"{value:.2f}" for value in ranks if value is not None)


def main() -> None:
    """Prints one block per concurrency."""
    server = subprocess.Popen(
        [sys.executable, str(SERVER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert server.stdout is not None
    root = f"http://127.0.0.1:{int(server.stdout.readline())}"
    place = Path(tempfile.mkdtemp(prefix="kvgate-bench-"))
    try:
        for seed, users in enumerate([int(item) for item in sys.argv[1:]] or [8, 32]):
            start = time.perf_counter()
            with LoadClient(
                base_url=f"{root}/good-{TOKEN_MS}", model="m", log_path=place / "log"
            ) as load:
                start_s = time.perf_counter() - start
                plan = schedule(users, TURNS, OUTPUT_TOKENS, seed)
                result = load.run(plan, records_path=place / f"{users}", deadline_s=300)
            with urllib.request.urlopen(f"{root}/log") as page:
                entries = json.load(page)["entries"]
            print(f"C={users} requests={len(plan.requests)} start_s={start_s:.2f}")
            for name, value in compare(plan, result, entries).items():
                print(f"  {name}: ms p50/p99/max = {value}")
            print(f"  {result.witness}")
        overhead(root, place)
    finally:
        server.kill()
        server.communicate()


def overhead(root: str, place: Path) -> None:
    """Wall time of run() beyond the wave it measured."""
    with LoadClient(base_url=f"{root}/good", model="m", log_path=place / "log") as load:
        for users in (1, 32):
            costs = []
            for seed in range(10):
                plan = schedule(users, 1, 1, 1000 + seed)
                start = time.perf_counter()
                result = load.run(plan, records_path=place / "overhead", deadline_s=60)
                wall_s = time.perf_counter() - start
                costs.append((wall_s - result.witness.duration_s) * 1e3)
            print(f"run() overhead, {users} users: ms p50/p99/max = {spread(costs)}")


if __name__ == "__main__":
    main()
