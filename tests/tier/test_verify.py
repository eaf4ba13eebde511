"""`kvgate tier verify`: every kind of damage is found, and nothing else is removed."""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.connector.blockfile import PAGE_BYTES, BlockHeader, write_block
from harness.connector.keys import block_path
from harness.tier.listing import survey
from harness.tier.upkeep import Outcome
from tests.tier.directory import (
    FILE_BYTES,
    NOW_NS,
    PAYLOAD_BYTES,
    add_block,
    add_namespace,
    checked,
    flip,
    kvgate,
)


def _replace(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _other_key(path: Path) -> None:
    other = block_path(path.parents[3], path.parents[2].name, bytes([9] * 16))
    other.parent.mkdir()
    path.rename(other)


def _other_namespace(path: Path) -> None:
    write_block(path, BlockHeader("0" * 32, (1).to_bytes(16, "big"), 0, 0), bytes(PAYLOAD_BYTES))


def _other_length(path: Path) -> None:
    header = BlockHeader(path.parents[2].name, (1).to_bytes(16, "big"), 0, 0)
    write_block(path, header, bytes(PAYLOAD_BYTES - 1))  # the same size on disk


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        pytest.param(lambda p: flip(p, 0), "bad_magic", id="magic"),
        pytest.param(lambda p: flip(p, 8), "bad_version", id="version"),
        pytest.param(lambda p: flip(p, 20), "bad_header", id="header"),
        pytest.param(lambda p: flip(p, PAGE_BYTES), "bad_checksum", id="first byte"),
        pytest.param(lambda p: flip(p, PAGE_BYTES + 4999), "bad_checksum", id="last byte"),
        pytest.param(lambda p: _replace(p, bytes(FILE_BYTES)), "bad_magic", id="zeros"),
        pytest.param(lambda p: os.truncate(p, 0), "truncated", id="empty"),
        pytest.param(lambda p: os.truncate(p, FILE_BYTES - 1), "truncated", id="one byte short"),
        pytest.param(lambda p: os.truncate(p, FILE_BYTES + 1), "wrong_length", id="one byte more"),
        pytest.param(_other_key, "wrong_key", id="another key"),
        pytest.param(_other_namespace, "wrong_namespace", id="another namespace"),
        pytest.param(_other_length, "wrong_length", id="another length"),
    ],
)
@pytest.mark.parametrize("delete", [False, True])
def test_every_damage_is_found_and_removed_only_when_asked(
    root: Path,
    damage: Callable[[Path], None],
    fault: str,
    delete: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = add_namespace(root)
    whole = add_block(root, name, 2)
    damage(add_block(root, name, 1))
    (result,) = checked(root)
    assert (result.outcome, result.fault) == (Outcome.DAMAGED, fault)
    assert kvgate("verify", root, *(["--delete"] if delete else [])) == 1
    out = capsys.readouterr().out
    assert f"{fault}  {result.entry.path}" in out
    assert "DAMAGED 1 of 3 files; " in out
    assert (root / result.entry.path).exists() != delete
    assert whole.exists()
    assert kvgate("verify", root) == (0 if delete else 1)


def test_all_fine(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = add_namespace(root)
    add_block(root, name, 1)
    add_block(root, name, 2, rank=3)
    assert checked(root) == []
    assert kvgate("verify", root) == 0
    assert "OK 3 files, 24.0 KiB, all as written" in capsys.readouterr().out


def test_json_of_verify(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = add_namespace(root)
    add_block(root, name, 1)
    flip(path := add_block(root, name, 2), PAGE_BYTES)
    assert kvgate("verify", root, "--delete", "--json") == 1
    content = json.loads(capsys.readouterr().out)
    assert (content["fine_count"], content["damaged_count"]) == (2, 1)
    assert content["is_complete"] is True
    assert content["fine_bytes"] == FILE_BYTES
    (trouble,) = content["trouble"]
    assert trouble["path"] == str(path.relative_to(root))
    assert (trouble["fault"], trouble["is_removed"]) == ("bad_checksum", True)


def test_without_a_configuration_the_headers_decide(root: Path) -> None:
    name = add_namespace(root)
    add_block(root, name, 1)
    flip(add_block(root, name, 2), PAGE_BYTES)
    (root / name / "config.json").unlink()
    (result,) = checked(root)
    assert (result.entry.parts[-1], result.fault) == ("0" * 31 + "2.kv", "bad_checksum")


def test_a_header_that_promises_a_huge_payload_costs_nothing(root: Path) -> None:
    name = add_namespace(root)
    path = add_block(root, name, 1)
    write_block(path, BlockHeader(name, (1).to_bytes(16, "big"), 0, 0), b"")
    (root / name / "config.json").unlink()
    content = bytearray(path.read_bytes())
    content[48:56] = struct.pack("<Q", 2**63)
    content[68:72] = struct.pack("<I", zlib.crc32(content[:68]))
    path.write_bytes(content)
    (result,) = checked(root)
    assert result.fault == "truncated"


@pytest.mark.parametrize("delete", [False, True])
def test_a_damaged_configuration_is_damage(root: Path, delete: bool) -> None:
    name = add_namespace(root)
    block = add_block(root, name, 1)
    (root / name / "config.json").write_text("{")
    assert kvgate("verify", root, *(["--delete"] if delete else [])) == 1
    assert (root / name / "config.json").exists() != delete
    assert block.exists()


def test_another_format_is_left_alone(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An older kvgate must not remove what a newer server wrote."""
    name = add_namespace(root)
    path = add_block(root, name, 1)
    flip(path, 8)
    (root / name / "config.json").write_text('{"format_version": 3}')
    assert kvgate("verify", root, "--delete") == 2
    assert "NOT ALL READ 2 of 2 files" in capsys.readouterr().out
    (root / name / "config.json").unlink()
    assert kvgate("verify", root, "--delete") == 2
    assert path.exists()


def test_only_the_namespaces_asked_for_are_read(root: Path) -> None:
    first, second = add_namespace(root), add_namespace(root, kv_heads=1)
    flip(add_block(root, first, 1), 0)
    add_block(root, second, 1)
    assert kvgate("verify", root, "--namespace", second) == 0
    assert kvgate("verify", root, "--namespace", first) == 1


def test_temporary_and_foreign_files_are_not_verified(root: Path) -> None:
    name = add_namespace(root)
    bucket = add_block(root, name, 1).parent
    (bucket / f".{'0' * 32}.1.2.tmp").write_bytes(b"half")
    (bucket / "notes.txt").touch()
    (bucket / f"{'A' * 32}.kv").touch()
    (bucket / f"{'1' * 32}.kv").touch()  # belongs into another bucket
    (bucket / f"00{'1' * 30}.kv").mkdir()
    os.mkfifo(bucket / f"00{'2' * 30}.kv")
    assert kvgate("verify", root, "--delete") == 0
    assert survey(root, now_ns=NOW_NS).foreign_count == 5
    assert len(list(bucket.iterdir())) == 7
