"""Two connector instances on one directory, on real vLLM: each writes a key once, both read all.

Both answer the same sessions at the same time, in opposite order, so that each meets files that the
other has just written and keys that the other is writing. Not shown: two machines, a network file
system.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests.live.connector_rig import (
    BLOCKS,
    RESTORED_TOKENS,
    SESSIONS,
    Reference,
    Rig,
    make_reference,
    partial_files,
    tier_server,
    torn_files,
)
from tests.live.vllm_server import BLOCK_TOKENS, Answer, prompt, wait_until

pytestmark = pytest.mark.live

LOADS = (1, 4, 8)
SETTINGS = {"rescan_interval_s": 1}


@pytest.fixture(scope="module")
def reference(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_reference(model, tmp_path_factory.mktemp("reference") / "server.log", SESSIONS)


def test_two_instances_populate_and_read_one_directory(
    model: Path, reference: Reference, tmp_path: Path
) -> None:
    blocks = len(SESSIONS) * BLOCKS
    with contextlib.ExitStack() as stack:
        first, second = (
            stack.enter_context(tier_server(model, tmp_path, reference, SETTINGS, name=name))
            for name in ("first", "second")
        )
        assert first.namespace == second.namespace
        for rig in (first, second):
            # Shorter than a block with its answer, so not stored: a first request is slow.
            rig.server.ask_all([prompt(s, 0, rest=96) for s in SESSIONS], 4)
        _populate_at_once(first, second)

        keys = [path.name for path in first.directory.rglob("*.kv")]
        assert Counter(keys) == dict.fromkeys(
            (path.name for s in SESSIONS for path in first.files(s)), 1
        )
        assert partial_files(first.directory) == []
        assert torn_files(first.directory, first.namespace) == []

        slot_bytes = first.server.ready_line()["slot_bytes"]
        written = [_written_blocks(rig) for rig in (first, second)]
        assert all(0 < count <= blocks for count in written)
        assert sum(written) >= blocks
        print(f"blocks written by the first and the second instance: {written}, of {blocks}")

        answers: list[list[Answer]] = []
        for rig in (first, second):
            rig.server.reset(external=True)
            wait_until(partial(_knows_all, rig), "files of the other instance are found")
            for concurrency in LOADS:
                answers.append(_assert_all_from_disk(rig, concurrency))
            # Reading has written nothing.
            assert sum(_written_blocks(rig) for rig in (first, second)) == sum(written)
            assert rig.server.metric("kvgate:tier_disk_used_bytes") <= blocks * slot_bytes * 2

        # The same files, so the same bits, whoever read them and under whatever load.
        assert all(found == answers[0] for found in answers)
        _delete_and_recover(first, second)


def _populate_at_once(first: Rig, second: Rig) -> None:
    with ThreadPoolExecutor(2) as pool:
        forward = pool.submit(first.ask, SESSIONS, 4)
        backward = pool.submit(second.ask, SESSIONS[::-1], 4)
        answers = (forward.result(), backward.result()[::-1])
    for rig, found in zip((first, second), answers, strict=True):
        assert rig.wrong_in_a_crowd(SESSIONS, found) == []
        rig.server.wait_durable()


def _written_blocks(rig: Rig) -> int:
    return int(rig.server.metric("kvgate:tier_stored_blocks_total", tier="disk"))


def _knows_all(rig: Rig) -> bool:
    answers = rig.ask(SESSIONS)
    rig.server.wait_durable()
    rig.server.reset(external=True)
    return all(a.cached_tokens == RESTORED_TOKENS for a in answers)


def _assert_all_from_disk(rig: Rig, concurrency: int) -> list[Answer]:
    """Oracles (a) at one request at a time, else (c): asked again from the device."""
    rig.server.reset(external=True)
    before = rig.server.metric("kvgate:tier_hit_tokens_total", tier="disk")
    answers = rig.ask(SESSIONS, concurrency)
    gained = rig.server.metric("kvgate:tier_hit_tokens_total", tier="disk") - before
    assert gained == len(SESSIONS) * RESTORED_TOKENS
    assert rig.server.metric("kvgate:tier_load_failed_blocks_total") == 0
    assert rig.wrong_in_a_crowd(SESSIONS, answers) == []
    # The files were computed in a crowd: bit for bit only where that makes no difference.
    if concurrency == 1:
        assert rig.wrong(SESSIONS, answers, is_restored=False) == []
    alone = rig.ask(SESSIONS)
    assert rig.wrong(SESSIONS, alone, is_restored=False) == []
    return alone


def _delete_and_recover(first: Rig, second: Rig) -> None:
    """Files that one instance's directory loses are computed again by the other, and found."""
    second.server.reset(external=True)
    first.server.reset(external=True)
    for path in first.files(0):
        path.unlink()
    answer = second.server.ask(prompt(0, BLOCKS))
    assert second.wrong([0], [answer], is_restored=False) == []
    second.server.wait_durable()

    def is_found() -> bool:
        first.server.reset(external=True)
        again = first.server.ask(prompt(0, BLOCKS))
        assert first.wrong([0], [again], is_restored=False) == []
        first.server.wait_durable()
        return again.cached_tokens == BLOCKS * BLOCK_TOKENS

    wait_until(is_found, "the files written again are found")
    assert all(path.is_file() for path in first.files(0))
    assert partial_files(first.directory) == []
