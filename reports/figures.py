"""Charts of the report: one small SVG per concurrency level, all of a kind on the same axis.

Draws the numbers of `Cell` as they are and computes none. Text inside a figure is digits and arm
names only: titles, units and legends are HTML, in the reader's language and font.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import (
    FixedLocator,
    FuncFormatter,
    Locator,
    LogLocator,
    MaxNLocator,
    NullFormatter,
)

from harness.verdicts import Cell
from reports.formats import significant
from reports.safe import clean
from reports.svg import inline_svg

# Okabe-Ito: told apart with any common colour blindness. Usual arms keep theirs in every report.
ARM_COLOURS = {
    "recompute": "#555555",
    "hbm_only": "#E69F00",
    "tiered_dram": "#56B4E9",
    "tiered_disk": "#0072B2",
}
OTHER_ARM_COLOURS = ("#009E73", "#CC79A7", "#D55E00")
SOURCE_COLOURS = {
    "recomputed": "#BFBFBF",
    "device": "#E69F00",
    "host": "#56B4E9",
    "disk": "#0072B2",
}
_OTHER_SOURCE = "#CC79A7"
_INK, _QUIET, _GRID = "#1c2430", "#5b6573", "#e3e6ea"
TARGET_COLOUR = "#8e2a6e"
_ON_SOURCE = {"disk": "#ffffff"}
_LABELLED_SHARE = 0.07  # a part of a bar lower than this has no room for its number
_SLOT = 0.72  # width of one arm's dots, where arms are 1 apart
_BAND = 0.12  # share of a panel's height kept for failed requests


# Per arm: the values where a PASS ends.
Required = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Axis:
    """Common vertical axis of the panels of one chart. ``failed``: room for failed requests."""

    log: bool
    low: float
    high: float
    failed: bool


def shared_axis(values: Sequence[float | str]) -> Axis:
    """Log where the largest value is over ten times the smallest; a text value is a failure."""
    finite = [value for value in values if not isinstance(value, str) and math.isfinite(value)]
    failed = len(finite) < len(values)
    if not finite:
        return Axis(False, 0.0, 1.0, failed)
    low, high = min(finite), max(finite)
    if low > 0 and high / low > 10:
        return Axis(True, low / 1.5, high * 1.9, failed)
    return Axis(False, 0.0, high * 1.16 or 1.0, failed)


def arm_colour(arm: str, arms: Sequence[str]) -> str:
    """Colour of an arm, the same in every chart and table of a page."""
    if arm in ARM_COLOURS:
        return ARM_COLOURS[arm]
    others = [name for name in arms if name not in ARM_COLOURS]
    return OTHER_ARM_COLOURS[others.index(arm) % len(OTHER_ARM_COLOURS)]


def source_colour(source: str) -> str:
    """Colour of a source of tokens."""
    return SOURCE_COLOURS.get(source, _OTHER_SOURCE)


def ttft_panel(
    cells: Sequence[Cell],
    colours: Mapping[str, str],
    axis: Axis,
    *,
    prefix: str,
    label: str,
    required: Required,
) -> str:
    """One level: every request a dot, every wave statistic a bar, failed ones a cross with count.

    ``colours``: the arms of the chart in their order; an arm without a cell keeps its place.
    ``required``: per arm where a PASS ends, in the chart's unit; a dashed line each.
    """
    with _house_style():
        arms = list(colours)
        figure, axes = _panel(arms, axis)
        for cell in cells:
            place, colour = arms.index(cell.arm), colours[cell.arm]
            _dots(axes, place, cell.ttft_s, colour, filled=cell.valid, size=26)
            half = 0.44 * _SLOT / max(len(cell.ttft_wave_s), 1)
            for x, value in _spread(place, cell.ttft_wave_s):
                if not isinstance(value, str):
                    axes.plot(
                        [x - half, x + half],
                        [value, value],
                        color=_INK,
                        linewidth=1.3,
                        solid_capstyle="butt",
                        zorder=4,
                    )
            _failures(axes, place, sum(isinstance(value, str) for value in cell.ttft_s))
            _targets(axes, place, required.get(cell.arm, ()))
            _label(axes, place, cell.ttft_wave_s_mean, [*cell.ttft_s, *cell.ttft_wave_s])
        return inline_svg(figure, prefix=prefix, label=label)


def throughput_panel(
    cells: Sequence[Cell],
    colours: Mapping[str, str],
    axis: Axis,
    *,
    prefix: str,
    label: str,
    required: Required,
) -> str:
    """One level: every repetition a dot; ``required`` as in `ttft_panel`."""
    with _house_style():
        arms = list(colours)
        figure, axes = _panel(arms, axis)
        for cell in cells:
            place, colour = arms.index(cell.arm), colours[cell.arm]
            rates = cell.throughput_tokens_per_s
            _dots(axes, place, rates, colour, filled=cell.valid, size=34)
            _targets(axes, place, required.get(cell.arm, ()))
            _label(axes, place, cell.throughput_tokens_per_s_mean, rates)
        return inline_svg(figure, prefix=prefix, label=label)


def tokens_panel(
    cells: Sequence[Cell],
    colours: Mapping[str, str],
    axis: Axis,
    *,
    prefix: str,
    label: str,
    required: Required,
) -> str:
    """One level: prompt tokens by source, stacked; the outline is all prompt tokens of the cell.

    A number stands in every part that is high enough for it. ``required`` plays no part.
    """
    with _house_style():
        arms = list(colours)
        figure, axes = _panel(arms, axis)
        for cell in cells:
            place, base = arms.index(cell.arm), 0
            for source in ordered_sources(cell.tokens_by_source):
                tokens = cell.tokens_by_source[source]
                if tokens is None:
                    axes.text(place, cell.prompt_tokens, "?", ha="center", va="bottom", color=_INK)
                    continue
                axes.bar(place, tokens, 0.58, bottom=base, color=source_colour(source), linewidth=0)
                if tokens > _LABELLED_SHARE * axis.high:
                    middle = base + tokens / 2
                    colour = _ON_SOURCE.get(source, _INK)
                    axes.text(
                        place, middle, f"{tokens:,}", ha="center", va="center", color=colour, size=8
                    )
                base += tokens
            axes.bar(place, cell.prompt_tokens, 0.58, fill=False, edgecolor=_QUIET, linewidth=0.7)
        return inline_svg(figure, prefix=prefix, label=label)


def ordered_sources(sources: dict[str, int | None]) -> tuple[str, ...]:
    """Known sources from the device outwards, recomputed first; others after them by name."""
    known = [source for source in SOURCE_COLOURS if source in sources]
    return (*known, *sorted(set(sources) - set(known)))


@contextmanager
def _house_style() -> Iterator[None]:
    """Same bytes whatever the user's matplotlibrc says, and no trace left in the process."""
    with matplotlib.rc_context(), warnings.catch_warnings():
        # Arm names may hold glyphs that matplotlib's own font lacks; the browser's font draws them.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(
            {
                "svg.hashsalt": "kvgate",
                "svg.fonttype": "none",
                "font.family": ["DejaVu Sans"],
                "font.size": 9.5,
                "text.parse_math": False,
                "axes.linewidth": 0.8,
            }
        )
        yield


def _panel(arms: Sequence[str], axis: Axis) -> tuple[Figure, Axes]:
    width = max(4.3, 1.0 + 0.78 * len(arms))
    figure = Figure(figsize=(width, 2.6))
    axes = figure.add_axes((0.62 / width, 0.178, 1 - 0.72 / width, 0.8))
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_QUIET)
    axes.set_xlim(-0.55, max(len(arms), 1) - 0.45)
    axes.set_xticks(range(len(arms)), [_wrapped(arm) for arm in arms], color=_INK)
    axes.tick_params(length=0, pad=6, colors=_QUIET, which="both")
    axes.tick_params(axis="x", colors=_INK)
    _vertical(axes, axis)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    if axis.failed:
        band = Rectangle((0, 1 - _BAND), 1, _BAND, transform=axes.transAxes, zorder=0)
        band.set(facecolor="#f6e9e1", linewidth=0)
        axes.add_patch(band)
    return figure, axes


def _vertical(axes: Axes, axis: Axis) -> None:
    share = 1 - _BAND if axis.failed else 1.0
    if axis.log:
        axes.set_yscale("log")
        axes.set_ylim(axis.low, axis.low * (axis.high / axis.low) ** (1 / share))
        decades = math.log10(axis.high / axis.low)
        subs = (1.0, 2.0, 5.0) if decades < 2.5 else (1.0, 3.0) if decades < 4 else (1.0,)
        locator: Locator = LogLocator(subs=subs, numticks=20)
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_minor_locator(LogLocator(subs=()))
    else:
        axes.set_ylim(axis.low, axis.low + (axis.high - axis.low) / share)
        locator = MaxNLocator(5)
    # No tick inside the band of the failed: nothing has a value there.
    ticks = [tick for tick in locator.tick_values(axis.low, axis.high) if tick <= axis.high]
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))


def _tick(value: float) -> str:
    text = f"{value:,.0f}" if abs(value) >= 10 else significant(value, 3)
    return text.rstrip("0").rstrip(".") if "." in text else text


def _dots(
    axes: Axes,
    place: int,
    values: Sequence[float | str],
    colour: str,
    *,
    filled: bool,
    size: float,
) -> None:
    points = [(x, value) for x, value in _spread(place, values) if not isinstance(value, str)]
    axes.scatter(
        [x for x, _ in points],
        [value for _, value in points],
        s=size,
        facecolors=colour if filled else "white",
        edgecolors="white" if filled else colour,
        linewidths=0.5 if filled else 1.2,
        zorder=3,
    )


def _targets(axes: Axes, place: int, values: Sequence[float]) -> None:
    for value in values:
        axes.plot(
            [place - 0.44, place + 0.44],
            [value, value],
            color=TARGET_COLOUR,
            linewidth=1.2,
            linestyle=(0, (3, 2)),
            zorder=5,
        )


def _label(
    axes: Axes, place: int, value: float | str | None, values: Sequence[float | str]
) -> None:
    """The value of the cell above its highest point; nothing for a failed or unknown one."""
    finite = [found for found in values if not isinstance(found, str)]
    if value is None or isinstance(value, str) or not finite:
        return
    axes.annotate(
        significant(value),
        (place, max(finite)),
        xytext=(0, 6),
        textcoords="offset points",
        ha="center",
        va="bottom",
        color=_INK,
        size=8.5,
        weight="bold",
        zorder=6,
        annotation_clip=False,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.85},
    )


def _failures(axes: Axes, place: int, count: int) -> None:
    if not count:
        return
    transform = axes.get_xaxis_transform()
    middle = 1 - _BAND / 2
    axes.plot(
        [place - 0.1],
        [middle],
        marker="x",
        markersize=6.5,
        markeredgewidth=1.8,
        color="#9c3600",
        transform=transform,
        clip_on=False,
        linestyle="none",
    )
    axes.text(
        place + 0.04, middle, str(count), transform=transform, va="center_baseline", color="#9c3600"
    )


def _spread(place: int, values: Sequence[float | str]) -> Iterator[tuple[float, float | str]]:
    """Side by side in their order, so that equal values stay visible; no chance involved."""
    for index, value in enumerate(values):
        yield place + _SLOT * ((index + 0.5) / len(values) - 0.5), value


def _wrapped(arm: str) -> str:
    """Long arm names break after an underscore, at most once."""
    arm = clean(arm)
    if len(arm) <= 11 or "_" not in arm[1:-1]:
        return arm if len(arm) <= 24 else arm[:23] + "…"
    cut = min(
        (index for index, character in enumerate(arm) if character == "_"),
        key=lambda index: abs(index - len(arm) / 2),
    )
    return arm[: cut + 1] + "\n" + arm[cut + 1 :]
