"""Runs under a runs root: which there are, in which state, and removing old ones when asked.

Reads names and states, judges nothing. A directory whose name is not one that a run gets is not
ours: it is neither listed nor removed.
"""

from __future__ import annotations

import enum
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.run.ownership import SCRATCH, is_live

_RUN_NAME = re.compile(r"\d{8}T\d{6}Z(-\d+)?")


class RunState(enum.Enum):
    """How far a run has come. DEAD: its harness is gone; the next run cleans it up and seals it."""

    LIVE = "live"
    DEAD = "dead"
    PLANNED = "planned"
    SEALED = "sealed"
    JUDGED = "judged"
    REPORTED = "reported"


@dataclass(frozen=True)
class Run:
    """One run directory. ``verdict``: of the newest verdict file, None when it was never judged."""

    path: Path
    campaign: str
    state: RunState
    verdict: str | None
    size_bytes: int


def list_runs(root: Path) -> list[Run]:
    """All runs under a root, by campaign and time."""
    return [
        Run(path, path.parent.name, run_state(path), _verdict(path), _size_bytes(path))
        for path in _run_paths(root)
    ]


def prune(root: Path, *, keep: int) -> Iterator[tuple[Path, int]]:
    """Removes all but the newest ``keep`` runs of each campaign; yields what is gone, and its size.

    A live or dead run is neither removed nor counted: the one is at work, the other may still own
    processes and directories that the next run has to end.
    """
    settled: dict[str, list[Run]] = {}
    for run in list_runs(root):
        if run.state not in (RunState.LIVE, RunState.DEAD):
            settled.setdefault(run.campaign, []).append(run)
    for runs in settled.values():
        for run in runs[: max(0, len(runs) - keep)]:
            shutil.rmtree(run.path, ignore_errors=True)
            if not run.path.exists():
                yield run.path, run.size_bytes


def run_state(path: Path) -> RunState:
    """The state of one run directory."""
    if (path / SCRATCH).is_dir():
        return RunState.LIVE if is_live(path) else RunState.DEAD
    if not (path / "seal.json").is_file():
        return RunState.PLANNED
    if (path / "report").is_dir():
        return RunState.REPORTED
    return RunState.JUDGED if any((path / "verdicts").glob("*.json")) else RunState.SEALED


def _run_paths(root: Path) -> Iterator[Path]:
    """Directories that a run made; a link may lead to somebody else's."""
    for campaign in sorted(root.iterdir()) if root.is_dir() else []:
        if not campaign.is_dir() or campaign.is_symlink():
            continue
        for path in sorted(campaign.iterdir(), key=_age):
            named = _RUN_NAME.fullmatch(path.name) is not None
            if named and not path.is_symlink() and (path / "trials").is_dir():
                yield path


def _age(path: Path) -> tuple[str, int]:
    """Orders runs by time; a second run of the same second bears a number."""
    stamp, _, number = path.name.partition("-")
    return stamp, int(number) if number.isdecimal() else 1


def _verdict(path: Path) -> str | None:
    files = sorted((path / "verdicts").glob("*.json"), key=lambda p: p.stat().st_mtime_ns)
    if not files:
        return None
    try:
        return str(json.loads(files[-1].read_text(encoding="utf-8")).get("verdict"))
    except (OSError, ValueError, AttributeError):
        return "unreadable"


def _size_bytes(path: Path) -> int:
    return sum(file.lstat().st_size for file in path.rglob("*") if file.is_file())
