"""A directory of block files: open, list, read, write, touch, drop, clear. Standard library only.

Knows nothing of vLLM, slots or requests. Several processes may share one directory: files are named
by content, appear by rename and never change, so the worst race is writing the same bytes twice. KV
encodes prompts, hence mode 0600 for files and 0700 for directories. Symbolic links below the root
are never followed: a link planted there must not make a server read, overwrite or delete elsewhere.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import mmap
import os
import secrets
import stat
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.connector.blockfile import (
    PAGE_BYTES,
    BlockFault,
    BlockFileError,
    BlockHeader,
    checksum_of,
    file_bytes,
    pack_header,
    verify,
)
from harness.connector.directories import make_private, open_below, open_file_below, unlink_below
from harness.connector.keys import (
    BLOCK_SUFFIX,
    CONFIG_NAME,
    block_names,
    block_path,
    is_block_name,
    rank_directory,
)
from harness.connector.partial_files import partial_name
from harness.connector.quota import DirectoryQuota

logger = logging.getLogger("vllm.kvgate.file_store")

_RETIRED = ".dropped-"
_O_DIRECT: int = getattr(os, "O_DIRECT", 0)
# Without O_NONBLOCK a pipe in a file's place would hang the reader.
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


class StoreUnavailable(Exception):
    """The directory cannot hold blocks; the message says what failed and where."""


class FileStore:
    """The block files of one namespace and rank.

    ``direct_io`` says whether reads and writes bypass the page cache. Where the file system refuses
    O_DIRECT, files are read buffered and their pages dropped at once.
    """

    def __init__(
        self,
        directory: Path,
        namespace: str,
        payload_bytes: int,
        *,
        rank: int = 0,
        quota: DirectoryQuota | None = None,
    ) -> None:
        self.directory = directory
        self.namespace = namespace
        self.payload_bytes = payload_bytes
        self.file_bytes = file_bytes(payload_bytes)
        self.rank = rank
        self.direct_io = False
        self.quota = quota or DirectoryQuota(directory, capacity_bytes=None, reserve_bytes=None)
        self._rank_directory = rank_directory(directory, namespace, rank)
        self._rank_name = self._rank_directory.name

    def of_rank(self, rank: int) -> FileStore:
        """The store of another rank of the same server."""
        return type(self)(
            self.directory, self.namespace, self.payload_bytes, rank=rank, quota=self.quota
        )

    def open(self, description: Mapping[str, Any]) -> None:
        """Creates what is missing, proves that files can be written, and probes O_DIRECT.

        Args:
            description: content of ``config.json``; a present file must say the same.

        Raises:
            StoreUnavailable: the directory cannot be created, written or belongs to something else.
        """
        try:
            make_private(self.directory)
            for parents, name in (((), self.namespace), ((self.namespace,), self._rank_name)):
                with (
                    open_below(self.directory, *parents) as parent,
                    contextlib.suppress(FileExistsError),
                ):
                    os.mkdir(name, 0o700, dir_fd=parent)
            self.check_present()
            self._check_description(description)
            self.direct_io = self._probe_direct_io()
        except OSError as error:
            raise StoreUnavailable(f"{self.directory} cannot be used: {error}") from error
        for name in self._names_in(self.namespace):
            if name.startswith(_RETIRED):  # a reset's deletion that did not end
                self._delete_in_background(name)

    def check_present(self) -> None:
        """Raises OSError when the rank's directory is gone or reached through a symbolic link."""
        with open_below(self.directory, self.namespace, self._rank_name):
            pass

    def probe(self) -> None:
        """Writes, reads back and removes a small file. Raises OSError when that does not work."""
        self.check_present()
        self._probe_direct_io()

    def bucket_changes(self) -> list[int]:
        """When a name was last added to or removed from each bucket, in nanoseconds; 0: no bucket.

        Raises:
            OSError: the rank's directory cannot be looked at.
        """
        changes: list[int] = []
        with open_below(self.directory, self.namespace, self._rank_name) as rank:
            for bucket in range(256):
                try:
                    status = os.stat(f"{bucket:02x}", dir_fd=rank, follow_symlinks=False)
                except FileNotFoundError:
                    changes.append(0)
                else:
                    changes.append(status.st_mtime_ns)
        return changes

    def list_bucket(self, bucket: int) -> frozenset[bytes]:
        """The keys of the files in bucket 0 to 255. Names only: content is verified on read.

        Raises:
            OSError: the bucket cannot be listed.
        """
        try:
            with self._bucket(f"{bucket:02x}") as descriptor:
                names = [name for name in os.listdir(descriptor) if is_block_name(name)]
        except FileNotFoundError:
            return frozenset()
        keys: set[bytes] = set()
        for name in names:
            with contextlib.suppress(ValueError):
                key = bytes.fromhex(name[: -len(BLOCK_SUFFIX)])
                if key[0] == bucket:
                    keys.add(key)
        return frozenset(keys)

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
        flags = _READ | (_O_DIRECT if self.direct_io else 0)
        names = (self.namespace, self._rank_name, *block_names(key))
        descriptor = open_file_below(self.directory, *names, flags=flags)
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

    def has(self, key: bytes) -> bool:
        """Whether a file of this name is there. Raises OSError when that cannot be told."""
        bucket_name, name = block_names(key)
        try:
            with self._bucket(bucket_name) as bucket:
                return _is_file(name, bucket)
        except FileNotFoundError:
            return False

    def write_from(self, key: bytes, buffer: memoryview) -> bool:
        """Writes a block from ``buffer``: payload from byte 4096, header page filled in here.

        Room must have been taken from the quota; the caller gives it back when nothing was
        written.

        Returns:
            True when a file was written, False when it was there already.

        Raises:
            OSError: nothing was published; the temporary file is gone.
        """
        if self.has(key):
            return False
        bucket_name, name = block_names(key)
        payload = buffer[PAGE_BYTES : PAGE_BYTES + self.payload_bytes]
        header = BlockHeader(self.namespace, key, self.payload_bytes, checksum_of(payload))
        buffer[:PAGE_BYTES] = pack_header(header)
        partial = partial_name(key.hex())
        with self._bucket(bucket_name, is_created=True) as bucket:
            try:
                self._write_file(partial, bucket, buffer[: self.file_bytes])
                if _is_file(name, bucket):  # another server was faster
                    os.unlink(partial, dir_fd=bucket)
                    return False
                os.rename(partial, name, src_dir_fd=bucket, dst_dir_fd=bucket)
                return True
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(partial, dir_fd=bucket)
                raise

    def drop(self, key: bytes) -> None:
        """Removes a block's file; errors are ignored, the caller has forgotten the key anyway."""
        with contextlib.suppress(OSError):
            names = (self.namespace, self._rank_name, *block_names(key))
            self.quota.give_back(unlink_below(self.directory, *names))

    def touch(self, keys: Sequence[bytes]) -> None:
        """Marks blocks as used now, the first ones most recently; missing files are ignored."""
        now_ns = time.time_ns()
        for depth, key in enumerate(keys):
            bucket_name, name = block_names(key)
            # A microsecond apart: the end of a prompt must be older than its beginning.
            stamp = now_ns - depth * 1000
            with (
                contextlib.suppress(FileNotFoundError),
                self._bucket(bucket_name) as bucket,
            ):
                os.utime(name, ns=(stamp, stamp), dir_fd=bucket, follow_symlinks=False)

    def clear(self) -> None:
        """Makes all files of this namespace and rank unreachable at once, then deletes them.

        The rename is the reset; the deletion may take long and runs in a thread of its own.

        Raises:
            StoreUnavailable: the directory could not be moved away; its files are still reachable.
        """
        retired = f"{_RETIRED}{os.getpid()}-{secrets.token_hex(4)}"
        try:
            self.check_present()
            with open_below(self.directory, self.namespace) as parent:
                os.rename(self._rank_name, retired, src_dir_fd=parent, dst_dir_fd=parent)
                os.mkdir(self._rank_name, 0o700, dir_fd=parent)
        except OSError as error:
            raise StoreUnavailable(f"{self._rank_directory} cannot be cleared: {error}") from error
        self._delete_in_background(retired)

    def _delete_in_background(self, retired: str) -> None:
        threading.Thread(
            target=self._delete_rank, args=(retired,), name="kvgate-clear", daemon=True
        ).start()

    def _delete_rank(self, retired: str) -> None:
        """Deletes a rank's directory that was moved away, and counts its files out."""
        for bucket in self._names_in(self.namespace, retired):
            for name in self._names_in(self.namespace, retired, bucket):
                with contextlib.suppress(OSError):
                    names = (self.namespace, retired, bucket, name)
                    self.quota.give_back(unlink_below(self.directory, *names))
            with (
                contextlib.suppress(OSError),
                open_below(self.directory, self.namespace, retired) as parent,
            ):
                os.rmdir(bucket, dir_fd=parent)
        with contextlib.suppress(OSError), open_below(self.directory, self.namespace) as parent:
            os.rmdir(retired, dir_fd=parent)

    def _names_in(self, *names: str) -> list[str]:
        """What a directory below the root holds; nothing when it cannot be listed."""
        with contextlib.suppress(OSError), open_below(self.directory, *names) as descriptor:
            return os.listdir(descriptor)
        return []

    @contextlib.contextmanager
    def _bucket(self, name: str, *, is_created: bool = False) -> Iterator[int]:
        """A descriptor of a bucket directory. Raises OSError."""
        names = (self.namespace, self._rank_name)
        if is_created:
            # Only the bucket is created. A vanished root must stay an error: recreating it would
            # fill whatever file system lies below a lost mount.
            with (
                open_below(self.directory, *names) as rank,
                contextlib.suppress(FileExistsError),
            ):
                os.mkdir(name, 0o700, dir_fd=rank)
        with open_below(self.directory, *names, name) as descriptor:
            yield descriptor

    def _write_file(self, name: str, bucket: int, content: memoryview) -> None:
        flags = _CREATE | (_O_DIRECT if self.direct_io else 0)
        descriptor = os.open(name, flags, 0o600, dir_fd=bucket)
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

    def _check_description(self, description: Mapping[str, Any]) -> None:
        wanted = json.dumps(description, indent=1, sort_keys=True) + "\n"
        with open_below(self.directory, self.namespace) as parent:
            try:
                descriptor = os.open(CONFIG_NAME, _READ, dir_fd=parent)
            except FileNotFoundError:
                partial = partial_name(CONFIG_NAME)
                descriptor = os.open(partial, _CREATE, 0o600, dir_fd=parent)
                with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                    file.write(wanted)
                os.replace(partial, CONFIG_NAME, src_dir_fd=parent, dst_dir_fd=parent)
                return
        with os.fdopen(descriptor, encoding="utf-8", errors="replace") as file:
            found = file.read()
        if found != wanted:
            raise StoreUnavailable(
                f"{self.directory / self.namespace / CONFIG_NAME} describes another layout under "
                "the same name; move the directory away"
            )

    def _probe_direct_io(self) -> bool:
        """Whether O_DIRECT works. Raises OSError when not even buffered writing does."""
        name = partial_name("probe")
        page = memoryview(mmap.mmap(-1, PAGE_BYTES))  # page aligned, as O_DIRECT demands
        page[:] = b"\x5a" * PAGE_BYTES
        with open_below(self.directory, self.namespace, self._rank_name) as rank:
            descriptor = os.open(name, _CREATE, 0o600, dir_fd=rank)
            try:
                os.pwrite(descriptor, page, 0)
                return bool(_O_DIRECT) and _direct_round_trip(name, rank, page)
            finally:
                os.close(descriptor)
                os.unlink(name, dir_fd=rank)


def _is_file(name: str, directory: int) -> bool:
    try:
        return stat.S_ISREG(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def _direct_round_trip(name: str, directory: int, page: memoryview) -> bool:
    try:
        descriptor = os.open(name, os.O_RDWR | os.O_NOFOLLOW | _O_DIRECT, dir_fd=directory)
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
