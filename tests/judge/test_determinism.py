"""The same evidence gives the same verdict bytes whatever the locale, hash seed or directory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from harness.verdicts import JUDGE_VERSION
from tests.campaign_text import SMALL_CAMPAIGN
from tests.sealed_runs import build_run, demo_plan

ROOT = Path(__file__).resolve().parents[2]


def test_verdict_bytes_depend_on_nothing_but_the_evidence(tmp_path: Path) -> None:
    path = build_run(tmp_path / "one", plan=demo_plan(SMALL_CAMPAIGN))
    moved = tmp_path / "elsewhere" / "renamed"
    seen = set()
    for number, changes in enumerate(
        (
            {"LANG": "C", "LC_ALL": "C", "PYTHONHASHSEED": "0", "TZ": "UTC"},
            {"LANG": "zh_CN.UTF-8", "LC_ALL": "zh_CN.UTF-8", "PYTHONHASHSEED": "1"},
            {"LANG": "de_DE.UTF-8", "PYTHONHASHSEED": "2", "TZ": "Asia/Shanghai"},
        )
    ):
        if number == 2:
            moved.parent.mkdir()
            path = path.rename(moved)
        result = subprocess.run(
            [sys.executable, "-m", "harness", "judge", str(path)],
            env={**os.environ, **changes, "PYTHONPATH": str(ROOT)},
            cwd=tmp_path,
            capture_output=True,
            timeout=120,
        )
        assert result.returncode == 0, result.stderr.decode(errors="replace")
        seen.add((path / "verdicts" / f"{JUDGE_VERSION}.json").read_bytes())
    assert len(seen) == 1
