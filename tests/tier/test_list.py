"""`kvgate tier ls` and `stat`, what is refused, and what all actions have in common."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.connector.blockfile import BlockFault
from harness.connector.quota import USAGE_NAME
from harness.errors import PlanError
from harness.tier import listing as tier
from harness.tier.listing import describe, resolve_namespaces, survey
from harness.tier.upkeep import Outcome
from tests.tier.directory import (
    DAY_S,
    FACTS,
    FILE_BYTES,
    NOW_NS,
    PAYLOAD_BYTES,
    add_block,
    add_namespace,
    checked,
    kvgate,
)


def test_a_survey_counts_everything_and_reads_the_configuration(root: Path) -> None:
    name = add_namespace(root)
    add_block(root, name, 1, age_s=10)
    add_block(root, name, 2, age_s=3 * DAY_S)
    add_block(root, name, 3, age_s=100 * DAY_S, rank=1)
    (root / name / "r0" / "00" / ".x.tmp").write_bytes(b"12345")
    (root / name / ".dropped-1-a" / "3f").mkdir(parents=True)
    (root / name / ".dropped-1-a" / "3f" / "x.kv").write_bytes(b"123")
    (root / name / "r0" / "notes.txt").touch()
    (root / USAGE_NAME).write_bytes(bytes(16))

    found = survey(root, now_ns=NOW_NS)

    (namespace,) = found.namespaces
    assert namespace.name == name
    assert namespace.description == tier.Description(
        "",
        format_version=2,
        namespace_version=2,
        vllm="0.32.0",
        weights="ab" * 32,
        model_dtype="torch.bfloat16",
        cache_dtype="auto",
        quantization="None",
        device="cpu",
        layer_count=4,
        kv_heads=8,
        head_size=128,
        tensor_parallel_size=1,
        block_tokens=16,
        payload_bytes=PAYLOAD_BYTES,
    )
    assert (namespace.blocks.count, namespace.blocks.size_bytes) == (3, 3 * FILE_BYTES)
    assert namespace.blocks.newest_ns == NOW_NS - 10 * 10**9
    assert namespace.blocks.oldest_ns == NOW_NS - 100 * DAY_S * 10**9
    assert {rank: of.count for rank, of in namespace.ranks.items()} == {0: 2, 1: 1}
    assert [of.count for of in namespace.ages] == [1, 0, 1, 0, 1]
    assert (namespace.temporary.count, namespace.temporary.size_bytes) == (1, 5)
    assert (namespace.retired.count, namespace.retired.size_bytes) == (1, 3)
    assert [entry.path for entry in found.foreign] == [f"{name}/r0/notes.txt"]
    assert (found.block_count, found.block_bytes) == (3, 3 * FILE_BYTES)
    assert found.unreadable_count == 0


def test_a_namespace_of_an_older_version_is_described_and_said_to_be_out_of_reach(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is as whole as ever: listed, verified and pruned like the others."""
    old_facts = {key: value for key, value in FACTS.items() if key != "namespace_version"}
    old, new = add_namespace(root, facts=old_facts), add_namespace(root)
    add_block(root, old, 1)
    description = describe(root, old)
    assert (description.problem, description.namespace_version) == ("", 1)
    assert (description.layer_count, description.kv_heads, description.vllm) == (4, 8, "0.32.0")
    assert describe(root, new).out_of_reach == ""
    assert checked(root) == []

    assert kvgate("ls", root) == 0
    shown = capsys.readouterr().out
    assert f"{old[:12]}: a name of version 1, this kvgate's are of 2" in shown
    assert f"{new[:12]}: " not in shown
    assert kvgate("stat", root, "--namespace", old) == 0
    assert "a name of version 1" in capsys.readouterr().out


def test_a_namespace_without_blocks_is_listed(root: Path) -> None:
    names = {add_namespace(root), add_namespace(root, kv_heads=1)}
    (root / ("0" * 32) / "r0").mkdir(parents=True)  # without config.json too
    assert {n.name for n in survey(root, now_ns=NOW_NS).namespaces} == names | {"0" * 32}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        pytest.param(None, "missing", id="missing"),
        pytest.param(b"{", "not JSON", id="torn"),
        pytest.param(b"[1]", "a JSON list, not an object", id="list"),
        pytest.param(b"\xff", "not JSON", id="not text"),
        pytest.param(b"[" * 100_000, "not JSON", id="deep"),
        pytest.param(b"{}", "format version None, this kvgate knows 2", id="empty"),
        pytest.param(
            b'{"format_version": 3}', "format version 3, this kvgate knows 2", id="newer format"
        ),
        pytest.param(
            b'{"format_version": 2, "namespace": "x"}', "describes namespace x", id="another"
        ),
    ],
)
def test_an_unusable_configuration_is_told_and_raises_nothing(
    root: Path, content: bytes | None, problem: str
) -> None:
    name = add_namespace(root)
    if content is None:
        (root / name / "config.json").unlink()
    else:
        (root / name / "config.json").write_bytes(content)
    assert describe(root, name).problem.startswith(problem)


def test_a_changed_fingerprint_and_a_wrong_length_are_told(root: Path) -> None:
    name = add_namespace(root)
    path = root / name / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "payload_bytes": True}))
    assert describe(root, name).problem == "payload_bytes is not a number above 0"
    config["fingerprint"]["weights"] = 7
    path.write_text(json.dumps(config))
    assert describe(root, name).problem == "its fingerprint gives another namespace"
    assert describe(root, name).weights is None


def test_a_huge_configuration_is_not_read(root: Path) -> None:
    name = add_namespace(root)
    os.truncate(root / name / "config.json", 2**40)
    assert describe(root, name).problem.startswith("larger than")


def test_ls_on_a_screen(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = add_namespace(root)
    os.utime(add_block(root, name, 1))
    assert kvgate("ls", root) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{root}\n1 namespace, 1 block, 12.0 KiB ")
    assert f"{name[:12]}  4 layers × 8 heads × 128" in out
    assert "bfloat16, 16 tokens, vLLM 0.32.0" in out


def test_ls_fits_80_columns(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    add_block(root, add_namespace(root, cache_dtype="fp8_e4m3"), 1, age_s=-3e9)
    assert kvgate("ls", root) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)


def test_stat_of_one_namespace(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = add_namespace(root), add_namespace(root, kv_heads=1)
    add_block(root, first, 1)
    add_block(root, first, 2, rank=1)
    assert kvgate("stat", root, "--namespace", first[:8]) == 0
    out = capsys.readouterr().out
    assert first in out
    assert second not in out
    assert "r0: 1, r1: 1" in out
    assert "312 bytes per token" in out


@pytest.mark.parametrize("action", ["ls", "stat"])
def test_json_of_ls_and_stat(action: str, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = add_namespace(root)
    add_block(root, name, 1)
    assert kvgate(action, root, "--json") == 0
    content = json.loads(capsys.readouterr().out)
    assert content["directory"] == str(root)
    assert (content["block_count"], content["block_bytes"]) == (1, FILE_BYTES)
    (namespace,) = content["namespaces"]
    assert namespace["name"] == name
    assert namespace["description"]["payload_bytes"] == PAYLOAD_BYTES
    assert namespace["blocks"]["newest_ns"] == NOW_NS
    assert namespace["ranks"]["0"]["count"] == 1
    assert [age["unused_s_max"] for age in namespace["ages"]][-2:] == [30 * DAY_S, None]


def test_names_cannot_steer_the_terminal(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = add_namespace(root, model_dtype="\x1b[31mred", weights="[bold]x[/bold]")
    (root / name / "\x1b]0;title\x07").touch()
    (root / name / "\udcff").touch()
    for action in ("ls", "stat", "verify"):
        kvgate(action, root)
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\\x1b]0;title" in out
    assert "[bold]x[/bold]" in out


def test_a_namespace_is_named_by_its_first_digits(root: Path) -> None:
    names = [add_namespace(root, kv_heads=heads) for heads in range(20)]
    found = survey(root, now_ns=NOW_NS)
    assert resolve_namespaces(found, [names[0], names[1]]) == {names[0], names[1]}
    with pytest.raises(PlanError) as caught:
        resolve_namespaces(found, ["zz", ""])
    assert [problem.partition(";")[0] for problem in caught.value.problems] == [
        "--namespace zz: unknown",
        "--namespace : unknown",
    ]
    shared = next(d for d in "0123456789abcdef" if sum(n.startswith(d) for n in names) > 1)
    with pytest.raises(PlanError, match=f"--namespace {shared}: fits "):
        resolve_namespaces(found, [shared])


# --- what is no tier --------------------------------------------------------


@pytest.mark.parametrize("action", ["ls", "stat", "verify", "prune"])
def test_what_is_no_tier_is_refused(
    action: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(path: Path) -> str:
        options = ["--max-bytes", "0", "--yes"] if action == "prune" else []
        assert kvgate(action, path, *options) == 64
        captured = capsys.readouterr()
        assert captured.out == ""
        return captured.err

    assert "does not exist; give the" in refused(tmp_path / "none")
    (tmp_path / "file").touch()
    assert "is not a directory; give the" in refused(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    assert "holds nothing of the kvgate connector: it is empty" in refused(tmp_path / "empty")
    (tmp_path / "other" / ("a" * 32)).mkdir(parents=True)
    (tmp_path / "other" / ("a" * 32) / "precious.kv").touch()
    assert f"found '{'a' * 32}'" in refused(tmp_path / "other")
    assert (tmp_path / "other" / ("a" * 32) / "precious.kv").exists()


def test_a_part_of_a_tier_is_refused_with_the_whole(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = add_namespace(root)
    for part in (root / name, root / name / "r0"):
        assert kvgate("ls", part) == 64
        assert f"give the tier itself: {root}\n" in capsys.readouterr().err


def test_a_directory_that_cannot_be_listed_is_a_storage_error(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    add_namespace(root)

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "scandir", fail)
    assert kvgate("ls", root) == 70
    assert f"{root}: cannot be read: Input/output error" in capsys.readouterr().err


def test_what_cannot_be_read_is_told_and_exits_2(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests run as root, whom no mode keeps out; hence the injected error."""
    name = add_namespace(root)
    add_block(root, name, 1)
    genuine = os.open

    def refuse(path: Any, *arguments: Any, **options: Any) -> int:
        if path in ("r0", "0" * 31 + "1.kv"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return genuine(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    for action in (["ls"], ["stat"], ["verify"], ["prune", "--max-bytes", "0"]):
        assert kvgate(action[0], root, *action[1:]) == 2
    assert f"not readable: {name}/r0 (Permission denied)" in capsys.readouterr().out


# --- help -------------------------------------------------------------------


@pytest.mark.parametrize("action", ["ls", "stat", "verify", "prune"])
def test_help_has_examples_and_exit_codes(action: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        kvgate(action, "--help")
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert f"examples:\n  kvgate tier {action} " in text
    assert "exit codes: 0 fine, 1 a damaged file was found" in text


def test_everything_a_user_can_meet_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "tier.md").read_text(encoding="utf-8")
    options = (
        "--json",
        "--namespace",
        "--delete",
        "--max-bytes",
        "--older-than",
        "--temp",
        "--yes",
    )
    counts = [f"{outcome.value}_count" for outcome in Outcome]
    faults = [fault.value for fault in BlockFault]
    keys = [field.name for field in dataclasses.fields(tier.NamespaceUse)]
    for word in (*options, *counts, *faults, *keys):
        assert f"`{word}`" in text, word


def test_json_survives_a_reader_that_has_seen_enough(root: Path) -> None:
    add_namespace(root)
    code = "import sys; from harness.cli.main import main; sys.exit(main(sys.argv[1:]))"
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        run = subprocess.run(
            [sys.executable, "-c", code, "tier", "ls", str(root), "--json"],
            stdout=write_end,
            stderr=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        )
    finally:
        os.close(write_end)
    assert (run.returncode, run.stderr) == (0, b"")
