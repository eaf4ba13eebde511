"""Where a key stands in a TOML file, and which known word a misspelt one is nearest to. Pure.

tomllib tells no lines. The text was parsed by it before, so this reader only has to skip values:
strings, comments and brackets.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable

_PART = r"""(?:"(?:[^"\\\n]|\\.)*"|'[^'\n]*'|[A-Za-z0-9_-]+)"""
_KEY = re.compile(rf"{_PART}(?:[ \t]*\.[ \t]*{_PART})*")
_HEADER = re.compile(rf"\[\[?[ \t]*({_KEY.pattern})[ \t]*\]")
_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
# What a value is made of, longest first; anything else is one character.
_TOKEN = re.compile(
    r'"""(?:[^\\]|\\.)*?"""+|' r"'''.*?'''+|" r'"(?:[^"\\\n]|\\.)*"|' r"'[^'\n]*'|#[^\n]*|.|\n",
    re.DOTALL,
)


def key_lines(text: str) -> dict[str, int]:
    """Line of each table header and key, by its dotted path. Of one that comes again, the first."""
    lines: dict[str, int] = {}
    table: list[str] = []
    at = 0
    while (at := _matched(_BLANK, text, at)) < len(text):
        header, key = _HEADER.match(text, at), _KEY.match(text, at)
        if header is not None:
            table = path = _parts(header.group(1))
            end = header.end()
            while end < len(text) and text[end] in "] \t":
                end += 1
        elif key is not None:
            path = [*table, *_parts(key.group())]
            end = _value_end(text, key.end())
        else:
            break  # not TOML; tomllib has said so
        line = text.count("\n", 0, at) + 1
        for length in range(len(path), 0, -1):
            lines.setdefault(".".join(path[:length]), line)
        at = end
    return lines


def located(label: str, lines: dict[str, int], problem: str) -> str:
    """``label:line: problem``, by the key that the problem opens with; of its table if it has none.

    A problem of the whole file has no line.
    """
    key = problem.partition(": ")[0]
    while key and key not in lines:
        key = key.rpartition(".")[0]
    return f"{label}:{lines[key]}: {problem}" if key else f"{label}: {problem}"


def nearest(found: str, known: Iterable[str]) -> str:
    """The end of a message: the known word that this one is nearest to; empty when none is near."""
    near = difflib.get_close_matches(found, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _parts(key: str) -> list[str]:
    parts = [part.strip() for part in re.findall(_PART, key)]
    return [tomllib.loads(f"x = {p}")["x"] if p[0] in "\"'" else p for p in parts]


def _matched(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return at if found is None else found.end()


def _value_end(text: str, at: int) -> int:
    """After the value that begins here: the end of its line, outside all brackets."""
    depth = 0
    while at < len(text):
        token = _TOKEN.match(text, at)
        assert token is not None
        at = token.end()
        depth += (token.group() in "[{") - (token.group() in "]}")
        if token.group() == "\n" and depth <= 0:
            break
    return at
