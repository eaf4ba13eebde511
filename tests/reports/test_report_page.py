"""The page for its readers: first screen, failing rows first, links, filter, paper."""

from __future__ import annotations

import dataclasses
import html
import json
import re
import tomllib
from importlib import resources
from pathlib import Path

import pytest

from harness.evidence import results
from harness.run.judging import judge_directory
from harness.verdicts import Cause, Consequence, Finding, Reason, ReasonCode, SignOff, Verdict
from reports import assemble
from reports.configuration import configuration
from reports.context import Fact
from reports.criteria import anchors, gate_block, headlines
from reports.phrases import Phrases, load_phrases
from reports.safe import evidence_href
from reports.signoff import render_html
from reports.texts import LOCALES, load
from tests.reports import sample
from tests.sealed_runs import build_run

EN, ZH = load("en"), load("zh")


# --- the first screen -----------------------------------------------------------------


def test_headlines_are_sentences_with_both_sides() -> None:
    demo = sample.demo_pass()
    found = headlines(demo, anchors(demo, EN), EN)
    assert [line.sentence for line in found] == [
        "First token 39.1 times sooner: 7.31 s to 0.187 s",
        "First token 38.1 times sooner: 7.12 s to 0.187 s",
        "Throughput of a wave 23.5 times as high: 10.0 tokens/s to 235 tokens/s",
    ]
    assert found[0].where == "tiered_disk against recompute · Concurrency 4 · repetitions: 3"
    assert found[0].required == "required ≥ 62.5 % each"
    assert found[0].anchor == anchors(demo, EN)["ttft_reduction_vs_recompute[tiered_disk-c4]"]


@pytest.mark.parametrize(
    ("candidate", "ratio", "inverse", "sentence"),
    [
        (0.2, 0.1, 10.0, "First token 10 times sooner: 2.00 s to 0.200 s"),
        (3.0, 1.5, 0.666666667, "First token 1.5 times later: 2.00 s to 3.00 s"),
        (0.01, 0.005, 200.0, "First token 200 times sooner: 2.00 s to 0.0100 s"),
        ("inf", "inf", 0.0, "Requests failed, so there is no figure against 2.00 s"),
    ],
)
def test_a_headline_says_sooner_later_or_failed(
    candidate: float | str, ratio: float | str, inverse: float, sentence: str
) -> None:
    demo = sample.demo_pass()
    gate = demo.gates[1]
    result = gate.criteria[0]
    assert result.measurement.compared is not None
    both = dataclasses.replace(
        result.measurement.compared,
        candidate=candidate,
        baseline=2.0,
        ratio=ratio,
        inverse=inverse,
    )
    changed = dataclasses.replace(
        result, measurement=dataclasses.replace(result.measurement, compared=both)
    )
    one = dataclasses.replace(demo, gates=(dataclasses.replace(gate, criteria=(changed,)),))
    (line,) = headlines(one, anchors(one, EN), EN)
    assert line.sentence == sentence


def test_a_verdict_file_without_both_sides_has_no_headline() -> None:
    altered = sample.evidence_altered()
    assert headlines(altered, anchors(altered, EN), EN) == ()


def test_the_first_screen_says_when_what_on_what_and_for_whom() -> None:
    assert assemble.first_facts(sample.production_pass(), sample.PROVENANCE, EN) == (
        Fact("Date, UTC", "2026-03-14 09:15"),
        Fact("Run", "cpu-demo/20260314T091502Z"),
        Fact("Evidence digest", "5f1c5f1c5f1c5f1c"),
        Fact("Model", "Qwen3-0.6B: Qwen3ForCausalLM, 28 layers, hidden size 1024"),
        Fact("Server", "vllm 0.32.0"),
        Fact("Machine of the run", "a made-up processor, cores: 2, 8.0 GiB"),
        Fact("Supplier", "Array Works Ltd"),
        Fact("Customer", "Model House plc"),
    )


def test_what_is_not_known_is_absent_on_the_first_screen() -> None:
    facts = assemble.first_facts(sample.evidence_altered(), {}, EN)
    assert {fact.value for fact in facts[:5]} == {"absent"}
    assert facts[-1].value == "not named in the campaign"


def test_a_gate_that_does_not_exist_is_called_so() -> None:
    page = html.unescape(render_html(sample.demo_pass(), {}))
    assert page.count("does not exist yet") == 2
    assert "Judged: G1, G3. Do not exist yet: G2, G4." in page


def test_the_main_reason_stands_in_the_banner_and_leads_to_its_place() -> None:
    page = render_html(sample.one_repetition_short(), {})
    banner = page.split('<section class="banner', 1)[1].split("</section>", 1)[0]
    assert 'href="#why-0"' in banner
    assert "At least one repetition does not reach" in banner


# --- criteria -------------------------------------------------------------------------


def test_failing_rows_come_first_and_name_bound_and_repetition() -> None:
    signoff = sample.one_repetition_short()
    block = gate_block(signoff.gates[1], signoff, EN)
    (row,) = block.failed
    assert (row.value, row.target, row.floor) == (
        "91.3 %",
        "≥ 90 %",
        "in every repetition; target ≥ 80 %",
    )
    assert row.missed == "repetition 2: 89.3 %"
    page = render_html(signoff, {})
    assert page.index('class="open by-arm') < page.index(
        '<table class="grid">', page.index("G3</b>")
    )


def test_passed_rows_are_grouped_by_criterion_with_levels_as_columns() -> None:
    demo = sample.demo_pass()
    block = gate_block(demo.gates[1], demo, EN)
    assert block.levels == ("Concurrency 1", "Concurrency 2", "Concurrency 4")
    assert [(g.title, [c.value for c in g.lines[0].cells]) for g in block.groups] == [
        ("TTFT reduction against recompute", ["96.5 %", "97.4 %", "97.4 %"]),
        ("TTFT reduction against hbm_only", ["96.4 %", "97.3 %", "97.4 %"]),
        ("Throughput gain of one wave against recompute", ["1,632 %", "2,196 %", "2,245 %"]),
    ]


def test_a_failing_level_is_marked_in_the_grid_and_leads_to_its_row() -> None:
    signoff = sample.one_repetition_short()
    block = gate_block(signoff.gates[1], signoff, EN)
    short, passed = block.groups[0].lines[0].cells[:2]
    assert short.mark is not None
    assert (short.mark.word, short.anchor) == ("INCONCLUSIVE", block.failed[0].anchor)
    assert passed.anchor == ""


def test_of_many_failing_rows_all_but_four_are_folded() -> None:
    page = render_html(sample.inconclusive(), {})
    assert page.count('class="open by-arm') == 9
    assert "and 5 more that are not passed" in page


@pytest.mark.parametrize("locale", LOCALES)
@pytest.mark.parametrize("name", sample.SAMPLES)
def test_every_place_of_a_reason_that_is_on_the_page_is_a_link(name: str, locale: str) -> None:
    signoff = sample.SAMPLES[name]()
    page = render_html(signoff, {}, locale=locale)
    ids = set(re.findall(r'id="([^"]+)"', page))
    for place, anchor in anchors(signoff, load(locale)).items():
        assert anchor in ids, place
    why = assemble.build_page(signoff, {}, load(locale)).why
    for result in (c for gate in signoff.gates for c in gate.criteria if c.reasons):
        for reason in result.reasons:
            assert why[reason.code.value] in ids


def test_the_filter_needs_no_script() -> None:
    page = render_html(sample.demo_pass(), {})
    assert "<script" not in page
    for arm in range(len(sample.ARMS)):
        assert f'id="only-{arm}"' in page
        assert f"#only-{arm}:checked ~ .gate .by-arm:not(.arm-{arm})" in page
    assert re.search(r'<tr class="by-arm arm-3', page)  # tiered_disk is the fourth arm
    assert "#show-open:checked ~ .gate .passed-part" in page


# --- evidence -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "href"),
    [
        ("trials/03-a-wave-c1-r1", "../trials/03-a-wave-c1-r1"),
        ("trials/03-a/requests.jsonl#session=7", "../trials/03-a/requests.jsonl"),
        ("server.json", ""),
        ("trials/../../etc/passwd", ""),
        ("trials/..", ""),
        ("javascript:alert(1)", ""),
        ("trials/a b", ""),
    ],
)
def test_only_files_of_trials_are_links(path: str, href: str) -> None:
    assert evidence_href(path) == href


def test_every_evidence_link_of_a_real_run_exists(tmp_path: Path) -> None:
    run = build_run(tmp_path)
    report = results.write_report(
        run, render_html(judge_directory(run), results.read_provenance(run))
    )
    links = set(re.findall(r'href="(\.\./[^"]+)"', report.read_text()))
    assert len(links) > 20
    assert [link for link in links if not (report.parent / link).exists()] == []


# --- configuration --------------------------------------------------------------------


def test_a_table_of_settings_shows_only_what_differs_between_arms_that_have_it() -> None:
    demo = sample.demo_pass()
    tables = {
        "tiered_dram": {"host_pool_bytes": 8, "checksum": "XXH3"},
        "tiered_disk": {"host_pool_bytes": 4, "checksum": "XXH3"},
    }
    arms = tuple(
        dataclasses.replace(arm, effective={**arm.effective, "connector_config": tables[arm.arm]})
        if arm.arm in tables
        else arm
        for arm in demo.arms
    )
    entry = {
        "key": "connector_config",
        "arm": "tiered_disk",
        "baseline": "recompute",
        "arm_value": tables["tiered_disk"],
        "baseline_value": None,
        "declared": True,
    }
    found = configuration(dataclasses.replace(demo, arms=arms, differences=(entry,)), EN)
    rows = {row.key: row for row in (*found.differing, *found.same)}
    pool = rows["connector_config.host_pool_bytes"]
    assert (pool.values, pool.status) == (("absent", "absent", "8", "4"), "declared")
    assert rows["connector_config.checksum"].status == "same"
    assert "connector_config" not in rows


# --- charts ---------------------------------------------------------------------------


def test_charts_are_described_with_their_values() -> None:
    page = render_html(sample.demo_pass(), {})
    assert 'aria-label="Concurrency 4, recompute 7.31 s, hbm_only 7.12 s' in page
    assert "target: where a PASS of that arm ends" in page


def test_target_lines_are_those_of_the_judge() -> None:
    """Two of TTFT per level (two baselines), one of throughput; none in another colour."""
    svgs = re.findall(r"<svg viewBox.*?</svg>", render_html(sample.demo_pass(), {}), re.DOTALL)
    drawn = [svg.lower().count("#8e2a6e") for svg in svgs if "aria-label" in svg]
    assert drawn == [2, 2, 2, 1, 1, 1, 0, 0, 0]


# --- paper ----------------------------------------------------------------------------


def test_the_first_page_on_paper_has_the_signatures() -> None:
    page = html.unescape(render_html(sample.production_pass(), sample.PROVENANCE))
    first = page.split('<section id="criteria">', 1)[0]
    assert "For the supplier: Array Works Ltd" in first
    assert "For the customer: Model House plc" in first
    assert ".signature.on-paper { break-after: page; }" in page


# --- languages ------------------------------------------------------------------------


def _criteria_texts() -> list[str]:
    text = (resources.files("gates") / "criteria.toml").read_text(encoding="utf-8")
    found: dict[str, None] = {}
    for profile in tomllib.loads(text)["profiles"].values():
        found |= dict.fromkeys(profile["not_tested"])
        for criterion in profile["criteria"].values():
            found |= dict.fromkeys((criterion["title"], criterion["rationale"]))
    return list(found)


@pytest.mark.parametrize("text", _criteria_texts())
def test_every_text_of_the_bundled_criteria_is_in_chinese_too(text: str) -> None:
    assert ZH.said(text) != text


def test_every_finding_and_estimator_of_a_run_is_in_chinese_too(tmp_path: Path) -> None:
    """Words only: numbers, lists of keys and bounds like `0.9 to 1.1` need none."""
    signoff = judge_directory(build_run(tmp_path))
    said = {text for check in signoff.checks for text in (check.found, check.allowed)}
    said |= {c.measurement.estimator for gate in signoff.gates for c in gate.criteria}
    names = re.compile(r"[a-z]+(_[a-z]+)+|[<>=.,\d\s]|connector")
    plain = {text for text in said if ZH.said(text) == text and names.sub("", text)}
    assert plain == set()


def test_details_of_reasons_are_in_chinese_too() -> None:
    shown = ZH.said("trials: x; allowed: y")
    assert shown == "trials：x；允许：y"
    missed = "repetition 2: 89.3 %, repetition 3: 88 %; needed in every repetition: >= 90 %"
    assert ZH.said(missed) == "第 2 次重复 89.3 %、第 3 次重复 88 %；每次重复都须 ≥ 90 %"
    failed = "15-tiered_disk-c4-r2: 3 of 4 failed (timeout, truncated); allowed: share <= 0"
    assert ZH.said(failed) == (
        "15-tiered_disk-c4-r2：4 个中失败 3 个（timeout, truncated）；允许：比例 <= 0"
    )


def test_a_text_that_nobody_translated_stands_as_it_is() -> None:
    assert ZH.said("something entirely new") == "something entirely new"
    assert EN.said("0 of 4 failed") == "0 of 4 failed"


def test_patterns_fill_nothing_but_what_they_found() -> None:
    """Braces of evidence are text, never a template."""
    phrases = Phrases({}, [("a {x} b", "c {x} d")])
    assert phrases.translated("a {__class__} b") == "c {__class__} d"
    assert load_phrases("en").translated("complete") == "complete"


def test_hostile_detail_is_translated_as_text(tmp_path: Path) -> None:
    reason = Reason(ReasonCode.GATE_NOT_REACHED, "the run ended early: <b>{0}</b>")
    altered = sample.evidence_altered()
    gate = dataclasses.replace(altered.gates[0], reasons=(reason,))
    changed = sample.caused(dataclasses.replace(altered, gates=(gate,)))
    page = render_html(changed, {}, locale="zh")
    assert "运行提前结束：&lt;b&gt;{0}&lt;/b&gt;" in page


def test_an_old_verdict_file_still_makes_a_page(tmp_path: Path) -> None:
    """Without the later fields: no headline, no line, no label, and nothing made up."""
    content = json.loads(json.dumps(sample.demo_pass().to_json()))
    for gate in content["gates"]:
        for result in gate["criteria"]:
            result["measurement"].pop("compared", None)
            for key in ("each", "each_stop", "low", "least_n"):
                result["bound"].pop(key, None)
    for cell in content["cells"]:
        cell.pop("ttft_wave_s_mean", None)
        cell.pop("throughput_tokens_per_s_mean", None)
    page = render_html(SignOff.from_json(content), {})
    assert 'class="headlines"' not in page
    assert "≥ 25 %" in page


def test_a_very_long_text_is_not_tried_on_patterns() -> None:
    text = ": ; allowed: " * 10_000
    assert ZH.said(text) == text


def test_what_follows_from_a_reason_is_folded_under_it_and_its_code_leads_there() -> None:
    finding = Finding("connection refused", "", ("g1",))
    effect = Consequence(ReasonCode.NOT_COLD, Verdict.INCONCLUSIVE, (finding,))
    cause = Cause(
        ReasonCode.SERVER_UNREACHABLE, Verdict.INCONCLUSIVE, (finding,), consequences=(effect,)
    )
    signoff = dataclasses.replace(sample.inconclusive(), causes=(cause,))
    page = render_html(signoff, {})
    article = page.split('id="why-0"', 1)[1].split("</article>", 1)[0]
    folded = article.split('<details class="following">', 1)[1]
    assert "trial.not_cold" in folded
    assert "trial.not_cold" not in article.split('<details class="following">', 1)[0]
    assert assemble.build_page(signoff, {}, EN).why == {
        ReasonCode.SERVER_UNREACHABLE.value: "why-0",
        ReasonCode.NOT_COLD.value: "why-0",
    }
