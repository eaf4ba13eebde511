"""A disk that fills up: what was sealed stays sealed, what was recorded is sealed, and it is said.

Injected where evidence reaches the disk (`store.write_bytes`), and once for real on a small tmpfs.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.cli.main import main
from harness.evidence import store
from harness.evidence.store import open_run
from harness.run import doctor
from harness.run.judging import judge_directory
from harness.verdicts import ReasonCode, Verdict
from tests.drills import fake
from tests.drills.fake import FakeSite, make_site

WRITE = store.write_bytes
Trigger = Callable[[Path], bool]


class FullDisk:
    """Refuses to write once the trigger was met, until the run's ballast is gone."""

    def __init__(self, trigger: Trigger, *, is_for_good: bool = False) -> None:
        self._trigger = trigger
        self._is_for_good = is_for_good
        self._ballast: Path | None = None

    def write(self, descriptor: int, content: bytes) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if self._ballast is None and self._trigger(path):
            run = next(p for p in path.parents if (p / "scratch").is_dir())
            self._ballast = run / "scratch" / "ballast"
        if self._ballast is not None and (self._is_for_good or self._ballast.exists()):
            WRITE(descriptor, content[: len(content) // 2])  # a full disk takes half of it
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        WRITE(descriptor, content)


def writes(trial: str, name: str) -> Trigger:
    """A file of a trial is written; atomic writes go to a hidden name first."""
    return lambda path: trial in path.parent.name and name in path.name


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSite:
    for name, text in fake.environment(tmp_path).items():
        monkeypatch.setenv(name, text)
    monkeypatch.setenv("KVGATE_DRILL", "disk-full")
    monkeypatch.chdir(tmp_path)
    return make_site(tmp_path)


def run(site: FakeSite) -> int:
    return main(["run", str(site.campaign), "--runs", "runs"])


def the_run(site: FakeSite) -> Path:
    (path,) = (site.root / "runs" / "drill").iterdir()
    return path


@pytest.mark.parametrize(
    ("trial", "name", "why"),
    [
        ("02-tiered_disk", "events.jsonl", "while recording"),
        ("02-tiered_disk", "metrics-cold.prom", "while recording"),
        ("02-tiered_disk", "server.log", "while sealing a trial"),
        ("02-tiered_disk", "requests.jsonl", "while sealing a trial"),
        ("02-tiered_disk", "manifest.json", "while sealing a trial"),
        ("02-tiered_disk", "trial.json", "as a trial starts"),
    ],
)
def test_a_full_disk_stops_the_run_and_loses_nothing(
    trial: str,
    name: str,
    why: str,
    site: FakeSite,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(store, "write_bytes", FullDisk(writes(trial, name)).write)
    assert run(site) == 2, why
    path = the_run(site)
    sealed = open_run(path)
    assert sealed.stopped is not None
    assert "No space left on device" in sealed.stopped
    complete, last = sealed.trials[:2], sealed.trials[2:]
    assert [e.events[-1].detail["ok"] for e in complete] == [True, True]
    for evidence in last:  # the trial that met the full disk is marked, and can be read
        assert evidence.events[-1].detail["ok"] is False
        assert all(record.phase for record in evidence.requests)
    if name in ("server.log", "requests.jsonl", "manifest.json"):
        assert [record.outcome.value for record in last[0].requests] == ["ok"] * 2
    assert not (path / "scratch").exists()
    output = " ".join(capsys.readouterr().out.split())
    assert "No space left on device" in output
    assert "free space" in output
    signoff = judge_directory(path)
    assert signoff.verdict is Verdict.INCONCLUSIVE
    root = signoff.causes[0]
    assert root.code is ReasonCode.DISK_FULL
    assert ReasonCode.GATE_NOT_REACHED in {effect.code for effect in root.consequences}
    assert "Why: The disk for the evidence refused to be written" in output


def test_a_disk_without_room_for_the_seal_is_told_and_sealed_by_the_next_run(
    site: FakeSite, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = FullDisk(lambda path: "seal.json" in path.name, is_for_good=True)
    with monkeypatch.context() as patch:
        patch.setattr(store, "write_bytes", full.write)
        assert run(site) == 70
    path = the_run(site)
    error = capsys.readouterr().err
    assert f"{path}: the run could not be sealed: No space left on device" in error
    assert "trials that were sealed before are untouched; free space and start any run" in error
    manifests = {p: p.read_bytes() for p in path.glob("trials/*/manifest.json")}
    assert len(manifests) > 3
    assert main(["run", str(site.campaign), "--runs", "runs", "--gates", "g1"]) in (1, 2)
    assert "sealed what it recorded; ended amid no trial" in " ".join(
        capsys.readouterr().out.split()
    )
    assert open_run(path).stopped == "harness died"
    assert {p: p.read_bytes() for p in path.glob("trials/*/manifest.json")} == manifests


def test_a_disk_without_room_for_the_plan_starts_nothing(
    site: FakeSite, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = FullDisk(lambda path: "plan.json" in path.name, is_for_good=True)
    monkeypatch.setattr(store, "write_bytes", full.write)
    assert run(site) == 70
    assert "the plan could not be saved: No space left on device; nothing was started" in (
        capsys.readouterr().err
    )
    assert list((site.root / "runs" / "drill").iterdir()) == []


def test_too_little_space_is_refused_before_anything_starts(
    site: FakeSite, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "disk_free_bytes", lambda _path: 2**20)
    assert run(site) == 64
    assert "disk: 0.0 GiB free; needed: >= 0.1 GiB under the runs directory" in (
        capsys.readouterr().err
    )
    assert not (site.root / "runs").exists()


def test_space_is_looked_at_before_each_trial(
    site: FakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = shutil.disk_usage

    def shrinking(path: Path) -> object:
        usage = honest(path)
        begun = any(Path(path).glob("trials/01-*"))
        return usage._replace(free=2**20) if begun else usage

    monkeypatch.setattr(shutil, "disk_usage", shrinking)
    assert run(site) == 2
    sealed = open_run(the_run(site))
    assert len(sealed.trials) == 2
    assert sealed.stopped is not None
    assert "trial 02-tiered_disk-cold_recovery-c1-r2: found 1.0 MiB free under" in sealed.stopped
    assert "needed: 1.1 MiB for one trial" in sealed.stopped
    assert all(e.events[-1].detail["ok"] for e in sealed.trials)


# --- a real disk ------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 160 MiB; skipped where it cannot be mounted."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=160m", "tmpfs", str(path)], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("a tmpfs cannot be mounted here")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def fill(path: Path) -> None:
    """Writes until nothing fits any more."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"\0" * 65536):
            pass
    assert shutil.disk_usage(path.parent).free == 0


def test_a_disk_that_is_really_full_amid_a_phase(small_disk: Path) -> None:
    site = make_site(small_disk)
    with site.drill(fake.PHASES["populate"]) as drill:
        site.wait_held()
        fill(small_disk / "theirs")
        site.release()
        outcome = drill.outcome(fake.LIMIT_S)
    # The output of the harness lies on the full disk too, so it is not looked at.
    assert outcome.exit_code == 2
    assert outcome.left == ()
    sealed = open_run(drill.path)
    assert sealed.stopped is not None
    assert "found 0.0 MiB free" in sealed.stopped or "No space left" in sealed.stopped
    (trial,) = sealed.trials
    assert trial.events[-1].detail["ok"] is False
    assert sum(record.outcome.value == "ok" for record in trial.requests) >= 4
    seal = json.loads((drill.path / "seal.json").read_text())
    assert list(seal["trials"]) == [trial.id]
