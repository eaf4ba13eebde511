"""A harness process for tests: starts a fake server, says so, waits to be killed or interrupted."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from harness.campaign.arms import LaunchSpec
from harness.server.managed import ManagedServer

FAKE = Path(__file__).with_name("fake_server.py")


def spec_of(mode: str, directory: Path, *more: str, deadline_s: float = 30.0) -> LaunchSpec:
    """A launch of the fake server."""
    return LaunchSpec(
        arm="fake",
        argv=(sys.executable, str(FAKE), mode, str(directory), *more),
        environment=dict(os.environ),
        ready_deadline_s=deadline_s,
    )


def main() -> None:
    directory = Path(sys.argv[1])
    spec = spec_of(sys.argv[2], directory, *sys.argv[3:])
    server = ManagedServer(spec, log_path=directory / "server.log", stop_grace_s=0.3)
    try:
        with server:
            print(server.port, flush=True)
            threading.Event().wait()
    except KeyboardInterrupt:
        print("interrupted", bool(server.leftovers), flush=True)


if __name__ == "__main__":
    main()
