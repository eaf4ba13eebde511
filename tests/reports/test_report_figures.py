"""Charts: axes, failures, and no trace left behind."""

from __future__ import annotations

import dataclasses
import re

import matplotlib
import pytest

from harness.verdicts import Cell
from reports import figures
from reports.figures import Axis, shared_axis
from tests.reports import sample

COLOURS = {"tiered_disk": "#0072B2"}


@pytest.mark.parametrize(
    ("values", "log", "failed"),
    [
        ([1.0, 10.0], False, False),  # exactly ten times
        ([1.0, 10.1], True, False),
        ([0.06, 7.0, "inf"], True, True),
        ([0.0, 7.0], False, False),  # zero has no place on a log axis
        (["inf"], False, True),
        ([], False, False),
        ([0.0], False, False),
    ],
)
def test_axis_is_log_above_ten_times(values: list[float | str], log: bool, failed: bool) -> None:
    axis = shared_axis(values)
    assert (axis.log, axis.failed) == (log, failed)
    assert axis.low < axis.high


def test_usual_arms_keep_their_colours_and_others_differ() -> None:
    arms = ("nvme", "tiered_disk", "recompute", "array")
    colours = [figures.arm_colour(arm, arms) for arm in arms]
    assert colours[1:3] == ["#0072B2", "#555555"]
    assert len(set(colours)) == 4


def test_failed_requests_are_a_cross_with_their_count() -> None:
    svg = _ttft(ttft_s=(0.1, "inf", "inf"))
    assert re.search(r"<text[^>]*>2</text>", svg)


def test_each_target_is_a_line_and_the_cell_has_its_value() -> None:
    svg = _ttft(ttft_s=(0.1, 0.2), required=(0.3, 0.5), mean=0.141421356)
    assert svg.count(figures.TARGET_COLOUR) == 2
    assert re.search(r"<text[^>]*>0\.141</text>", svg)


def test_no_target_and_no_value_are_not_drawn() -> None:
    svg = _ttft(ttft_s=(0.1, "inf"), mean="inf")
    assert figures.TARGET_COLOUR not in svg
    assert "inf" not in svg


def test_no_cross_without_failures() -> None:
    assert "#9c3600" not in _ttft(ttft_s=(0.1, 0.2, 0.3))


def test_all_requests_failed_still_draws() -> None:
    svg = _ttft(ttft_s=("inf",) * 3, ttft_wave_s=("inf",))
    assert re.search(r"<text[^>]*>3</text>", svg)


def test_whole_numbers_are_values_not_failures() -> None:
    assert shared_axis([1, 2]).failed is False


def test_unreadable_source_is_a_question_mark() -> None:
    cell = dataclasses.replace(_cell(), tokens_by_source={"disk": None, "device": 3})
    svg = figures.tokens_panel(
        [cell], COLOURS, Axis(False, 0.0, 5000.0, False), prefix="p", label="x", required={}
    )
    assert ">?</text>" in svg


def test_sources_keep_their_order_and_unknown_ones_come_last() -> None:
    order = figures.ordered_sources({"remote": 1, "disk": 1, "recomputed": 1, "device": None})
    assert order == ("recomputed", "device", "disk", "remote")


def test_figures_leave_matplotlib_as_it_was() -> None:
    before = dict(matplotlib.rcParams)
    _ttft(ttft_s=(0.1,))
    assert dict(matplotlib.rcParams) == before


def test_arm_name_in_another_script_draws() -> None:
    cell = dataclasses.replace(_cell(), arm="磁盘层")
    svg = figures.throughput_panel(
        [cell],
        {"磁盘层": "#000000"},
        Axis(False, 0.0, 9.0, False),
        prefix="p",
        label="并发 1",
        required={},
    )
    assert "磁盘层" in svg


def _cell() -> Cell:
    (cell,) = (c for c in sample.demo_pass().cells if c.arm == "tiered_disk" and c.level == 1)
    return cell


def _ttft(
    ttft_s: tuple[float | str, ...],
    ttft_wave_s: tuple[float | str, ...] = (0.1,),
    required: tuple[float, ...] = (),
    mean: float | str | None = None,
) -> str:
    cell = dataclasses.replace(
        _cell(), ttft_s=ttft_s, ttft_wave_s=ttft_wave_s, ttft_wave_s_mean=mean
    )
    axis = shared_axis([*ttft_s, *ttft_wave_s])
    return figures.ttft_panel(
        [cell], COLOURS, axis, prefix="p", label="x", required={"tiered_disk": required}
    )
