"""docs/placement.md says what the code says: its table, and its campaign with the finding."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

import pytest

from harness.cli.main import main
from tests.placement.architectures import ARCHITECTURES

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "placement.md").read_text(encoding="utf-8")
CONFIG = {
    **next(row.config for row in ARCHITECTURES if row.name == "Qwen3-Coder-480B"),
    "vocab_size": 151_936,
    "max_position_embeddings": 262_144,
}


def _count(number: int | None) -> str:
    return f"{number:,}" if number else "-" if number is None else "0"


def test_the_table_of_architectures() -> None:
    rows = re.findall(r"^\| ([\w.-]+) \| `([\w./-]+)`(?: ✓)? \| (.+) \|$", PAGE, re.MULTILINE)
    assert len(ARCHITECTURES) >= 15
    assert rows == [
        (
            row.name,
            row.source,
            f"{_count(row.unique)} | {_count(row.total_tp8)} | {_count(row.growing)} | "
            f"{_count(row.state or None)}",
        )
        for row in ARCHITECTURES
    ]


@pytest.fixture
def campaign() -> str:
    (block,) = re.findall(r"^    format = 1\n(?:(?:    .*)?\n)*?(?=    placement:)", PAGE, re.M)
    return textwrap.dedent(block)


def _plan(text: str, directory: Path, capsys: pytest.CaptureFixture[str]) -> str:
    model, path = directory / "model", directory / "campaign.toml"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    text = re.sub(r'^path = ".*"$', f'path = "{model}"', text, flags=re.MULTILINE)
    path.write_text(text, encoding="utf-8")
    assert main(["plan", str(path)]) == 0
    return capsys.readouterr().out


def test_34_sessions_fit_and_243_do_not(
    campaign: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = re.findall(r"^    (placement: .+)$", PAGE, re.MULTILINE)
    few = _plan(campaign, tmp_path, capsys)
    many = _plan(campaign.replace("sessions = 34", "sessions = 243"), tmp_path, capsys)
    found = [line for text in (few, many) for line in text.splitlines() if "placement: " in line]
    assert found == shown
    assert found[0].startswith("placement: 34 sessions probably fit: device memory holds 109 ")
    assert found[1].startswith("placement: 243 sessions do not fit: ")
    assert "253,952 bytes (bfloat16); 31,744 on a rank, 253,952 on all" in few


def test_an_unknown_architecture_ends_the_plan(
    campaign: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(CONFIG, "model_type", "brand_new")
    with pytest.raises(AssertionError, match="64 == 0"):
        _plan(campaign, tmp_path, capsys)
    error = capsys.readouterr().err
    assert "config.json model_type: found 'brand_new'; known: " in error
    assert "state model.kv_bytes_per_token" in error
