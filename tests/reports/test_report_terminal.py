"""The verdict on a terminal, a pipe and a poor locale."""

from __future__ import annotations

import dataclasses
import io

import pytest
from rich.cells import cell_len
from rich.console import Console

from harness.verdicts import SignOff, Verdict
from reports.terminal import print_signoff
from reports.texts import load
from tests.reports import sample


def test_inconclusive_at_80_columns_without_colour() -> None:
    lines = _printed(sample.inconclusive(), width=80).splitlines()
    assert lines[0].split() == ["Criterion", "Value", "Bound", "n", "Verdict"]
    assert lines[3:5] == [
        "connector_round_trip[tiered_disk]   99.6 %         >= 95 %  1  PASS",
        "kv_bytes_per_token[tiered_disk]        0 B           = 0 B  1  PASS",
    ]
    first = lines.index("ttft_reduction_vs_recompute")
    row = "  [tiered_disk-c4]                            failed  >= 62.5 % each  3  INCONCLUSIVE"
    assert lines[first + 3].split() == row.split()
    assert lines[-3:] == [
        "Why: Requests failed, were cut short or timed out.",
        "15-tiered_disk-cold_recovery-c4-r2: 3 of 4 failed (timeout, truncated); allowed:",
        "share <= 0",
    ]


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("locale", ["en", "zh"])
@pytest.mark.parametrize("name", sample.SAMPLES)
def test_nothing_is_cut_or_overflows(name: str, locale: str, width: int) -> None:
    signoff = sample.SAMPLES[name]()
    shown = _printed(signoff, width=width, locale=locale)
    assert max(cell_len(line) for line in shown.splitlines()) <= width
    assert "…" not in shown
    joined = "".join(shown.split())
    for gate in signoff.gates:
        for result in gate.criteria:
            name, _, scope = result.id.partition("[")
            assert name in joined
            assert f"[{scope}" in joined
        for reason in gate.reasons:
            if gate.verdict is not Verdict.PASS:
                assert reason.code.value in shown
                assert "".join(load(locale).said(reason.text).split()) in joined


def test_the_bound_is_the_one_applied_and_the_repetition_short_of_it_is_named() -> None:
    lines = _printed(sample.one_repetition_short(), width=80).splitlines()
    row = next(i for i, line in enumerate(lines) if line.endswith("INCONCLUSIVE"))
    assert lines[row].split() == ["[tiered_disk-c1]", "91.3", "%", ">=", "90", "%", "each", "3",
                                  "INCONCLUSIVE"]  # fmt: skip
    assert lines[row + 1].strip() == "missed: repetition 2: 89.3 %"


def test_an_undecided_interval_shows_the_limit_it_missed() -> None:
    demo = sample.production_pass()
    gate = demo.gates[-1]
    wide = dataclasses.replace(
        gate.criteria[0],
        verdict=Verdict.INCONCLUSIVE,
        measurement=dataclasses.replace(gate.criteria[0].measurement, low=0.11, high=0.39),
    )
    gates = (dataclasses.replace(gate, verdict=Verdict.INCONCLUSIVE, criteria=(wide,)),)
    shown = _printed(dataclasses.replace(demo, gates=gates), width=120)
    assert "interval 11.0 % to 39.0 % at 95 %; lower limit needed >= 22 %" in shown


def test_very_long_id_breaks_at_its_bracket() -> None:
    demo = sample.demo_pass()
    gate = demo.gates[1]
    long = dataclasses.replace(gate.criteria[0], arm="tiered_network_file_system")
    gates = (dataclasses.replace(gate, criteria=(long,)),)
    lines = _printed(dataclasses.replace(demo, gates=gates), width=80).splitlines()
    assert lines[3].startswith("ttft_reduction_vs_recompute ")
    assert lines[4] == "  [tiered_network_file_system-c1]"


def test_pass_ends_with_verdict_and_scope() -> None:
    shown = _printed(sample.production_pass(), width=120)
    assert shown.splitlines()[-1].startswith("PASS  Every criterion that was judged is met.")
    assert "[acceptance test]" in shown


def test_no_criteria_is_said() -> None:
    assert _printed(sample.evidence_altered(), width=80).startswith("No criterion was judged.")


def test_colour_only_on_a_terminal_that_has_it() -> None:
    assert "\x1b[" not in _printed(sample.demo_pass(), width=80)
    file = io.StringIO()
    console = Console(file=file, width=80, color_system="standard", force_terminal=True)
    print_signoff(sample.demo_pass(), console)
    assert "\x1b[" in file.getvalue()


def test_control_codes_and_markup_from_evidence_are_inert() -> None:
    demo = sample.evidence_altered()
    hostile = "[bold red]x[/] \x1b[2J\nPASS  forged"
    reason = dataclasses.replace(demo.gates[0].reasons[0], text=hostile, evidence=hostile)
    gates = (dataclasses.replace(demo.gates[0], reasons=(reason,)),)
    shown = _printed(sample.caused(dataclasses.replace(demo, gates=gates)), width=200)
    assert "[bold red]x[/] \\x1b[2J\\nPASS  forged" in shown
    assert "\x1b" not in shown


def test_ascii_console_gets_ascii() -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    print_signoff(sample.stop_wrong_output(), Console(file=file, width=80))
    print_signoff(sample.stop_wrong_output(), Console(file=file, width=80), locale="zh")
    file.flush()
    assert b"STOP" in raw.getvalue()
    assert b"\\u505c\\u6b62" in raw.getvalue()


def _printed(signoff: SignOff, *, width: int, locale: str = "en") -> str:
    file = io.StringIO()
    print_signoff(signoff, Console(file=file, width=width, no_color=True), locale)
    return file.getvalue()
