"""The cold-recovery workload: who asks what, in which order, and what the prompts are."""

from __future__ import annotations

import dataclasses
import hashlib
import json

import pytest

from harness.records import PromptRecipe
from workloads.cold_recovery import (
    ARRIVAL_SESSION,
    CONTROL_SESSION,
    DONOR_SESSION,
    FITS_SESSION,
    STEADY_STAGGER_NS,
    WARM_UP_SESSION,
    Parameters,
    oracle_sessions,
    populated_sessions,
    sequence,
    steady,
    warm_up,
    wave,
    wave_sessions,
)
from workloads.prompts import token_ids

DEMO = Parameters(
    seed=20260718,
    vocab_size=512,
    levels=(1, 2, 4),
    repetitions=3,
    sessions=16,
    prompt_tokens=40,
    output_tokens=4,
    oracle_sessions=8,
    steady_cycles=4,
    fits_sessions=3,
)


def test_waves_read_the_sessions_in_one_cyclic_order() -> None:
    # 3 x 1 + 3 x 2 + 3 x 4 = 21 reads over 16 sessions.
    order = [
        session
        for level in DEMO.levels
        for repetition in (1, 2, 3)
        for session in wave_sessions(DEMO, level, repetition)
    ]
    assert order == [i % 16 for i in range(21)]


def test_a_second_round_reads_in_the_same_order_and_shares_no_session() -> None:
    rounds = dataclasses.replace(DEMO, repetitions=6, round_ends=(3, 6))
    assert list(populated_sessions(rounds, 2)) == list(range(16, 32))
    for level in DEMO.levels:
        for repetition in (1, 2, 3):
            first = wave_sessions(DEMO, level, repetition)
            assert wave_sessions(rounds, level, repetition) == first
            assert wave_sessions(rounds, level, repetition + 3) == [16 + s for s in first]
    # What follows the waves follows those of the first round.
    assert oracle_sessions(rounds) == oracle_sessions(DEMO)
    assert steady(rounds) == steady(DEMO)


def test_rounds_may_differ_in_length() -> None:
    rounds = dataclasses.replace(DEMO, levels=(1, 2), repetitions=3, round_ends=(1, 3))
    order = [wave_sessions(rounds, level, r) for level in (1, 2) for r in (2, 3)]
    assert order == [[16], [17], [18, 19], [20, 21]]


def test_a_repetition_beyond_the_rounds_is_refused() -> None:
    with pytest.raises(ValueError, match="repetition 4 is not one of 3"):
        wave_sessions(DEMO, 1, 4)


def test_each_level_and_repetition_has_its_sessions() -> None:
    assert [wave_sessions(DEMO, 1, r) for r in (1, 2, 3)] == [[0], [1], [2]]
    assert [wave_sessions(DEMO, 2, r) for r in (1, 2, 3)] == [[3, 4], [5, 6], [7, 8]]
    assert [wave_sessions(DEMO, 4, r) for r in (1, 2, 3)] == [
        [9, 10, 11, 12],
        [13, 14, 15, 0],
        [1, 2, 3, 4],
    ]


def test_no_session_is_read_twice_within_a_level() -> None:
    for level in DEMO.levels:
        read = [s for r in (1, 2, 3) for s in wave_sessions(DEMO, level, r)]
        assert len(read) == len(set(read))


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match=r"level 3 is not one of \(1, 2, 4\)"):
        wave_sessions(DEMO, 3, 1)


def test_a_wave_releases_one_user_per_session_at_once() -> None:
    schedule = wave(DEMO, "wave", [3, 4])
    assert [(r.seq, r.user, r.session, r.planned_offset_ns) for r in schedule.requests] == [
        (0, 0, 3, 0),
        (1, 1, 4, 0),
    ]
    assert schedule.users == 2
    assert schedule.phase == "wave"


def test_a_sequence_is_one_user_asking_one_by_one() -> None:
    schedule = sequence(DEMO, "reask", [3, 4, 3], turn=1)
    assert [(r.seq, r.user, r.session, r.turn) for r in schedule.requests] == [
        (0, 0, 3, 1),
        (1, 0, 4, 1),
        (2, 0, 3, 1),
    ]
    assert all(r.planned_offset_ns is None for r in schedule.requests)
    assert schedule.users == 1


def test_steady_goes_on_where_the_waves_ended() -> None:
    schedule = steady(DEMO)
    assert [r.session for r in schedule.requests] == [(21 + i) % 16 for i in range(16)]
    assert [(r.user, r.turn) for r in schedule.requests] == [
        (user, cycle) for cycle in range(4) for user in range(4)
    ]


def test_steady_users_start_staggered_and_then_follow_their_own_answers() -> None:
    offsets = [r.planned_offset_ns for r in steady(DEMO).requests]
    assert offsets[:4] == [0, STEADY_STAGGER_NS, 2 * STEADY_STAGGER_NS, 3 * STEADY_STAGGER_NS]
    assert offsets[4:] == [None] * 12


def test_the_oracle_follows_the_steady_window() -> None:
    # 21 wave reads + 4 cycles x 4 users = 37.
    assert oracle_sessions(DEMO) == [(37 + i) % 16 for i in range(8)]


def test_warm_up_is_a_full_wave_on_sessions_of_its_own() -> None:
    schedule = warm_up(DEMO)
    assert [r.session for r in schedule.requests] == [WARM_UP_SESSION + i for i in range(4)]
    assert {r.planned_offset_ns for r in schedule.requests} == {0}


def test_reserved_sessions_never_meet_the_measured_ones() -> None:
    reserved = [WARM_UP_SESSION, FITS_SESSION, ARRIVAL_SESSION, CONTROL_SESSION, DONOR_SESSION]
    assert len(set(reserved)) == len(reserved)
    assert min(reserved) > DEMO.sessions


def test_every_request_has_the_planned_size() -> None:
    for request in (*steady(DEMO).requests, *warm_up(DEMO).requests):
        assert request.output_tokens == 4
        assert request.prompt == PromptRecipe(
            seed=20260718, session=request.session, tokens=40, vocab_size=512
        )


def test_the_same_parameters_give_the_same_schedule() -> None:
    assert steady(DEMO) == steady(dataclasses.replace(DEMO))


# --- prompts ----------------------------------------------------------------

RECIPE = PromptRecipe(seed=20260718, session=3, tokens=4160, vocab_size=512)


def test_a_recipe_gives_the_same_prompt_for_ever() -> None:
    # Golden: a change here makes every saved run incomparable. The first ids are worked from
    # `printf 'kvgate/20260718/3' | openssl dgst -shake256 -xoflen 8`:
    # 0562e8efa6f45fb3, two little-endian numbers modulo 512.
    ids = token_ids(RECIPE)
    text = json.dumps(ids).encode()
    assert (
        hashlib.sha256(text).hexdigest()
        == "992858c1b8f341b7fc0ef85c47a7078ab58231e84429fc1f4d3a426b3e5fe182"
    )
    assert ids[:2] == [5, 166]


def test_a_prompt_has_its_exact_length_and_vocabulary() -> None:
    ids = token_ids(RECIPE)
    assert len(ids) == 4160
    assert min(ids) >= 0
    assert max(ids) == 511
    assert max(token_ids(dataclasses.replace(RECIPE, vocab_size=3))) == 2


def test_a_shorter_prompt_is_the_beginning_of_a_longer_one() -> None:
    assert token_ids(dataclasses.replace(RECIPE, tokens=100)) == token_ids(RECIPE)[:100]


@pytest.mark.parametrize("change", [{"session": 4}, {"seed": 1}])
def test_another_session_or_seed_shares_no_block(change: dict[str, int]) -> None:
    one, other = token_ids(RECIPE), token_ids(dataclasses.replace(RECIPE, **change))
    blocks = {tuple(one[i : i + 16]) for i in range(0, 4160, 16)}
    assert not blocks & {tuple(other[i : i + 16]) for i in range(0, 4160, 16)}
