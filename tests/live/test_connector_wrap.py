"""The connector's directory stays within its bound while three times as much goes through it.

A canary session is asked again and again; least recently used eviction must keep it. A thread adds
up what is really in the directory all the time, temporary files included: never more than the bound
and one block per writer. Not shown: more than one rank, weeks.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.campaign.generated_model import ModelArchitecture
from tests.live.connector_rig import (
    BLOCKS,
    RESTORED_TOKENS,
    SESSIONS,
    Reference,
    make_reference,
    partial_files,
    tier_server,
    torn_files,
)
from tests.live.vllm_server import prompt, value

pytestmark = pytest.mark.live

CANARY = SESSIONS[0]
BOUND_BLOCKS = 48
WRITERS = 2
SCANS = BOUND_BLOCKS * 3 // BLOCKS  # sessions that make three times the bound
CANARY_EVERY = 2
FIRST_SCAN = 100


@pytest.fixture(scope="module")
def reference(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_reference(model, tmp_path_factory.mktemp("reference") / "server.log", SESSIONS)


class UsageWatch:
    """Adds up the sizes of all files below a directory, again and again, in a thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.most_bytes = 0
        self.looks = 0

    def __enter__(self) -> UsageWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.002):
            self.most_bytes = max(self.most_bytes, used_bytes(self._directory))
            self.looks += 1


def used_bytes(directory: Path) -> int:
    """Bytes of all block files, whole or being written.

    Each directory is listed at once and files are only counted while there, so a file that is
    renamed or removed meanwhile is counted once or not at all.
    """
    return sum(size for bucket in _buckets(directory) for size in _sizes(bucket))


def _buckets(directory: Path) -> Iterator[Path]:
    for path in directory.glob("*/r0/*"):
        if path.is_dir():
            yield path


def _sizes(bucket: Path) -> Iterator[int]:
    seen: set[int] = set()
    with contextlib.suppress(OSError), os.scandir(bucket) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if status.st_ino not in seen:
                    seen.add(status.st_ino)
                    yield status.st_size


def test_use_stays_within_the_bound_and_the_canary_is_kept(
    model: Path, reference: Reference, tmp_path: Path
) -> None:
    architecture = ModelArchitecture(num_layers=2)
    file_bytes = 4096 + architecture.kv_bytes_per_token * (RESTORED_TOKENS // BLOCKS)
    bound = BOUND_BLOCKS * file_bytes
    settings = {"disk_capacity_bytes": bound, "writer_threads": WRITERS, "rescan_interval_s": 1}
    with tier_server(model, tmp_path, reference, settings) as rig, UsageWatch(rig.directory) as use:
        server = rig.server
        assert rig.server.ready_line()["slot_bytes"] == file_bytes
        rig.ask([CANARY])
        server.wait_durable()
        asked = hit = 0
        for scan in range(SCANS):
            server.reset(external=True)
            server.ask(prompt(FIRST_SCAN + scan, BLOCKS))
            server.wait_durable()
            if scan % CANARY_EVERY == 0:
                server.reset(external=True)  # from disk, or not at all
                (answer,) = rig.ask([CANARY])
                assert rig.wrong([CANARY], [answer], is_restored=False) == []
                asked += 1
                hit += answer.cached_tokens == RESTORED_TOKENS
        metrics = server.metrics()
        on_disk = value(metrics, "kvgate:tier_disk_used_bytes")
        stored = value(metrics, "kvgate:tier_stored_blocks_total", tier="disk")
        dropped = value(metrics, "kvgate:tier_dropped_store_blocks_total")
        evicted = value(metrics, "kvgate:tier_evicted_blocks_total", tier="disk")
        found = used_bytes(rig.directory)
    print(
        f"canary {hit}/{asked}; most {use.most_bytes / file_bytes:.2f} blocks of {BOUND_BLOCKS} "
        f"in {use.looks} looks; stored {stored:.0f}, dropped {dropped:.0f}, evicted {evicted:.0f}"
    )
    assert hit == asked
    assert 0 < use.most_bytes <= bound + WRITERS * file_bytes
    assert stored >= SCANS * BLOCKS
    assert stored / (stored + dropped) >= 0.99
    assert evicted >= SCANS * BLOCKS - BOUND_BLOCKS
    assert on_disk == found
    assert value(metrics, "kvgate:tier_disk_capacity_bytes") == bound
    assert value(metrics, "kvgate:tier_load_failed_blocks_total") == 0
    assert partial_files(rig.directory) == []
    assert torn_files(rig.directory, rig.namespace) == []


def test_a_crowd_that_wraps_the_directory_gets_right_answers(
    model: Path, reference: Reference, tmp_path: Path
) -> None:
    """Eight at a time over a working set above the bound: blocks go while others read them."""
    architecture = ModelArchitecture(num_layers=2)
    file_bytes = 4096 + architecture.kv_bytes_per_token * (RESTORED_TOKENS // BLOCKS)
    bound = len(SESSIONS) * BLOCKS * file_bytes // 2
    settings = {"disk_capacity_bytes": bound, "writer_threads": WRITERS, "rescan_interval_s": 1}
    with tier_server(model, tmp_path, reference, settings) as rig, UsageWatch(rig.directory) as use:
        for _ in range(6):
            answers = rig.ask(SESSIONS, len(SESSIONS))
            assert rig.wrong_in_a_crowd(SESSIONS, answers) == []
            assert rig.wrong(SESSIONS, rig.ask(SESSIONS), is_restored=False) == []
            rig.server.wait_durable()
            rig.server.reset(external=True)
        assert rig.server.is_alive()
        metrics = rig.server.metrics()
        stored = value(metrics, "kvgate:tier_stored_blocks_total", tier="disk")
        dropped = value(metrics, "kvgate:tier_dropped_store_blocks_total")
    print(f"most {use.most_bytes / file_bytes:.2f} blocks; stored {stored}, dropped {dropped}")
    assert use.most_bytes <= bound + WRITERS * file_bytes
    assert stored / (stored + dropped) >= 0.99
