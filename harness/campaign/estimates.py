"""How much disk and time a run takes: estimated from its plan beforehand. Pure.

Measured on the demo (51 trials, 8 output tokens): 9.8 MB, 230 kB for a trial of three marks. The
estimate is above that by a factor of three, because running out costs a run.
"""

from __future__ import annotations

from harness.campaign.plan import Plan

MIB = 2**20
# Raw /metrics pages, samples of all marks, the server's log of the trial.
TRIAL_BYTES = MIB // 2
# A request and its plan: recipe, times, outcome; then id, log probability and arrival per token.
REQUEST_BYTES = 2048
TOKEN_BYTES = 96
# Report, verdict, start-up logs in scratch, ballast.
RUN_BYTES = 64 * MIB
# Measured on two AVX2 cores with the demo model: start of a server, a prefill, a restore with
# decode.
_START_S = 55.0
_PREFILL_S_PER_TOKEN = 5.0e-4
_ANSWER_S = 0.7


def evidence_bytes(plan: Plan) -> int:
    """Bytes that a whole run writes under its directory, tier files apart."""
    trials = sum(1 for _ in plan.trials())
    requests = _requests_per_arm(plan) * len(plan.campaign.arms)
    return RUN_BYTES + trials * TRIAL_BYTES + requests * _request_bytes(plan)


def trial_bytes(plan: Plan) -> int:
    """Bytes that the largest trial of a plan may write, twice: it is merged before it is sealed."""
    work = plan.campaign.cold_recovery
    largest = max(3 * (work.sessions + 1) + work.levels[-1], work.levels[-1] * work.steady_cycles)
    return 2 * (TRIAL_BYTES + largest * _request_bytes(plan))


def tier_bytes(plan: Plan) -> int:
    """Bytes of tier files of the largest arm; they are removed as each arm ends."""
    if not any(arm.medium == "disk" for arm in plan.campaign.arms.values()):
        return 0
    # Measured, warm-up, arrival and control sessions all leave their blocks on the medium.
    work = plan.campaign.cold_recovery
    sessions = work.sessions + work.levels[-1] + 3
    return int(sessions * plan.sizes.session_kv_bytes * 1.05)


def estimate_s(plan: Plan) -> float:
    """Rough duration of a run; a guide for planning, never used elsewhere."""
    work = plan.campaign.cold_recovery
    waves = sum(work.levels) * work.repetitions + work.levels[-1] * work.steady_cycles
    prefill = work.prompt_tokens * _PREFILL_S_PER_TOKEN
    total = 0.0
    for arm in plan.campaign.arms.values():
        prefills = work.sessions + work.levels[-1] + 2
        prefills += 0 if arm.role == "tiered" else waves
        total += _START_S + prefills * prefill + 2 * waves * _ANSWER_S
    return total


def _requests_per_arm(plan: Plan) -> int:
    work = plan.campaign.cold_recovery
    waves = sum(work.levels) * work.repetitions
    steady = work.levels[-1] * work.steady_cycles
    rest = work.oracle_sessions + 2 * work.fits_sessions + 16
    return 3 * (work.sessions + 1) + work.levels[-1] + 2 * waves + steady + rest


def _request_bytes(plan: Plan) -> int:
    return REQUEST_BYTES + TOKEN_BYTES * plan.campaign.cold_recovery.output_tokens
