"""What `kvgate plan` says of the placement, in each case that it knows."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from harness.campaign.plan import make_plan
from harness.campaign.reading import parse_campaign
from harness.cli.placement_screen import show_placement
from tests.campaign.test_placing import CONFIGS, MACHINE, TP8, text_of


def screen(
    name: str, *, sessions: int = 9, reported: dict[str, int] | None = None, **changes: str
) -> str:
    text = text_of(**changes).replace("sessions = 9", f"sessions = {sessions}")
    text = text.replace("prompt_tokens = 328", "prompt_tokens = 30203")
    config: dict[str, Any] = {**CONFIGS[name], "vocab_size": 1000}
    if changes.get("model"):
        config["model_type"] = "brand_new"
    plan = make_plan(parse_campaign(text), text, model_config=config)
    output = io.StringIO()
    show_placement(plan, Console(file=output, width=200), reported)
    return output.getvalue()


@pytest.mark.parametrize(
    ("sessions", "said"),
    [
        (109, "placement: 109 sessions probably fit: device memory holds 109 (at most 130)"),
        (110, "placement: too close to tell whether 110 sessions fit: device memory holds 109"),
        (130, "placement: too close to tell whether 130 sessions fit"),
        (131, "placement: 131 sessions do not fit: device memory holds 109 (at most 130)"),
    ],
)
def test_the_finding_at_its_bounds(sessions: int, said: str) -> None:
    shown = screen("Qwen3-Coder-480B", sessions=sessions, args=TP8, deployment=MACHINE)
    assert said in shown
    assert "wave of 2" in shown


def test_copies_of_heads_are_shown() -> None:
    shown = screen("Qwen3-235B-A22B", args=TP8, deployment=MACHINE)
    assert "192,512 bytes (bfloat16); 48,128 on a rank, 385,024 on all: 2 copies" in shown


def test_copies_of_the_model_are_counted() -> None:
    halves = MACHINE.replace("tensor_parallel = 8", "tensor_parallel = 4")
    shown = screen("Qwen3-Coder-480B", args='"-tp", "4"', deployment=halves)
    assert "2 copies of the model" in shown
    assert "of each copy" in shown


def test_windows_are_shown_with_and_without_a_connector() -> None:
    shown = screen("gpt-oss-120b")
    # 36 layers of 30,207 tokens; or 18 of them and 18 of 128 tokens.
    assert "2.07 GiB for 30,207 tokens" in shown
    assert "1.04 GiB a session: blocks behind windows are freed" in shown


def test_states_are_shown() -> None:
    assert "37.7 MiB, whatever the length" in screen("Qwen3-Next-80B-A3B")


def test_a_campaign_that_states_no_devices() -> None:
    assert "not known whether the working set fits in device memory; state [deployment]" in screen(
        "Qwen3-8B"
    )


def test_bytes_that_were_stated_for_an_unknown_model() -> None:
    shown = screen("Qwen3-8B", model="kv_bytes_per_token = 4096")
    assert "4,096 bytes on all ranks, as stated" in shown
    assert "placement: not computed: model.path: config.json model_type: found 'brand_new'" in shown


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        # 206,533 blocks of 16 tokens expected, 246,394 at most.
        (3_304_527, "NOT as computed: 3,304,528 (at most 3,942,304)"),
        (3_304_528, "KV capacity 3,304,528 tokens; as computed: 3,304,528 (at most 3,942,304)"),
        (3_942_304, "; as computed: "),
        (3_942_305, "NOT as computed"),
    ],
)
def test_what_a_server_reported_is_compared(tokens: int, said: str) -> None:
    shown = screen("Qwen3-Coder-480B", args=TP8, deployment=MACHINE, reported={"hbm_only": tokens})
    assert "hbm_only reported" in shown
    assert said in shown
