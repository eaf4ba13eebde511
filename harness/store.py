"""The run directory: the only owner of its paths, digests, atomic writes, sealing and opening.

A run moves one way: planned -> sealed -> judged -> reported; each step only adds files. A trial is
sealed by a manifest with the digest of each of its files, the run by `seal.json` with the digests
of all manifests and of its plan. Judging opens sealed files only, so a crash in judging costs
nothing. Layout and formats: docs/evidence.md.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from harness.errors import DigestMismatch, EvidenceError, Unsealed
from harness.records import (
    EVIDENCE_FORMAT,
    Event,
    MetricSample,
    Record,
    RecordError,
    RequestRecord,
    Schedule,
    ServerFacts,
    TrialFacts,
    canonical_json,
    parse_json,
)
from harness.verdicts import JUDGE_VERSION, SignOff

PLAN_FILES = ("campaign.toml", "criteria.toml", "plan.json", "provenance.json")
_AFTER_SEALING = ("verdicts", "report")
_Kind = TypeVar("_Kind", bound=Record)


# --- writing ----------------------------------------------------------------


class TrialWriter:
    """Collects the files of one trial and seals them. Not for several threads at once."""

    def __init__(self, path: Path, facts: TrialFacts) -> None:
        self.path = path
        self.facts = facts
        path.mkdir(parents=True)
        write_atomic(path / "trial.json", canonical_json(facts))

    def requests_path(self, phase: str) -> Path:
        """Where the load client records the requests of one phase, line by line."""
        return self.path / f"requests-{phase}.part"

    def add_schedule(self, schedule: Schedule) -> None:
        """Saves what is about to be sent, before it is sent."""
        self._append("schedule.jsonl", [schedule])

    def add_samples(self, samples: Iterable[MetricSample]) -> None:
        """Appends readings."""
        self._append("samples.jsonl", samples)

    def add_event(self, event: Event) -> None:
        """Appends an event."""
        self._append("events.jsonl", [event])

    def add_text(self, name: str, text: str) -> None:
        """Saves a text file, such as a raw scrape."""
        write_atomic(self.path / name, text)

    def set_server(self, facts: ServerFacts) -> None:
        """Saves what the server was asked and says it does."""
        write_atomic(self.path / "server.json", canonical_json(facts))

    def set_figures(self, figures: dict[str, Any]) -> None:
        """Replaces the trial's figures, known only once the trial has run."""
        self.facts = TrialFacts.from_json({**self.facts.to_json(), "figures": figures})
        write_atomic(self.path / "trial.json", canonical_json(self.facts))

    def seal(self) -> str:
        """Merges the request files, writes the manifest; returns its digest."""
        parts = sorted(self.path.glob("requests-*.part"))
        text = "".join(part.read_text(encoding="utf-8") for part in parts)
        write_atomic(self.path / "requests.jsonl", text)
        for part in parts:
            part.unlink()
        for name in ("schedule.jsonl", "samples.jsonl", "events.jsonl"):
            (self.path / name).touch()
        files = {p.name: _file_facts(p) for p in sorted(self.path.iterdir())}
        manifest = canonical_json({"format": EVIDENCE_FORMAT, "files": files})
        write_atomic(self.path / "manifest.json", manifest)
        return _sha256(manifest.encode())

    def _append(self, name: str, records: Iterable[Record]) -> None:
        with (self.path / name).open("a", encoding="ascii") as file:
            for record in records:
                file.write(canonical_json(record) + "\n")


class RunWriter:
    """Creates a run directory, hands out trial writers, seals the run."""

    def __init__(self, root: Path, campaign: str, started: datetime) -> None:
        stamp = started.astimezone(UTC).strftime("%Y%m%dT%H%M%SZ")
        self.path = _unused(root / campaign / stamp)
        self.path.mkdir(parents=True)
        (self.path / "trials").mkdir()

    @property
    def scratch(self) -> Path:
        """Logs and tier files while the run lasts; not evidence, removed before sealing."""
        path = self.path / "scratch"
        path.mkdir(exist_ok=True)
        return path

    def write_plan(
        self, *, campaign: str, criteria: str, plan: dict[str, Any], provenance: dict[str, Any]
    ) -> None:
        """Saves everything that is fixed before the first measured trial."""
        for name, text in zip(
            PLAN_FILES,
            (campaign, criteria, canonical_json(plan), canonical_json(provenance)),
            strict=True,
        ):
            write_atomic(self.path / name, text)

    def start_trial(self, facts: TrialFacts) -> TrialWriter:
        """A writer for the trial's directory."""
        return TrialWriter(self.path / "trials" / facts.id, facts)

    def seal(self, *, ended: str, stopped: str | None) -> None:
        """Seals the run. ``stopped``: why it ended before its plan, None when it did all of it."""
        trials = {}
        for path in sorted((self.path / "trials").iterdir()):
            manifest = path / "manifest.json"
            trials[path.name] = _sha256(manifest.read_bytes()) if manifest.is_file() else None
        content = {
            "format": EVIDENCE_FORMAT,
            "plan": {name: _file_facts(self.path / name) for name in PLAN_FILES},
            "trials": trials,
            "ended": ended,
            "stopped": stopped,
        }
        write_atomic(self.path / "seal.json", canonical_json(content))


def write_atomic(path: Path, text: str) -> None:
    """The file appears whole or not at all, also after a power loss."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


# --- reading ----------------------------------------------------------------


@dataclass(frozen=True)
class TrialEvidence:
    """Read-only view of one sealed trial."""

    path: Path
    facts: TrialFacts

    @property
    def id(self) -> str:
        """The trial's directory name."""
        return self.facts.id

    @cached_property
    def schedules(self) -> tuple[Schedule, ...]:
        """What was planned, in order."""
        return tuple(read_records(self.path / "schedule.jsonl", Schedule))

    @cached_property
    def requests(self) -> tuple[RequestRecord, ...]:
        """What happened, by phase and sequence number."""
        records = read_records(self.path / "requests.jsonl", RequestRecord)
        return tuple(sorted(records, key=lambda r: (r.phase, r.seq)))

    @cached_property
    def samples(self) -> tuple[MetricSample, ...]:
        """All readings in order."""
        return tuple(read_records(self.path / "samples.jsonl", MetricSample))

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """All events in order."""
        return tuple(read_records(self.path / "events.jsonl", Event))

    @cached_property
    def server(self) -> ServerFacts | None:
        """None when the server never got so far."""
        path = self.path / "server.json"
        return _parse(path, ServerFacts) if path.is_file() else None


@dataclass(frozen=True)
class RunEvidence:
    """Read-only view of a sealed run, all digests verified."""

    path: Path
    campaign_text: str
    criteria_text: str
    plan: dict[str, Any]
    trials: tuple[TrialEvidence, ...]
    stopped: str | None
    digest: str


def open_run(path: Path) -> RunEvidence:
    """Verifies every digest, then returns the evidence.

    Raises Unsealed, DigestMismatch (naming each file that was altered, removed or added) or
    EvidenceError.
    """
    seal_path = path / "seal.json"
    if not path.is_dir():
        raise EvidenceError(f"{path}: no such run directory")
    if not seal_path.is_file():
        raise Unsealed(f"{path}: no seal.json: the run never ended; run it again")
    seal = _json(seal_path)
    if not isinstance(seal, dict) or seal.get("format") != EVIDENCE_FORMAT:
        raise EvidenceError(
            f"{seal_path}: format is not {EVIDENCE_FORMAT}; judge with its own version"
        )
    if set(seal.get("plan", ())) != set(PLAN_FILES) or not {"trials", "ended", "stopped"} <= set(
        seal
    ):
        raise EvidenceError(f"{seal_path}: not a seal: a key is missing")
    problems = list(_problems(path, seal))
    if problems:
        raise DigestMismatch(problems)
    trials = tuple(
        TrialEvidence(
            path / "trials" / name, _parse(path / "trials" / name / "trial.json", TrialFacts)
        )
        for name in sorted(seal["trials"])
    )
    return RunEvidence(
        path=path,
        campaign_text=(path / "campaign.toml").read_text(encoding="utf-8"),
        criteria_text=(path / "criteria.toml").read_text(encoding="utf-8"),
        plan=_json(path / "plan.json"),
        trials=trials,
        stopped=seal["stopped"],
        digest=_sha256(seal_path.read_bytes()),
    )


def _problems(path: Path, seal: dict[str, Any]) -> Iterator[str]:
    try:
        for name, facts in seal["plan"].items():
            yield from _file_problem(path, path / name, facts)
        known = {"trials", "seal.json", *seal["plan"], *_AFTER_SEALING}
        for entry in sorted(path.iterdir()):
            if entry.name not in known:
                yield f"{entry.name}: added after sealing"
        for entry in sorted((path / "trials").iterdir()):
            if entry.name not in seal["trials"]:
                yield f"trials/{entry.name}: added after sealing"
        for name, expected in seal["trials"].items():
            trial = path / "trials" / name
            manifest = trial / "manifest.json"
            if expected is None:
                yield f"trials/{name}: was never sealed"
            elif not manifest.is_file():
                yield f"trials/{name}/manifest.json: removed"
            elif _sha256(manifest.read_bytes()) != expected:
                yield f"trials/{name}/manifest.json: altered"
            else:
                files = _json(manifest)["files"]
                for file, facts in files.items():
                    yield from _file_problem(path, trial / file, facts)
                for entry in sorted(trial.iterdir()):
                    if entry.name not in files and entry.name != "manifest.json":
                        yield f"trials/{name}/{entry.name}: added after sealing"
    except (KeyError, TypeError, AttributeError, OSError) as error:
        raise EvidenceError(f"{path}/seal.json: not a seal: {error!r}") from error


def _file_problem(root: Path, path: Path, facts: dict[str, Any]) -> Iterator[str]:
    name = path.relative_to(root)
    if not path.is_file():
        yield f"{name}: removed"
    elif _file_facts(path) != facts:
        yield f"{name}: altered"


def read_records(path: Path, kind: type[_Kind]) -> Iterator[_Kind]:
    """Records of a JSON Lines file. Raises EvidenceError naming the line."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield kind.from_json(parse_json(line.decode("utf-8")))
            except ValueError as error:
                raise EvidenceError(f"{path}:{number}: {error}") from error


def _parse(path: Path, kind: type[_Kind]) -> _Kind:
    try:
        return kind.from_json(_json(path))
    except RecordError as error:
        raise EvidenceError(f"{path}: {error}") from error


def _json(path: Path) -> Any:
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EvidenceError(f"{path}: {error}") from error


# --- what comes after sealing -----------------------------------------------


def write_verdict(path: Path, signoff: SignOff) -> Path:
    """Adds the verdict file of this judge version; the same evidence gives the same bytes."""
    target = path / "verdicts" / f"{JUDGE_VERSION}.json"
    target.parent.mkdir(exist_ok=True)
    text = json.dumps(
        signoff.to_json(), sort_keys=True, indent=1, ensure_ascii=True, allow_nan=False
    )
    write_atomic(target, text + "\n")
    return target


def read_verdict(path: Path) -> SignOff:
    """The verdict of this judge version. Raises EvidenceError."""
    target = path / "verdicts" / f"{JUDGE_VERSION}.json"
    if not target.is_file():
        raise EvidenceError(f"{target}: not judged yet; run `kvgate judge {path}` first")
    return _parse(target, SignOff)


def write_report(path: Path, html: str) -> Path:
    """Adds the sign-off page."""
    target = path / "report" / "signoff.html"
    target.parent.mkdir(exist_ok=True)
    write_atomic(target, html)
    return target


def read_provenance(path: Path) -> dict[str, str]:
    """Who, where and when: shown in the report, never judged."""
    found = _json(path / "provenance.json")
    seal = _json(path / "seal.json") if (path / "seal.json").is_file() else {}
    return {
        "run": f"{path.parent.name}/{path.name}",
        **{str(k): str(v) for k, v in found.items()},
        "ended": str(seal.get("ended", "never")),
    }


def _unused(path: Path) -> Path:
    candidate, number = path, 1
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate


def _file_facts(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return {"sha256": digest.hexdigest(), "bytes": path.stat().st_size}


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
