"""Mutated block files: never accepted with another payload, never an unexpected exception.

What is covered by the two checksums: header bytes 0 to 71 and the payload. What is not: bytes 72 to
4095 and the padding after the payload; they carry nothing, and a file that differs there alone is
read as before. Length: ``FileStore.read_into`` needs at least a block's size (longer files are read
as far as a block goes), ``kvgate tier verify`` exactly it, ``read_block`` header and payload.
``read_block`` is not told a name, so it may return any block that was once written as it is;
``FileStore`` and ``verify`` hold the file to its name.

Not covered: forgery. Who computes fresh checksums is believed (see ``blockfile``). The
payload's XXH3-64 misses damage of any kind once in 2**64 times. CRC-32, the header's, finds every
burst of up to 32 bits and every change of up to three bits in so small a page.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from harness.connector.blockfile import (
    PAGE_BYTES,
    BlockFileError,
    BlockHeader,
    file_bytes,
    read_block,
    verify,
    write_block,
)
from harness.connector.file_store import FileStore
from harness.connector.keys import block_path, namespace_of
from harness.tier.upkeep import Outcome, check_files

FACTS = {"model": "fuzzed"}
NAMESPACE = namespace_of(FACTS)
KEY, OTHER_KEY = b"k" * 16, b"o" * 16
HEADER_BYTES = 72
# Padded by almost a page, by one byte, and not at all.
PAYLOAD_SIZES = (100, PAGE_BYTES - 1, 2 * PAGE_BYTES)

_CONFIG_KEYS = (
    "format_version",
    "namespace",
    "payload_bytes",
    "fingerprint",
    "versions",
    "layers",
    "platform",
    "weights",
    "block_tokens",
    "kv_heads",
)

Mutation = tuple[Any, ...]


class Target:
    """One block file in a directory of its own, and the ways to read it."""

    def __init__(self, root: Path, payload_bytes: int) -> None:
        self.root = root
        self.payload = bytes(i * 7 % 251 for i in range(payload_bytes))
        self.other_payload = bytes(i * 11 % 241 for i in range(payload_bytes))
        self.store = FileStore(root, NAMESPACE, payload_bytes)
        self.store.open(
            {
                "format_version": 2,
                "namespace": NAMESPACE,
                "payload_bytes": payload_bytes,
                "fingerprint": FACTS,
            }
        )
        self.buffer = memoryview(mmap.mmap(-1, file_bytes(payload_bytes)))
        self.path = block_path(root, NAMESPACE, KEY)
        self.path.parent.mkdir()
        self.other = self._content(OTHER_KEY, self.other_payload)
        self.content = self._content(KEY, self.payload)

    def _content(self, key: bytes, payload: bytes) -> bytes:
        write_block(self.path, BlockHeader(NAMESPACE, key, 0, 0), payload)
        return self.path.read_bytes()

    def is_intact(self, content: bytes) -> bool:
        """Whether everything that is covered is as it was written."""
        end = PAGE_BYTES + len(self.payload)
        return (
            content[:HEADER_BYTES] == self.content[:HEADER_BYTES]
            and content[PAGE_BYTES:end] == self.payload
        )

    def check(self, content: bytes) -> None:
        """All readers on a file of this content; anything but the two errors comes through."""
        self.path.write_bytes(content)
        self._check_store(content)
        self._check_read_block()
        self._check_verify(content)

    def _check_store(self, content: bytes) -> None:
        self.buffer[:] = b"\xaa" * len(self.buffer)
        try:
            self.store.read_into(KEY, self.buffer)
        except (BlockFileError, OSError):
            is_accepted = False
        else:
            is_accepted = True
            assert self.buffer[PAGE_BYTES : PAGE_BYTES + len(self.payload)] == self.payload
        assert is_accepted == (self.is_intact(content) and len(content) >= len(self.content))

    def _check_read_block(self) -> None:
        try:
            header, payload = read_block(self.path)
        except (BlockFileError, OSError):
            return
        assert (header.key, payload) in ((KEY, self.payload), (OTHER_KEY, self.other_payload))

    def _check_verify(self, content: bytes) -> None:
        (result,) = (r for r in check_files(self.root, None, delete=False) if "kv" in r.entry.path)
        is_fine = result.outcome is Outcome.FINE
        assert is_fine == (self.is_intact(content) and len(content) == len(self.content))


@pytest.fixture(scope="module", params=PAYLOAD_SIZES)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target(tmp_path_factory.mktemp("tier"), request.param)


@pytest.fixture(scope="module", params=PAYLOAD_SIZES)
def nameless(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    """As ``target``, without a config.json: the headers alone say how long a payload is."""
    target = Target(tmp_path_factory.mktemp("nameless"), request.param)
    (target.root / NAMESPACE / "config.json").unlink()
    return target


# Offsets and lengths are shares of the file, so that one strategy fits all sizes; half of them fall
# into the header's fields.
_SHARE = st.floats(0, 1, exclude_max=True)
_PLACE = st.one_of(st.integers(0, HEADER_BYTES - 1), st.just(PAGE_BYTES), _SHARE)
_MUTATION: st.SearchStrategy[Mutation] = st.one_of(
    st.tuples(st.just("flip"), _PLACE, st.integers(0, 7)),
    st.tuples(st.just("put"), _PLACE, st.binary(min_size=1, max_size=64)),
    st.tuples(st.just("zero"), _PLACE, _SHARE),
    st.tuples(st.just("swap"), _PLACE, _PLACE, st.integers(1, 64)),
    st.tuples(st.just("cut"), _PLACE),
    st.tuples(st.just("grow"), st.binary(min_size=1, max_size=PAGE_BYTES + 1)),
    st.tuples(st.just("insert"), _PLACE, st.binary(min_size=1, max_size=16)),
    st.tuples(st.just("splice"), _PLACE),
    st.tuples(st.just("random"), st.binary(max_size=2 * PAGE_BYTES)),
    st.just(("other",)),
)


def _at(place: float, size: int) -> int:
    return min(place, size) if isinstance(place, int) else int(place * size)


def mutate(content: bytes, other: bytes, mutations: list[Mutation]) -> bytes:
    """Applies the mutations, in order."""
    for name, *values in mutations:
        changed = bytearray(content)
        at = _at(values[0], len(content)) if values and not isinstance(values[0], bytes) else 0
        if name == "flip" and at < len(content):
            changed[at] ^= 1 << values[1]
        elif name == "put":
            changed[at : at + len(values[1])] = values[1]
        elif name == "zero":
            count = int(values[1] * (len(content) - at))
            changed[at : at + count] = bytes(count)
        elif name == "swap":
            there, count = _at(values[1], len(content)), values[2]
            first, second = content[at : at + count], content[there : there + count]
            changed[at : at + len(second)] = second
            changed[there : there + len(first)] = first
        elif name == "cut":
            del changed[at:]
        elif name == "grow":
            changed += values[0]
        elif name == "insert":
            changed[at:at] = values[1]
        elif name == "splice":
            changed[at:] = other[at:]
        elif name == "random":
            changed = bytearray(values[0])
        elif name == "other":
            changed = bytearray(other)
        content = bytes(changed)
    return content


@settings(deadline=None, max_examples=300)
@given(mutations=st.lists(_MUTATION, min_size=1, max_size=4))
@example(mutations=[("other",)])
@example(mutations=[("splice", PAGE_BYTES)])  # a header with another block's payload
@example(mutations=[("splice", HEADER_BYTES)])
@example(mutations=[("cut", 0)])
@example(mutations=[("grow", b"\0")])
def test_a_mutated_file_is_never_accepted_with_another_payload(
    target: Target, mutations: list[Mutation]
) -> None:
    target.check(mutate(target.content, target.other, mutations))


@settings(deadline=None, max_examples=100)
@given(mutations=st.lists(_MUTATION, min_size=1, max_size=4))
def test_the_same_without_a_configuration(nameless: Target, mutations: list[Mutation]) -> None:
    nameless.check(mutate(nameless.content, nameless.other, mutations))


@settings(deadline=None, max_examples=200)
@given(content=st.binary(max_size=3 * PAGE_BYTES))
def test_random_bytes_are_never_accepted(target: Target, content: bytes) -> None:
    target.check(content)
    target.check(target.content[:8] + content)
    target.check(target.content[:HEADER_BYTES] + content)


def test_every_bit_of_the_header_counts(target: Target) -> None:
    for bit in range(8 * HEADER_BYTES):
        content = mutate(target.content, b"", [("flip", bit // 8, bit % 8)])
        assert not target.is_intact(content)
        target.check(content)


def test_every_byte_of_the_payload_counts(target: Target) -> None:
    """One bit of each byte, and of each byte a different one."""
    content = memoryview(bytearray(target.content))
    size = len(target.payload)
    for index in range(size):
        content[PAGE_BYTES + index] ^= 1 << index % 8
        with pytest.raises(BlockFileError, match="bad_checksum"):
            verify(content, namespace=NAMESPACE, key=KEY, payload_bytes=size)
        if index in (0, size // 2, size - 1):
            target.check(bytes(content))
        content[PAGE_BYTES + index] ^= 1 << index % 8


@pytest.mark.parametrize("size_of", [lambda size: size - 1, lambda size: size // 2, lambda _: 0])
def test_every_shorter_file_is_refused(target: Target, size_of: Callable[[int], int]) -> None:
    content = target.content[: size_of(len(target.content))]
    target.path.write_bytes(content)
    with pytest.raises(BlockFileError, match="truncated"):
        target.store.read_into(KEY, target.buffer)
    target.check(content)


def test_what_is_not_covered_changes_nothing(target: Target) -> None:
    """Unused header bytes and padding, every one of them changed."""
    content = bytearray(target.content)
    end = PAGE_BYTES + len(target.payload)
    for part in (slice(HEADER_BYTES, PAGE_BYTES), slice(end, len(content))):
        content[part] = bytes(byte ^ 0xFF for byte in content[part])
    assert target.is_intact(bytes(content))
    target.check(bytes(content))


@settings(deadline=None, max_examples=200)
@given(content=st.binary(max_size=200), data=st.data())
def test_a_mutated_configuration_raises_nothing(
    target: Target, content: bytes, data: st.DataObject
) -> None:
    path = target.root / NAMESPACE / "config.json"
    whole = path.read_bytes()
    at = data.draw(st.integers(0, len(whole)))
    try:
        for config in (content, whole[:at] + content + whole[at:], whole[:at]):
            path.write_bytes(config)
            list(check_files(target.root, None, delete=False))
    finally:
        path.write_bytes(whole)


@settings(deadline=None, max_examples=200)
@given(
    config=st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.just(NAMESPACE),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(_CONFIG_KEYS),
                inner | st.just(1),
                max_size=6,
            )
        ),
        max_leaves=12,
    )
)
def test_a_configuration_of_wrong_types_raises_nothing(target: Target, config: object) -> None:
    path = target.root / NAMESPACE / "config.json"
    whole = path.read_bytes()
    try:
        path.write_text(json.dumps(config))
        list(check_files(target.root, None, delete=False))
    finally:
        path.write_bytes(whole)
