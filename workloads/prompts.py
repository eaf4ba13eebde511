"""Prompts as token ids, made from a recipe. Pure; the same recipe gives the same ids everywhere."""

from __future__ import annotations

import hashlib

import numpy as np

from harness.records import PromptRecipe


def token_ids(recipe: PromptRecipe) -> list[int]:
    """``recipe.tokens`` ids, uniform in [0, vocab_size).

    SHAKE-256 of (seed, session) as a stream of 32-bit numbers, modulo the vocabulary: no
    dependence on the random module of any version. Two sessions share no block but by a chance of
    about 2**-1000.
    """
    stream = hashlib.shake_256(f"kvgate/{recipe.seed}/{recipe.session}".encode())
    words = np.frombuffer(stream.digest(4 * recipe.tokens), dtype="<u4")
    ids: list[int] = (words % recipe.vocab_size).tolist()
    return ids
