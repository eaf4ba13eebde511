"""Makes text from evidence harmless to show. Knows neither HTML nor terminals.

Escaping for HTML is the template's job; here go the characters that no medium should get: control
codes (a terminal obeys them), line breaks (a text could forge a line of the report), direction
marks (they reorder what a reader sees), lone surrogates and noncharacters (UTF-8 or XML cannot
hold them).
"""

from __future__ import annotations

import re
import unicodedata
from typing import Any

from harness.records import canonical_json

_HIDDEN = {"Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp"}
_IN_A_TRIAL = re.compile(r"trials/[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)?")
_SPELLED = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}


def clean(text: str) -> str:
    r"""Spells invisible and unwritable characters as \n, \xNN or \uNNNN. Pure."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_visible(character) for character in text)


def show(value: Any) -> str:
    """One line for any JSON value: text as it is, everything else in its canonical spelling."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return clean(canonical_json(value))


def evidence_href(path: str) -> str:
    """Where the page, in ``report/`` of the run, finds a file of a trial; empty for any other."""
    file = path.partition("#")[0]
    return f"../{file}" if _IN_A_TRIAL.fullmatch(file) and ".." not in file else ""


def _visible(character: str) -> str:
    if character in _SPELLED:
        return _SPELLED[character]
    if unicodedata.category(character) not in _HIDDEN:
        return character
    code = ord(character)
    if code > 0xFFFF:
        return f"\\U{code:08x}"
    return f"\\u{code:04x}" if code > 0xFF else f"\\x{code:02x}"
