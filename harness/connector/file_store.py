"""A directory of block files: open, scan, read, write, drop, clear. Standard library only.

Knows nothing of vLLM, slots or requests. Several processes may share one directory: files are named
by content, appear by rename and never change, so the worst race is writing the same bytes twice. KV
encodes prompts, hence mode 0600 for files and 0700 for directories.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import mmap
import os
import secrets
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.connector.blockfile import (
    KEY_BYTES,
    PAGE_BYTES,
    BlockFault,
    BlockFileError,
    BlockHeader,
    checksum_of,
    file_bytes,
    pack_header,
    verify,
)
from harness.connector.keys import BLOCK_SUFFIX, CONFIG_NAME, block_path, rank_directory

logger = logging.getLogger("vllm.kvgate.file_store")

_TMP_SUFFIX = ".tmp"
_TMP_MAX_AGE_S = 3600.0
_O_DIRECT: int = getattr(os, "O_DIRECT", 0)


class StoreUnavailable(Exception):
    """The directory cannot hold blocks; the message says what failed and where."""


class FileStore:
    """The block files of one namespace and rank.

    ``direct_io`` says whether reads and writes bypass the page cache. Where the file system refuses
    O_DIRECT, files are read buffered and their pages dropped at once.
    """

    def __init__(
        self, directory: Path, namespace: str, payload_bytes: int, *, rank: int = 0
    ) -> None:
        self.directory = directory
        self.namespace = namespace
        self.payload_bytes = payload_bytes
        self.file_bytes = file_bytes(payload_bytes)
        self.rank = rank
        self.direct_io = False
        self._rank_directory = rank_directory(directory, namespace, rank)

    def open(self, description: Mapping[str, Any]) -> None:
        """Creates what is missing, proves that files can be written, and probes O_DIRECT.

        Args:
            description: content of ``config.json``; a present file must say the same.

        Raises:
            StoreUnavailable: the directory cannot be created, written or belongs to something else.
        """
        try:
            # One by one: ``mode`` does not apply to the parents that mkdir creates on the way.
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._rank_directory.parent.mkdir(mode=0o700, exist_ok=True)
            self._rank_directory.mkdir(mode=0o700, exist_ok=True)
            self._check_description(description)
            self.direct_io = self._probe()
            self._sweep_partial_files()
        except OSError as error:
            raise StoreUnavailable(f"{self.directory} cannot be used: {error}") from error

    def scan(self) -> list[bytes]:
        """The keys of all whole-sized files present. Content is verified on read, not here.

        Raises:
            StoreUnavailable: the directory cannot be listed.
        """
        keys: list[bytes] = []
        try:
            for bucket in os.scandir(self._rank_directory):
                if bucket.is_dir(follow_symlinks=False):
                    keys.extend(self._scan_bucket(bucket.path))
        except OSError as error:
            raise StoreUnavailable(f"{self.directory} cannot be listed: {error}") from error
        return keys

    def path_of(self, key: bytes) -> Path:
        """Where the block called ``key`` is kept, present or not."""
        return block_path(self.directory, self.namespace, key, self.rank)

    def read_into(self, key: bytes, buffer: memoryview) -> int:
        """Reads a file into ``buffer`` and verifies it; the payload starts at byte 4096.

        Args:
            buffer: ``file_bytes`` long and page aligned (O_DIRECT). Undefined after an error.

        Returns:
            Bytes read from the file, header page and padding included.

        Raises:
            BlockFileError: the bytes are not this block.
            OSError: the file is missing or unreadable.
        """
        flags = os.O_RDONLY | os.O_CLOEXEC | (_O_DIRECT if self.direct_io else 0)
        descriptor = os.open(self.path_of(key), flags)
        try:
            count = 0
            while count < self.file_bytes:
                # A short read that is not page aligned is the end of a torn file: O_DIRECT cannot
                # go on.
                part = os.preadv(descriptor, [buffer[count : self.file_bytes]], count)
                count += part
                if part == 0 or part % PAGE_BYTES:
                    break
            if not self.direct_io:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
        if count != self.file_bytes:
            raise BlockFileError(
                BlockFault.TRUNCATED, f"{count} bytes, a block has {self.file_bytes}"
            )
        verify(buffer, namespace=self.namespace, key=key, payload_bytes=self.payload_bytes)
        return count

    def write_from(self, key: bytes, buffer: memoryview) -> bool:
        """Writes a block from ``buffer``: payload from byte 4096, header page filled in here.

        Returns:
            True when a file was written, False when it was there already.

        Raises:
            OSError: nothing was published; the temporary file is gone.
        """
        path = self.path_of(key)
        if path.exists():
            return False
        payload = buffer[PAGE_BYTES : PAGE_BYTES + self.payload_bytes]
        header = BlockHeader(self.namespace, key, self.payload_bytes, checksum_of(payload))
        buffer[:PAGE_BYTES] = pack_header(header)
        partial = path.with_name(f".{path.stem}.{os.getpid()}.{secrets.token_hex(4)}{_TMP_SUFFIX}")
        try:
            self._write_file(partial, buffer[: self.file_bytes])
            partial.rename(path)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise
        return True

    def drop(self, key: bytes) -> None:
        """Removes a block's file; errors are ignored, the caller has forgotten the key anyway."""
        with contextlib.suppress(OSError):
            self.path_of(key).unlink()

    def clear(self) -> None:
        """Makes all files of this namespace and rank unreachable at once, then deletes them.

        The rename is the reset; the deletion may take long and runs in a thread of its own.

        Raises:
            StoreUnavailable: the directory could not be moved away; its files are still reachable.
        """
        retired = self._rank_directory.with_name(f".dropped-{os.getpid()}-{secrets.token_hex(4)}")
        try:
            self._rank_directory.rename(retired)
            self._rank_directory.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise StoreUnavailable(f"{self._rank_directory} cannot be cleared: {error}") from error
        threading.Thread(
            target=shutil.rmtree, args=(retired, True), name="kvgate-clear", daemon=True
        ).start()

    def _write_file(self, partial: Path, content: memoryview) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        flags |= _O_DIRECT if self.direct_io else 0
        try:
            descriptor = os.open(partial, flags, 0o600)
        except FileNotFoundError:
            # Only the bucket is created. A vanished root must stay an error: recreating it would
            # fill whatever file system lies below a lost mount.
            partial.parent.mkdir(mode=0o700, exist_ok=True)
            descriptor = os.open(partial, flags, 0o600)
        try:
            count = 0
            while count < len(content):
                count += os.pwrite(descriptor, content[count:], count)
            if not self.direct_io:
                # Only clean pages can be dropped.
                os.fdatasync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)

    def _scan_bucket(self, bucket: str) -> list[bytes]:
        keys: list[bytes] = []
        with os.scandir(bucket) as entries:
            for entry in entries:
                stem, suffix = os.path.splitext(entry.name)
                if suffix != BLOCK_SUFFIX or len(stem) != 2 * KEY_BYTES:
                    continue
                with contextlib.suppress(ValueError, OSError):
                    if entry.stat(follow_symlinks=False).st_size == self.file_bytes:
                        keys.append(bytes.fromhex(stem))
        return keys

    def _check_description(self, description: Mapping[str, Any]) -> None:
        path = self.directory / self.namespace / CONFIG_NAME
        wanted = json.dumps(description, indent=1, sort_keys=True) + "\n"
        try:
            found = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            partial = path.with_name(
                f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}{_TMP_SUFFIX}"
            )
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(wanted)
            partial.replace(path)
            return
        if found != wanted:
            raise StoreUnavailable(
                f"{path} describes another layout under the same name; move the directory away"
            )

    def _probe(self) -> bool:
        """Whether O_DIRECT works. Raises OSError when not even buffered writing does."""
        partial = self._rank_directory / f".probe.{os.getpid()}.{secrets.token_hex(4)}{_TMP_SUFFIX}"
        page = memoryview(mmap.mmap(-1, PAGE_BYTES))  # page aligned, as O_DIRECT demands
        page[:] = b"\x5a" * PAGE_BYTES
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.pwrite(descriptor, page, 0)
            return bool(_O_DIRECT) and _direct_round_trip(partial, page)
        finally:
            os.close(descriptor)
            partial.unlink()

    def _sweep_partial_files(self) -> None:
        # A crash leaves temporary files. Another instance may be writing one right now, hence the
        # age.
        oldest_ns = time.time_ns() - int(_TMP_MAX_AGE_S * 1e9)
        for path in self._rank_directory.rglob(f".*{_TMP_SUFFIX}"):
            with contextlib.suppress(OSError):
                if path.stat().st_mtime_ns < oldest_ns:
                    path.unlink()
        for path in self._rank_directory.parent.glob(".dropped-*"):
            shutil.rmtree(path, ignore_errors=True)


def _direct_round_trip(path: Path, page: memoryview) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | _O_DIRECT)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return False
        raise
    try:
        return (
            os.pwrite(descriptor, page, 0) == PAGE_BYTES
            and os.preadv(descriptor, [page], 0) == PAGE_BYTES
        )
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return False
        raise
    finally:
        os.close(descriptor)
