"""Reads and checks campaign and criteria files, and lays out the trials. Starts nothing.

All problems of a file are collected and raised at once as `PlanError`; each line names the file,
the key, the value found and the values allowed.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from harness.errors import PlanError
from harness.model import ModelArchitecture
from harness.records import TrialFacts
from harness.sim.config import campaign_problem
from harness.verdicts import ReasonCode

Gate = Literal["g1", "g3"]
GATES: tuple[Gate, ...] = ("g1", "g3")
DEFAULT_CAMPAIGN = "cpu-demo"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


Positive = Annotated[int, Field(gt=0)]
# Names become directory names of the run.
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")]


class Model(_Section):
    """The served model: generated from an architecture, or a directory of real weights."""

    kind: Literal["generated", "path"] = "generated"
    path: str | None = None
    architecture: dict[str, int | float | str] = {}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.kind == "path" and not self.path:
            raise ValueError("path: found none; kind = 'path' requires a directory")
        if self.kind == "generated":
            known = ModelArchitecture.__dataclass_fields__
            unknown = sorted(set(self.architecture) - set(known))
            if unknown:
                raise ValueError(
                    f"architecture: found unknown keys {unknown}; allowed: "
                    f"{', '.join(sorted(known))}"
                )
            try:
                self.generated.check()
            except ValueError as error:
                raise ValueError(f"architecture: {error}") from error
        return self

    @property
    def generated(self) -> ModelArchitecture:
        """The architecture of a generated model."""
        return ModelArchitecture(**self.architecture)  # type: ignore[arg-type]


class Server(_Section):
    """What every arm's server shares."""

    python: str = "auto"
    args: list[str] = []
    environment: dict[str, str] = {}
    block_tokens: Positive | None = None
    device_kv_tokens: Positive | None = None
    cpu_cores: Positive | None = None
    port: Positive | None = None
    ready_deadline_s: Annotated[float, Field(gt=0)] = 300.0
    request_deadline_s: Annotated[float, Field(gt=0)] = 600.0
    answer_deadline_s: Annotated[float, Field(gt=0)] = 60.0
    sim: dict[str, Any] = {}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.device_kv_tokens is not None and self.block_tokens is None:
            raise ValueError("device_kv_tokens needs block_tokens")
        if self.sim and (problem := campaign_problem(self.sim)):
            raise ValueError(f"sim: {problem}")
        return self


class Arm(_Section):
    """One server configuration. ``declared`` lists the effective keys in which it may differ."""

    name: str = ""
    kind: Literal["vllm", "url", "imported", "sim"] = "vllm"
    role: Literal["recompute", "hbm_only", "tiered"]
    medium: Literal["host", "disk"] | None = None
    python: str | None = None
    args: list[str] = []
    environment: dict[str, str] = {}
    python_path: list[str] = []
    cpu_cores: Positive | None = None
    kv_transfer: dict[str, Any] | None = None
    tier_root: str | None = None
    declared: list[str] = []
    url: str | None = None
    api_key_env: str | None = None
    api_key_file: str | None = None
    verify_tls: bool = True
    served_model: str | None = None
    sim: dict[str, Any] = {}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.role == "tiered" and self.medium is None:
            raise ValueError(
                "medium: found none; role = 'tiered' requires medium = 'host' or 'disk'"
            )
        for key in ("medium", "kv_transfer"):
            if self.role != "tiered" and getattr(self, key):
                raise ValueError(f"found {key}; role = {self.role!r} allows none: no tier there")
        uses_tier_dir = "{tier_dir}" in json.dumps(self.kv_transfer, default=str)
        if uses_tier_dir and self.medium != "disk":
            raise ValueError(
                f"kv_transfer: found {{tier_dir}} with medium = {self.medium!r}; allowed with "
                "medium = 'disk'"
            )
        bundled = (self.kv_transfer or {}).get("kv_connector") == "KvgateTierConnector"
        if bundled and self.medium == "disk" and self.extra_config.get("reset_scope") != "host":
            # The default would delete the files at every cold reset.
            found = self.extra_config.get("reset_scope", "none")
            raise ValueError(
                f"kv_transfer.kv_connector_extra_config.reset_scope: found {found!r}; allowed with "
                "medium = 'disk': 'host'"
            )
        if self.kind == "url" and not self.url:
            raise ValueError("url: found none; kind = 'url' requires the server's address")
        if self.sim and self.kind != "sim":
            raise ValueError(f"found sim; allowed with kind = 'sim' only, found {self.kind!r}")
        if self.sim and (problem := campaign_problem(self.sim)):
            raise ValueError(f"sim: {problem}")
        if self.kind == "sim" and (self.args or self.kv_transfer):
            raise ValueError("found args or kv_transfer; kind = 'sim' takes a sim table instead")
        if self.api_key_env is not None and self.api_key_file is not None:
            raise ValueError("found api_key_env and api_key_file; allowed: one of them")
        for key in ("args", "environment", "kv_transfer"):
            if self.kind in ("url", "imported") and getattr(self, key):
                raise ValueError(
                    f"found {key}; allowed with kind = 'vllm' only: kind = {self.kind!r} is run by "
                    "somebody else"
                )
        return self

    @property
    def host_pool_bytes(self) -> int | None:
        """Size of the bundled connector's host pool, when the arm configures one."""
        value = self.extra_config.get("host_pool_bytes")
        return value if isinstance(value, int) else None

    @property
    def extra_config(self) -> dict[str, Any]:
        """The connector's own configuration."""
        found = (self.kv_transfer or {}).get("kv_connector_extra_config", {})
        return found if isinstance(found, dict) else {}


class ColdRecovery(_Section):
    """Parameters of the cold-recovery workload (docs/protocol.md, section 3)."""

    levels: Annotated[list[Positive], Field(min_length=1)]
    repetitions: Positive
    sessions: Positive
    prompt_tokens: Positive
    output_tokens: Annotated[int, Field(gt=1)]
    oracle_sessions: Annotated[int, Field(ge=0)] = 8
    steady_cycles: Annotated[int, Field(ge=0)] = 4
    fits_sessions: Annotated[int, Field(ge=0)] = 3
    restart: Literal["arm"] = "arm"

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.levels != sorted(set(self.levels)):
            raise ValueError(f"levels: found {self.levels}; allowed: ascending, no level twice")
        if self.steady_cycles in (1, 2):
            raise ValueError(
                f"steady_cycles: found {self.steady_cycles}; allowed: 0 (no steady window) or at "
                "least 3, because two are discarded"
            )
        return self


class CriterionOverride(_Section):
    """A campaign's own bound for one criterion; shown in the report as a deviation."""

    target: float


class Campaign(_Section):
    """One campaign file."""

    format: Literal[1]
    name: Name
    profile: str
    gates: Annotated[list[Gate], Field(min_length=1)]
    seed: int
    model: Model
    server: Server
    arms: Annotated[dict[Name, Arm], Field(min_length=1)]
    cold_recovery: ColdRecovery
    criteria: dict[str, CriterionOverride] = {}

    @model_validator(mode="before")
    @classmethod
    def _name_arms(cls, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(value.get("arms"), dict):
            arms = {
                name: {**arm, "name": name} if isinstance(arm, dict) else arm
                for name, arm in value["arms"].items()
            }
            return {**value, "arms": arms}
        return value

    @model_validator(mode="after")
    def _imported_alone(self) -> Self:
        if len({arm.kind == "imported" for arm in self.arms.values()}) > 1:
            raise ValueError("arms: found kind = 'imported' beside others; allowed: all or none")
        return self

    @property
    def is_imported(self) -> bool:
        """True when every arm is rows of a published table: nothing was run, nothing can be."""
        return all(arm.kind == "imported" for arm in self.arms.values())


# --- criteria ---------------------------------------------------------------


class CriterionSpec(_Section):
    """A named bound on a measurement. ``arms``: which candidates, by role or medium or name."""

    id: str = ""
    gate: Gate
    title: str
    measure: str
    arms: list[str]
    baseline: str | None = None
    per_level: bool = False
    comparison: Literal[">=", "<=", "=="]
    target: float
    floor: float | None = None
    decide: Literal["exact", "point", "large_effect", "interval"]
    min_n: Positive = 1
    on_miss: Literal["STOP", "INCONCLUSIVE"] = "STOP"
    reason: str = "criterion.below_target"
    rationale: str

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        known = [code.value for code in ReasonCode]
        if self.reason not in known:
            raise ValueError(f"reason: found {self.reason!r}; allowed: {', '.join(known)}")
        return self


class ValidityBounds(_Section):
    """Bounds of the validity checks (docs/protocol.md, section 4)."""

    failed_share_max: float
    equal_work_ratio_max: float
    tier_share_min: float
    disk_bytes_ratio_min: float
    disk_bytes_ratio_max: float
    capacity_ratio_max: float
    warmth_ratio_max: float
    loop_lag_s_max: float
    send_spread_s_max: float
    client_cpu_share_max: float
    invalid_share_max: float


class Profile(_Section):
    """A named set of criteria and protocol parameters."""

    signable: bool
    label: str
    minimum_repetitions: Positive
    working_set_ratio_min: float
    looks: list[Annotated[int, Field(gt=1)]] = []
    validity: ValidityBounds
    criteria: dict[str, CriterionSpec]
    not_tested: list[str] = []

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.looks != sorted(set(self.looks)):
            raise ValueError(f"looks: found {self.looks}; allowed: ascending, none twice")
        return self

    @model_validator(mode="before")
    @classmethod
    def _name_criteria(cls, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(value.get("criteria"), dict):
            criteria = {
                key: {**spec, "id": key} if isinstance(spec, dict) else spec
                for key, spec in value["criteria"].items()
            }
            return {**value, "criteria": criteria}
        return value


def load_campaign(source: str | Path) -> tuple[Campaign, str]:
    """Campaign and its text, from a path or the name of a bundled one. Raises PlanError."""
    text, label = _read(source, "campaigns", "campaign")
    campaign = _parse(Campaign, _toml(text, label), label)
    return campaign, text


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
        raise PlanError([f"{asked_by}: profile: found {profile!r}; allowed, by {label}: {known}"])
    return _parse(Profile, profiles[profile], f"{label}: profiles.{profile}")


def parse_campaign(text: str, label: str = "campaign.toml") -> Campaign:
    """A campaign from its text, as stored in a run. Raises PlanError."""
    return _parse(Campaign, _toml(text, label), label)


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
            f"{', '.join(known)}"
        ]
    )


def _toml(text: str, label: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise PlanError([f"{label}: not TOML: nested too deep"]) from None
    except ValueError as error:  # TOMLDecodeError, and an integer or date that Python cannot hold
        raise PlanError([f"{label}: not TOML: {error}"]) from error


_Parsed = TypeVar("_Parsed", bound=BaseModel)


def _parse(kind: type[_Parsed], content: Any, label: str) -> _Parsed:
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        problems = [_problem(kind, label, item) for item in error.errors()]
        raise PlanError(list(dict.fromkeys(problems))) from error


def _problem(kind: type[BaseModel], label: str, item: Any) -> str:
    """One line: file, key, value found, values allowed."""
    location = [part for part in item["loc"] if part != "[key]"]
    key = ".".join(str(part) for part in location) or "(whole file)"
    code, context, found = item["type"], item.get("ctx", {}), item.get("input")
    if code == "extra_forbidden":
        section = ", ".join(_keys_beside(kind, location))
        return f"{label}: {key}: found {_shown(found)}, an unknown key; allowed: {section}"
    if code == "missing":
        return f"{label}: {key}: found nothing; required"
    if code == "literal_error":
        return f"{label}: {key}: found {_shown(found)}; allowed: {context.get('expected')}"
    if code == "value_error":  # our own sentence, which names what it found
        return f"{label}: {key}: {context['error']}"
    message = f"{item['msg'][0].lower()}{item['msg'][1:]}"
    return f"{label}: {key}: found {_shown(found)}; allowed: {message.removeprefix('input ')}"


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


# --- sizes and trials -------------------------------------------------------


def kv_bytes_per_token(config: dict[str, Any], dtype_bytes: int | None = None) -> int:
    """Bytes of key and value per token from a model's own config.json (MHA and GQA, one rank).

    2 x layers x KV heads x head size x bytes. Raises PlanError when the config lacks what it takes.
    """
    try:
        layers = config["num_hidden_layers"]
        heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        name = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")
    except KeyError as error:
        raise PlanError(
            [f"model.path: config.json has no {error}; required to compute the KV size"]
        ) from error
    except (TypeError, ZeroDivisionError, AttributeError) as error:
        raise PlanError(
            [f"model.path: config.json: cannot compute the KV size: {error}"]
        ) from error
    for what, value in (("layers", layers), ("KV heads", heads), ("head size", head_size)):
        if type(value) is not int or not 0 < value < 2**31:
            raise PlanError([f"model.path: config.json: {what}: found {value!r}; allowed: above 0"])
    size = dtype_bytes or {"float32": 4, "bfloat16": 2, "float16": 2}.get(name, 2)
    return int(2 * layers * heads * head_size * size)


@dataclass(frozen=True)
class Sizes:
    """Figures of a plan, all derived. Tokens and bytes; ``None``: not fixed by the campaign."""

    kv_bytes_per_token: int
    block_tokens: int
    session_blocks: int
    session_kv_bytes: int
    working_set_bytes: int
    device_kv_bytes: int | None
    cached_tokens_per_session: int

    @property
    def working_set_ratio(self) -> float | None:
        """Working set over device KV capacity."""
        if self.device_kv_bytes is None:
            return None
        return self.working_set_bytes / self.device_kv_bytes


@dataclass(frozen=True)
class Plan:
    """A checked campaign with its profile, sizes and trials."""

    campaign: Campaign
    campaign_text: str
    profile: Profile
    criteria_text: str
    model_config: dict[str, Any]
    gates: tuple[Gate, ...] = field(default=())

    @cached_property
    def sizes(self) -> Sizes:
        """Derived sizes."""
        work, server = self.campaign.cold_recovery, self.campaign.server
        block = server.block_tokens or 16
        per_token = kv_bytes_per_token(self.model_config)
        blocks = math.ceil((work.prompt_tokens + work.output_tokens) / block)
        device = server.device_kv_tokens
        return Sizes(
            kv_bytes_per_token=per_token,
            block_tokens=block,
            session_blocks=blocks,
            session_kv_bytes=work.prompt_tokens * per_token,
            working_set_bytes=work.sessions * work.prompt_tokens * per_token,
            device_kv_bytes=None if device is None else device * per_token,
            cached_tokens_per_session=(work.prompt_tokens - 1) // block * block,
        )

    def figures(self, arm: Arm) -> dict[str, Any]:
        """What each trial of an arm is checked against; every trial carries a copy."""
        sizes, work = self.sizes, self.campaign.cold_recovery
        return {
            "role": arm.role,
            "medium": arm.medium,
            "kv_bytes_per_token": sizes.kv_bytes_per_token,
            "block_tokens": sizes.block_tokens,
            "cached_tokens_per_session": sizes.cached_tokens_per_session,
            "prompt_tokens": work.prompt_tokens,
            "output_tokens": work.output_tokens,
            **({"simulated": True} if arm.kind == "sim" else {}),
        }

    @property
    def looks(self) -> tuple[int, ...]:
        """Repetitions at which this plan decides; empty: once, over all of them."""
        planned = self.campaign.cold_recovery.repetitions
        return tuple(look for look in self.profile.looks if look <= planned)

    def trials(self) -> Iterator[TrialFacts]:
        """All trials in the order they run: arm by arm, because a demo starts each server once."""
        index = 0
        for arm in self.campaign.arms.values():
            for gate, workload, concurrency, repetition in self._arm_trials(arm):
                yield TrialFacts(
                    index=index,
                    gate=gate,
                    arm=arm.name,
                    workload=workload,
                    concurrency=concurrency,
                    repetition=repetition,
                )
                index += 1

    def _arm_trials(self, arm: Arm) -> Iterator[tuple[str, str, int, int]]:
        work = self.campaign.cold_recovery
        if "g1" in self.gates:
            yield "g1", "arrival", 1, 1
        if "g3" not in self.gates:
            return
        yield "g3", "populate", 1, 1
        for level in work.levels:
            for repetition in range(1, work.repetitions + 1):
                yield "g3", "cold_recovery", level, repetition
        if work.steady_cycles:
            yield "g3", "steady", work.levels[-1], 1
        if arm.role == "tiered" and work.oracle_sessions:
            yield "g3", "oracle", 1, 1
        if arm.role == "hbm_only" and work.fits_sessions:
            yield "g3", "fits_in_hbm", 1, 1


def make_plan(
    campaign: Campaign,
    campaign_text: str,
    *,
    model_config: dict[str, Any],
    gates: list[str] | None = None,
    criteria: Path | None = None,
    label: str = "campaign",
) -> Plan:
    """Checks a campaign against its profile and its numbers. Raises PlanError with all problems."""
    profile, criteria_text = load_criteria(campaign.profile, criteria, asked_by=label)
    chosen = tuple(g for g in GATES if g in (gates or campaign.gates))
    plan = Plan(campaign, campaign_text, profile, criteria_text, model_config, chosen)
    problems = [f"{label}: {problem}" for problem in _impossible(plan)]
    if problems:
        raise PlanError(problems)
    return plan


def _impossible(plan: Plan) -> Iterator[str]:
    campaign, profile, sizes = plan.campaign, plan.profile, plan.sizes
    work, server = campaign.cold_recovery, campaign.server
    if not plan.gates:
        yield f"gates: found nothing to run; allowed: {', '.join(GATES)}"
    if "vocab_size" not in plan.model_config:
        yield "model.path: config.json has no 'vocab_size'; required to make prompts"
    longest = plan.model_config.get("max_position_embeddings")
    if isinstance(longest, int) and work.prompt_tokens + work.output_tokens > longest:
        yield (
            f"cold_recovery.prompt_tokens: found {work.prompt_tokens} + {work.output_tokens} "
            f"output; allowed: {longest} positions of the model"
        )
    if "tiered" not in {arm.role for arm in campaign.arms.values()}:
        yield "arms: found no arm with role 'tiered'; at least one candidate is required"
    for name in sorted(set(campaign.criteria) - set(profile.criteria)):
        known = ", ".join(sorted(profile.criteria))
        yield (
            f"criteria.{name}: found no such criterion in profile {campaign.profile}; "
            f"allowed: {known}"
        )
    if campaign.is_imported:
        yield "arms: found kind = 'imported'; allowed only in what `kvgate import` writes"
    if profile.looks and work.repetitions not in profile.looks:
        looks = ", ".join(map(str, profile.looks))
        yield (
            f"cold_recovery.repetitions: found {work.repetitions}; allowed: a look of profile "
            f"{campaign.profile}: {looks}"
        )
    elif work.repetitions < profile.minimum_repetitions:
        yield (
            f"cold_recovery.repetitions: found {work.repetitions}; profile {campaign.profile} "
            f"needs at least {profile.minimum_repetitions}"
        )
    needed = work.levels[-1] * work.repetitions
    if work.sessions < needed:
        yield (
            f"cold_recovery.sessions: found {work.sessions}; level {work.levels[-1]} x "
            f"{work.repetitions} repetitions reads {needed} different sessions"
        )
    if work.prompt_tokens % sizes.block_tokens == 0:
        yield (
            f"cold_recovery.prompt_tokens: found {work.prompt_tokens}, a multiple of the block of "
            f"{sizes.block_tokens} tokens; the exact oracle needs a remainder"
        )
    ratio = sizes.working_set_ratio
    if ratio is not None and ratio < profile.working_set_ratio_min:
        yield (
            f"cold_recovery.sessions: found {work.sessions} x {sizes.session_kv_bytes} bytes "
            f"= {ratio:.2f} x the device cache; at least {profile.working_set_ratio_min:g} x is "
            "needed"
        )
    if server.device_kv_tokens is not None:
        blocks = server.device_kv_tokens // sizes.block_tokens
        wave = work.levels[-1] * sizes.session_blocks + 1
        if wave > blocks:
            yield (
                f"server.device_kv_tokens: found {server.device_kv_tokens} tokens = {blocks} "
                f"blocks; a wave of {work.levels[-1]} needs at least {wave}"
            )
        fits = work.fits_sessions * sizes.session_blocks + 1
        if fits > blocks:
            yield (
                f"cold_recovery.fits_sessions: found {work.fits_sessions}, which need {fits} "
                f"blocks; allowed: {blocks} blocks of the device cache"
            )
    for arm in campaign.arms.values():
        pool = arm.host_pool_bytes
        if arm.medium == "host" and pool is not None and pool < sizes.working_set_bytes:
            yield (
                f"arms.{arm.name}: host_pool_bytes: found {pool}; allowed: at least the working "
                f"set of {sizes.working_set_bytes} bytes"
            )
    names = set(campaign.arms)
    roles = {arm.role for arm in campaign.arms.values()}
    missing: dict[str, list[str]] = {}
    for spec in profile.criteria.values():
        if spec.gate in plan.gates and spec.baseline and spec.baseline not in names | roles:
            missing.setdefault(spec.baseline, []).append(spec.id)
    for baseline, criteria in missing.items():
        yield (
            f"arms: found no arm with name or role {baseline!r}; required by {', '.join(criteria)}"
        )


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
