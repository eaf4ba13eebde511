"""`kvgate tier prune`: what goes, in which order, and what stays."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path

import pytest

from harness.cli import tier_verbs
from harness.connector import partial_files
from harness.connector.blockfile import PAGE_BYTES
from harness.connector.quota import DirectoryQuota
from harness.tier.listing import survey
from harness.tier.upkeep import Outcome, plan_prune, remove
from tests.tier.directory import (
    DAY_S,
    FILE_BYTES,
    NOW_NS,
    add_block,
    add_namespace,
    aged,
    flip,
    kvgate,
    pruned,
)


@pytest.fixture
def aged_tier(root: Path) -> tuple[Path, str, str]:
    """Blocks 1 to 4 of one namespace, unused for as many days, and 5 and 6 of another."""
    first, second = add_namespace(root), add_namespace(root, kv_heads=1)
    for number in (4, 2, 1, 3):
        add_block(root, first, number, age_s=number * DAY_S)
    for number in (5, 6):
        add_block(root, second, number, age_s=number * DAY_S, rank=1)
    return root, first, second


def test_the_least_recently_used_go_first(aged_tier: tuple[Path, str, str]) -> None:
    root, first, second = aged_tier
    assert pruned(root, max_bytes=0) == ["6", "5", "4", "3", "2", "1"]
    assert pruned(root, max_bytes=4 * FILE_BYTES) == ["6", "5"]
    assert pruned(root, max_bytes=4 * FILE_BYTES - 1) == ["6", "5", "4"]
    assert pruned(root, max_bytes=6 * FILE_BYTES) == []
    assert pruned(root, namespaces={first}, max_bytes=FILE_BYTES) == ["4", "3", "2"]
    assert pruned(root, namespaces={second}) == ["6", "5"]


def test_older_than_is_exclusive_and_combines_with_a_bound(
    aged_tier: tuple[Path, str, str],
) -> None:
    root, first, _ = aged_tier
    assert pruned(root, older_than_s=4 * DAY_S) == ["6", "5"]
    assert pruned(root, older_than_s=4 * DAY_S, max_bytes=3 * FILE_BYTES) == ["6", "5", "4"]
    assert pruned(root, older_than_s=4 * DAY_S, max_bytes=9 * FILE_BYTES) == ["6", "5"]
    assert pruned(root, namespaces={first}, older_than_s=0) == ["4", "3", "2", "1"]


def test_no_choice_removes_nothing(
    aged_tier: tuple[Path, str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    root, first, _ = aged_tier
    assert pruned(root) == []
    assert pruned(root, namespaces={first}, with_temporary=True) == []
    assert kvgate("prune", root, "--yes") == 64
    assert "give --max-bytes, --older-than, --namespace or --temp" in capsys.readouterr().err


def test_prune_shows_and_only_yes_removes(
    aged_tier: tuple[Path, str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    root, first, second = aged_tier
    before = sorted(root.rglob("*"))
    assert kvgate("prune", root, "--namespace", first) == 0
    out = capsys.readouterr().out
    assert "WOULD REMOVE 4 files, 48.0 KiB; 0 blocks, 0 B, stay; add --yes to do it" in out
    assert sorted(root.rglob("*")) == before
    assert kvgate("prune", root, "--namespace", first, "--yes") == 0
    assert "REMOVED 4 files, 48.0 KiB; 0 blocks, 0 B, stay" in capsys.readouterr().out
    assert [path.parents[2].name for path in root.rglob("*.kv")] == [second] * 2
    assert (root / first / "config.json").exists()  # a running server needs its directories
    assert kvgate("prune", root, "--namespace", first, "--yes") == 0
    assert "NOTHING TO REMOVE" in capsys.readouterr().out


def test_json_of_prune(
    aged_tier: tuple[Path, str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    root, _, _ = aged_tier
    options = ("prune", root, "--max-bytes", "24KiB", "--json")
    assert kvgate(*options) == 0
    content = json.loads(capsys.readouterr().out)
    assert (content["is_dry_run"], content["planned"]["count"]) == (True, 4)
    assert content["stays"]["size_bytes"] == 2 * FILE_BYTES
    assert content["removed"]["count"] == 0
    assert kvgate(*options, "--yes") == 0
    content = json.loads(capsys.readouterr().out)
    assert (content["is_dry_run"], content["removed"]["count"]) == (False, 4)
    assert content["removed"]["kinds"] == {"block": 4}
    assert content["removed_count"] == 4
    assert survey(root, now_ns=NOW_NS).block_bytes == 2 * FILE_BYTES


def test_leftovers_go_only_when_asked_and_abandoned(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = add_namespace(root)
    block = add_block(root, name, 1, age_s=DAY_S)
    old, young = (block.with_name(f".{n}.tmp") for n in ("old", "young"))
    probe = root / name / "r0" / ".probe.tmp"
    retired = root / name / ".dropped-12-ab"
    (retired / "00").mkdir(parents=True)
    for path in (old, young, probe, retired / "00" / "x.kv"):
        path.write_bytes(b"123")
    past_ns = time.time_ns() - 2 * 3600 * 10**9
    for path in (old, probe, retired):
        os.utime(path, ns=(past_ns, past_ns))
    DirectoryQuota(root, capacity_bytes=None, reserve_bytes=0).take(1000)
    kvgate("prune", root, "--max-bytes", "1TB", "--yes")
    assert old.exists()

    def present() -> list[bool]:
        return [path.exists() for path in (old, probe, retired, young, block)]

    assert kvgate("prune", root, "--temp", "--yes") == 0
    # The directory was renamed just now, whatever its modification time: its server is at it.
    assert present() == [False, False, True, True, True]
    genuine = time.time_ns
    monkeypatch.setattr(partial_files.time, "time_ns", lambda: genuine() + 3601 * 10**9)
    assert kvgate("prune", root, "--temp", "--yes") == 0
    assert present() == [False, False, False, False, True]
    quota = DirectoryQuota(root, capacity_bytes=None, reserve_bytes=0)
    quota.take(0)
    assert quota.used_bytes == 1000 - 4 * 3


def test_a_block_used_since_the_plan_stays(root: Path) -> None:
    name = add_namespace(root)
    used, unused, gone = (add_block(root, name, n, age_s=n * DAY_S) for n in (1, 2, 3))
    plan = plan_prune(root, now_ns=NOW_NS, max_bytes=0)
    aged(used, 0)
    gone.unlink()
    outcomes = [result.outcome for result in remove(root, plan)]
    assert outcomes == [Outcome.GONE, Outcome.REMOVED, Outcome.USED]
    assert used.exists()
    assert not unused.exists()


def test_what_cannot_be_removed_is_told_and_exits_2(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = add_block(root, add_namespace(root), 1)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "unlink", refuse)
    assert kvgate("prune", root, "--max-bytes", "0", "--yes") == 2
    out = capsys.readouterr().out
    assert "REMOVED 0 files, 0 B; 1 could not be removed" in out
    assert f"{path.relative_to(root)}: Read-only file system" in out


def test_removed_bytes_are_counted_out_for_the_servers(root: Path) -> None:
    name = add_namespace(root)
    for number in (1, 2, 3):
        add_block(root, name, number)
    flip(add_block(root, name, 4), PAGE_BYTES)
    quota = DirectoryQuota(root, capacity_bytes=None, reserve_bytes=0)
    quota.take(4 * FILE_BYTES)
    assert kvgate("verify", root, "--delete") == 1
    assert kvgate("prune", root, "--max-bytes", FILE_BYTES, "--yes") == 0
    quota.take(0)
    assert quota.used_bytes == FILE_BYTES


def test_a_server_that_counts_anew_during_a_removal_keeps_its_bound(root: Path) -> None:
    name = add_namespace(root)
    for number in range(1, 7):
        add_block(root, name, number)
    quota = DirectoryQuota(root, capacity_bytes=None, reserve_bytes=0)
    quota.take(6 * FILE_BYTES)
    quota.keep(6 * FILE_BYTES)
    removal = remove(root, plan_prune(root, now_ns=NOW_NS, max_bytes=2 * FILE_BYTES))
    for _ in range(3):
        assert next(removal).is_removed
    with quota.recount() as correct:
        assert correct is not None
        correct(3 * FILE_BYTES)
    assert [result.is_removed for result in removal] == [True]
    quota.take(0)
    assert quota.used_bytes == 2 * FILE_BYTES


def test_a_directory_without_a_count_gets_none(root: Path) -> None:
    add_block(root, add_namespace(root), 1)
    kvgate("prune", root, "--max-bytes", "0", "--yes")
    assert [path.name for path in root.iterdir() if path.is_file()] == []


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("1048576", 2**20),
        ("2GiB", 2**31),
        ("2G", 2**31),
        ("500MB", 500 * 10**6),
        ("1.5 kib", 1536),
        ("7B", 7),
        ("1tb", 10**12),
    ],
)
def test_sizes(text: str, size_bytes: int) -> None:
    assert tier_verbs._bytes(text) == size_bytes


@pytest.mark.parametrize(
    ("text", "seconds"), [("90m", 5400), ("12h", 43200), ("7d", 604800), ("0.5w", 302400)]
)
def test_ages(text: str, seconds: float) -> None:
    assert tier_verbs._seconds(text) == seconds


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("--max-bytes", "many", "allowed: bytes, or a number with KiB"),
        ("--max-bytes", "3X", "allowed: bytes, or a number with KiB"),
        ("--max-bytes", "-1", "allowed: bytes, or a number with KiB"),
        ("--older-than", "7", "allowed: a number with s, m, h, d or w, such as 7d"),
        ("--older-than", "7y", "allowed: a number with s, m, h, d or w, such as 7d"),
    ],
)
def test_wrong_values_exit_64_naming_what_is_allowed(
    root: Path, option: str, value: str, allowed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        kvgate("prune", root, option, value)
    assert stop.value.code == 64
    assert allowed in capsys.readouterr().err
