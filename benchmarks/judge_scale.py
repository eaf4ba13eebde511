"""How long judging and reporting a very large run takes, and how much memory.

Builds a synthetic run of the size of a 72 h soak: an honest small campaign whose steady window on
one arm holds a million requests, with five million readings taken between its marks. Gate 4 is not
built, so its slopes are not part of this; what is measured is reading, checking, judging and
reporting so much sealed evidence. Prints seconds and peak resident memory of a process of its own
and fails beyond the limits.

Run: python -m benchmarks.judge_scale [--requests N] [--samples N] [--keep DIR]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.evidence.store import RunWriter, TrialWriter
from harness.records import (
    MetricSample,
    Outcome,
    PlannedRequest,
    PromptRecipe,
    RequestRecord,
    Schedule,
    canonical_json,
)
from tests import sealed_runs as evidence
from tests.campaign_text import SMALL_CAMPAIGN

LIMIT_S = 60.0
LIMIT_BYTES = int(1.5 * 2**30)
HOURS = 72
USERS = 2
OUTPUT_TOKENS = 16
SERIES = 20


class _Soak(evidence._Trial):
    """A trial as tests build it, but for the steady window of the tiered arm."""

    requests_count = 0
    samples_count = 0

    def _steady(self) -> None:
        if self.arm.role != "tiered":
            super()._steady()
            return
        self._cold_and_mark()
        start_ns, span_ns = self.now, HOURS * 3600 * 10**9
        cycles = self.requests_count // USERS
        step_ns = span_ns // cycles
        schedule = self._plan(cycles)
        with self.writer.requests_path("steady").open("w", encoding="ascii") as file:
            for planned in schedule:
                file.write(canonical_json(self._record(planned, start_ns, step_ns)) + "\n")
        self._samples(start_ns, span_ns)
        tokens = self.plan.sizes.cached_tokens_per_session * cycles * USERS
        size = tokens * self.plan.sizes.kv_bytes_per_token
        self.counters["external_hit_tokens"] += tokens
        for name in ("tier_hit_tokens/disk", "tier_read_bytes/disk", "tier_file_read_bytes"):
            self.counters[name] += tokens if "tokens" in name else size
        self.disk_read_bytes += size
        self.now = start_ns + span_ns + 10**9
        self.writer.add_samples(
            MetricSample(self.now, "steady", "client", name, value)
            for name, value in (
                ("loop_lag_s_max", 0.002),
                ("cpu_share", 0.05),
                ("in_flight_max", float(USERS)),
                ("send_spread_s", 0.001),
            )
        )
        self._mark("steady_end")

    def _plan(self, cycles: int) -> Iterator[PlannedRequest]:
        """One schedule per hour, each saved as it is planned."""
        per_hour = -(-cycles // HOURS)
        for first in range(0, cycles, per_hour):
            requests = tuple(
                PlannedRequest(
                    seq=cycle * USERS + user,
                    user=user,
                    session=(cycle * USERS + user) % 1000,
                    turn=cycle,
                    prompt=PromptRecipe(7, (cycle * USERS + user) % 1000, 328, 512),
                    output_tokens=OUTPUT_TOKENS,
                )
                for cycle in range(first, min(first + per_hour, cycles))
                for user in range(USERS)
            )
            self.writer.add_schedule(Schedule("cold_recovery", "steady", requests, logprobs=False))
            yield from requests

    def _record(self, planned: PlannedRequest, start_ns: int, step_ns: int) -> RequestRecord:
        sent = start_ns + planned.turn * step_ns + planned.user
        first = sent + 80_000_000 + planned.seq * 7919 % 10_000_000
        stamps = tuple(first + i * 4_000_000 for i in range(OUTPUT_TOKENS))
        return RequestRecord(
            seq=planned.seq,
            user=planned.user,
            session=planned.session,
            phase="steady",
            prompt_tokens_planned=planned.prompt.tokens,
            output_tokens_planned=OUTPUT_TOKENS,
            planned_ns=sent,
            outcome=Outcome.OK,
            sent_ns=sent,
            headers_ns=sent + 1_000_000,
            first_event_ns=first,
            first_token_ns=first,
            last_token_ns=stamps[-1],
            done_ns=stamps[-1],
            http_status=200,
            finish_reason="length",
            prompt_tokens=planned.prompt.tokens,
            completion_tokens=OUTPUT_TOKENS,
            cached_tokens=self.plan.sizes.cached_tokens_per_session,
            output_digest="0" * 64,
            token_ids=tuple((planned.seq + i) % 512 for i in range(OUTPUT_TOKENS)),
            logprobs=tuple(-0.5 - i / 1000 for i in range(OUTPUT_TOKENS)),
            token_ns=stamps,
            token_counts=(1,) * OUTPUT_TOKENS,
        )

    def _samples(self, start_ns: int, span_ns: int) -> None:
        """Readings between the marks: counters of every tier, one line each."""
        rounds = self.samples_count // SERIES
        for index in range(rounds):
            t_ns = start_ns + span_ns * index // rounds
            self.writer.add_samples(
                MetricSample(
                    t_ns,
                    "interval",
                    "prometheus",
                    "tier_read_bytes",
                    float(index * 65536),
                    {"tier": f"part{series}"},
                )
                for series in range(SERIES)
            )


def build(root: Path, requests: int, samples: int) -> Path:
    """The synthetic run, sealed."""
    plan = evidence.demo_plan(SMALL_CAMPAIGN)
    # `steady_cycles` of the plan says where the window closes, so it must be the soak's own.
    text = SMALL_CAMPAIGN.replace("steady_cycles = 3", f"steady_cycles = {requests // USERS}")
    campaign = plan.campaign.model_copy(
        update={
            "cold_recovery": plan.campaign.cold_recovery.model_copy(
                update={"steady_cycles": requests // USERS}
            )
        }
    )
    small = plan
    plan = dataclasses.replace(plan, campaign=campaign, campaign_text=text)
    writer = RunWriter(root, "soak", evidence.STARTED)
    trials = list(plan.trials())
    writer.write_plan(
        campaign=text,
        criteria=plan.criteria_text,
        plan={
            "gates": list(plan.gates),
            "model": {"config": plan.model_config},
            "trials": [facts.id for facts in trials],
        },
        provenance={"started": evidence.STARTED.isoformat()},
    )
    _Soak.requests_count, _Soak.samples_count = requests, samples
    for facts in trials:
        started: TrialWriter = writer.start_trial(facts)
        # The other arms keep the small plan's few cycles; only the tiered arm soaks.
        trial = _Soak(small, facts, evidence.Doctor())
        trial.write(started)
    writer.seal(ended=evidence.STARTED.isoformat(), stopped=None)
    return writer.path


_JUDGE = """
import json, os, sys, time
from pathlib import Path
began = time.monotonic()
from harness.evidence import results
from harness.run.judging import judge_directory
from reports.signoff import render_html
path = Path(sys.argv[1])
signoff = judge_directory(path)
judged = time.monotonic()
results.write_verdict(path, signoff)
page = results.write_report(path, render_html(signoff, results.read_provenance(path)))
# Not ru_maxrss, which a child inherits from the process that started it.
status = Path("/proc/self/status").read_text()
peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
failed = [f"{c.name} {c.subject}: {c.found}" for c in signoff.checks if not c.passed]
print(json.dumps({
    "judge_s": judged - began,
    "report_s": time.monotonic() - judged,
    "cpu_s": sum(os.times()[:2]),
    "rss_bytes_max": int(peak.split()[1]) * 1024,
    "verdict": signoff.verdict.value,
    "reasons": sorted({r.code.value for g in signoff.gates for r in g.reasons}),
    "failed": failed[:5],
    "page_bytes": page.stat().st_size,
}))
"""


def judge(path: Path) -> dict[str, Any]:
    """Judges and reports in a process of its own, so that its memory is its own."""
    result = subprocess.run(
        [sys.executable, "-c", _JUDGE, str(path)], capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def main() -> int:
    """Returns 1 when a limit is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--samples", type=int, default=5_000_000)
    parser.add_argument("--keep", type=Path, help="build here, or judge what is there already")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = arguments.keep or Path(scratch)
        there = sorted(root.glob("soak/*/seal.json"))
        began = time.monotonic()
        path = there[0].parent if there else build(root, arguments.requests, arguments.samples)
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        print(f"evidence: {size / 2**30:.2f} GiB, built in {time.monotonic() - began:.0f} s")
        found = judge(path)
    total = found["judge_s"] + found["report_s"]
    peak = found["rss_bytes_max"]
    print(f"judge {found['judge_s']:.1f} s, report {found['report_s']:.1f} s, total {total:.1f} s")
    print(f"processor time {found['cpu_s']:.1f} s")
    print(f"peak resident memory {peak / 2**20:.0f} MiB")
    print(f"verdict {found['verdict']}, page {found['page_bytes'] / 2**20:.1f} MiB")
    for line in [*found["reasons"], *found["failed"]]:
        print(f"  {line}")
    fine = total <= LIMIT_S and peak <= LIMIT_BYTES
    print(
        f"limits {LIMIT_S:.0f} s and {LIMIT_BYTES / 2**20:.0f} MiB: {'met' if fine else 'BROKEN'}"
    )
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
