"""Cold recovery: long sessions are populated once, made cold, and recovered in waves. Pure.

All arms read in the same order. The order is cyclic over the sessions and goes on across levels,
repetitions and the steady window: with a working set above the device cache that is the worst case
for an LRU cache, and every report says so. Within one level no session is read twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.records import PlannedRequest, PromptRecipe, Schedule

NAME = "cold_recovery"

# Session numbers outside the measured ones; no two ranges meet.
WARM_UP_SESSION = 1_000_000
FITS_SESSION = 2_000_000
ARRIVAL_SESSION = 3_000_000
CONTROL_SESSION = 4_000_000
DONOR_SESSION = 4_000_001

# Planted faults that the exact oracles must see, in the order they are asked.
CONTROLS = ("zeroed_block", "other_session", "swapped_layers", "zeroed_layer", "flipped_exponent")
# Planted in earlier evidence, which is still judged. Two whole blocks exchanged: attention does not
# see it, so nothing but the order of a sum could show it (docs/adr/0017-visible-controls.md).
RETIRED_CONTROLS = ("swapped_blocks",)

STEADY_STAGGER_NS = 100_000_000


@dataclass(frozen=True)
class Parameters:
    """Sizes of the workload; tokens are exact.

    ``round_ends``: the last repetition of each round, ascending, ending with ``repetitions``. A
    round has servers and sessions of its own; none given: a single round.
    """

    seed: int
    vocab_size: int
    levels: tuple[int, ...]
    repetitions: int
    sessions: int
    prompt_tokens: int
    output_tokens: int
    oracle_sessions: int
    steady_cycles: int
    fits_sessions: int
    round_ends: tuple[int, ...] = ()

    def round_of(self, repetition: int) -> tuple[int, int, int]:
        """Number of a repetition's round, from 1; its place there, from 0; the round's length."""
        start = 0
        for number, end in enumerate(self.round_ends or (self.repetitions,), start=1):
            if start < repetition <= end:
                return number, repetition - start - 1, end - start
            start = end
        raise ValueError(f"repetition {repetition} is not one of {self.repetitions}")


def sequence(
    parameters: Parameters, phase: str, sessions: Sequence[int], *, turn: int = 0
) -> Schedule:
    """One user asks the sessions one after the other."""
    return _schedule(parameters, phase, [(0, session, None) for session in sessions], turn=turn)


def wave(parameters: Parameters, phase: str, sessions: Sequence[int]) -> Schedule:
    """One user per session, all released together."""
    return _schedule(parameters, phase, [(user, s, 0) for user, s in enumerate(sessions)])


def warm_up(parameters: Parameters) -> Schedule:
    """One full wave at the largest level, on sessions that are never measured."""
    level = parameters.levels[-1]
    return wave(parameters, "warm_up", [WARM_UP_SESSION + user for user in range(level)])


def steady(parameters: Parameters) -> Schedule:
    """Closed-loop users at the largest level, starts staggered; ``turn`` is the user's cycle."""
    level = parameters.levels[-1]
    first = _waves_length(parameters)
    requests = []
    for cycle in range(parameters.steady_cycles):
        for user in range(level):
            session = (first + cycle * level + user) % parameters.sessions
            offset = user * STEADY_STAGGER_NS if cycle == 0 else None
            requests.append((user, session, offset, cycle))
    return Schedule(
        workload=NAME,
        phase="steady",
        requests=tuple(
            _request(parameters, seq, user, session, offset, turn)
            for seq, (user, session, offset, turn) in enumerate(requests)
        ),
    )


def wave_sessions(parameters: Parameters, level: int, repetition: int) -> list[int]:
    """Sessions of the wave of one level and repetition (counted from 1)."""
    number, place, length = parameters.round_of(repetition)
    first, position = populated_sessions(parameters, number).start, 0
    for other in parameters.levels:
        if other == level:
            position += place * level
            return [first + (position + user) % parameters.sessions for user in range(level)]
        position += other * length
    raise ValueError(f"level {level} is not one of {parameters.levels}")


def populated_sessions(parameters: Parameters, number: int) -> range:
    """Sessions that a round (counted from 1) populates: none is asked in two rounds."""
    first = (number - 1) * parameters.sessions
    return range(first, first + parameters.sessions)


def oracle_sessions(parameters: Parameters) -> list[int]:
    """The sessions of the first round that follow the steady window in the cyclic order."""
    first = _waves_length(parameters) + parameters.steady_cycles * parameters.levels[-1]
    return [(first + index) % parameters.sessions for index in range(parameters.oracle_sessions)]


def _waves_length(parameters: Parameters) -> int:
    """Requests of the first round's waves; what follows them is in the first round alone."""
    _number, _place, length = parameters.round_of(1)
    return sum(parameters.levels) * length


def _schedule(
    parameters: Parameters,
    phase: str,
    requests: Sequence[tuple[int, int, int | None]],
    *,
    turn: int = 0,
) -> Schedule:
    return Schedule(
        workload=NAME,
        phase=phase,
        requests=tuple(
            _request(parameters, seq, user, session, offset, turn)
            for seq, (user, session, offset) in enumerate(requests)
        ),
    )


def _request(
    parameters: Parameters, seq: int, user: int, session: int, offset_ns: int | None, turn: int
) -> PlannedRequest:
    return PlannedRequest(
        seq=seq,
        user=user,
        session=session,
        turn=turn,
        prompt=PromptRecipe(
            seed=parameters.seed,
            session=session,
            tokens=parameters.prompt_tokens,
            vocab_size=parameters.vocab_size,
        ),
        output_tokens=parameters.output_tokens,
        planned_offset_ns=offset_ns,
    )
