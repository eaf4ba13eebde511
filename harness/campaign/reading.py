"""Reads campaign, criteria and model files.

All problems of a file are collected and raised at once as `PlanError`; each line names the file,
the key, the value found and the values allowed.
"""

from __future__ import annotations

import json
import re
import tomllib
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError

from harness.campaign.criteria import CriterionSpec, Profile
from harness.campaign.places import key_lines, located, nearest
from harness.campaign.sections import Arm, Campaign
from harness.errors import PlanError


def load_campaign(source: str | Path) -> tuple[Campaign, str]:
    """Campaign and its text, from a path or the name of a bundled one. Raises PlanError."""
    text, label = _read(source, "campaigns", "campaign")
    return parse_campaign(text, label), text


def load_criteria(
    profile: str, source: Path | None = None, *, asked_by: str = "campaign"
) -> tuple[Profile, str]:
    """The profile and the criteria file's text. Raises PlanError."""
    if source is None:
        text = (resources.files("gates") / "criteria.toml").read_text(encoding="utf-8")
        return parse_criteria(text, profile, asked_by=asked_by), text
    try:
        text = source.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError([f"{source}: cannot read the criteria file: {error}"]) from error
    return parse_criteria(text, profile, str(source), asked_by=asked_by), text


def parse_criteria(
    text: str, profile: str, label: str = "criteria.toml", *, asked_by: str = "campaign"
) -> Profile:
    """The named profile of a criteria file. Raises PlanError."""
    content = _toml(text, label)
    if content.get("format") != 1:
        raise PlanError([f"{label}: format: found {content.get('format')!r}; allowed: 1"])
    profiles = content.get("profiles", {})
    if not isinstance(profiles, dict) or profile not in profiles:
        known = ", ".join(sorted(profiles)) or "none"
        near = nearest(profile, profiles if isinstance(profiles, dict) else ())
        raise PlanError(
            [f"{asked_by}: profile: found {profile!r}; allowed, by {label}: {known}{near}"]
        )
    return _parse(Profile, profiles[profile], text, label, under=f"profiles.{profile}")


def parse_campaign(text: str, label: str = "campaign.toml") -> Campaign:
    """A campaign from its text, as stored in a run. Raises PlanError."""
    return _parse(Campaign, _toml(text, label), text, label)


def bundled_campaigns() -> list[str]:
    """Names of the campaigns that come with the package."""
    folder = resources.files("gates") / "campaigns"
    return sorted(
        p.name.removesuffix(".toml") for p in folder.iterdir() if p.name.endswith(".toml")
    )


def _read(source: str | Path, folder: str, what: str) -> tuple[str, str]:
    path = Path(source)
    if path.suffix == ".toml" or path.exists():
        try:
            return path.read_text(encoding="utf-8"), str(source)
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError([f"{source}: cannot read the {what} file: {error}"]) from error
    known = bundled_campaigns()
    if str(source) in known:
        packaged = resources.files("gates") / folder / f"{source}.toml"
        return packaged.read_text(encoding="utf-8"), f"{source}.toml"
    raise PlanError(
        [
            f"{source}: no such {what} file; allowed: a path ending in .toml, or one of "
            f"{', '.join(known)}{nearest(str(source), known)}"
        ]
    )


def _toml(text: str, label: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise PlanError([f"{label}: not TOML: nested too deep"]) from None
    except ValueError as error:  # TOMLDecodeError, and an integer or date that Python cannot hold
        raise PlanError([f"{label}: not TOML: {error}"]) from error


def unit_of(key: str) -> str:
    """The unit that the name of a key ends in, to end a message with; empty for none."""
    for end, unit in (("_s", "seconds"), ("_bytes", "bytes"), ("_tokens", "tokens")):
        if key.endswith(end):
            return f", in {unit}"
    return ""


_Parsed = TypeVar("_Parsed", bound=BaseModel)


def _parse(kind: type[_Parsed], content: Any, text: str, label: str, *, under: str = "") -> _Parsed:
    """``under``: the table of the file that is parsed, where it is not the whole."""
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        lines = key_lines(text)
        problems = [located(label, lines, _problem(kind, item, under)) for item in error.errors()]
        raise PlanError(list(dict.fromkeys(problems))) from error


def _problem(kind: type[BaseModel], item: Any, under: str) -> str:
    """One line: key, value found, values allowed with their unit, nearest spelling."""
    location = [part for part in item["loc"] if part != "[key]"]
    parts = [*([under] if under else []), *(str(part) for part in location)]
    key = ".".join(parts) or "(whole file)"
    code, context, found = item["type"], item.get("ctx", {}), item.get("input")
    if code == "extra_forbidden":
        known = _keys_beside(kind, location)
        near = nearest(str(location[-1]), known)
        return f"{key}: found {_shown(found)}, an unknown key; allowed: {', '.join(known)}{near}"
    if code == "missing":
        return f"{key}: found nothing; required{unit_of(key)}"
    if code == "literal_error":
        expected = str(context.get("expected"))
        near = nearest(found, re.findall(r"'([^']*)'", expected)) if isinstance(found, str) else ""
        return f"{key}: found {_shown(found)}; allowed: {expected}{near}"
    if code == "value_error":  # our own sentence, which names what it found
        return f"{key}: {context['error']}"
    message = f"{item['msg'][0].lower()}{item['msg'][1:]}".removeprefix("input ")
    return f"{key}: found {_shown(found)}; allowed: {message}{unit_of(key)}"


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return f"a table of {len(value)} keys"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _keys_beside(kind: type[BaseModel], location: list[Any]) -> list[str]:
    """The keys that a file may have in the section of an unknown one."""
    section: Any = kind
    for part in location[:-1]:
        if isinstance(section, type) and issubclass(section, BaseModel):
            section = section.model_fields[part].annotation
            while not isinstance(section, type) and get_origin(section) is Annotated:
                section = get_args(section)[0]
        else:  # a table of sections by name
            section = get_args(section)[-1]
    if not (isinstance(section, type) and issubclass(section, BaseModel)):
        return []
    # Arms and criteria are named by their table, never by a key in it.
    hidden = {"name"} if section is Arm else {"id"} if section is CriterionSpec else set()
    return sorted(set(section.model_fields) - hidden)


def read_model_config(model_dir: Path) -> dict[str, Any]:
    """config.json of a model directory. Raises PlanError."""
    path = model_dir / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlanError([f"model.path: cannot read {path}: {error}"]) from error
    if not isinstance(content, dict):
        raise PlanError([f"model.path: {path} is not a JSON object"])
    return content
