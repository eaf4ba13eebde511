"""Lines of keys, on texts with everything that TOML may put in a reader's way."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from harness.campaign.places import key_lines, located, nearest
from harness.campaign.reading import bundled_campaigns, load_campaign

TEXT = r"""a = 1  # x = 2
b.c = "= ] # no comment"

["q.r" . 't'] # [no header]
list = [ # [
  "]", '[', [1, 2],
  { k = 1 },
]
long = '''
d = 4
[e]
'''
also = QQQ
f = \""5
QQQ
date = 1979-05-27T07:32:00Z
"sp ace" = { x = 1, y = [1] }

[[many]]
g = 1
[[many]]
g = 2
""".replace("QQQ", '"' * 3)


def test_lines_of_keys() -> None:
    tomllib.loads(TEXT)
    assert key_lines(TEXT) == {
        "a": 1,
        "b.c": 2,
        "b": 2,
        "q.r.t": 4,
        "q.r": 4,
        "q.r.t.list": 5,
        "q.r.t.long": 9,
        "q.r.t.also": 13,
        "q.r.t.date": 16,
        "q.r.t.sp ace": 17,
        "many": 19,
        "many.g": 20,
    }


@pytest.mark.parametrize("name", bundled_campaigns())
def test_every_key_of_a_bundled_campaign_has_the_line_it_stands_in(name: str) -> None:
    _campaign, text = load_campaign(name)
    lines = text.splitlines()
    found = key_lines(text)

    def keys(table: dict[str, Any], path: str = "") -> list[str]:
        own = [f"{path}{key}" for key in table]
        inner = [keys(v, f"{path}{k}.") for k, v in table.items() if isinstance(v, dict)]
        return own + [key for found in inner for key in found]

    # Keys of inline tables have the line of their table.
    for key in keys(tomllib.loads(text)):
        line = int(located("f", found, f"{key}: wrong").split(":")[1])
        assert key.rpartition(".")[2] in lines[line - 1], key


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        ("a: wrong", "f:1: a: wrong"),
        ("q.r.t.list.2.k: wrong", "f:5: q.r.t.list.2.k: wrong"),
        ("q.r.t.absent: found nothing", "f:4: q.r.t.absent: found nothing"),
        ("nowhere: found nothing", "f: nowhere: found nothing"),
        ("(whole file): wrong", "f: (whole file): wrong"),
    ],
)
def test_a_problem_has_the_line_of_its_key_or_its_table(problem: str, expected: str) -> None:
    assert located("f", key_lines(TEXT), problem) == expected


def test_the_nearest_known_word() -> None:
    assert nearest("conector", ["dtype", "connector"]) == "; did you mean 'connector'?"
    assert nearest("zzz", ["dtype", "connector"]) == ""
