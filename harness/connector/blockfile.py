"""The block file: one KV block of one prompt position on disk.

Standard library, and xxhash where it is installed.

Layout (little endian), format version 2. A file is a 4096-byte header page followed by the payload,
zero-padded to a multiple of 4096 bytes, so that one aligned read or write moves all of it
(O_DIRECT):

    offset  size  field
    0       8     magic, b"KVGBLOCK"
    8       4     format version, 2
    12      4     header size in bytes, 4096
    16      16    namespace (what produced the bytes; the directory's name in hexadecimal)
    32      16    content key (keys.py); the file's name in hexadecimal
    48      8     payload length in bytes, without padding
    56      8     checksum of the payload
    64      4     which: 1 CRC-32 (zlib), 2 XXH3-64
    68      4     CRC-32 of header bytes 0 to 67
    72      4024  zero

The payload is the block's device bytes, opaque: the runs of all layers one after the other, in
layer order, all of equal length. ``config.json`` in the namespace directory names each layer's
offset and length. Nothing in the file is executable or self-describing beyond this; it is never
unpickled.

The checksum finds damage, not forgery: whoever may write to the directory can replace a payload and
compute a fresh checksum (the harness's negative controls do exactly that, with ``write_block``).
"""

from __future__ import annotations

import contextlib
import enum
import os
import secrets
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

xxhash: Any
try:
    import xxhash
except ImportError:  # vLLM does not bring it; CRC-32 then takes three times as long
    xxhash = None

MAGIC = b"KVGBLOCK"
FORMAT_VERSION = 2
PAGE_BYTES = 4096
KEY_BYTES = 16
NAMESPACE_BYTES = 16
_FIELDS = struct.Struct("<8sII16s16sQQI")
_HEADER_CRC = struct.Struct("<I")
assert _FIELDS.size == 68


class Checksum(enum.IntEnum):
    """How a payload's checksum is computed."""

    CRC32 = 1
    XXH3_64 = 2


# What this interpreter writes. Part of a namespace's fingerprint: servers that could not verify
# each other's files do not meet them.
CHECKSUM = Checksum.CRC32 if xxhash is None else Checksum.XXH3_64


class BlockFault(enum.Enum):
    """Why a block file cannot be used."""

    TRUNCATED = "truncated"
    BAD_MAGIC = "bad_magic"
    BAD_VERSION = "bad_version"
    BAD_HEADER = "bad_header"
    WRONG_NAMESPACE = "wrong_namespace"
    WRONG_KEY = "wrong_key"
    WRONG_LENGTH = "wrong_length"
    BAD_CHECKSUM = "bad_checksum"


class BlockFileError(Exception):
    """A block file's bytes are no valid block. ``fault`` says why, the message what was found."""

    def __init__(self, fault: BlockFault, message: str) -> None:
        super().__init__(f"{fault.value}: {message}")
        self.fault = fault


@dataclass(frozen=True)
class BlockHeader:
    """The header page's fields. ``namespace`` is 32 hexadecimal digits, ``key`` 16 bytes."""

    namespace: str
    key: bytes
    payload_bytes: int
    checksum: int
    checksum_kind: Checksum = CHECKSUM


def file_bytes(payload_bytes: int) -> int:
    """Size of the file, and of a host slot, for a payload of ``payload_bytes``. Pure."""
    return PAGE_BYTES + -(-payload_bytes // PAGE_BYTES) * PAGE_BYTES


def checksum_of(payload: bytes | memoryview, kind: Checksum = CHECKSUM) -> int:
    """The payload's checksum. Pure; releases the interpreter lock while it runs.

    Raises:
        BlockFileError: this interpreter lacks what ``kind`` needs.
    """
    if kind is Checksum.CRC32:
        return zlib.crc32(payload)
    if xxhash is None:
        raise BlockFileError(
            BlockFault.BAD_VERSION, "its checksum is XXH3-64, which needs the package xxhash"
        )
    digest: int = xxhash.xxh3_64_intdigest(payload)
    return digest


def pack_header(header: BlockHeader) -> bytes:
    """The 4096-byte header page. Pure."""
    namespace = bytes.fromhex(header.namespace)
    if len(namespace) != NAMESPACE_BYTES or len(header.key) != KEY_BYTES:
        raise ValueError(
            f"namespace has {len(namespace)} bytes and key {len(header.key)}; both must have 16"
        )
    fields = _FIELDS.pack(
        MAGIC,
        FORMAT_VERSION,
        PAGE_BYTES,
        namespace,
        header.key,
        header.payload_bytes,
        header.checksum,
        header.checksum_kind,
    )
    return (fields + _HEADER_CRC.pack(zlib.crc32(fields))).ljust(PAGE_BYTES, b"\0")


def parse_header(page: bytes | memoryview) -> BlockHeader:
    """Reads a header page.

    Raises:
        BlockFileError: the page is short, not of this format, or its own checksum does not match.
    """
    if len(page) < PAGE_BYTES:
        raise BlockFileError(
            BlockFault.TRUNCATED, f"{len(page)} bytes, a header page has {PAGE_BYTES}"
        )
    fields = bytes(page[: _FIELDS.size])
    magic, version, header_bytes, namespace, key, length, checksum, kind = _FIELDS.unpack(fields)
    if magic != MAGIC:
        raise BlockFileError(BlockFault.BAD_MAGIC, f"magic {magic!r}, expected {MAGIC!r}")
    if version != FORMAT_VERSION or header_bytes != PAGE_BYTES:
        raise BlockFileError(
            BlockFault.BAD_VERSION, f"version {version}, this reader knows {FORMAT_VERSION}"
        )
    (header_crc,) = _HEADER_CRC.unpack(page[_FIELDS.size : _FIELDS.size + _HEADER_CRC.size])
    if header_crc != zlib.crc32(fields):
        raise BlockFileError(BlockFault.BAD_HEADER, "the header's own checksum does not match")
    if kind not in list(Checksum):
        raise BlockFileError(BlockFault.BAD_VERSION, f"unknown kind of checksum, {kind}")
    return BlockHeader(namespace.hex(), key, length, checksum, Checksum(kind))


def verify(content: memoryview, *, namespace: str, key: bytes, payload_bytes: int) -> None:
    """Checks a whole file's bytes (header page, payload, padding) against what was asked for. Pure.

    Raises:
        BlockFileError: anything differs; the payload must then not be used.
    """
    header = parse_header(content[:PAGE_BYTES])
    if header.namespace != namespace:
        raise BlockFileError(
            BlockFault.WRONG_NAMESPACE, f"written for {header.namespace}, expected {namespace}"
        )
    if header.key != key:
        raise BlockFileError(
            BlockFault.WRONG_KEY, f"holds {header.key.hex()}, expected {key.hex()}"
        )
    if header.payload_bytes != payload_bytes:
        raise BlockFileError(
            BlockFault.WRONG_LENGTH,
            f"payload of {header.payload_bytes} bytes, expected {payload_bytes}",
        )
    _verify_payload(content, header)


def read_block(path: Path) -> tuple[BlockHeader, bytes]:
    """Reads and verifies one file; returns its header and its payload without padding.

    Raises:
        BlockFileError: the bytes are not a valid block.
        OSError: the file cannot be read.
    """
    content = path.read_bytes()
    header = parse_header(content)
    _verify_payload(memoryview(content), header)
    return header, content[PAGE_BYTES : PAGE_BYTES + header.payload_bytes]


def write_block(path: Path, header: BlockHeader, payload: bytes) -> BlockHeader:
    """Writes one file atomically (temporary file, then rename), mode 0600.

    Length and checksum are computed from ``payload``; those in ``header`` are ignored, not the
    kind of checksum. Returns the header as written.
    """
    kind = header.checksum_kind
    written = BlockHeader(
        header.namespace, header.key, len(payload), checksum_of(payload, kind), kind
    )
    content = (pack_header(written) + payload).ljust(file_bytes(len(payload)), b"\0")
    partial = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    return written


def _verify_payload(content: memoryview, header: BlockHeader) -> None:
    end = PAGE_BYTES + header.payload_bytes
    if len(content) < end:
        raise BlockFileError(
            BlockFault.TRUNCATED, f"{len(content)} bytes, header and payload need {end}"
        )
    found = checksum_of(content[PAGE_BYTES:end], header.checksum_kind)
    if found != header.checksum:
        raise BlockFileError(
            BlockFault.BAD_CHECKSUM,
            f"payload checksum {found:x}, the header says {header.checksum:x}",
        )
