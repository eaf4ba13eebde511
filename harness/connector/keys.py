"""Names KV blocks by content. Standard library only; usable outside vLLM.

A block's key is a chained hash: it covers the namespace, every token from the start of the prompt
to the end of the block, and whatever else changes the KV (cache salt, LoRA adapter, images). Equal
keys therefore mean equal KV. vLLM's own block hashes are not used: in some versions they differ
with every process start, and they are a pickle of Python objects, which is no contract.

    root  = H("kvgate-chain-1" || namespace)
    key_0 = H(root  || tokens of block 0 || extra_0)
    key_i = H(key_{i-1} || tokens of block i || extra_i)

H is BLAKE2b with 16 bytes of output; tokens are unsigned 32-bit little endian; extra is one byte 0
for none, else one byte 1 and its canonical JSON.

To find the file of block ``i`` of a prompt from outside: read ``namespace`` and ``block_tokens``
from ``<directory>/<namespace>/config.json``, then ``block_path(directory, namespace,
chain_keys(namespace, token_ids, block_tokens)[i])``.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.connector.blockfile import KEY_BYTES

# What a namespace's name is made of. A change makes older directories misses: their names are then
# names of nothing. Version 1 lacked all of the configuration but a few settings.
NAMESPACE_VERSION = 2
_ROOT_TAG = b"kvgate-chain-1"
CONFIG_NAME = "config.json"
BLOCK_SUFFIX = ".kv"


def namespace_of(fingerprint: Mapping[str, Any]) -> str:
    """Names everything that changes KV bytes, as 32 hexadecimal digits. Pure.

    Args:
        fingerprint: JSON-compatible; equal content gives an equal name, whatever the order.
    """
    text = json.dumps(fingerprint, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=KEY_BYTES).hexdigest()


def root_key(namespace: str) -> bytes:
    """The chain's start, before any token. Pure."""
    return hashlib.blake2b(_ROOT_TAG + bytes.fromhex(namespace), digest_size=KEY_BYTES).digest()


def next_key(parent: bytes, token_ids: Sequence[int], extra: Sequence[Any] | None = None) -> bytes:
    """The key of the block of ``token_ids`` that follows the block ``parent``. Pure."""
    digest = hashlib.blake2b(parent, digest_size=KEY_BYTES)
    digest.update(struct.pack(f"<{len(token_ids)}I", *token_ids))
    digest.update(_canonical(extra))
    return digest.digest()


def chain_keys(
    namespace_fingerprint: str,
    token_ids: Sequence[int],
    block_tokens: int,
    extra: Mapping[int, Sequence[Any]] | None = None,
) -> list[bytes]:
    """The keys of all full blocks of a prompt, in order. Pure.

    Args:
        namespace_fingerprint: ``namespace`` of the directory's config.json.
        token_ids: the prompt; tokens after the last full block are ignored.
        block_tokens: tokens per block, ``block_tokens`` of config.json.
        extra: by block index, what else the KV of that block depends on, as vLLM lists it: for
            instance ``{0: (("cache_salt", "abc"),)}``. None for plain text prompts.
    """
    if block_tokens < 1:
        raise ValueError(f"block_tokens is {block_tokens}; a block holds at least one token")
    keys: list[bytes] = []
    parent = root_key(namespace_fingerprint)
    for index in range(len(token_ids) // block_tokens):
        tokens = token_ids[index * block_tokens : (index + 1) * block_tokens]
        parent = next_key(parent, tokens, (extra or {}).get(index))
        keys.append(parent)
    return keys


def rank_directory(directory: Path, namespace: str, rank: int = 0) -> Path:
    """Where one tensor-parallel rank keeps its blocks. Pure."""
    return directory / namespace / f"r{rank}"


def block_path(directory: Path, namespace: str, key: bytes, rank: int = 0) -> Path:
    """The file of a block: ``<directory>/<namespace>/r<rank>/<2 digits>/<32 digits>.kv``. Pure."""
    return rank_directory(directory, namespace, rank).joinpath(*block_names(key))


def block_names(key: bytes) -> tuple[str, str]:
    """A block's bucket directory and file name below the rank's directory. Pure."""
    name = key.hex()
    return name[:2], name + BLOCK_SUFFIX


def is_block_name(name: str) -> bool:
    """Whether a file of this name would be a block's. Pure."""
    return name.endswith(BLOCK_SUFFIX) and len(name) == 2 * KEY_BYTES + len(BLOCK_SUFFIX)


def _canonical(extra: Sequence[Any] | None) -> bytes:
    if not extra:
        return b"\0"
    text = json.dumps(extra, separators=(",", ":"), sort_keys=True, default=_encode_leaf)
    return b"\1" + text.encode()


def _encode_leaf(value: object) -> object:
    # Only bytes occur beside JSON's own types (digests of prompt embeddings). Anything else must
    # fail: a repr with an address in it would make a key that no later process finds again.
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": bytes(value).hex()}
    raise TypeError(f"cannot name a block by a {type(value).__name__}")
