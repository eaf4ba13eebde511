"""The tables of a campaign file, as types. What one table alone can contradict is checked here.

What needs more than the file (sizes, the profile, the model) is checked by `plan.make_plan`.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from harness.campaign.generated_model import ModelArchitecture
from harness.sim.config import campaign_problem
from harness.verdicts import GATES_BUILT

Gate = Literal["g1", "g3"]
GATES: tuple[Gate, ...] = GATES_BUILT
DEFAULT_CAMPAIGN = "cpu-demo"


class Section(BaseModel):
    """A table whose unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


Positive = Annotated[int, Field(gt=0)]
# Names become directory names of the run.
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")]


class Model(Section):
    """The served model: generated from an architecture, or a directory of real weights."""

    kind: Literal["generated", "path"] = "generated"
    path: str | None = None
    kv_bytes_per_token: Positive | None = None
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


class Server(Section):
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


class Arm(Section):
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


class ColdRecovery(Section):
    """Parameters of the cold-recovery workload (docs/protocol.md, section 3)."""

    levels: Annotated[list[Positive], Field(min_length=1)]
    repetitions: Positive
    sessions: Positive
    prompt_tokens: Positive
    output_tokens: Annotated[int, Field(gt=1)]
    oracle_sessions: Annotated[int, Field(ge=0)] = 8
    steady_cycles: Annotated[int, Field(ge=0)] = 4
    fits_sessions: Annotated[int, Field(ge=0)] = 3
    restart: Literal["arm", "look"] = "arm"
    time_budget_s: Annotated[float, Field(gt=0)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.time_budget_s is not None and self.restart != "look":
            raise ValueError("time_budget_s: allowed with restart = 'look' only")
        if self.levels != sorted(set(self.levels)):
            raise ValueError(f"levels: found {self.levels}; allowed: ascending, no level twice")
        if self.steady_cycles in (1, 2):
            raise ValueError(
                f"steady_cycles: found {self.steady_cycles}; allowed: 0 (no steady window) or at "
                "least 3, because two are discarded"
            )
        return self


class Deployment(Section):
    """The devices of the machine under test, for the placement that `kvgate plan` prints."""

    accelerators: Positive
    memory_gib: Annotated[float, Field(gt=0)]
    weights_gib: Annotated[float, Field(gt=0)]
    utilisation: Annotated[float, Field(gt=0, le=1)] | None = None
    tensor_parallel: Positive | None = None
    pipeline_parallel: Positive | None = None
    activation_reserve_gib: Annotated[float, Field(ge=0)] = 8.0
    margin: Annotated[float, Field(ge=0, lt=1)] = 0.1


class Size(Section):
    """Sizes of a generated model and its prompts, one of several to choose from."""

    num_layers: Positive
    intermediate_size: Positive
    prompt_tokens: Positive


class Sizing(Section):
    """Lets a calibration choose sizes before the plan is fixed (docs/campaigns.md).

    ``contrast``: how many times as long a prefill should take as a restore; ``round_s_max``: how
    long all arms together may take once, in seconds. ``choices``: least work first.
    """

    contrast: Annotated[float, Field(gt=1)]
    round_s_max: Annotated[float, Field(gt=0)]
    choices: Annotated[list[Size], Field(min_length=1)]


class CriterionOverride(Section):
    """A campaign's own bound for one criterion; shown in the report as a deviation."""

    target: float


class Parties(Section):
    """Who signs; printed on the page's first screen and beside the signature lines."""

    supplier: str = ""
    customer: str = ""


class Campaign(Section):
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
    deployment: Deployment | None = None
    sizing: Sizing | None = None
    criteria: dict[str, CriterionOverride] = {}
    parties: Parties = Parties()

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

    @model_validator(mode="after")
    def _sized(self) -> Self:
        if self.sizing is not None and self.model.kind != "generated":
            raise ValueError("sizing: allowed with model.kind = 'generated' only")
        if self.sizing is not None and all(arm.role != "tiered" for arm in self.arms.values()):
            raise ValueError("sizing: needs an arm with role 'tiered'")
        return self

    @property
    def is_imported(self) -> bool:
        """True when every arm is rows of a published table: nothing was run, nothing can be."""
        return all(arm.kind == "imported" for arm in self.arms.values())
