"""Fixed texts of the report in one locale. A missing key raises; there is no fallback language.

English reasons come from `harness.verdicts.REASON_TEXTS`, so that they are written once; every
other text lies in `locales/<locale>.toml`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any

from harness.verdicts import REASON_TEXTS, ReasonCode, ReasonText
from reports.phrases import Phrases, load_phrases

LOCALES = ("en", "zh")


class MissingText(LookupError):
    """A locale has no text for a key: our own defect, never the evidence's."""


class Texts:
    """Looks texts up by dotted key and fills in named values."""

    def __init__(
        self, locale: str, entries: Mapping[str, str], said: Phrases | None = None
    ) -> None:
        self.locale = locale
        self._entries = dict(entries)
        self._said = said or Phrases({}, ())

    def __call__(self, key: str, **values: object) -> str:
        """Raises MissingText when the locale lacks the key or the text names a value not given."""
        try:
            return self._entries[key].format(**values)
        except KeyError as error:
            raise MissingText(f"locale {self.locale!r}: no text {key!r} with {values!r}") from error

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def reason(self, code: ReasonCode) -> ReasonText:
        """Meaning and remedy of a reason."""
        return ReasonText(self(f"reason.{code.value}.meaning"), self(f"reason.{code.value}.remedy"))

    def said(self, text: str) -> str:
        """A text of the verdict file in this language; as it stands where nobody translated it."""
        return self._said.translated(text)

    def listing(self, items: tuple[str, ...]) -> str:
        """Items joined by this language's comma."""
        return self("word.comma").join(items)


def load(locale: str) -> Texts:
    """Reads one locale. Raises MissingText, naming the known locales, for any other."""
    if locale not in LOCALES:
        raise MissingText(f"no locale {locale!r}; known: {', '.join(LOCALES)}")
    source = resources.files("reports").joinpath("locales", f"{locale}.toml")
    entries = dict(_flat(tomllib.loads(source.read_text(encoding="utf-8")), ""))
    if locale == "en":
        for code, text in REASON_TEXTS.items():
            entries[f"reason.{code.value}.meaning"] = text.meaning
            entries[f"reason.{code.value}.remedy"] = text.remedy
    return Texts(locale, entries, load_phrases(locale))


def _flat(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)
