"""The plan: a campaign checked against its profile and its own numbers, and its list of trials."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from harness.campaign.criteria import Profile
from harness.campaign.figures import Sizes
from harness.campaign.places import key_lines, located, nearest
from harness.campaign.placing import DEFAULT_BLOCK_TOKENS, ArmKV, arm_kv, candidate, placement
from harness.campaign.reading import load_criteria
from harness.campaign.sections import GATES, Arm, Campaign, Gate
from harness.errors import PlanError
from harness.records import TrialFacts


@dataclass(frozen=True)
class Round:
    """One start of each arm's server. ``repetitions``: those it runs; ``arms``: in their order."""

    number: int
    arms: tuple[str, ...]
    repetitions: range


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
        block = server.block_tokens or DEFAULT_BLOCK_TOKENS
        kv = self.kv(candidate(self.campaign))
        per_token, session = kv.bytes_per_token, kv.session_bytes(work.prompt_tokens)
        blocks = math.ceil((work.prompt_tokens + work.output_tokens) / block)
        device = server.device_kv_tokens
        return Sizes(
            kv_bytes_per_token=per_token,
            block_tokens=block,
            session_blocks=blocks,
            session_kv_bytes=session,
            working_set_bytes=work.sessions * session,
            device_kv_bytes=None if device is None else device * per_token,
            cached_tokens_per_session=(work.prompt_tokens - 1) // block * block,
        )

    def kv(self, arm: Arm) -> ArmKV:
        """The KV of an arm's server. Raises PlanError."""
        return arm_kv(self.campaign, arm, self.model_config)

    def figures(self, arm: Arm) -> dict[str, Any]:
        """What each trial of an arm is checked against; every trial carries a copy."""
        sizes, work = self.sizes, self.campaign.cold_recovery
        return {
            "role": arm.role,
            "medium": arm.medium,
            "kv_bytes_per_token": self.kv(arm).bytes_per_token,
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

    @property
    def round_ends(self) -> tuple[int, ...]:
        """The last repetition of each round: a look each, or all of them at once."""
        work = self.campaign.cold_recovery
        return self.looks if work.restart == "look" else (work.repetitions,)

    @cached_property
    def rounds(self) -> tuple[Round, ...]:
        """Rounds in order. Every second one runs the arms in reverse, so that drift cancels.

        With ``restart = "look"`` a run ends with the first round that leaves nothing undecided.
        """
        names = tuple(self.campaign.arms)
        starts = (0, *self.round_ends)
        if "g3" not in self.gates:
            starts = starts[:2]
        return tuple(
            Round(number, names if number % 2 else names[::-1], range(before + 1, end + 1))
            for number, (before, end) in enumerate(pairwise(starts), start=1)
        )

    def trials(self) -> Iterator[TrialFacts]:
        """All trials in the order they run: round by round, and there arm by arm."""
        for trials in self.trials_by_round.values():
            yield from trials

    @cached_property
    def trials_by_round(self) -> dict[int, tuple[TrialFacts, ...]]:
        """The trials by the number of their round."""
        found, index = {}, 0
        for one in self.rounds:
            trials = []
            for name in one.arms:
                for gate, workload, level, repetition in self._arm_trials(one, name):
                    trials.append(TrialFacts(index, gate, name, workload, level, repetition))
                    index += 1
            found[one.number] = tuple(trials)
        return found

    def _arm_trials(self, one: Round, name: str) -> Iterator[tuple[str, str, int, int]]:
        """What is not a wave has the round's number as its repetition."""
        work, arm = self.campaign.cold_recovery, self.campaign.arms[name]
        if "g1" in self.gates and one.number == 1:
            yield "g1", "arrival", 1, 1
        if "g3" not in self.gates:
            return
        yield "g3", "populate", 1, one.number
        for level in work.levels:
            for repetition in one.repetitions:
                yield "g3", "cold_recovery", level, repetition
        if one.number > 1:
            return  # judged on the first round: oracles, controls, control cell, steady window
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
    lines = key_lines(campaign_text)
    asked_by = f"{label}:{lines['profile']}" if "profile" in lines else label
    profile, criteria_text = load_criteria(campaign.profile, criteria, asked_by=asked_by)
    chosen = tuple(g for g in GATES if g in (gates or campaign.gates))
    plan = Plan(campaign, campaign_text, profile, criteria_text, model_config, chosen)
    require_possible(plan, label)
    return plan


def require_possible(plan: Plan, label: str) -> None:
    """Raises PlanError with all that the file, the model and the profile make impossible."""
    lines = key_lines(plan.campaign_text)
    # Without the KV's size nothing else can be checked.
    found = dict.fromkeys(_unsized(plan)) or _impossible(plan)
    problems = [located(label, lines, problem) for problem in found]
    if problems:
        raise PlanError(problems)


def _unsized(plan: Plan) -> Iterator[str]:
    """What keeps the KV of an arm, or what the devices hold, from being known."""
    for arm in plan.campaign.arms.values():
        try:
            plan.kv(arm)
        except PlanError as error:
            yield from error.problems
    try:
        placement(plan.campaign, plan.model_config)
    except PlanError as error:
        yield from error.problems


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
            f"allowed: {known}{nearest(name, profile.criteria)}"
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
    if work.restart == "look" and not profile.looks:
        yield (
            f"cold_recovery.restart: found 'look'; allowed: 'arm', since profile "
            f"{campaign.profile} has no looks"
        )
    longest_round = max((len(one.repetitions) for one in plan.rounds), default=0)
    needed = work.levels[-1] * longest_round
    if work.sessions < needed:
        yield (
            f"cold_recovery.sessions: found {work.sessions}; level {work.levels[-1]} x "
            f"{longest_round} repetitions reads {needed} different sessions"
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
