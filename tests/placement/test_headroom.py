"""Blocks, pools and what fits, against sums worked by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.errors import PlanError
from harness.placement.cache import KVSize, Parallel
from harness.placement.headroom import (
    GIB,
    Capacity,
    Devices,
    Fits,
    capacity,
    known_capacity,
    kv_bytes_per_device,
    server_tokens,
)
from tests.placement.test_architectures import size_of

# The published machine: 8 x 192 GB, 480 B parameters in 8 bit, about 450 GB of weights.
MACHINE = Devices(
    accelerators=8,
    memory_bytes=192 * GIB,
    utilisation=0.9,
    weights_bytes=450 * GIB,
    reserve_bytes=8 * GIB,
    margin=0.1,
)
PROMPT = 30_208


def coder(tensor: int = 8) -> KVSize:
    return size_of("Qwen3-Coder-480B", parallel=Parallel(tensor=tensor))


def test_the_published_machine_holds_34_sessions_and_not_243() -> None:
    found = capacity(coder(), MACHINE)
    # 192 x 0.9 - 450 / 8 = 116.55 GiB at most; (116.55 - 8) x 0.9 = 97.695 expected.
    expected, largest = kv_bytes_per_device(MACHINE, 8)
    assert (expected / GIB, largest / GIB) == pytest.approx((97.695, 116.55))
    # A block is 16 x 31,744 = 507,904 bytes on each device; a session 1,888 blocks.
    assert found.size.session_blocks(PROMPT) == 1_888
    assert (found.expected_blocks, found.largest_blocks) == (206_533, 246_394)
    assert found.sessions(PROMPT) == (109, 130)
    assert found.holds(34, PROMPT) is Fits.YES
    assert found.holds(243, PROMPT) is Fits.NO
    assert [found.holds(n, PROMPT) for n in (109, 110, 130, 131)] == [
        Fits.YES, Fits.CLOSE, Fits.CLOSE, Fits.NO,
    ]  # fmt: skip


def test_it_says_the_same_when_the_192_are_decimal() -> None:
    decimal = replace(MACHINE, memory_bytes=192e9, weights_bytes=450e9)
    found = capacity(coder(), decimal)
    assert found.holds(34, PROMPT) is Fits.YES
    assert found.holds(243, PROMPT) is Fits.NO


def test_two_copies_on_half_the_devices_each_pay_for_their_weights() -> None:
    """2 x TP4: 192 x 0.9 - 450 / 4 = 60.3 GiB at most, blocks twice as large."""
    found = capacity(coder(tensor=4), MACHINE)
    assert found.copies == 2
    assert found.size.block_bytes == 1_015_808
    # 60.3 GiB / 1,015,808 = 63,739 blocks of each copy: 33 sessions, twice.
    assert found.largest_blocks == 63_739
    assert found.sessions(PROMPT)[1] == 2 * 33


def test_nothing_left_for_kv_is_an_error_with_the_numbers() -> None:
    with pytest.raises(PlanError, match=r"172\.8 GiB usable per device - 225\.0 weights - 8\.0"):
        capacity(coder(tensor=2), MACHINE)


def test_devices_that_make_no_whole_copy() -> None:
    with pytest.raises(PlanError, match=r"accelerators: found 6; allowed: a multiple of .* = 8"):
        capacity(coder(), replace(MACHINE, accelerators=6))


def test_heads_kept_twice_halve_what_fits() -> None:
    """235B: four heads. On eight devices each keeps as much as on four."""
    on_four = size_of("Qwen3-235B-A22B", parallel=Parallel(tensor=4))
    on_eight = size_of("Qwen3-235B-A22B", parallel=Parallel(tensor=8))
    assert on_four.block_bytes == on_eight.block_bytes == 16 * 48_128


def test_a_latent_gains_nothing_from_more_devices() -> None:
    one, eight = size_of("DeepSeek-V3"), size_of("DeepSeek-V3", parallel=Parallel(tensor=8))
    assert one.block_bytes == eight.block_bytes == 16 * 70_272


def test_blocks_are_rounded_up_and_one_is_the_engines_own() -> None:
    size = size_of("Qwen3-8B")
    assert [size.session_blocks(n) for n in (1, 16, 17, 32)] == [1, 1, 2, 2]
    found = Capacity(size, expected_blocks=10, largest_blocks=11)
    # Three blocks each: 9 of 10 and 10 of 11 are for sessions.
    assert found.sessions(48) == (3, 3)
    assert known_capacity(size, blocks=9).sessions(48) == (2, 2)
    assert known_capacity(size, blocks=0).sessions(48) == (0, 0)


# --- pools of several kinds --------------------------------------------------


def test_a_window_frees_what_lies_behind_it() -> None:
    """gpt-oss: 18 full and 18 windowed layers, two groups in a pool of blocks of 18 layers."""
    full, dropping = size_of("gpt-oss-120b"), size_of("gpt-oss-120b", drops_windows=True)
    assert full.block_bytes == 16 * 73_728
    assert dropping.block_bytes == 16 * 36_864
    # 1,600 tokens: 100 blocks of all layers; or 100 of the full ones and 9 of the window:
    # 127 earlier tokens in 8 blocks, and one because they need not start at one.
    assert full.session_blocks(1_600) == 100
    assert dropping.session_blocks(1_600) == 100 + 9
    # Shorter than the window: as many as there are.
    assert dropping.session_blocks(32) == 2 + 2


def test_a_short_group_is_filled_up() -> None:
    """Gemma 3: 10 full, 52 windowed: groups of ten layers, one and six of them."""
    size = size_of("Gemma-3-27B", drops_windows=True)
    page = 16 * 2 * 16 * 128 * 2
    assert size.block_bytes == 10 * page
    # 16,000 tokens: 1,000 blocks, and six times ceil(1023 / 16) + 1 = 65.
    assert size.session_blocks(16_000) == 1_000 + 6 * 65


def test_chunks() -> None:
    """Llama 4: 12 full, 36 in chunks of 8192: a quarter grows, three groups hold 512 blocks."""
    size = size_of("Llama-4-Scout", drops_windows=True)
    assert size.session_blocks(32_000) == 2_000 + 3 * 512


def test_windows_in_all_layers_are_dropped_in_any_case() -> None:
    size = size_of("Mistral-7B-v0.1")
    assert size.session_blocks(30_000) == 4096 // 16 + 1
    assert size.session_bytes(30_000) == 4_096 * 131_072


def test_a_state_takes_one_block_and_makes_blocks_larger() -> None:
    """Qwen3-Next: a state of 1,097,728 bytes, 2,048 bytes per token and layer: 536 tokens and more;
    the block of 16 becomes 34 x 16 = 544. Four groups of twelve layers."""
    size = size_of("Qwen3-Next-80B-A3B")
    assert size.page_tokens == 544
    assert size.block_bytes == 12 * 544 * 2_048
    assert size.session_blocks(5_440) == 10 + 3
    assert size.session_blocks(54_400) == 100 + 3
    assert size.session_bytes(1_000) == 1_000 * 24_576 + 39_518_208


def test_pages_that_differ_in_one_group() -> None:
    """DeepSeek-V3.2: latent and indexer grow alike; a block holds a page of both."""
    assert size_of("DeepSeek-V3.2").block_bytes == 16 * 78_324


# --- what a server reports ---------------------------------------------------


def test_tokens_that_vllm_prints() -> None:
    """140 blocks of 128 tokens, requests of up to 4,608 = 36 blocks: all 17,920 tokens."""
    size = size_of("Qwen3-8B", block_tokens=128)
    found = server_tokens(size, blocks=140, max_model_len=4608, in_flight_tokens=2048)
    assert found == 140 * 128
    # Requests of up to 4,600 tokens take 36 blocks as well: 140 / 36 x 4,600.
    assert server_tokens(size, blocks=140, max_model_len=4600, in_flight_tokens=2048) == 17_888


def test_tokens_that_vllm_prints_for_windows() -> None:
    """gpt-oss, 16,384 tokens: 1,024 blocks and ceil((127 + 2,048) / 16) + 1 = 137 set aside."""
    size = size_of("gpt-oss-120b", drops_windows=True)
    found = server_tokens(size, blocks=11_610, max_model_len=16_384, in_flight_tokens=2_048)
    assert found == 10 * 16_384
