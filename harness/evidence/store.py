"""The run directory: the only owner of its paths, digests, atomic writes, sealing and opening.

A run moves one way: planned -> sealed -> judged -> reported; each step only adds files. A trial is
sealed by a manifest with the digest of each of its files, the run by `seal.json` with the digests
of all manifests and of its plan. Judging opens sealed files only, so a crash in judging costs
nothing. Layout and formats: docs/evidence.md.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeVar

from harness.errors import DigestMismatch, EvidenceError, Unsealed
from harness.evidence.lines import LineReader, integers
from harness.records import (
    EVIDENCE_FORMAT,
    Event,
    MetricSample,
    Record,
    RecordError,
    RequestRecord,
    Schedule,
    ServerFacts,
    StopCause,
    TrialFacts,
    canonical_json,
    parse_json,
)

PLAN_FILES = ("campaign.toml", "criteria.toml", "plan.json", "provenance.json")
_AFTER_SEALING = ("verdicts", "report")
# Never evidence, never read here: see harness/run/ownership.py. A harness killed between the seal
# and its last step leaves it.
_OUTSIDE = ("scratch",)
# What `write_atomic` leaves when the harness is killed inside it.
_PARTIAL = re.compile(r"\.[\w.-]+\.\d+")
_LINES = ("schedule.jsonl", "samples.jsonl", "events.jsonl")
# Freed when the disk is full, so that what was recorded can still be sealed.
BALLAST_BYTES = 8 * 2**20
_Kind = TypeVar("_Kind", bound=Record)


# --- writing ----------------------------------------------------------------


class TrialWriter:
    """Collects the files of one trial and seals them. Not for several threads at once."""

    def __init__(self, path: Path, facts: TrialFacts) -> None:
        self.path = path
        self.facts = facts
        path.mkdir(parents=True)
        write_atomic(path / "trial.json", canonical_json(facts))

    @classmethod
    def resume(cls, path: Path) -> Self:
        """A writer for the trial that a dead harness left, to seal it. Raises EvidenceError.

        Lines that were cut in writing are cut off: they are no records.
        """
        writer = cls.__new__(cls)
        writer.path = path
        writer.facts = parse_file(path / "trial.json", TrialFacts)
        _remove_partials(path)
        for name in _LINES:
            if (path / name).is_file():
                _cut_torn_line(path / name)
        return writer

    @property
    def is_sealed(self) -> bool:
        """True once nothing can be added."""
        return (self.path / "manifest.json").is_file()

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
        """Replaces the trial's figures of the plan."""
        self.facts = TrialFacts.from_json({**self.facts.to_json(), "figures": figures})
        write_atomic(self.path / "trial.json", canonical_json(self.facts))

    def seal(self) -> str:
        """Merges the request files, writes the manifest; returns its digest.

        May be called again after it failed or was killed: the merged file appears whole, and only
        then its parts go.
        """
        parts = sorted(self.path.glob("requests-*.part"))
        if not (self.path / "requests.jsonl").is_file():
            for part in parts:
                _cut_torn_line(part)
            text = "".join(part.read_text(encoding="utf-8") for part in parts)
            write_atomic(self.path / "requests.jsonl", text)
        for part in parts:
            part.unlink()
        for name in _LINES:
            (self.path / name).touch()
        files = {p.name: _file_facts(p) for p in sorted(self.path.iterdir())}
        manifest = canonical_json({"format": EVIDENCE_FORMAT, "files": files})
        write_atomic(self.path / "manifest.json", manifest)
        return _sha256(manifest.encode())

    def _append(self, name: str, records: Iterable[Record]) -> None:
        path = self.path / name
        content = "".join(canonical_json(record) + "\n" for record in records).encode("ascii")
        size_bytes = path.stat().st_size if path.exists() else 0
        try:
            with path.open("ab", buffering=0) as file:
                write_bytes(file.fileno(), content)
        except OSError:
            os.truncate(path, size_bytes)  # a full disk takes half a line
            raise


class RunWriter:
    """Creates a run directory, hands out trial writers, seals the run."""

    def __init__(self, root: Path, campaign: str, started: datetime) -> None:
        stamp = started.astimezone(UTC).strftime("%Y%m%dT%H%M%SZ")
        self.path = _unused(root / campaign / stamp)
        self.path.mkdir(parents=True)
        (self.path / "trials").mkdir()

    @classmethod
    def resume(cls, path: Path) -> Self:
        """A writer for a run directory that is there, to seal it."""
        writer = cls.__new__(cls)
        writer.path = path
        return writer

    @property
    def scratch(self) -> Path:
        """Logs, tier files and the lock while the run lasts; not evidence, removed at its end."""
        path = self.path / "scratch"
        path.mkdir(exist_ok=True)
        return path

    def reserve(self) -> None:
        """Takes disk space that `free_reserve` gives back when the disk is full. Raises OSError."""
        with (self.scratch / "ballast").open("wb") as file:
            # Random: a file system that compresses would reserve nothing for zeros.
            file.write(os.urandom(BALLAST_BYTES))
            file.flush()
            os.fsync(file.fileno())

    def free_reserve(self) -> None:
        """Gives the reserved space back."""
        (self.path / "scratch" / "ballast").unlink(missing_ok=True)

    @property
    def is_sealed(self) -> bool:
        """True once the run cannot change any more."""
        return (self.path / "seal.json").is_file()

    @property
    def is_planned(self) -> bool:
        """True once everything is there that was fixed before the first trial."""
        return all((self.path / name).is_file() for name in PLAN_FILES)

    def seal_open_trials(
        self, why: str, cause: StopCause, log_of: Callable[[str], str]
    ) -> list[str]:
        """Seals each trial that is still open with what it recorded; returns their ids.

        ``why`` and ``cause`` mark such a trial as ended early; ``log_of`` gives the server's log by
        arm. A directory in which nothing was recorded yet is removed.
        """
        found = []
        _remove_partials(self.path)
        for path in sorted((self.path / "trials").iterdir()):
            if (path / "manifest.json").is_file():
                continue
            if not (path / "trial.json").is_file():
                _remove_partials(path)
                path.rmdir()
                continue
            writer = TrialWriter.resume(path)
            detail = {"ok": False, "error": why[:2000], "cause": cause.value}
            writer.add_event(Event(time.monotonic_ns(), "trial_ended", detail))
            if not (path / "server.log").is_file():
                writer.add_text("server.log", log_of(writer.facts.arm))
            writer.seal()
            found.append(writer.facts.id)
        return found

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

    def seal(
        self,
        *,
        ended: str,
        stopped: str | None,
        cause: StopCause | None = None,
        looks: Sequence[Any] = (),
    ) -> None:
        """Seals the run.

        ``stopped``: why it ended before its plan, in words; None when it did all of it. ``cause``:
        the same as a name, which the judge goes by. ``looks``: what each look of the plan led to.
        """
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
            **({} if cause is None else {"cause": cause.value}),
            "looks": list(looks),
        }
        write_atomic(self.path / "seal.json", canonical_json(content))


def write_atomic(path: Path, text: str) -> None:
    """The file appears whole or not at all, also after a power loss."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("wb", buffering=0) as file:
            write_bytes(file.fileno(), text.encode("utf-8"))
            os.fsync(file.fileno())
        partial.rename(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_bytes(descriptor: int, content: bytes) -> None:
    """Writes it all. The one place where evidence reaches the disk; tests fill the disk here."""
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]


def is_disk_full(error: BaseException) -> bool:
    """True for an error that says that no space, or no quota, is left."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def _remove_partials(directory: Path) -> None:
    for path in directory.iterdir():
        if _PARTIAL.fullmatch(path.name):
            path.unlink()


def _cut_torn_line(path: Path) -> None:
    """Cuts off what follows the last line end: whoever wrote it died or met a full disk."""
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        os.truncate(path, content.rfind(b"\n") + 1)


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

    def stream_requests(self) -> Iterator[tuple[RequestRecord, list[int], list[int]]]:
        """Each request without its output, with `token_ns` and `token_counts`; in file order.

        For trials of a million requests whose outputs nobody compares. Every line is checked.
        """
        reader = LineReader(RequestRecord, without=_OUTPUT_FIELDS)
        with _Reading(self.path / "requests.jsonl") as lines:
            for line in lines:
                found = reader.match(line)
                if found is not None:
                    record = reader.build(found)
                    stamps, counts = integers(found["token_ns"]), integers(found["token_counts"])
                else:
                    whole = reader.strict(line)
                    record = reader(line)
                    stamps, counts = list(whole.token_ns), list(whole.token_counts)
                if len(stamps) != len(counts):
                    raise ValueError("token_ns and token_counts differ in length")
                yield record, stamps, counts

    @cached_property
    def samples(self) -> tuple[MetricSample, ...]:
        """All readings in order."""
        return tuple(read_records(self.path / "samples.jsonl", MetricSample))

    def samples_at(self, marks: Collection[str]) -> tuple[MetricSample, ...]:
        """Readings at these marks, in order. All lines are checked, the others are not kept."""
        reader = LineReader(MetricSample)
        wanted = {canonical_json(mark).encode() for mark in marks}
        kept = []
        with _Reading(self.path / "samples.jsonl") as lines:
            for line in lines:
                found = reader.match(line)
                if found is None:
                    sample = reader.strict(line)
                    if sample.mark in marks:
                        kept.append(sample)
                elif found["mark"] in wanted:
                    kept.append(reader.build(found))
        return tuple(kept)

    def planned_requests(self) -> Counter[str]:
        """How many requests were planned, by phase. Every line of the schedule is checked."""
        reader = LineReader(Schedule)
        planned: Counter[str] = Counter()
        with _Reading(self.path / "schedule.jsonl") as lines:
            for line in lines:
                found = reader.match(line)
                if found is not None:
                    planned[json.loads(found["phase"])] += found["requests"].count(b'"seq":')
                else:
                    schedule = reader.strict(line)
                    planned[schedule.phase] += len(schedule.requests)
        return planned

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """All events in order."""
        return tuple(read_records(self.path / "events.jsonl", Event))

    @cached_property
    def server(self) -> ServerFacts | None:
        """None when the server never got so far."""
        path = self.path / "server.json"
        return parse_file(path, ServerFacts) if path.is_file() else None


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
    cause: StopCause | None = None


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
    seal = json_file(seal_path)
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
            path / "trials" / name, parse_file(path / "trials" / name / "trial.json", TrialFacts)
        )
        for name in sorted(seal["trials"])
    )
    return RunEvidence(
        path=path,
        campaign_text=(path / "campaign.toml").read_text(encoding="utf-8"),
        criteria_text=(path / "criteria.toml").read_text(encoding="utf-8"),
        plan=json_file(path / "plan.json"),
        trials=trials,
        stopped=seal["stopped"],
        cause=_cause(seal_path, seal.get("cause")),
        digest=_sha256(seal_path.read_bytes()),
    )


def _cause(seal_path: Path, value: object) -> StopCause | None:
    """Why a run ended early; None for one that did not, and in seals that do not say."""
    try:
        return None if value is None else StopCause(value)
    except ValueError as error:
        allowed = ", ".join(cause.value for cause in StopCause)
        raise EvidenceError(f"{seal_path}: cause: found {value!r}; allowed: {allowed}") from error


def _problems(path: Path, seal: dict[str, Any]) -> Iterator[str]:
    try:
        for name, facts in seal["plan"].items():
            yield from _file_problem(path, path / name, facts)
        known = {"trials", "seal.json", *seal["plan"], *_AFTER_SEALING, *_OUTSIDE}
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
                files = json_file(manifest)["files"]
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


# Not kept of a request whose output nobody compares; the rest is what analysis asks for.
_OUTPUT_FIELDS = frozenset(
    {
        "headers_ns",
        "first_event_ns",
        "error_detail",
        "http_status",
        "finish_reason",
        "output_digest",
        "token_ids",
        "logprobs",
        "token_ns",
        "token_counts",
    }
)


class _Reading:
    """Lines of a file; while it is open, a ValueError becomes an EvidenceError naming the line."""

    def __init__(self, path: Path) -> None:
        self.path, self.number = path, 0

    def __enter__(self) -> Self:
        try:
            self._file = self.path.open("rb", buffering=1 << 20)
        except OSError as error:
            raise EvidenceError(f"{self.path}: {error}") from error
        return self

    def __iter__(self) -> Iterator[bytes]:
        for line in self._file:
            self.number += 1
            yield line

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._file.close()
        if isinstance(error, ValueError):
            raise EvidenceError(f"{self.path}:{self.number}: {error}") from error


def parse_file(path: Path, kind: type[_Kind]) -> _Kind:
    try:
        return kind.from_json(json_file(path))
    except RecordError as error:
        raise EvidenceError(f"{path}: {error}") from error


def json_file(path: Path) -> Any:
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EvidenceError(f"{path}: {error}") from error


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
