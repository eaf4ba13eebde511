"""From a campaign file to a plan that may run: one validation for `plan`, `doctor`, `run`, pytest.

Refuses here what would end a run later. Saved campaigns are not read through it: what was once
allowed to run stays readable.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from harness.analysis.measures import unknown_measures
from harness.campaign.generated_model import ensure_model
from harness.campaign.places import key_lines, located, nearest
from harness.campaign.plan import Plan, make_plan
from harness.campaign.reading import load_campaign, read_model_config
from harness.campaign.sections import Arm, Campaign
from harness.connector.config import ConfigError, parse_config
from harness.errors import PlanError
from harness.run.doctor import Finding, examine
from harness.server.known_keys import KNOWN_KEYS, KNOWN_TABLES

BUNDLED = "KvgateTierConnector"
_EXTRA = "kv_connector_extra_config"
_PORT_MAX = 65535
# What the harness gives each server itself; a second one would win or lose by its place.
_OWN_ARGUMENTS = ("--model", "--served-model-name", "--host", "--port")
_DECLARED = re.compile(r"[a-z][a-z0-9_]*(\.[A-Za-z0-9_.-]+)?")
# Keys of an arm that mean something for a server of one kind only, and why not for another.
_FOR_KINDS: dict[str, tuple[tuple[str, ...], str]] = {
    "python": (("vllm",), "nothing is started from it"),
    "python_path": (("vllm",), "nothing is started with it"),
    "tier_root": (("vllm",), "no directory is made for it"),
    "cpu_cores": (("vllm", "sim"), "its cores are not ours to bind"),
    "url": (("url",), "set kind = 'url' to ask a server that runs already"),
    "served_model": (("url",), "the harness names the model of its own servers"),
    "api_key_env": (("url",), "the harness's own servers take no key"),
    "api_key_file": (("url",), "the harness's own servers take no key"),
}


def model_directory(campaign: Campaign, home: Path) -> Path:
    """The served model's directory; generates the model when the campaign says so."""
    if campaign.model.kind == "path":
        assert campaign.model.path is not None
        return Path(campaign.model.path).expanduser()
    return ensure_model(campaign.model.generated, home / "models")


def checked_plan(
    source: str | Path,
    *,
    home: Path,
    gates: list[str] | None = None,
    criteria: Path | None = None,
) -> tuple[Plan, Path]:
    """The plan of a campaign file or bundled name, and its model's directory.

    Raises PlanError with every problem found, each with file, line and key.
    """
    label = str(source)
    campaign, text = load_campaign(source)
    lines = key_lines(text)
    problems = [located(label, lines, problem) for problem in _problems(campaign)]
    try:
        model_dir = model_directory(campaign, home)
        plan = make_plan(
            campaign,
            text,
            model_config=_model_config(model_dir, label, lines),
            gates=gates,
            criteria=criteria,
            label=label,
        )
    except PlanError as error:
        raise PlanError([*problems, *error.problems]) from error
    # The measures are ours: only a criteria file of one's own can ask for what nobody computes.
    missing = unknown_measures(plan.profile.criteria.values())
    problems += [f"{criteria or 'criteria.toml'}: {problem}" for problem in missing]
    if problems:
        raise PlanError(problems)
    return plan, model_dir


def require_able(plan: Plan, *, home: Path, runs_root: Path) -> None:
    """Raises PlanError with what this machine, or a server to be asked, lacks for a plan."""
    findings = examine(plan, home=home, runs_root=runs_root)
    if missing := [f for f in findings if f.required and not f.fine]:
        raise PlanError([_sentence(finding) for finding in missing])


def _sentence(finding: Finding) -> str:
    return f"{finding.name}: {finding.found}; needed: {finding.needed}. {finding.remedy}".strip()


def _model_config(model_dir: Path, label: str, lines: dict[str, int]) -> dict[str, object]:
    try:
        return read_model_config(model_dir)
    except PlanError as error:
        raise PlanError([located(label, lines, text) for text in error.problems]) from error


def _problems(campaign: Campaign) -> Iterator[str]:
    """What the file alone shows to be impossible or without effect."""
    port = campaign.server.port
    if port is not None and port > _PORT_MAX:
        yield f"server.port: found {port}; allowed: a TCP port, 1 to {_PORT_MAX}"
    yield from _own_arguments("server.args", campaign.server.args)
    for arm in campaign.arms.values():
        where = f"arms.{arm.name}"
        yield from _without_effect(arm, where)
        yield from _own_arguments(f"{where}.args", arm.args)
        if arm.kind == "url" and arm.url is not None and (problem := _url_problem(arm.url)):
            yield f"{where}.url: {problem}"
        if (arm.kv_transfer or {}).get("kv_connector") == BUNDLED:
            yield from _bundled_connector(arm, f"{where}.kv_transfer.{_EXTRA}")
        for key in arm.declared:
            if problem := _declared_problem(key):
                yield f"{where}.declared: {problem}"


def _own_arguments(where: str, args: list[str]) -> Iterator[str]:
    for text in args:
        name = text.partition("=")[0].replace("_", "-")
        if name in _OWN_ARGUMENTS:
            yield (
                f"{where}: found {text!r}; allowed: none of {', '.join(_OWN_ARGUMENTS)}, which "
                "the harness gives itself"
            )


def _without_effect(arm: Arm, where: str) -> Iterator[str]:
    for key, (kinds, why) in _FOR_KINDS.items():
        value = getattr(arm, key)
        if value not in (None, []) and arm.kind not in kinds:
            allowed = " or ".join(repr(kind) for kind in kinds)
            yield (
                f"{where}.{key}: found {value!r} with kind = {arm.kind!r}; allowed with kind = "
                f"{allowed}: {why}"
            )


def _url_problem(url: str) -> str | None:
    """Why an address cannot be asked; None when it can."""
    allowed = f"http(s)://host[:port][/path], port 1 to {_PORT_MAX}"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return f"found {url!r}: {str(error)[0].lower()}{str(error)[1:]}; allowed: {allowed}"
    if parts.username is not None or parts.password is not None:
        # The url is evidence and is shown; a password in it would be, too.
        return "found a user or password in the url; allowed: api_key_env or api_key_file"
    if parts.scheme not in ("http", "https"):
        has_none = "://" not in url
        hint = f"; did you mean 'http://{url}'?" if has_none else nearest(parts.scheme, ["http"])
        found = "no scheme" if has_none else f"scheme {parts.scheme!r}"
        return f"found {url!r}, {found}; allowed: {allowed}{hint}"
    if not parts.hostname or port == 0 or parts.query or parts.fragment or re.search(r"\s", url):
        return f"found {url!r}; allowed: {allowed}"
    return None


def _bundled_connector(arm: Arm, where: str) -> Iterator[str]:
    """The connector's own check of its settings, with the directory that it will be given."""
    extra = {
        key: value.replace("{tier_dir}", "/tier") if isinstance(value, str) else value
        for key, value in arm.extra_config.items()
    }
    try:
        parse_config(extra)
    except ConfigError as error:
        for line in str(error).splitlines():
            if line.startswith("- "):
                yield _setting_problem(line.removeprefix("- "), extra, where)


def _setting_problem(text: str, extra: dict[str, object], where: str) -> str:
    """Our words for one problem: "KEY is VALUE; it must be ALLOWED" and its likes."""
    key = next((k for k in extra if text.startswith(f"{k} is ")), None)
    if key is not None:
        found, _, allowed = text.removeprefix(f"{key} is ").partition("; it must be ")
        unit = " bytes" if key.endswith("_bytes") else " seconds" if key.endswith("_s") else ""
        size = _size_in_bytes(extra[key]) if unit == " bytes" else None
        hint = "" if size is None else f"; did you mean {size}?"
        return (
            f"{where}.{key}: found {found}; allowed: {allowed}{f', in{unit}' if unit else ''}{hint}"
        )
    if text.startswith("unknown key "):
        name = text.removeprefix("unknown key ").partition(";")[0].strip("'")
        known = text.partition("known keys: ")[2].split(", ")
        return (
            f"{where}.{name}: found an unknown key; allowed: {', '.join(known)}"
            f"{nearest(name, known)}"
        )
    return f"{where}: {text}"


def _size_in_bytes(value: object) -> int | None:
    """The bytes that a person meant by "160MiB"; None when it is no such text."""
    if not isinstance(value, str):
        return None
    match = re.fullmatch(r"([0-9]+)\s*([KMGT]?)(i?)B?", value.strip(), re.IGNORECASE)
    if match is None:
        return None
    base = 1024 if match.group(3) else 1000
    factors = {"": 1, "K": base, "M": base**2, "G": base**3, "T": base**4}
    return int(match.group(1)) * factors[match.group(2).upper()]


def _declared_problem(key: str) -> str | None:
    """A key nobody knows is allowed: a later vLLM may state it. A near miss of a known one is not,
    because it would declare nothing and the difference would stay undeclared.
    """
    if key in KNOWN_KEYS or key.partition(".")[0] in KNOWN_TABLES:
        return None
    if not _DECLARED.fullmatch(key):
        return f"found {key!r}; allowed: names of effective keys, such as 'connector'"
    hint = nearest(key, KNOWN_KEYS)
    if not hint:
        return None
    return (
        f"found {key!r}, which no server states; allowed: keys of `effective` in server.json{hint}"
    )
