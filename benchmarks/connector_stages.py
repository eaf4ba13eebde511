"""Where a restore from host memory spends its time, ours and the peer's, stage by stage in one run.

The connectors are subclasses that stamp the stations of a request (traced_connectors.py); client
and servers share one monotonic clock. Prints a table and adds no bound.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from benchmarks import connector_live as live
from benchmarks.connector_report import say
from benchmarks.foreign_cpu import ForeignCpu
from harness.campaign.sections import Arm
from harness.errors import ServerError
from harness.records import PromptRecipe, RequestRecord
from workloads.prompts import token_ids

STATIONS = ("arrived", "planned", "loaded", "scheduled")
STAGES = (
    "sent to arrived: HTTP, tokens, the way to the engine",
    "arrived to planned: lookup, device blocks",
    "planned to loaded: the step that copies",
    "loaded to scheduled: report, next step",
    "scheduled to first token: (copy,) forward, answer",
)
_NAMED_TOKENS = 6
ROOT = Path(__file__).resolve().parent.parent


def run_stages(*, rounds: int, levels: Sequence[int], directory: Path) -> None:
    """Measures and prints the table. Raises HarnessError when a server fails or a stamp lacks."""
    stamps = {name: directory / f"stamps-{name}" for name in (live.OURS, live.PEER)}

    def traced(arm: Arm) -> Arm:
        assert arm.kv_transfer is not None
        kind = {live.OURS: "TracedTierConnector", live.PEER: "TracedOffloadingConnector"}[arm.name]
        module = "benchmarks.traced_connectors"
        return arm.model_copy(
            update={
                "kv_transfer": arm.kv_transfer
                | {
                    "kv_connector": kind,
                    "kv_connector_module_path": module,
                },
                "environment": {"KVGATE_STAMPS": str(stamps[arm.name])},
                "python_path": [str(ROOT)],
            }
        )

    found: dict[tuple[str, int], list[RequestRecord]] = {}
    with live.running(directory, [live.OURS, live.PEER], traced) as servers:
        bench = live.Bench(servers, levels, rounds)
        bench.warm_up()
        bench.populate(0, (live.OURS, live.PEER))
        watch = ForeignCpu()
        for _ in range(rounds):
            for level in levels:
                for cell in live.CELLS:
                    if cell.name in ("ours, DRAM", "peer, DRAM"):
                        records = bench.wave(cell, level, watch)
                        found.setdefault((cell.arm, level), []).extend(records)
        vocabulary, seeds = live.vocabulary(), dict(bench.seeds)
    say(f"others took {watch.cores:.2f} cores; {bench.repeated} disturbed readings repeated")
    at = {name: _stations(path) for name, path in stamps.items()}
    for level in levels:
        say(f"\nstages at concurrency {level}, ms, median of {rounds} x {live.SESSIONS} requests")
        say(f"  {'':<58}{'ours':>8}{'peer':>8}")
        columns = [
            [
                _spans(record, at[arm][_named(seeds[arm], record.session, vocabulary)])
                for record in found[arm, level]
            ]
            for arm in (live.OURS, live.PEER)
        ]
        for index, stage in enumerate(STAGES):
            values = [statistics.median(spans[index] for spans in spans_of) for spans_of in columns]
            say(f"  {stage:<58}" + "".join(f"{value * 1e3:>8.2f}" for value in values))
        whole = [statistics.median(sum(spans) for spans in spans_of) for spans_of in columns]
        say(f"  {'TTFT p50':<58}" + "".join(f"{value * 1e3:>8.2f}" for value in whole))


def _stations(path: Path) -> dict[str, list[dict[str, int]]]:
    """By the prompt's first tokens: the stamps of each request that asked it, in order."""
    of_prompt: dict[str, list[dict[str, int]]] = {}
    of_request: dict[str, dict[str, int]] = {}
    for line in path.read_text().splitlines():
        t_ns, station, request_id, *prompt = line.split()
        if station == "arrived":
            of_request[request_id] = {}
            of_prompt.setdefault(prompt[0], []).append(of_request[request_id])
        if request_id in of_request:
            of_request[request_id].setdefault(station, int(t_ns))
    return of_prompt


def _named(seed: int, session: int, vocabulary: int) -> str:
    recipe = PromptRecipe(seed, session, _NAMED_TOKENS, vocabulary)
    return ",".join(map(str, token_ids(recipe)))


def _spans(record: RequestRecord, asked: list[dict[str, int]]) -> list[float]:
    """Seconds of each stage of one request. Raises ServerError when a station is missing."""
    sent, first = record.sent_ns or 0, record.first_token_ns or 0
    own = next((stamps for stamps in asked if sent <= stamps["arrived"] <= first), {})
    missing = [station for station in STATIONS if station not in own]
    if missing:
        raise ServerError(f"session {record.session}: no stamp of {', '.join(missing)}")
    times = [sent, *(own[station] for station in STATIONS), first]
    return [(after - before) / 1e9 for before, after in pairwise(times)]
