"""The belief about the directory, and the thread that lists it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from harness.connector.disk_index import DirectoryWatcher, DiskIndex, Listing
from harness.connector.file_store import FileStore

A, B, C = (bytes([7, number]) + bytes(14) for number in range(3))


def test_a_listing_adds_and_removes() -> None:
    index = DiskIndex()
    index.apply(Listing(0, 7, 10.0, frozenset({A, B})))
    index.apply(Listing(0, 7, 20.0, frozenset({B, C})))
    assert set(index) == {B, C}
    assert (A in index, len(index)) == (False, 2)


def test_own_write_survives_a_listing_that_began_before_it() -> None:
    index = DiskIndex()
    index.add(A, 15.0)
    index.apply(Listing(0, 7, 14.0, frozenset()))
    assert A in index
    index.apply(Listing(0, 7, 16.0, frozenset()))
    assert A not in index, "deleted by somebody else"


def test_a_dropped_key_does_not_come_back_with_a_listing_that_began_before() -> None:
    """Else a block that was found damaged, and recomputed, would not be stored again."""
    index = DiskIndex()
    index.apply(Listing(0, 7, 10.0, frozenset({A, B})))
    index.discard(A, 15.0)
    index.apply(Listing(0, 7, 14.0, frozenset({A, B})))
    assert set(index) == {B}
    index.add(A, 15.5)
    index.apply(Listing(0, 7, 15.2, frozenset({B})))
    assert set(index) == {A, B}
    index.discard(A, 15.8)
    index.apply(Listing(0, 7, 16.0, frozenset({A, B})))
    assert set(index) == {A, B}, "stored by another server"


def test_a_listing_from_before_a_reset_is_ignored() -> None:
    index = DiskIndex()
    index.apply(Listing(0, 7, 10.0, frozenset({A})))
    index.clear(11.0)
    index.apply(Listing(0, 7, 10.5, frozenset({A})))
    assert len(index) == 0
    index.apply(Listing(0, 7, 12.0, frozenset({B})))
    assert set(index) == {B}


def test_the_memory_of_own_writes_and_drops_is_bounded() -> None:
    index = DiskIndex()
    for number in range(1000):
        index.add(bytes([7]) + number.to_bytes(15, "little"), float(number))
        index.discard(bytes([8]) + number.to_bytes(15, "little"), float(number))
    assert len(index) == 1000
    assert len(index._recent[0]) <= 2 * 121


def _until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.001)


class _CountingStore(FileStore):
    passes = 0

    def bucket_changes(self) -> list[int]:
        self.passes += 1
        return super().bucket_changes()


def test_the_watcher_finds_files_of_others_and_their_removal(tmp_path: Path) -> None:
    store = _CountingStore(tmp_path, "ab" * 16, 100)
    store.open({})
    path = store.path_of(A)
    path.parent.mkdir()
    path.touch()
    index = DiskIndex()
    watcher = DirectoryWatcher(store, 0.005)

    def take() -> None:
        for listing in watcher.take():
            index.apply(listing)

    def knows(*keys: bytes) -> bool:
        take()
        return set(index) == set(keys)

    try:
        watcher.start(30.0)
        take()
        assert set(index) == {A}, "the first pass is waited for"
        store.path_of(B).touch()
        _until(lambda: knows(A, B))
        path.unlink()
        _until(lambda: knows(B))
        os.rename(tmp_path / ("ab" * 16), tmp_path / "away")
        before = store.passes
        _until(lambda: store.passes >= before + 2)
        assert knows(B), "a directory that cannot be listed proves no absence"
    finally:
        watcher.stop()
