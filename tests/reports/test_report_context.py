"""What the page says, before any HTML."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from harness.verdicts import (
    Cause,
    Check,
    Consequence,
    Finding,
    GateVerdict,
    Reason,
    ReasonCode,
    SignOff,
    Verdict,
)
from reports import assemble
from reports.charts import measured
from reports.configuration import configuration
from reports.context import (
    Banner,
    Decisive,
    GateTile,
    Mark,
    Occurrence,
    ReasonGroup,
    SettingRow,
    Summary,
)
from reports.criteria import gate_block
from reports.texts import load
from reports.verdict_words import label, reason_groups
from tests.reports import sample

EN = load("en")
PASS = Mark("pass", "PASS", "")
STOP = Mark("stop", "STOP", "")
INCONCLUSIVE = Mark("inconclusive", "INCONCLUSIVE", "")
NOT_RUN = Mark("not-run", "NOT RUN", "")
NOT_BUILT = Mark("not-built", "does not exist yet", "")


def test_banner_of_a_pass() -> None:
    absent = "Not in this version of kvgate"
    assert assemble.banner(sample.demo_pass(), EN) == Banner(
        mark=PASS,
        sentence="Every criterion that was judged is met.",
        scope="Judged: G1, G3. Do not exist yet: G2, G4.",
        label="demonstration, not signable",
        campaign="cpu-demo cold recovery, Qwen3-0.6B",
        profile="cpu-demo",
        gates=(
            GateTile("G1", "Arrival check", PASS, "Criteria judged: 2"),
            GateTile("G2", "Integration and correctness", NOT_BUILT, absent),
            GateTile("G3", "Main performance gate", PASS, "Criteria judged: 9"),
            GateTile("G4", "Stability", NOT_BUILT, absent),
        ),
    )


def test_altered_evidence_says_that_no_gate_was_judged() -> None:
    banner = assemble.banner(sample.evidence_altered(), EN)
    assert banner.mark == INCONCLUSIVE
    assert banner.scope == (
        "No criterion could be judged in: Evidence. Not run: G1, G3. Do not exist yet: G2, G4."
    )
    changed = "Sealed evidence was changed, removed or added to."
    assert banner.gates[0] == GateTile("Evidence", "", INCONCLUSIVE, changed)
    assert {tile.note for tile in banner.gates[1:] if tile.mark == NOT_RUN} == {"Not judged"}


def test_summary_of_a_pass_shows_the_levels_of_the_last_gate() -> None:
    assert assemble.summary(sample.demo_pass(), EN) == Summary(
        levels=("Concurrency 1", "Concurrency 2", "Concurrency 4"),
        rows=(
            Decisive("TTFT reduction against recompute", "tiered_disk against recompute",
                     ("96.5 %", "97.4 %", "97.4 %"), "≥ 62.5 % each"),
            Decisive("TTFT reduction against hbm_only", "tiered_disk against hbm_only",
                     ("96.4 %", "97.3 %", "97.4 %"), "≥ 62.5 % each"),
            Decisive("Throughput gain of one wave against recompute",
                     "tiered_disk against recompute",
                     ("1,632 %", "2,196 %", "2,245 %"), "≥ 158 % each"),
        ),
        others=2,
    )  # fmt: skip


def test_summary_without_levels_keeps_every_arm() -> None:
    demo = sample.demo_pass()
    first = demo.gates[0].criteria[0]
    arms = tuple(dataclasses.replace(first, arm=arm) for arm in ("recompute", "tiered_disk"))
    gates = (dataclasses.replace(demo.gates[0], criteria=arms),)
    found = assemble.summary(dataclasses.replace(demo, gates=gates), EN)
    assert found is not None
    assert [row.comparison for row in found.rows] == ["recompute", "tiered_disk"]


def test_criterion_without_levels_is_one_family_of_arms() -> None:
    demo = sample.demo_pass()
    first = demo.gates[0].criteria[0]
    arms = tuple(dataclasses.replace(first, arm=arm) for arm in ("recompute", "tiered_disk"))
    gate = dataclasses.replace(demo.gates[0], criteria=arms)
    block = gate_block(gate, dataclasses.replace(demo, gates=(gate,)), EN)
    (group,) = block.groups
    assert (block.levels, group.is_levelled) == ((), False)
    assert [(line.comparison, line.cells[0].value) for line in group.lines] == [
        ("recompute", "99.6 %"),
        ("tiered_disk", "99.6 %"),
    ]


@pytest.mark.parametrize("make", [sample.stop_wrong_output, sample.evidence_altered])
def test_no_summary_without_a_pass(make: Any) -> None:
    assert assemble.summary(make(), EN) is None


def test_reasons_of_a_stop_come_gravest_first() -> None:
    trial = "trials/09-tiered_disk-oracle-c1-r1/requests.jsonl#session="
    place = ("oracle_exact[tiered_disk-c1]",)
    text = "Session {}: token 1 is {}, reference {}; 2032 of 2040 prompt tokens came from disk."
    assert reason_groups(sample.stop_wrong_output(), EN) == (
        ReasonGroup(
            code="oracle.output_differs",
            mark=STOP,
            meaning=EN.reason(ReasonCode.OUTPUT_DIFFERS).meaning,
            remedy=EN.reason(ReasonCode.OUTPUT_DIFFERS).remedy,
            occurrences=(
                Occurrence(text.format(7, 1183, 271), f"{trial}7", place, 0),
                Occurrence(text.format(11, 13, 904), f"{trial}11", place, 0),
            ),
            more=0,
        ),
        ReasonGroup(
            code="gate.stop_loss",
            mark=NOT_RUN,
            meaning=EN.reason(ReasonCode.STOP_LOSS).meaning,
            remedy=EN.reason(ReasonCode.STOP_LOSS).remedy,
            occurrences=(Occurrence("G2 is STOP.", "", ("G3",), 0),),
            more=0,
        ),
    )


def test_one_finding_named_by_check_and_criteria_is_listed_once() -> None:
    groups = {group.code: group for group in reason_groups(sample.inconclusive(), EN)}
    (finding,) = groups["arms.unequal_compute"].occurrences
    assert finding.text == "tiered_disk vs recompute: compute threads 2 vs 1; allowed: equal"
    assert (len(finding.places), finding.more_places) == (6, 5)  # 9 criteria, a check, a gate


def test_many_findings_of_one_reason_are_counted() -> None:
    reasons = tuple(Reason(ReasonCode.NOT_COLD, f"trial {i}", f"trials/{i}") for i in range(50))
    gate = GateVerdict("g3", Verdict.INCONCLUSIVE, (), reasons)
    signoff = sample.caused(dataclasses.replace(sample.evidence_altered(), gates=(gate,)))
    (group,) = reason_groups(signoff, EN)
    assert (len(group.occurrences), group.more) == (8, 42)


def test_failed_check_is_a_reason_even_under_a_pass() -> None:
    signoff = _with_failed_check(sample.demo_pass())
    assert [group.code for group in reason_groups(signoff, EN)] == ["trial.client_saturated"]


def test_what_follows_stands_under_its_cause_with_the_count() -> None:
    finding = Finding("3 trials missing", "", ("g3",))
    effect = Consequence(ReasonCode.GATE_NOT_REACHED, Verdict.INCONCLUSIVE, (finding,) * 9)
    cause = Cause(
        ReasonCode.DISK_FULL,
        Verdict.INCONCLUSIVE,
        (Finding("full", "seal.json", ("g3",)),),
        (effect,),
    )
    (group,) = reason_groups(dataclasses.replace(sample.inconclusive(), causes=(cause,)), EN)
    (folded,) = group.following
    assert group.code == "run.disk_full"
    assert group.occurrences[0].places == ("G3",)
    assert (folded.code, folded.count, len(folded.occurrences), folded.more) == (
        "gate.not_reached",
        9,
        8,
        1,
    )


def test_checks_split_into_failed_and_passed_by_name() -> None:
    checks = assemble.checks(_with_failed_check(sample.demo_pass()), EN)
    assert checks.summary == "Failed: 1. Passed: 83."
    assert [row.subject for row in checks.failed] == ["t1"]
    assert {group.name: group.count for group in checks.passed} == {
        "equal_capacity": 2, "requests_complete": 36, "send_lag": 36, "disk_bytes": 9
    }  # fmt: skip


@pytest.mark.parametrize(
    ("signable", "own", "expected"),
    [
        (False, "demonstration, not signable", "demonstration, not signable"),
        (False, "", "not signable"),
        (False, "evidence that cannot be judged", "evidence that cannot be judged, not signable"),
        (True, "acceptance test", "acceptance test"),
        (True, "", ""),
    ],
)
def test_label_always_tells_when_not_signable(signable: bool, own: str, expected: str) -> None:
    signoff = dataclasses.replace(sample.demo_pass(), signable=signable, label=own)
    assert label(signoff, EN) == expected


def test_undeclared_difference_comes_first() -> None:
    found = configuration(sample.inconclusive(), EN)
    assert [(row.key, row.status) for row in found.differing] == [
        ("compute_threads", "undeclared"),
        ("kv_capacity_tokens", "undeclared"),
        ("connector", "declared"),
        ("prefix_caching", "declared"),
        ("tier_host_pool_bytes", "declared"),
    ]
    assert found.differing[0].values == ("1", "1", "2", "2")


def test_difference_within_its_bound_is_not_called_undeclared() -> None:
    found = configuration(sample.demo_pass(), EN)
    assert found.differing[-1] == SettingRow(
        "kv_capacity_tokens", ("12160", "12160", "12160", "12144"), "differs", "differs"
    )


def test_absent_key_differs_from_null() -> None:
    rows = {row.key: row.values for row in configuration(sample.demo_pass(), EN).differing}
    assert rows["connector"] == ("none", "none", "kvgate", "kvgate")
    assert rows["tier_host_pool_bytes"] == ("absent", "absent", "2147483648", "67108864")


def test_difference_outside_the_effective_configuration_shows_its_values() -> None:
    entry = {
        "key": "version.torch",
        "arm": "tiered_disk",
        "baseline": "recompute",
        "arm_value": "2.9",
        "baseline_value": "2.8",
        "declared": False,
    }
    signoff = dataclasses.replace(sample.demo_pass(), differences=(entry, {"odd": 1}), checks=())
    found = configuration(signoff, EN)
    assert found.differing[0] == SettingRow(
        "version.torch", ("2.8", "absent", "absent", "2.9"), "undeclared", "UNDECLARED"
    )
    assert found.notes == ('{"odd":1}',)


def test_cells_show_every_number_and_failed_waves() -> None:
    (block,) = measured(sample.inconclusive(), EN)
    row = block.rows[-1]
    assert (row.arm, row.level, row.ttft) == ("tiered_disk", 4, "0.187 · failed · 0.183")
    assert (row.sources, row.disk_read) == (("96", "0", "0", "absent"), "absent")
    assert (row.requests, row.valid, row.is_valid) == ("9 of 12", "invalid", False)


def test_chart_captions_say_what_they_do_not_show() -> None:
    (block,) = measured(sample.demo_pass(), EN)
    ttft, throughput, _ = block.charts
    worst = (
        "sessions are populated and read in the same cyclic order with a working set above the "
        "device cache: the worst case for an LRU cache"
    )
    assert worst in ttft.shows
    assert worst in throughput.shows
    assert "the throughput of one wave restates TTFT; not a second proof" in throughput.hides


def test_steady_window_is_not_captioned_as_a_wave() -> None:
    demo = sample.demo_pass()
    cells = tuple(dataclasses.replace(cell, workload="steady") for cell in demo.cells)
    (block,) = measured(dataclasses.replace(demo, cells=cells), EN)
    assert block.charts[1].title == "Throughput of the steady window"
    assert "one wave" not in block.charts[1].hides


def test_no_cells_and_no_arms_are_an_empty_page() -> None:
    page = assemble.build_page(sample.evidence_altered(), {}, EN)
    assert (page.measured, page.configuration.arms, page.checks.failed) == ((), (), ())
    assert page.commands == ("kvgate judge RUN",)


def test_override_names_the_default() -> None:
    gates = assemble.build_page(sample.production_pass(), {}, EN).gates
    rows = {row.id: row for group in gates[-1].groups for row in group.results}
    changed = rows["ttft_reduction_vs_recompute[tiered_disk-c4]"]
    assert (changed.target, changed.floor) == ("≥ 25 %", "lower limit ≥ 22 %")
    assert changed.override == "profile default 30 %"
    assert rows["ttft_reduction_vs_recompute[tiered_disk-c1]"].override == ""


def _with_failed_check(signoff: SignOff) -> SignOff:
    reason = Reason(ReasonCode.CLIENT_SATURATED, "send lag 31 ms", "trials/t1/samples.jsonl")
    failed = Check("send_lag", "t1", False, "31 ms", "at most 20 ms", (reason,))
    return sample.caused(dataclasses.replace(signoff, checks=(failed, *signoff.checks)))
