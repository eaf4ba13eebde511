"""The page itself: complete, self-contained, safe and the same every time."""

from __future__ import annotations

import dataclasses
import html
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from harness.verdicts import REASON_TEXTS, Reason, ReasonCode, SignOff, Verdict
from reports.signoff import render_html
from reports.texts import LOCALES, load
from tests.reports import sample

ROOT = Path(__file__).parents[2]
HOSTILE = "<script>alert(1)</script>\"'>&{{ 7*7 }}$x^2$\x1b[31m\u202e"
_VOID = {"meta", "br", "circle", "path", "rect", "input"}


@pytest.fixture(scope="module")
def pages() -> dict[tuple[str, str], str]:
    return {
        (name, locale): render_html(make(), sample.PROVENANCE, locale=locale)
        for name, make in sample.SAMPLES.items()
        for locale in LOCALES
    }


@pytest.mark.parametrize("locale", LOCALES)
@pytest.mark.parametrize("name", sample.SAMPLES)
def test_every_criterion_and_reason_is_on_the_page(
    pages: dict[tuple[str, str], str], name: str, locale: str
) -> None:
    page, signoff = html.unescape(pages[name, locale]), sample.SAMPLES[name]()
    for gate in signoff.gates:
        for result in gate.criteria:
            assert result.id in page
            assert load(locale).said(result.title) in page
    texts = load(locale)
    for reason in _reasons(signoff):
        words = texts.reason(reason.code)
        for part in (reason.code.value, texts.said(reason.text), reason.evidence):
            assert part in page
        assert words.meaning in page
        assert words.remedy in page


def test_english_page_uses_the_judges_own_remedies(pages: dict[tuple[str, str], str]) -> None:
    remedy = REASON_TEXTS[ReasonCode.OUTPUT_DIFFERS].remedy
    assert remedy in html.unescape(pages["stop", "en"])


@pytest.mark.parametrize("locale", LOCALES)
@pytest.mark.parametrize("name", sample.SAMPLES)
def test_page_needs_nothing_from_outside(
    pages: dict[tuple[str, str], str], name: str, locale: str
) -> None:
    page = pages[name, locale]
    assert not re.search(r"https?:|//[a-z]|<script|<img|<iframe|<link|@import|url\((?!#)", page)


@pytest.mark.parametrize("locale", LOCALES)
@pytest.mark.parametrize("name", sample.SAMPLES)
def test_page_is_well_formed_with_unique_ids(
    pages: dict[tuple[str, str], str], name: str, locale: str
) -> None:
    checker = _Checker()
    checker.feed(pages[name, locale])
    checker.close()
    assert checker.open == []
    assert len(checker.ids) == len(set(checker.ids))
    assert checker.references <= set(checker.ids)


@pytest.mark.parametrize(
    ("name", "word"),
    [("pass", "PASS"), ("stop", "STOP"), ("inconclusive", "INCONCLUSIVE")],
)
def test_verdict_is_a_word_and_a_shape(
    pages: dict[tuple[str, str], str], name: str, word: str
) -> None:
    banner = pages[name, "en"].split('<section class="banner', 1)[1].split("</section>", 1)[0]
    assert f'<p class="word">{word}</p>' in banner
    assert "<svg" in banner


def test_not_run_page_says_so() -> None:
    empty = dataclasses.replace(sample.evidence_altered(), verdict=Verdict.NOT_RUN, gates=())
    page = render_html(empty, {})
    assert '<p class="word">NOT RUN</p>' in page
    assert "No gate was judged, so there is no answer." in page


def test_signature_lines_only_when_signable(pages: dict[tuple[str, str], str]) -> None:
    assert "For the supplier" in pages["production", "en"]
    for name in ("pass", "stop", "inconclusive", "altered"):
        assert "For the supplier" not in pages[name, "en"]
        assert "This page cannot be signed." in pages[name, "en"]


def test_failed_requests_are_drawn_and_counted(pages: dict[tuple[str, str], str]) -> None:
    page = pages["inconclusive", "en"]
    assert "failed requests, with their number" in page
    assert re.search(r"<text[^>]*>3</text>", page)
    assert "inf" not in re.sub(r"<style>.*?</style>", "", page, flags=re.S).split()


def test_evidence_cannot_inject_markup_templates_or_control_codes() -> None:
    signoff = _hostile(sample.inconclusive())
    for locale in LOCALES:
        page = render_html(signoff, {HOSTILE: HOSTILE}, locale=locale)
        assert "<script" not in page
        assert "{{ 7*7 }}" in page
        assert "\x1b" not in page
        assert "\u202e" not in page
        checker = _Checker()
        checker.feed(page)
        assert checker.open == []
        assert not checker.handlers


def test_lone_surrogate_can_be_written() -> None:
    signoff = dataclasses.replace(sample.demo_pass(), campaign="a\ud800b")
    assert "a\\ud800b" in render_html(signoff, {}).encode("utf-8").decode("utf-8")


def test_same_input_gives_same_bytes(pages: dict[tuple[str, str], str]) -> None:
    again = render_html(sample.inconclusive(), sample.PROVENANCE)
    assert again == pages["inconclusive", "en"]


@pytest.mark.parametrize("language", ["C", "zh_CN.UTF-8"])
def test_another_process_and_language_give_the_same_bytes(
    pages: dict[tuple[str, str], str], language: str, tmp_path: Path
) -> None:
    (tmp_path / "matplotlibrc").write_text("font.size: 30\naxes.facecolor: red\n")
    program = (
        "import sys; from tests.reports import sample; from reports.signoff import render_html\n"
        "page = render_html(sample.demo_pass(), sample.PROVENANCE, locale='zh')\n"
        "sys.stdout.buffer.write(page.encode('utf-8'))"
    )
    env = {
        **os.environ,
        "LANG": language,
        "LC_ALL": language,
        "PYTHONHASHSEED": "7",
        "MATPLOTLIBRC": str(tmp_path / "matplotlibrc"),
    }
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=env, capture_output=True, check=True
    )
    assert result.stdout.decode("utf-8") == pages["pass", "zh"]


def test_provenance_stands_at_the_end_and_judges_nothing() -> None:
    page = render_html(sample.demo_pass(), {"run": "cpu-demo/x", "judge_version": "99", "odd": "y"})
    footer = page.split('<footer id="provenance">', 1)[1]
    assert "cpu-demo/x" in footer
    assert "<dt>odd</dt>" in footer
    assert "99" not in footer


def test_page_language_is_marked(pages: dict[tuple[str, str], str]) -> None:
    assert '<html lang="en">' in pages["pass", "en"]
    assert '<html lang="zh-CN">' in pages["pass", "zh"]
    assert "演示用途，不可签署" in pages["pass", "zh"]


def _reasons(signoff: SignOff) -> list[Reason]:
    found = [r for gate in signoff.gates if gate.verdict is not Verdict.PASS for r in gate.reasons]
    found += [
        reason
        for gate in signoff.gates
        for result in gate.criteria
        if result.verdict is not Verdict.PASS
        for reason in result.reasons
    ]
    return found + [r for check in signoff.checks if not check.passed for r in check.reasons]


def _hostile(signoff: SignOff) -> SignOff:
    """The same text wherever evidence or a campaign can put one."""
    bad = Reason(ReasonCode.REQUESTS_FAILED, HOSTILE, HOSTILE)
    first = signoff.arms[0].arm
    arms = tuple(
        dataclasses.replace(
            arm,
            arm=HOSTILE if arm.arm == first else arm.arm,
            argv=(HOSTILE,),
            role=HOSTILE,
            medium=HOSTILE,
            effective={**arm.effective, HOSTILE: HOSTILE},
        )
        for arm in signoff.arms
    )
    cells = tuple(
        dataclasses.replace(
            cell,
            arm=HOSTILE if cell.arm == first else cell.arm,
            workload=HOSTILE,
            ttft_estimator=HOSTILE,
            tokens_by_source={**cell.tokens_by_source, HOSTILE: 1},
        )
        for cell in signoff.cells
    )
    checks = tuple(
        dataclasses.replace(
            check, name=HOSTILE, subject=HOSTILE, found=HOSTILE, allowed=HOSTILE, reasons=(bad,)
        )
        for check in signoff.checks
    )
    return dataclasses.replace(
        signoff,
        campaign=HOSTILE,
        profile=HOSTILE,
        label=HOSTILE,
        arms=arms,
        cells=cells,
        checks=checks,
        differences=({"key": HOSTILE, "declared": False}, {"odd": HOSTILE}),
        plan={HOSTILE: {HOSTILE: [HOSTILE]}},
        overrides=(HOSTILE,),
        not_tested=(HOSTILE,),
        evidence_digest=HOSTILE,
    )


class _Checker(HTMLParser):
    """Balanced tags, ids, references to ids, event handlers."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.references: set[str] = set()
        self.handlers: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in _VOID:
            self.open.append(tag)
        self._attributes(attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._attributes(attrs)

    def handle_endtag(self, tag: str) -> None:
        if tag in _VOID:
            return
        assert self.open, f"</{tag}> without a start"
        assert self.open[-1] == tag, f"</{tag}> closes <{self.open[-1]}>"
        self.open.pop()

    def _attributes(self, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name == "href" and not (value or "").startswith("../trials/"):
                self.references.add((value or "").lstrip("#"))
            self.references.update(re.findall(r"url\(#([^)]+)\)", value or ""))
            if name.startswith("on"):
                self.handlers.append(name)
