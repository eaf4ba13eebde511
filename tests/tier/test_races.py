"""`kvgate tier` beside running servers and hostile links, and when it is interrupted."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from harness.cli import tier_verbs
from harness.connector.blockfile import PAGE_BYTES
from harness.connector.keys import block_path
from harness.tier import upkeep as tier_upkeep
from harness.tier.listing import Kind, walk
from harness.tier.upkeep import Checked, Outcome, check_files, plan_prune, remove
from tests.tier.directory import (
    DAY_S,
    NOW_NS,
    add_block,
    add_namespace,
    checked,
    flip,
    kvgate,
)


@pytest.mark.parametrize("level", ["namespace", "rank", "bucket", "block", "config"])
def test_links_are_not_followed(
    root: Path, outside: Path, level: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = add_namespace(root)
    (theirs,) = (p.parents[2] for p in outside.rglob("*.kv"))
    ours = root / name
    (ours / "r0").rmdir()
    block = "r0/00/" + "0" * 31 + "1.kv"
    add_namespace(root, kv_heads=3)  # so that there is a tier in each case
    if level == "namespace":
        (ours / "config.json").unlink()
        ours.rmdir()
    part = {"namespace": "", "rank": "r0", "bucket": "r0/00", "block": block}
    target = part.get(level, "config.json")
    if level == "config":
        (ours / "config.json").unlink()
    (ours / target).parent.mkdir(parents=True, exist_ok=True)
    (ours / target).symlink_to(theirs / target)
    before = {p: p.lstat().st_mtime_ns for p in outside.rglob("*")}

    assert kvgate("ls", root) == 0
    assert "a symbolic link; not followed" in capsys.readouterr().out
    assert kvgate("verify", root, "--delete") == 0
    assert kvgate("prune", root, "--max-bytes", "0", "--temp", "--yes") == 0
    assert {p: p.lstat().st_mtime_ns for p in outside.rglob("*")} == before
    assert os.path.lexists(ours / target)


def test_a_link_put_in_place_after_the_walk_is_not_followed(root: Path, outside: Path) -> None:
    name = add_namespace(root)
    add_block(root, name, 1, age_s=99 * DAY_S)
    plan = plan_prune(root, now_ns=NOW_NS, max_bytes=0)
    (theirs,) = (p.parents[2] for p in outside.rglob("*.kv"))
    (root / name / "r0").rename(root / name / "moved")
    (root / name / "r0").symlink_to(theirs / "r0")
    assert [result.outcome for result in remove(root, plan)] == [Outcome.GONE]
    assert len(list(outside.rglob("*.kv"))) == 1


def test_the_root_itself_may_be_a_link(root: Path, tmp_path: Path) -> None:
    add_block(root, add_namespace(root), 1)
    (tmp_path / "link").symlink_to(root)
    assert kvgate("verify", tmp_path / "link") == 0


def test_a_replaced_file_is_not_removed_as_damaged(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server found the damage too, and wrote the block anew."""
    name = add_namespace(root)
    flip(path := add_block(root, name, 1), PAGE_BYTES)
    genuine = tier_upkeep._unlink_if_same

    def late(*arguments: Any) -> bool:
        path.unlink()
        add_block(root, name, 1)
        return genuine(*arguments)

    monkeypatch.setattr(tier_upkeep, "_unlink_if_same", late)
    (result,) = checked(root, delete=True)
    assert (result.outcome, result.is_removed) == (Outcome.DAMAGED, False)
    assert checked(root) == []


def test_files_that_vanish_are_no_trouble(root: Path) -> None:
    """Each step of a walk removes something that the walk is about to see."""
    name = add_namespace(root)
    paths = [add_block(root, name, number) for number in (1, 2, 3)]
    seen = []
    for entry in walk(root):
        seen.append(entry.kind)
        for path in paths[:1]:
            path.unlink(missing_ok=True)
    assert Kind.UNREADABLE not in seen


def test_a_file_that_vanishes_before_it_is_read_is_gone(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = add_block(root, add_namespace(root), 1)
    genuine = tier_upkeep.open_regular

    def late(*arguments: Any) -> Any:
        path.unlink(missing_ok=True)
        return genuine(*arguments)

    monkeypatch.setattr(tier_upkeep, "open_regular", late)
    assert [result.outcome for result in checked(root, delete=True)] == [Outcome.GONE]


def test_a_directory_that_vanishes_is_no_trouble(root: Path) -> None:
    name = add_namespace(root)
    for number in (1 << 120, 2 << 120):
        path = block_path(root, name, number.to_bytes(16, "big"))
        path.parent.mkdir()
        path.touch()
    kinds = []
    for entry in walk(root):
        kinds.append(entry.kind)
        if (root / name / "r0" / "02").exists():
            (root / name / "r0").rename(root / name / ".dropped-1-1")
    assert Kind.UNREADABLE not in kinds


@pytest.mark.parametrize("action", ["ls", "stat", "verify", "prune"])
def test_ctrl_c_ends_with_130_and_no_traceback(
    action: str, root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    add_block(root, add_namespace(root), 1)

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tier_verbs, "survey", interrupt)
    options = ["--temp"] if action == "prune" else []
    assert kvgate(action, root, *options) == 130
    assert capsys.readouterr().err == "kvgate: interrupted\n"


def test_an_interrupted_verification_shows_what_it_found(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = add_namespace(root)
    flip(add_block(root, name, 1), PAGE_BYTES)
    add_block(root, name, 2)
    genuine = check_files

    def interrupted(*arguments: Any, **options: Any) -> Any:
        results = genuine(*arguments, **options)
        yield next(results)
        yield next(results)
        raise KeyboardInterrupt

    monkeypatch.setattr(tier_verbs, "check_files", interrupted)
    assert kvgate("verify", root) == 130
    captured = capsys.readouterr()
    assert "DAMAGED 1 of 2 files" in captured.out
    assert captured.err == "kvgate: interrupted: 2 of 3 files were checked\n"
    assert kvgate("verify", root, "--json") == 130
    assert json.loads(capsys.readouterr().out)["is_complete"] is False


def test_an_interrupted_prune_says_how_far_it_came(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = add_namespace(root)
    for number in (1, 2):
        add_block(root, name, number)
    genuine = tier_upkeep._remove
    calls: list[object] = []

    def once(*arguments: Any) -> Checked:
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return genuine(*arguments)

    monkeypatch.setattr(tier_upkeep, "_remove", once)
    assert kvgate("prune", root, "--max-bytes", "0", "--yes") == 130
    captured = capsys.readouterr()
    assert "REMOVED 1 file, 12.0 KiB" in captured.out
    assert captured.err == "kvgate: interrupted: 1 of 2 files were gone through\n"
