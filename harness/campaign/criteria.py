"""The tables of a criteria file, as types: profiles, their criteria and validity bounds."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from harness.campaign.sections import Gate, Positive, Section
from harness.verdicts import ReasonCode


class CriterionSpec(Section):
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


class ValidityBounds(Section):
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
    # None: not checked, as in criteria files that are older than the check.
    speed_ratio_max: Annotated[float, Field(gt=1)] | None = None


class Profile(Section):
    """A named set of criteria and protocol parameters."""

    signable: bool
    label: str
    minimum_repetitions: Positive
    working_set_ratio_min: float
    looks: list[Annotated[int, Field(gt=1)]] = Field(default_factory=list)
    validity: ValidityBounds
    criteria: dict[str, CriterionSpec]
    not_tested: list[str] = Field(default_factory=list)

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
