"""Seals a run in a process of its own and dies at the n-th step that touches the disk.

    seal_script.py RUN STEP

A step is one open, rename, removal or cut inside the run directory. Ends with 9 when it was killed,
with 0 when there were fewer steps.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from harness.evidence.store import RunWriter
from harness.records import StopCause

WATCHED = {"open", "os.rename", "os.remove", "os.truncate", "os.rmdir"}


def seal(run: Path) -> None:
    """What the harness does at the end of a run, and for a dead one."""
    writer = RunWriter.resume(run)
    cause = StopCause.HARNESS_DIED
    writer.seal_open_trials("harness died", cause, lambda _arm: "log\n")
    writer.seal(ended="2026-11-30T12:00:00+00:00", stopped="harness died", cause=cause)


def main() -> None:
    run, left = Path(sys.argv[1]), int(sys.argv[2])

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event in WATCHED and str(arguments[0]).startswith(str(run)):
            left -= 1
            if left < 0:
                os._exit(9)  # as kill -9: nothing of ours runs any more

    sys.addaudithook(audit)
    seal(run)


if __name__ == "__main__":
    main()
