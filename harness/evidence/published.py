"""Turns a published table into imported evidence. Measures nothing and judges nothing.

Each experiment of the table becomes a sealed run directory of its own: one trial per row, marked as
imported, with one reading per column and no request records, because there are none
(docs/adr/0013-imported-evidence.md).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

import harness
from harness.campaign.reading import load_criteria
from harness.errors import PlanError
from harness.evidence.store import RunWriter
from harness.records import Event, MetricSample, TrialFacts, parse_json

PROFILE = "published"
WORKLOAD = "published_table"
BUNDLED = "published_results.json"
# Arms that the published comparison rests on: the device under test and the reference medium.
CANDIDATE, REFERENCE = "fx100", "local_nvme"
_MAX_BYTES = 4 * 2**20


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


_Positive = Annotated[float, Field(gt=0, lt=1e9)]
_Rate = Annotated[float, Field(ge=0, lt=1e9)]


class Row(_Section):
    """One row: an arm at one concurrency. None, or a key that is not there: not published."""

    arm: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$", max_length=64)]
    concurrency: Annotated[int, Field(gt=0, le=10**6)]
    ttft_p50_s: _Positive | None = None
    ttft_p90_s: _Positive | None = None
    ttft_p99_s: _Positive | None = None
    ttft_mean_s: _Positive | None = None
    tpot_p50_ms: _Positive | None = None
    throughput_tok_s: _Positive | None = None
    disk_peak_gb_s: _Rate | None = None
    disk_busy_mean_gb_s: _Rate | None = None
    cold_hits: str | None = None
    note: str | None = None


class Workload(_Section):
    """What the publisher says was run; only what evidence repeats is read."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, allow_inf_nan=False)

    prompt_tokens_about: Annotated[int, Field(gt=0, lt=10**9)]
    output_tokens: Annotated[int, Field(gt=1, lt=10**9)]
    sessions_populated: Annotated[int, Field(gt=0, lt=10**9)]


class Table(_Section):
    """The file's content, as far as it is read; other keys are descriptions."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, allow_inf_nan=False)

    source: Annotated[str, Field(min_length=1, max_length=2000)]
    workload: Workload
    r2_tp8: Annotated[list[Row], Field(min_length=1, max_length=1000)]
    r3_tp4x2_whole_machine: Annotated[list[Row], Field(min_length=1, max_length=1000)]


@dataclass(frozen=True)
class Experiment:
    """One experiment of the table and the name of the run it becomes."""

    key: str
    run: str


EXPERIMENTS = (
    Experiment("r2_tp8", "published-r2"),
    Experiment("r3_tp4x2_whole_machine", "published-r3"),
)
# Column, name of the reading, and what the column is divided by to be in the reading's unit. A
# published GB/s of the disk columns is 1.024e9 bytes/s, by the table's own definition.
_COLUMNS = (
    ("ttft_p50_s", "ttft_s_p50", 1),
    ("ttft_p90_s", "ttft_s_p90", 1),
    ("ttft_p99_s", "ttft_s_p99", 1),
    ("ttft_mean_s", "ttft_s_mean", 1),
    ("tpot_p50_ms", "tpot_s_p50", 1000),
    ("throughput_tok_s", "throughput_tokens_per_s", 1),
    ("disk_peak_gb_s", "disk_read_bytes_per_s_max", 1 / 1.024e9),
    ("disk_busy_mean_gb_s", "disk_read_bytes_per_s_busy_mean", 1 / 1.024e9),
)
_NOTHING = "not in the table"


def load_table(source: Path | None = None) -> tuple[Table, bytes]:
    """The table of a file, the bundled one by default, and its bytes. Raises PlanError."""
    label = str(source or BUNDLED)
    try:
        if source is None:
            content = resources.files("harness.evidence.data").joinpath(BUNDLED).read_bytes()
        else:
            with source.open("rb") as file:
                content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise PlanError([f"{label}: found more than {_MAX_BYTES} bytes; allowed: {_MAX_BYTES}"])
        table = Table.model_validate(_floats(parse_json(content.decode("utf-8"))))
    except ValidationError as error:
        raise PlanError([_problem(label, item) for item in error.errors()]) from error
    except (OSError, ValueError) as error:
        raise PlanError([f"{label}: cannot read a published table: {error}"]) from error
    if problems := [f"{label}: {problem}" for problem in _problems(table)]:
        raise PlanError(problems)
    return table, content


def import_published(source: Path | None, *, runs_root: Path, started: datetime) -> list[Path]:
    """Writes one sealed run directory per experiment and returns them. Raises PlanError, OSError.

    ``started`` names the directories: it is when the figures were imported, not measured.
    """
    table, content = load_table(source)
    sha256 = hashlib.sha256(content).hexdigest()
    return [
        _write(table, experiment, sha256, runs_root=runs_root, started=started)
        for experiment in EXPERIMENTS
    ]


def _write(
    table: Table, experiment: Experiment, sha256: str, *, runs_root: Path, started: datetime
) -> Path:
    rows: list[Row] = getattr(table, experiment.key)
    trials = [_facts(index, row) for index, row in enumerate(rows)]
    _profile, criteria = load_criteria(PROFILE)
    writer = RunWriter(runs_root, experiment.run, started)
    writer.write_plan(
        campaign=_campaign(table, experiment),
        criteria=criteria,
        plan={
            "campaign": experiment.run,
            "profile": PROFILE,
            "gates": ["g3"],
            "model": {"config": {}},
            "trials": [facts.id for facts in trials],
            "import": {
                "kind": "imported",
                "source": table.source,
                "table": experiment.key,
                "table_sha256": sha256,
            },
        },
        provenance={"imported": started.isoformat(), "harness": harness.__version__},
    )
    for facts, row in zip(trials, rows, strict=True):
        trial = writer.start_trial(facts)
        published = row.model_dump(exclude_none=True)
        trial.add_event(Event(0, "imported", {"table": experiment.key, "row": published}))
        trial.add_samples(_readings(row))
        trial.seal()
    writer.seal(ended=started.isoformat(), stopped=None)
    return writer.path


def _facts(index: int, row: Row) -> TrialFacts:
    role, medium = _part(row.arm)
    return TrialFacts(
        index=index,
        gate="g3",
        arm=row.arm,
        workload=WORKLOAD,
        concurrency=row.concurrency,
        repetition=1,
        figures={"kind": "imported", "role": role, "medium": medium},
    )


def _readings(row: Row) -> list[MetricSample]:
    """One per column; the table has no times, so all stand at 0."""
    readings = []
    for column, name, divisor in _COLUMNS:
        value = getattr(row, column)
        readings.append(
            MetricSample(
                t_ns=0,
                mark="published",
                source=WORKLOAD,
                name=name,
                value=None if value is None else value / divisor,
                error=_NOTHING if value is None else None,
            )
        )
    return readings


def _part(arm: str) -> tuple[str, str | None]:
    return ("recompute", None) if arm == "recompute" else ("tiered", "disk")


def _campaign(table: Table, experiment: Experiment) -> str:
    """The plan of the imported run, in the format of a campaign; nothing of it can be run."""
    rows: list[Row] = getattr(table, experiment.key)
    levels = sorted({row.concurrency for row in rows})
    work = table.workload
    lines = [
        "# Made by `kvgate import published`. Nothing here was run by kvgate: every arm is rows of",
        "# a published table, and prompt_tokens is the publisher's own round figure.",
        "format = 1",
        f'name = "{experiment.run}"',
        f'profile = "{PROFILE}"',
        'gates = ["g3"]',
        "seed = 0",
        "",
        "[model]",
        'kind = "path"',
        'path = "not served here"',
        "",
        "[server]",
        "",
        "[cold_recovery]",
        f"levels = {levels}",
        "repetitions = 1",
        f"sessions = {work.sessions_populated}",
        f"prompt_tokens = {work.prompt_tokens_about}",
        f"output_tokens = {work.output_tokens}",
        "oracle_sessions = 0",
        "steady_cycles = 0",
        "fits_sessions = 0",
    ]
    for arm in dict.fromkeys(row.arm for row in rows):
        role, medium = _part(arm)
        lines += ["", f"[arms.{arm}]", 'kind = "imported"', f'role = "{role}"']
        lines += [f'medium = "{medium}"'] if medium else []
    return "\n".join([*lines, ""])


def _problems(table: Table) -> list[str]:
    """What the shape of the file does not tell."""
    found = []
    for experiment in EXPERIMENTS:
        rows: list[Row] = getattr(table, experiment.key)
        points = [(row.arm, row.concurrency) for row in rows]
        twice = sorted({point for point in points if points.count(point) > 1})
        found += [
            f"{experiment.key}: found {arm} at concurrency {level} more than once; allowed: once"
            for arm, level in twice
        ]
        found += [
            f"{experiment.key}: found no row of {arm}; the comparison needs it"
            for arm in (CANDIDATE, REFERENCE)
            if arm not in {row.arm for row in rows}
        ]
    return found


def _floats(value: Any) -> Any:
    """A published 10 is 10.0: JSON has one kind of number. Only the rows' figures are touched."""
    if not isinstance(value, dict):
        return value
    figures = {column for column, _, _ in _COLUMNS}
    for experiment in EXPERIMENTS:
        rows = value.get(experiment.key)
        for row in rows if isinstance(rows, list) else []:
            for name in figures & row.keys() if isinstance(row, dict) else ():
                if type(row[name]) is int and abs(row[name]) < 2**53:
                    row[name] = float(row[name])
    return value


def _problem(label: str, item: Any) -> str:
    key = ".".join(str(part) for part in item["loc"]) or "(whole file)"
    found = repr(item["input"])
    shown = found if len(found) <= 80 else f"{found[:77]}..."
    return f"{label}: {key}: found {shown}; {item['msg'][0].lower()}{item['msg'][1:]}"
