"""Texts of a verdict file in another language: titles, rationales, findings of checks, reasons.

The judge writes them in English, once, because a verdict file is the same bytes everywhere. A
locale may have `locales/<locale>_said.toml`: whole phrases, and patterns whose {values} stay as
they were found (or are themselves phrases). What nobody translated is shown as it stands.
"""

from __future__ import annotations

import re
import string
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources

# Of nested phrases (24 repetitions in one list), and of a text: a server's own words may be of any
# length, and patterns of several values must not be tried on those.
_MAX_DEPTH = 30
_MAX_LENGTH = 1000


class Phrases:
    """Whole phrases first, then patterns in their order; the first that fits the whole text."""

    def __init__(self, phrases: Mapping[str, str], patterns: Sequence[tuple[str, str]]) -> None:
        self._phrases = dict(phrases)
        self._patterns = [(_compiled(said), shown) for said, shown in patterns]

    def __contains__(self, text: str) -> bool:
        return self.translated(text) != text

    def translated(self, text: str, depth: int = 0) -> str:
        """The text in this language, or as it stands."""
        if text in self._phrases:
            return self._phrases[text]
        if depth == _MAX_DEPTH or len(text) > _MAX_LENGTH:
            return text
        for pattern, shown in self._patterns:
            if found := pattern.fullmatch(text):
                values = {
                    name: self.translated(value, depth + 1)
                    for name, value in found.groupdict().items()
                }
                return shown.format(**values)
        return text


def load_phrases(locale: str) -> Phrases:
    """The phrases of a locale; none where it has no file of them."""
    source = resources.files("reports").joinpath("locales", f"{locale}_said.toml")
    if not source.is_file():
        return Phrases({}, ())
    content = tomllib.loads(source.read_text(encoding="utf-8"))
    patterns = [(entry["said"], entry["shown"]) for entry in content.get("pattern", [])]
    return Phrases(content.get("phrase", {}), patterns)


def _compiled(said: str) -> re.Pattern[str]:
    parts = []
    for literal, name, _, _ in string.Formatter().parse(said):
        parts.append(re.escape(literal))
        if name is not None:
            parts.append(f"(?P<{name}>.+?)")
    return re.compile("".join(parts))
