"""The block file format and every way a file can be wrong."""

from __future__ import annotations

import stat
import struct
import zlib
from pathlib import Path

import pytest

from harness.connector.blockfile import (
    PAGE_BYTES,
    BlockFault,
    BlockFileError,
    BlockHeader,
    Checksum,
    checksum_of,
    file_bytes,
    pack_header,
    parse_header,
    read_block,
    verify,
    write_block,
)

NAMESPACE = "0f" * 16
KEY = b"k" * 16
PAYLOAD = bytes(range(256)) * 20  # 5120 bytes: two padded pages


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "block.kv"
    write_block(path, BlockHeader(NAMESPACE, KEY, 0, 0), PAYLOAD)
    return path


def _damage(path: Path, offset: int, replacement: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[offset : offset + len(replacement)] = replacement
    path.write_bytes(content)


def _fault(path: Path) -> BlockFault:
    with pytest.raises(BlockFileError) as caught:
        read_block(path)
    return caught.value.fault


def test_round_trip(path: Path) -> None:
    header, payload = read_block(path)
    assert payload == PAYLOAD
    assert header == BlockHeader(NAMESPACE, KEY, len(PAYLOAD), checksum_of(PAYLOAD))


def test_file_is_private_padded_and_alone(path: Path) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_size == file_bytes(len(PAYLOAD)) == 3 * PAGE_BYTES
    assert list(path.parent.iterdir()) == [path]


def test_golden_header() -> None:
    page = pack_header(BlockHeader(NAMESPACE, KEY, 5120, 0x01020304, Checksum.XXH3_64))
    assert page[:68].hex() == (
        "4b5647424c4f434b" + "02000000" + "00100000" + "0f" * 16 + "6b" * 16
        + "0014000000000000" + "0403020100000000" + "02000000"
    )  # fmt: skip
    assert not any(page[72:])
    assert len(page) == PAGE_BYTES


@pytest.mark.parametrize(
    ("offset", "replacement", "fault"),
    [
        (0, b"X", BlockFault.BAD_MAGIC),
        (8, b"\x01", BlockFault.BAD_VERSION),
        (12, b"\x01", BlockFault.BAD_VERSION),
        (20, b"\xff", BlockFault.BAD_HEADER),  # namespace without its checksum
        (64, b"\x01", BlockFault.BAD_HEADER),  # another kind of checksum
        (69, b"\xff", BlockFault.BAD_HEADER),  # the checksum itself
        (PAGE_BYTES, b"\xff", BlockFault.BAD_CHECKSUM),  # first payload byte
        (PAGE_BYTES + len(PAYLOAD) - 1, b"\x00", BlockFault.BAD_CHECKSUM),  # last payload byte
    ],
)
def test_damage_is_found(path: Path, offset: int, replacement: bytes, fault: BlockFault) -> None:
    _damage(path, offset, replacement)
    assert _fault(path) is fault


@pytest.mark.parametrize(
    ("kind", "content", "checksum"),
    [
        (Checksum.CRC32, b"123456789", 0xCBF43926),  # the check value of every CRC catalogue
        (Checksum.XXH3_64, b"", 0x2D06800538D394C2),  # xxHash's own self-test, seed 0
    ],
)
def test_checksums_are_the_published_ones(kind: Checksum, content: bytes, checksum: int) -> None:
    assert checksum_of(content, kind) == checksum


@pytest.mark.parametrize("kind", Checksum)
def test_either_checksum_guards_a_file(path: Path, kind: Checksum) -> None:
    write_block(path, BlockHeader(NAMESPACE, KEY, 0, 0, kind), PAYLOAD)
    assert read_block(path)[0].checksum_kind is kind
    _damage(path, PAGE_BYTES + 7, b"\xff")
    assert _fault(path) is BlockFault.BAD_CHECKSUM


def test_an_unknown_kind_of_checksum_is_no_block(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[64:68] = struct.pack("<I", 3)
    content[68:72] = struct.pack("<I", zlib.crc32(content[:68]))
    path.write_bytes(content)
    assert _fault(path) is BlockFault.BAD_VERSION


def test_without_xxhash_its_files_are_not_believed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.connector.blockfile.xxhash", None)
    assert _fault(path) is BlockFault.BAD_VERSION
    write_block(path, BlockHeader(NAMESPACE, KEY, 0, 0, Checksum.CRC32), PAYLOAD)
    assert read_block(path)[1] == PAYLOAD


@pytest.mark.parametrize("size", [0, 100, PAGE_BYTES, PAGE_BYTES + len(PAYLOAD) - 1])
def test_torn_file_is_found(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])
    assert _fault(path) is BlockFault.TRUNCATED


def test_padding_carries_no_meaning(path: Path) -> None:
    _damage(path, PAGE_BYTES + len(PAYLOAD), b"\xff")
    assert read_block(path)[1] == PAYLOAD


@pytest.mark.parametrize(
    ("namespace", "key", "payload_bytes", "fault"),
    [
        ("00" * 16, KEY, len(PAYLOAD), BlockFault.WRONG_NAMESPACE),
        (NAMESPACE, b"x" * 16, len(PAYLOAD), BlockFault.WRONG_KEY),
        (NAMESPACE, KEY, len(PAYLOAD) - 1, BlockFault.WRONG_LENGTH),
    ],
)
def test_another_block_is_refused(
    path: Path, namespace: str, key: bytes, payload_bytes: int, fault: BlockFault
) -> None:
    with pytest.raises(BlockFileError) as caught:
        verify(
            memoryview(path.read_bytes()),
            namespace=namespace,
            key=key,
            payload_bytes=payload_bytes,
        )
    assert caught.value.fault is fault


def test_a_replaced_payload_with_a_fresh_checksum_is_accepted(path: Path) -> None:
    """The negative controls rely on it: the checksum finds damage, not forgery."""
    header, _ = read_block(path)
    write_block(path, header, bytes(len(PAYLOAD)))
    verify(memoryview(path.read_bytes()), namespace=NAMESPACE, key=KEY, payload_bytes=len(PAYLOAD))
    assert read_block(path)[1] == bytes(len(PAYLOAD))


def test_parse_header_needs_a_whole_page() -> None:
    with pytest.raises(BlockFileError, match="truncated"):
        parse_header(b"KVGBLOCK")


def test_pack_header_refuses_a_short_key() -> None:
    with pytest.raises(ValueError, match="must have 16"):
        pack_header(BlockHeader(NAMESPACE, b"short", 1, 1))


def test_failed_write_leaves_nothing(tmp_path: Path) -> None:
    target = tmp_path / "taken"
    target.mkdir()
    (target / "file").touch()
    with pytest.raises(OSError, match=r"taken"):
        write_block(target, BlockHeader(NAMESPACE, KEY, 0, 0), PAYLOAD)
    assert list(tmp_path.iterdir()) == [target]
