"""Locales: complete, equal in keys, loud about what is missing."""

from __future__ import annotations

import string

import pytest

from harness.verdicts import REASON_TEXTS, ReasonCode
from reports.texts import LOCALES, MissingText, Texts, load


def test_locales_have_the_same_keys() -> None:
    assert set(load("en")) == set(load("zh"))


@pytest.mark.parametrize("locale", LOCALES)
def test_every_reason_has_meaning_and_remedy(locale: str) -> None:
    texts = load(locale)
    assert all(texts.reason(code).meaning and texts.reason(code).remedy for code in ReasonCode)


def test_english_reasons_are_those_of_the_judge() -> None:
    texts = load("en")
    assert {code: texts.reason(code) for code in ReasonCode} == REASON_TEXTS


def test_translations_name_the_same_values() -> None:
    english, chinese = load("en"), load("zh")
    assert {key: _fields(english, key) for key in english} == {
        key: _fields(chinese, key) for key in english
    }


def test_chinese_texts_are_translated() -> None:
    english, chinese = load("en"), load("zh")
    same = {key for key in english if english._entries[key] == chinese._entries[key]}
    assert same <= {"word.none", "terminal.n"}


def test_missing_key_fails() -> None:
    with pytest.raises(MissingText, match=r"no\.such"):
        load("en")("no.such")


def test_missing_value_fails() -> None:
    with pytest.raises(MissingText, match="greeting"):
        Texts("en", {"greeting": "hello {name}"})("greeting")


def test_unknown_locale_names_the_known_ones() -> None:
    with pytest.raises(MissingText, match="en, zh"):
        load("fr")


def _fields(texts: Texts, key: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(texts._entries[key]) if name}
