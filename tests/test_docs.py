"""Documentation that is tested: whatever a user can write or read is explained somewhere."""

from __future__ import annotations

import argparse
import re
import tomllib
from importlib import resources
from pathlib import Path

import pytest
from pydantic import BaseModel

from harness.analysis.measures import MEASURES
from harness.campaign.criteria import CriterionSpec, Profile, ValidityBounds
from harness.campaign.generated_model import ModelArchitecture
from harness.campaign.reading import bundled_campaigns, load_campaign
from harness.campaign.sections import (
    Arm,
    Campaign,
    ColdRecovery,
    CriterionOverride,
    Model,
    Parties,
    Server,
)
from harness.cli.main import _parser
from harness.cli.reasons_page import reasons_markdown
from harness.verdicts import REASON_TEXTS, ReasonCode

ROOT = Path(__file__).resolve().parent.parent
DOCS = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
}
TEXT = "\n".join(DOCS.values())


def is_explained(word: str) -> bool:
    """The word stands in code: in backticks, as a key before an = sign, or as a section."""
    word = re.escape(word)
    in_backticks = rf"`(?:[\w.<>-]+\.)?{word}(?:`| =)"
    in_a_block = rf"^\s*#?\s*{word}\s*="
    in_a_section = rf"(?:^|`)\[(?:[\w.<>-]+\.)?{word}(?:\.[\w.<>-]+)?\]"
    return bool(re.search(f"{in_backticks}|{in_a_block}|{in_a_section}", TEXT, re.MULTILINE))


def verbs() -> dict[str, argparse.ArgumentParser]:
    (action,) = [a for a in _parser()._actions if isinstance(a, argparse._SubParsersAction)]
    return dict(action.choices)


def keys_of(section: type[BaseModel]) -> list[str]:
    hidden = {"name"} if section is Arm else {"id"} if section is CriterionSpec else set()
    return [key for key in section.model_fields if key not in hidden]


@pytest.mark.parametrize("verb", verbs())
def test_every_command_is_explained(verb: str) -> None:
    assert f"kvgate {verb}" in TEXT


@pytest.mark.parametrize(
    ("verb", "flag"),
    [
        (verb, flag)
        for verb, parser in verbs().items()
        for action in parser._actions
        for flag in action.option_strings
        if flag.startswith("--") and flag != "--help"
    ],
)
def test_every_flag_is_explained(verb: str, flag: str) -> None:
    assert re.search(rf"{flag}\b", TEXT), f"{flag} of kvgate {verb}"


@pytest.mark.parametrize(
    ("section", "key"),
    [
        pytest.param(section, key, id=f"{section.__name__}.{key}")
        for section in (Campaign, Model, Server, Arm, ColdRecovery, CriterionOverride, Parties)
        for key in keys_of(section)
    ],
)
def test_every_campaign_key_is_explained(section: type[BaseModel], key: str) -> None:
    assert is_explained(key)


@pytest.mark.parametrize("key", ModelArchitecture.__dataclass_fields__)
def test_every_key_of_the_model_is_explained(key: str) -> None:
    assert is_explained(key)


@pytest.mark.parametrize(
    ("section", "key"),
    [
        pytest.param(section, key, id=f"{section.__name__}.{key}")
        for section in (Profile, ValidityBounds, CriterionSpec)
        for key in keys_of(section)
    ],
)
def test_every_criteria_key_is_explained(section: type[BaseModel], key: str) -> None:
    assert is_explained(key)


CRITERIA = tomllib.loads((resources.files("gates") / "criteria.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("profile", CRITERIA["profiles"])
def test_every_profile_is_explained(profile: str) -> None:
    assert is_explained(profile)


@pytest.mark.parametrize(
    "criterion",
    sorted({name for profile in CRITERIA["profiles"].values() for name in profile["criteria"]}),
)
def test_every_criterion_is_explained(criterion: str) -> None:
    assert is_explained(criterion)


@pytest.mark.parametrize("measure", MEASURES)
def test_every_measure_is_explained(measure: str) -> None:
    assert is_explained(measure)


@pytest.mark.parametrize("name", bundled_campaigns())
def test_every_bundled_campaign_and_its_arms_are_explained(name: str) -> None:
    assert is_explained(name)
    campaign, _text = load_campaign(name)
    assert [arm for arm in campaign.arms if not is_explained(arm)] == []


@pytest.mark.parametrize("code", ReasonCode, ids=lambda code: code.value)
def test_every_reason_is_explained(code: ReasonCode) -> None:
    assert REASON_TEXTS[code].meaning.endswith(".")
    assert REASON_TEXTS[code].remedy.endswith((".", "?"))
    assert f"`{code.value}`" in DOCS["docs/reasons.md"]


def test_the_reasons_page_is_made_from_the_code() -> None:
    assert DOCS["docs/reasons.md"] == reasons_markdown(), (
        "run: python -m harness.cli.reasons_page > docs/reasons.md"
    )


@pytest.mark.parametrize("page", DOCS)
def test_links_between_pages_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", DOCS[page]):
        if "://" not in target:
            assert (ROOT / page).parent.joinpath(target).exists(), target


def test_the_tree_of_the_architecture_is_the_tree() -> None:
    block = DOCS["docs/architecture.md"].partition("## The tree")[2].partition("\n\nFrom a path")[0]
    rows = dict(re.findall(r"^    (\S+)\s+(.+)$", block, re.MULTILINE))
    to_come = {name for name, text in rows.items() if text.startswith("to come")}
    packages = {
        f"{path.parent.relative_to(ROOT).as_posix()}/"
        for top in ("workloads", "reports", "gates", "harness/*")
        for path in ROOT.glob(f"{top}/__init__.py")
    }
    modules = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "harness").glob("*.py")
        if path.name != "__init__.py"
    }
    assert rows.keys() - to_come == packages | modules
    assert not any((ROOT / name).exists() for name in to_come)
    for planned in ("soak", "ledger", "placement", "remote control", "advise"):
        assert planned in block
