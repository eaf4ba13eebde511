"""A dead run is cleaned up by pid and start time, path and inode; nothing else is ever touched."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.run.ownership import RunOwner, dead_runs, is_live
from harness.server import processes
from harness.server.processes import OwnedProcess, OwnedServer, owned_path

SLEEPER = [sys.executable, "-c", "import threading; print(flush=True); threading.Event().wait()"]


@pytest.fixture
def run_path(tmp_path: Path) -> Path:
    path = tmp_path / "runs" / "site" / "20261130T120000Z"
    path.mkdir(parents=True)
    return path


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that would live for ever."""
    with subprocess.Popen(SLEEPER, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def of(process: subprocess.Popen[bytes]) -> OwnedProcess:
    ticks = processes.start_ticks(process.pid)
    assert ticks is not None
    return OwnedProcess(process.pid, ticks)


def found(run_path: Path) -> list[Path]:
    return [dead.path for dead in dead_runs(run_path.parents[1])]


def end_all(run_path: Path) -> list[str]:
    return [line for dead in dead_runs(run_path.parents[1]) for line in dead.end(patience_s=0.1)]


def dies(run_path: Path, *processes: OwnedProcess, **changes: Any) -> None:
    """A run that owned these processes, and whose harness is gone."""
    with RunOwner(run_path) as owner:
        owner.note_server(OwnedServer("tiered", 1, None, processes))
    if changes:
        path = run_path / "scratch" / "owner.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_run_is_live_while_its_lock_is_held_and_dead_afterwards(run_path: Path) -> None:
    with RunOwner(run_path):
        assert is_live(run_path)
        assert found(run_path) == []
    assert not is_live(run_path)
    assert found(run_path) == [run_path]


def test_a_finished_run_leaves_no_scratch(run_path: Path) -> None:
    owner = RunOwner(run_path)
    (run_path / "scratch" / "ballast").write_text("x")
    owner.finish()
    assert list(run_path.iterdir()) == []
    assert found(run_path) == []


def test_a_dead_run_is_cleaned_up_by_one_at_a_time(run_path: Path) -> None:
    dies(run_path)
    outer = dead_runs(run_path.parents[1])
    assert next(outer).path == run_path
    assert found(run_path) == []
    outer.close()
    assert found(run_path) == [run_path]


def test_recorded_processes_are_ended(run_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    dies(run_path, of(sleeper))
    assert end_all(run_path) == [f"tiered: ended its processes {sleeper.pid}"]
    assert sleeper.wait(10) == -9


def test_a_pid_that_was_reused_is_left_alone(
    run_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    mine = of(sleeper)
    dies(run_path, OwnedProcess(mine.pid, mine.start_ticks - 1))
    assert end_all(run_path) == []
    assert sleeper.poll() is None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"boot_id": "another"}, "the machine was booted since: the pid is somebody else's"),
        ({"pid_namespace": "pid:[1]"}, "another container: its pids are not ours"),
    ],
)
def test_pids_of_another_numbering_are_left_alone(
    changes: dict[str, str], why: str, run_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    dies(run_path, of(sleeper), **changes)
    assert end_all(run_path) == []
    assert sleeper.poll() is None, why


def test_a_run_of_another_machine_is_left_alone(run_path: Path) -> None:
    dies(run_path, boot_id="another", host="elsewhere")
    assert found(run_path) == []


def test_a_run_whose_recorded_harness_lives_is_left_alone_without_flock(
    run_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    dies(run_path, harness=of(sleeper).to_json())
    assert is_live(run_path)
    assert found(run_path) == []


def test_a_record_that_cannot_be_read_ends_nothing(run_path: Path) -> None:
    dies(run_path)
    (run_path / "scratch" / "owner.json").write_text("{")
    assert found(run_path) == [run_path]
    assert end_all(run_path) == []


def test_only_directories_that_the_run_made_are_removed(run_path: Path, tmp_path: Path) -> None:
    (tmp_path / "tier" / "theirs").mkdir(parents=True)
    mine, replaced = tmp_path / "tier" / "mine", tmp_path / "tier" / "replaced"
    with RunOwner(run_path) as owner:
        owner.make_directory(mine)
        owner.make_directory(replaced)
        with pytest.raises(FileExistsError):
            owner.make_directory(tmp_path / "tier" / "theirs")
    (mine / "block").write_text("x")
    replaced.rename(tmp_path / "tier" / "moved")
    replaced.mkdir()
    assert end_all(run_path) == [f"removed {mine}"]
    left = sorted(entry.name for entry in (tmp_path / "tier").iterdir())
    assert left == ["moved", "replaced", "theirs"]


def test_shared_memory_is_removed_by_inode(run_path: Path, tmp_path: Path) -> None:
    mine, replaced = tmp_path / "mine", tmp_path / "replaced"
    for path in (mine, replaced):
        path.write_text("x")
    memory = tuple(m for m in (owned_path(str(mine)), owned_path(str(replaced))) if m)
    with RunOwner(run_path) as owner:
        owner.note_server(OwnedServer("tiered", 1, None, (), memory))
    replaced.rename(tmp_path / "moved")
    replaced.write_text("somebody else's")
    assert end_all(run_path) == [f"tiered: removed {mine}"]
    assert replaced.exists()


def test_a_link_to_a_run_elsewhere_is_not_followed(run_path: Path, tmp_path: Path) -> None:
    dies(run_path)
    other = tmp_path / "other" / "site"
    other.mkdir(parents=True)
    (other / run_path.name).symlink_to(run_path)
    assert list(dead_runs(tmp_path / "other")) == []
