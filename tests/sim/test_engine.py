"""Steps, admission, tiers and counters against times and tokens worked by hand."""

from __future__ import annotations

import pytest

from harness.records import PromptRecipe
from harness.sim.content import block_keys, damaged
from harness.sim.faults import Fault, FaultName
from tests.sim.rig import Answer, Rig
from workloads.cold_recovery import CONTROL_SESSION, CONTROLS, DONOR_SESSION
from workloads.prompts import token_ids

PROMPT = list(range(100, 110))  # two whole blocks of four, and two tokens
OTHER = list(range(200, 210))


def output(answer: Answer) -> list[tuple[int, float]]:
    return [(token.id, token.logprob) for token in answer.tokens]


# --- time ---------------------------------------------------------------------


def test_a_prompt_takes_its_tokens_over_the_prefill_rate_and_then_a_step_per_token() -> None:
    # 0.01 + 10 / 100 = 0.11; each further token 0.01 + 0.1.
    assert Rig().run(PROMPT, 3).times_s == [0.11, 0.22, 0.33]


def test_prompts_are_computed_in_chunks_in_the_order_of_arrival() -> None:
    rig = Rig(chunk_tokens=10)
    first, second = rig.ask(PROMPT, 3), rig.ask(OTHER, 1)
    rig.settle()
    # Step 1: all of the first. Step 2: its token and 9 of the second: 0.01 + 0.09 + 0.1.
    # Step 3: its last token and the second's last: 0.01 + 0.01 + 0.1.
    assert first.times_s == [0.11, 0.31, 0.43]
    assert second.times_s == [0.43]


def test_a_request_waits_until_there_are_blocks_for_all_of_it() -> None:
    rig = Rig(device_blocks=4)  # three usable; prompt and answer need three
    first, second = rig.ask(PROMPT, 2), rig.ask(OTHER, 1)
    rig.settle()
    assert first.times_s == [0.11, 0.22]
    assert second.times_s == [0.33]


def test_equal_runs_are_equal() -> None:
    runs = []
    for _ in range(2):
        rig = Rig(medium="disk")
        runs.append([output(rig.run(prompt, 3)) for prompt in (PROMPT, OTHER, PROMPT)])
    assert runs[0] == runs[1]


# --- caches -------------------------------------------------------------------


def test_a_repeat_comes_from_the_device_and_computes_the_rest_only() -> None:
    rig = Rig()
    cold = rig.run(PROMPT)
    start_s = rig.now_s
    warm = rig.run(PROMPT)
    assert warm.request.cached_tokens == 8
    assert warm.times_s[0] - start_s == pytest.approx(0.01 + 2 / 100)
    assert (warm.tokens[0].id, warm.tokens[0].logprob) != (
        cold.tokens[0].id,
        cold.tokens[0].logprob,
    )
    assert warm.tokens[0].id == cold.tokens[0].id
    assert rig.count("vllm:prefix_cache_queries") == 20
    assert rig.count("vllm:prefix_cache_hits") == 8


def test_the_last_token_is_always_computed() -> None:
    rig = Rig()
    whole = PROMPT[:8]
    rig.run(whole)
    assert rig.run(whole).request.cached_tokens == 4


def test_without_prefix_caching_nothing_is_kept() -> None:
    rig = Rig(prefix_caching=False)
    first, second = rig.run(PROMPT), rig.run(PROMPT)
    assert second.request.cached_tokens == 0
    assert output(first) == output(second)
    assert rig.engine.device.available == 100


# --- tiers --------------------------------------------------------------------


def test_a_restore_from_disk_takes_bytes_over_bandwidth_and_equals_a_device_hit() -> None:
    reference = Rig()
    reference.run(PROMPT, 3)
    hit = reference.run(PROMPT, 3)
    rig = Rig(medium="disk")
    rig.run(PROMPT, 3)
    rig.make_cold()
    start_s = rig.now_s
    restored = rig.run(PROMPT, 3)
    # Two blocks of 40 bytes at 80 bytes/s, then two tokens.
    assert restored.times_s[0] - start_s == pytest.approx(1.0 + 0.01 + 0.02)
    assert output(restored) == output(hit)
    assert rig.count("kvgate:tier_hit_tokens", "disk") == 8
    assert rig.count("kvgate:tier_read_bytes", "disk") == 80
    assert rig.count("vllm:external_prefix_cache_hits") == 8
    assert rig.count("vllm:prompt_tokens_by_source", "external_kv_transfer") == 8
    assert rig.engine.tiers is not None
    assert rig.engine.tiers.media["disk"].read_bytes == 80


def test_what_was_read_from_disk_is_in_the_host_pool_until_that_is_emptied() -> None:
    rig = Rig(medium="disk")
    rig.run(PROMPT)
    rig.make_cold()
    rig.run(PROMPT)
    rig.make_cold(external=False)
    rig.run(PROMPT)
    assert rig.count("kvgate:tier_hit_tokens", "host") == 8
    rig.make_cold()
    rig.run(PROMPT)
    assert rig.count("kvgate:tier_hit_tokens", "disk") == 16


def test_stores_become_durable_at_the_write_rate_and_a_reset_waits_for_them() -> None:
    rig = Rig(medium="disk")
    rig.ask(PROMPT)
    duration = rig.engine.begin_step(0.0)
    assert duration == pytest.approx(0.11)
    rig.engine.end_step(0.11)
    tiers = rig.engine.tiers
    assert tiers is not None
    assert tiers.backlog_blocks == 2
    assert not rig.engine.reset_prefix_cache(external=True, now_s=0.11)
    tiers.advance(0.11 + 0.15)  # 40 bytes at 400 bytes/s: 0.1 s each
    assert tiers.backlog_blocks == 1
    tiers.advance(0.11 + 0.21)
    assert tiers.backlog_blocks == 0


def test_a_full_disk_forgets_the_oldest_session() -> None:
    rig = Rig(medium="disk", disk_bytes=80)  # two blocks
    rig.run(PROMPT)
    rig.run(OTHER)
    rig.make_cold()
    assert rig.run(PROMPT).request.cached_tokens == 0


def test_a_block_that_was_damaged_on_the_medium_changes_the_output_also_on_the_device() -> None:
    rig = Rig(medium="disk")
    rig.run(PROMPT)
    rig.make_cold()
    right = output(rig.run(PROMPT))
    rig.make_cold()
    tiers = rig.engine.tiers
    assert tiers is not None
    key = next(iter(tiers.disk))
    tiers.replace({key: bytes(16)})
    restored, again = rig.run(PROMPT), rig.run(PROMPT)
    assert output(restored) != right
    assert output(again) == output(restored)
    assert again.request.tokens_by_source["device"] == 8


@pytest.mark.parametrize("control", CONTROLS)
def test_every_negative_control_is_seen_restored_and_on_the_device_whatever_the_seed(
    control: str,
) -> None:
    for seed in range(100):
        rig = Rig(medium="disk", seed=seed)
        prompt, donor = (
            token_ids(PromptRecipe(seed=seed, session=session, tokens=10, vocab_size=512))
            for session in (CONTROL_SESSION, DONOR_SESSION)
        )
        for stored in (prompt, donor):
            rig.run(stored)
        rig.make_cold()
        right = output(rig.run(prompt))
        tiers = rig.engine.tiers
        assert tiers is not None
        keys, others = (block_keys(ids, 4) for ids in (prompt, donor))
        wrong = damaged(control, list(tiers.stored(keys)), list(tiers.stored(others)), layers=2)
        tiers.replace({keys[index]: payload for index, payload in wrong.items()})
        rig.make_cold()
        restored, again = rig.run(prompt), rig.run(prompt)
        assert restored.request.cached_tokens == again.request.cached_tokens == 8
        assert output(restored) != right
        assert output(again) != right


def test_statistics_advance_with_steps_only() -> None:
    rig = Rig(medium="disk")
    rig.run(PROMPT)
    assert rig.engine.counters.gauges["kvgate:tier_store_backlog_blocks"] == 2
    assert rig.engine.tiers is not None
    assert rig.engine.tiers.backlog_blocks == 0
    rig.run([1, 2, 3])
    assert rig.engine.counters.gauges["kvgate:tier_store_backlog_blocks"] == 0


# --- faults -------------------------------------------------------------------


def restored(rig: Rig, prompt: list[int]) -> Answer:
    """Stores, makes cold, asks again."""
    rig.run(prompt)
    rig.make_cold()
    return rig.run(prompt)


def test_wrong_kv_is_another_sessions_and_fluent() -> None:
    right = output(restored(Rig(medium="disk"), PROMPT))
    rig = Rig(Fault(FaultName.WRONG_KV), medium="disk")
    rig.run(OTHER)
    wrong = restored(rig, PROMPT)
    assert output(wrong) != right
    assert wrong.request.cached_tokens == 8


def test_hits_without_bytes_count_tokens_alone() -> None:
    rig = Rig(Fault(FaultName.HITS_WITHOUT_BYTES), medium="disk")
    restored(rig, PROMPT)
    assert rig.count("kvgate:tier_hit_tokens", "disk") == 8
    assert rig.count("kvgate:tier_read_bytes", "disk") == 0
    assert rig.engine.tiers is not None
    assert rig.engine.tiers.media["disk"].read_bytes == 0


def test_a_tier_that_fills_up_drops_stores_without_a_word() -> None:
    rig = Rig(Fault(FaultName.TIER_FILLS_UP, value=2.0), medium="disk")
    rig.run(PROMPT)
    rig.run(OTHER)
    rig.make_cold()
    assert rig.run(OTHER).request.cached_tokens == 0
    assert rig.run(PROMPT).request.cached_tokens == 8
    assert rig.count("kvgate:tier_dropped_store_blocks") == 0


def test_a_stalled_engine_computes_nothing_more() -> None:
    rig = Rig(Fault(FaultName.STALL, from_request=2))
    assert rig.run(PROMPT).times_s == [0.11]
    assert rig.run(OTHER).times_s == []


def test_a_restart_gives_up_requests_and_finds_the_disk_again() -> None:
    rig = Rig(medium="disk")
    rig.run(PROMPT)
    lost = rig.ask(OTHER)
    rig.engine.restart()
    assert lost.given_up
    assert rig.run(PROMPT).request.tokens_by_source["disk"] == 8
    assert rig.count("vllm:prompt_tokens") == 10


def test_a_convoy_gives_first_tokens_together() -> None:
    rig = Rig(Fault(FaultName.CONVOY, value=0.5), chunk_tokens=10)
    first, second = rig.ask(PROMPT), rig.ask(OTHER)
    rig.settle()
    assert first.times_s == second.times_s
