"""What comes after sealing: verdict files and reports of a run, and where the run was made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness.errors import EvidenceError
from harness.evidence.store import json_file, parse_file, write_atomic
from harness.verdicts import JUDGE_VERSION, SignOff


def write_verdict(path: Path, signoff: SignOff) -> Path:
    """Adds the verdict file of this judge version; the same evidence gives the same bytes."""
    target = path / "verdicts" / f"{JUDGE_VERSION}.json"
    target.parent.mkdir(exist_ok=True)
    text = json.dumps(
        signoff.to_json(), sort_keys=True, indent=1, ensure_ascii=True, allow_nan=False
    )
    write_atomic(target, text + "\n")
    return target


def read_verdict(path: Path) -> SignOff:
    """The verdict of this judge version. Raises EvidenceError."""
    target = path / "verdicts" / f"{JUDGE_VERSION}.json"
    if not target.is_file():
        raise EvidenceError(f"{target}: not judged yet; run `kvgate judge {path}` first")
    return parse_file(target, SignOff)


def write_report(path: Path, html: str) -> Path:
    """Adds the sign-off page."""
    target = path / "report" / "signoff.html"
    target.parent.mkdir(exist_ok=True)
    write_atomic(target, html)
    return target


def read_provenance(path: Path) -> dict[str, str]:
    """Who, where and when: shown in the report, never judged."""
    found = json_file(path / "provenance.json")
    seal = json_file(path / "seal.json") if (path / "seal.json").is_file() else {}
    for name, content in (("provenance.json", found), ("seal.json", seal)):
        if not isinstance(content, dict):
            raise EvidenceError(f"{path / name}: expected an object")
    return {
        "run": _run_name(path, found),
        **{str(k): str(v) for k, v in found.items()},
        "ended": str(seal.get("ended", "never")),
    }


def _run_name(path: Path, provenance: dict[str, Any]) -> str:
    """Campaign and start as they were sealed: a copied or renamed directory is the same run."""
    started = str(provenance.get("started", provenance.get("imported", "")))
    compact = started.split("+")[0].replace("-", "").replace(":", "")
    plan = json_file(path / "plan.json") if (path / "plan.json").is_file() else {}
    campaign = plan.get("campaign") if isinstance(plan, dict) else None
    name = "/".join(str(part) for part in (campaign, f"{compact}Z" if compact else None) if part)
    return name or "not named in the evidence"
