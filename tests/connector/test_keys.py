"""Content keys: golden values pin the format, because files outlive the program."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.connector.keys import block_path, chain_keys, namespace_of, next_key, root_key

NAMESPACE = "000102030405060708090a0b0c0d0e0f"


def test_golden_chain() -> None:
    keys = chain_keys(NAMESPACE, [1, 2, 3, 4, 5, 6, 7, 8, 9], 4)
    assert [key.hex() for key in keys] == [
        "54f58f6f354af9d862284f5468f92f58",
        "b559ca4d09e36fc1a9049ee2583dcb44",
    ]


def test_golden_chain_with_salt() -> None:
    keys = chain_keys(NAMESPACE, [1, 2, 3, 4, 5, 6, 7, 8], 4, {0: (("cache_salt", "s"),)})
    assert [key.hex() for key in keys] == [
        "eee9647d65d71e8307aab0b8dbeadee5",
        "4860d7d84b5f5b6162378eb15d8cd9df",
    ]


def test_golden_namespace() -> None:
    assert namespace_of({"b": [1, None], "a": "x"}) == "d92cfda2ee000de2a5d2cad81143ebeb"


def test_namespace_ignores_the_order_of_keys() -> None:
    assert namespace_of({"a": 1, "b": 2}) == namespace_of({"b": 2, "a": 1})


def test_partial_block_has_no_key() -> None:
    assert chain_keys(NAMESPACE, [1, 2, 3], 4) == []


def test_a_key_covers_every_token_before_it() -> None:
    first = chain_keys(NAMESPACE, [1, 2, 3, 4], 2)
    other = chain_keys(NAMESPACE, [9, 2, 3, 4], 2)
    assert first[1] != other[1]


def test_another_namespace_gives_other_keys() -> None:
    assert chain_keys(NAMESPACE, [1, 2], 2) != chain_keys("f" * 32, [1, 2], 2)


def test_a_salt_in_the_first_block_changes_all_keys() -> None:
    plain = chain_keys(NAMESPACE, [1, 2, 3, 4], 2)
    salted = chain_keys(NAMESPACE, [1, 2, 3, 4], 2, {0: (("cache_salt", "s"),)})
    assert not set(plain) & set(salted)


def test_bytes_are_a_legal_extra_key() -> None:
    assert next_key(root_key(NAMESPACE), [1], (("embeds", b"\0"),)) != next_key(
        root_key(NAMESPACE), [1], (("embeds", b"\1"),)
    )


def test_an_extra_key_without_a_stable_name_is_refused() -> None:
    with pytest.raises(TypeError, match="object"):
        next_key(root_key(NAMESPACE), [1], (object(),))


def test_block_tokens_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="block_tokens is 0"):
        chain_keys(NAMESPACE, [1], 0)


def test_block_path() -> None:
    path = block_path(Path("/d"), NAMESPACE, bytes(range(16)))
    assert path == Path(f"/d/{NAMESPACE}/r0/00/{bytes(range(16)).hex()}.kv")


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 9), st.integers(0, 40))
def test_keys_of_a_prefix_are_a_prefix_of_the_keys(
    tokens: list[int], block_tokens: int, cut: int
) -> None:
    whole = chain_keys(NAMESPACE, tokens, block_tokens)
    part = chain_keys(NAMESPACE, tokens[:cut], block_tokens)
    assert whole[: len(part)] == part
