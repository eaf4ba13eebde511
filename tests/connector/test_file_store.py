"""The directory of block files, with real files."""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.connector import file_store
from harness.connector.blockfile import (
    PAGE_BYTES,
    BlockFault,
    BlockFileError,
    file_bytes,
    read_block,
)
from harness.connector.file_store import FileStore, StoreUnavailable

NAMESPACE = "ab" * 16
PAYLOAD_BYTES = 5000
KEY, OTHER = b"k" * 16, b"o" * 16


@pytest.fixture
def buffer() -> Iterator[memoryview]:
    view = memoryview(mmap.mmap(-1, file_bytes(PAYLOAD_BYTES)))
    view[PAGE_BYTES : PAGE_BYTES + PAYLOAD_BYTES] = b"0123456789" * 500
    yield view
    view.release()


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    store = FileStore(tmp_path / "tier", NAMESPACE, PAYLOAD_BYTES)
    store.open({"format_version": 1})
    return store


def _keys(store: FileStore) -> set[bytes]:
    return {key for bucket in range(256) for key in store.list_bucket(bucket)}


def test_round_trip(store: FileStore, buffer: memoryview) -> None:
    payload = bytes(buffer[PAGE_BYTES:])
    assert store.write_from(KEY, buffer)
    buffer[:] = bytes(len(buffer))
    assert store.read_into(KEY, buffer) == file_bytes(PAYLOAD_BYTES)
    assert bytes(buffer[PAGE_BYTES:]) == payload
    assert _keys(store) == {KEY}


def test_files_are_block_files_and_private(store: FileStore, buffer: memoryview) -> None:
    store.write_from(KEY, buffer)
    header, payload = read_block(store.path_of(KEY))
    assert (header.namespace, header.key, len(payload)) == (NAMESPACE, KEY, PAYLOAD_BYTES)
    for path in [store.directory, *store.directory.rglob("*")]:
        expected = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == expected, path


def test_nothing_temporary_is_left(store: FileStore, buffer: memoryview) -> None:
    store.write_from(KEY, buffer)
    names = sorted(p.name for p in store.directory.rglob("*") if p.is_file())
    assert names == [KEY.hex() + ".kv", "config.json"]


def test_a_present_file_is_not_written_again(store: FileStore, buffer: memoryview) -> None:
    store.write_from(KEY, buffer)
    before = store.path_of(KEY).stat().st_mtime_ns
    assert not store.write_from(KEY, buffer)
    assert store.path_of(KEY).stat().st_mtime_ns == before


def test_buffered_fallback_reads_and_writes_the_same(
    tmp_path: Path, buffer: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_store, "_O_DIRECT", 0)
    store = FileStore(tmp_path / "tier", NAMESPACE, PAYLOAD_BYTES)
    store.open({})
    assert not store.direct_io
    payload = bytes(buffer[PAGE_BYTES:])
    store.write_from(KEY, buffer)
    buffer[:] = bytes(len(buffer))
    assert store.read_into(KEY, buffer) == file_bytes(PAYLOAD_BYTES)
    assert bytes(buffer[PAGE_BYTES:]) == payload


def test_missing_file(store: FileStore, buffer: memoryview) -> None:
    with pytest.raises(FileNotFoundError):
        store.read_into(KEY, buffer)


@pytest.mark.parametrize("size", [0, 10, PAGE_BYTES, PAGE_BYTES + 1, file_bytes(PAYLOAD_BYTES) - 1])
def test_torn_file(store: FileStore, buffer: memoryview, size: int) -> None:
    store.write_from(KEY, buffer)
    os.truncate(store.path_of(KEY), size)
    with pytest.raises(BlockFileError) as caught:
        store.read_into(KEY, buffer)
    assert caught.value.fault is BlockFault.TRUNCATED


def test_flipped_bit(store: FileStore, buffer: memoryview) -> None:
    store.write_from(KEY, buffer)
    with store.path_of(KEY).open("r+b") as file:
        file.seek(PAGE_BYTES + 77)
        byte = file.read(1)[0]
        file.seek(PAGE_BYTES + 77)
        file.write(bytes([byte ^ 0x40]))
    with pytest.raises(BlockFileError) as caught:
        store.read_into(KEY, buffer)
    assert caught.value.fault is BlockFault.BAD_CHECKSUM


def test_file_under_another_name(store: FileStore, buffer: memoryview) -> None:
    store.write_from(KEY, buffer)
    target = store.path_of(OTHER)
    target.parent.mkdir()
    store.path_of(KEY).rename(target)
    with pytest.raises(BlockFileError) as caught:
        store.read_into(OTHER, buffer)
    assert caught.value.fault is BlockFault.WRONG_KEY


def test_drop_removes_and_tolerates_absence(store: FileStore, buffer: memoryview) -> None:
    store.write_from(KEY, buffer)
    store.drop(KEY)
    store.drop(KEY)
    assert _keys(store) == set()


def test_clear_makes_everything_unreachable_and_the_store_goes_on(
    store: FileStore, buffer: memoryview
) -> None:
    store.write_from(KEY, buffer)
    store.clear()
    assert _keys(store) == set()
    with pytest.raises(FileNotFoundError):
        store.read_into(KEY, buffer)
    assert store.write_from(OTHER, buffer)
    assert _keys(store) == {OTHER}


def test_touch_renews_a_prompt_with_its_head_newest(store: FileStore, buffer: memoryview) -> None:
    for key in (KEY, OTHER):
        store.write_from(key, buffer)
        os.utime(store.path_of(key), (1, 1))
    store.touch([KEY, b"m" * 16, OTHER])
    head, tail = (store.path_of(key).stat().st_mtime_ns for key in (KEY, OTHER))
    assert head - tail == 2000
    assert tail > 10**18


def test_probe_of_a_well_and_of_a_vanished_directory(store: FileStore) -> None:
    store.probe()
    assert [p.name for p in store.directory.rglob("*") if p.is_file()] == ["config.json"]
    store.directory.rename(store.directory.with_name("unmounted"))
    with pytest.raises(FileNotFoundError):
        store.probe()


def test_clear_that_cannot_rename_says_so(store: FileStore) -> None:
    (store.directory / NAMESPACE / "r0").rename(store.directory / "elsewhere")
    with pytest.raises(StoreUnavailable, match="cannot be cleared"):
        store.clear()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_failed_write_publishes_nothing(
    store: FileStore, buffer: memoryview, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(OSError) as caught:  # noqa: PT011 (the code is checked below)
        store.write_from(KEY, buffer)
    assert caught.value.errno == code
    assert [p.name for p in store.directory.rglob("*") if p.is_file()] == ["config.json"]


def test_a_vanished_root_is_not_recreated(store: FileStore, buffer: memoryview) -> None:
    """Below a lost mount lies another file system; it must not fill up."""
    store.directory.rename(store.directory.with_name("unmounted"))
    with pytest.raises(FileNotFoundError):
        store.write_from(KEY, buffer)
    assert not store.directory.exists()


def test_directory_below_a_regular_file_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = FileStore(tmp_path / "file" / "tier", NAMESPACE, PAYLOAD_BYTES)
    with pytest.raises(StoreUnavailable, match="cannot be used"):
        store.open({})


def test_unwritable_directory_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Tests run as root, whom no mode keeps out; hence the injected error.
    store = FileStore(tmp_path, NAMESPACE, PAYLOAD_BYTES)
    store.open({})

    def fail(*_: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(StoreUnavailable, match="Read-only"):
        store.open({})


def test_config_of_another_layout_is_unavailable(store: FileStore) -> None:
    with pytest.raises(StoreUnavailable, match="another layout"):
        store.open({"format_version": 2})


def test_reopening_finds_the_blocks(store: FileStore, buffer: memoryview) -> None:
    store.write_from(KEY, buffer)
    again = FileStore(store.directory, NAMESPACE, PAYLOAD_BYTES)
    again.open({"format_version": 1})
    assert _keys(again) == {KEY}


def test_a_listing_ignores_foreign_files(store: FileStore, buffer: memoryview) -> None:
    store.write_from(KEY, buffer)
    bucket = store.path_of(KEY).parent
    (bucket / "notes.txt").touch()
    (bucket / f"{'z' * 32}.kv").write_bytes(bytes(file_bytes(PAYLOAD_BYTES)))
    (bucket / f"{'0' * 32}.kv").touch()  # in the wrong bucket
    assert _keys(store) == {KEY}
