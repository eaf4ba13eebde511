"""Charts and numbers of the measured cells, per workload, for the page. Formats only."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from harness.verdicts import Cell, SignOff
from reports import figures
from reports.context import CellRow, Chart, Facet, Key, Measured
from reports.figures import Axis, arm_colour, ordered_sources, shared_axis, source_colour
from reports.formats import integer, significant, size
from reports.safe import clean
from reports.texts import Texts

# Every workload but these reads sessions back in the cyclic order in which they were populated.
_PUBLISHED = "published_table"
_NOT_CYCLIC = (_PUBLISHED, "multi_turn", "shared_prefix", "random_long", "short_chat", "trace")
_FAILED = "#9c3600"
_INK = "#1c2430"
_QUIET = "#5b6573"

_STEADY = "steady"

Panel = Callable[..., str]
Targets = Mapping[tuple[str, int], figures.Required]


def measured(signoff: SignOff, texts: Texts) -> tuple[Measured, ...]:
    """One block per workload, in the order of the cells."""
    arms = arm_order(signoff)
    workloads = dict.fromkeys(cell.workload for cell in signoff.cells)
    return tuple(
        _block(
            workload,
            index,
            [cell for cell in signoff.cells if cell.workload == workload],
            arms,
            {} if workload == _STEADY else _required(signoff),
            texts,
        )
        for index, workload in enumerate(workloads)
    )


def _required(signoff: SignOff) -> Targets:
    """Where a PASS ends, as the judge put it: by measure and level, then by arm."""
    found: dict[tuple[str, int], dict[str, list[float]]] = {}
    for gate in signoff.gates:
        for result in gate.criteria:
            both = result.measurement.compared
            if both is not None and both.required is not None and result.level is not None:
                at_level = found.setdefault((result.measurement.name, result.level), {})
                at_level.setdefault(result.arm, []).append(both.required)
    return found


def arm_order(signoff: SignOff) -> tuple[str, ...]:
    """Arms as the campaign lists them, then any that only the cells name."""
    names = [arm.arm for arm in signoff.arms] + [cell.arm for cell in signoff.cells]
    return tuple(dict.fromkeys(names))


def _block(
    workload: str,
    index: int,
    cells: list[Cell],
    all_arms: tuple[str, ...],
    targets: Targets,
    texts: Texts,
) -> Measured:
    arms = tuple(arm for arm in all_arms if any(cell.arm == arm for cell in cells))
    sources = ordered_sources({name: None for cell in cells for name in cell.tokens_by_source})
    prefix = f"w{index}"
    estimators = tuple(dict.fromkeys(clean(cell.ttft_estimator) for cell in cells))
    cyclic = "" if workload in _NOT_CYCLIC else texts("charts.cyclic")
    charts: tuple[Chart, ...] = (
        _ttft(cells, all_arms, arms, targets, prefix, texts, cyclic, texts.listing(estimators)),
        _throughput(cells, all_arms, arms, targets, prefix, texts, cyclic),
    )
    if workload == _PUBLISHED:
        shows, hides = texts("charts.published_shows"), texts("charts.published_hides")
        charts = tuple(dataclasses.replace(c, shows=shows, hides=hides) for c in charts)
    else:
        charts += (_tokens(cells, all_arms, arms, sources, prefix, texts, cyclic),)
    return Measured(
        workload=clean(workload),
        charts=charts,
        sources=tuple(_source(name, texts) for name in sources),
        estimator=texts.listing(estimators),
        rows=tuple(
            _row(cell, all_arms, sources, texts)
            for cell in sorted(cells, key=lambda cell: (cell.level, arms.index(cell.arm)))
        ),
    )


def _ttft(
    cells: list[Cell],
    all_arms: tuple[str, ...],
    arms: tuple[str, ...],
    targets: Targets,
    prefix: str,
    texts: Texts,
    cyclic: str,
    estimators: str,
) -> Chart:
    own = _of_measure("ttft_reduction", targets)
    values = [value for cell in cells for value in (*cell.ttft_s, *cell.ttft_wave_s)]
    axis = shared_axis([*values, *_all_of(own)])
    dots = any(cell.ttft_s for cell in cells)
    legend = [
        *([Key("dot", _QUIET, texts("charts.key_request"))] if dots else []),
        Key("bar", _INK, texts("charts.key_wave", estimator=estimators)),
    ]
    if axis.failed:
        legend.append(Key("cross", _FAILED, texts("charts.key_failed")))
    legend += _label_keys(own, texts)
    return Chart(
        title=texts("charts.ttft_title"),
        unit=_unit("charts.ttft_unit", axis, texts),
        facets=_facets(
            figures.ttft_panel,
            cells,
            all_arms,
            arms,
            axis,
            own,
            f"{prefix}t",
            [(c, c.ttft_wave_s_mean, "s") for c in cells],
            texts,
        ),
        legend=(*legend, *_invalid_key(cells, texts)),
        shows=_join(texts, texts("charts.ttft_shows"), cyclic),
        hides=texts("charts.ttft_hides"),
    )


def _throughput(
    cells: list[Cell],
    all_arms: tuple[str, ...],
    arms: tuple[str, ...],
    targets: Targets,
    prefix: str,
    texts: Texts,
    cyclic: str,
) -> Chart:
    own = _of_measure("wave_throughput_gain", targets)
    values = [value for cell in cells for value in cell.throughput_tokens_per_s]
    axis = shared_axis([*values, *_all_of(own)])
    kind = "steady" if cells[0].workload == _STEADY else "throughput"
    return Chart(
        title=texts(f"charts.{kind}_title"),
        unit=_unit("charts.throughput_unit", axis, texts),
        facets=_facets(
            figures.throughput_panel,
            cells,
            all_arms,
            arms,
            axis,
            own,
            f"{prefix}p",
            [(c, c.throughput_tokens_per_s_mean, "tokens/s") for c in cells],
            texts,
        ),
        legend=(
            Key("dot", _QUIET, texts("charts.key_repetition")),
            *_label_keys(own, texts),
            *_invalid_key(cells, texts),
        ),
        shows=_join(texts, texts(f"charts.{kind}_shows"), cyclic),
        hides=texts(f"charts.{kind}_hides"),
        is_folded=kind == "throughput",
    )


def _tokens(
    cells: list[Cell],
    all_arms: tuple[str, ...],
    arms: tuple[str, ...],
    sources: tuple[str, ...],
    prefix: str,
    texts: Texts,
    cyclic: str,
) -> Chart:
    # A linear axis from zero: stacked lengths mean nothing on any other.
    axis = Axis(False, 0.0, max(cell.prompt_tokens for cell in cells) * 1.1 or 1.0, False)
    keys = [Key("box", source_colour(name), _source(name, texts)) for name in sources]
    return Chart(
        title=texts("charts.tokens_title"),
        unit=texts("charts.tokens_unit"),
        facets=_facets(
            figures.tokens_panel,
            cells,
            all_arms,
            arms,
            axis,
            {},
            f"{prefix}s",
            [(c, float(c.prompt_tokens), "tokens") for c in cells],
            texts,
        ),
        legend=(*keys, Key("outline", _QUIET, texts("charts.key_prompt"))),
        shows=_join(texts, texts("charts.tokens_shows"), cyclic),
        hides=texts("charts.tokens_hides"),
    )


def _facets(
    panel: Panel,
    cells: list[Cell],
    all_arms: tuple[str, ...],
    arms: tuple[str, ...],
    axis: Axis,
    required: Mapping[int, figures.Required],
    prefix: str,
    told: Sequence[tuple[Cell, float | str | None, str]],
    texts: Texts,
) -> tuple[Facet, ...]:
    """``told``: value and unit per cell, read out where the figure cannot be seen."""
    facets = []
    for level in sorted({cell.level for cell in cells}):
        heading = texts("charts.level", level=level)
        at_level = [cell for cell in cells if cell.level == level]
        colours = {arm: arm_colour(arm, all_arms) for arm in arms}
        parts = tuple(
            f"{clean(cell.arm)} {significant(value)} {unit}"
            for cell, value, unit in told
            if cell.level == level and isinstance(value, float)
        )
        svg = panel(
            at_level,
            colours,
            axis,
            prefix=f"{prefix}{level}",
            label=texts.listing((heading, *parts)),
            required=required.get(level, {}),
        )
        facets.append(Facet(heading, svg))
    return tuple(facets)


def _of_measure(name: str, targets: Targets) -> dict[int, figures.Required]:
    return {level: by_arm for (measure, level), by_arm in targets.items() if measure == name}


def _all_of(targets: Mapping[int, figures.Required]) -> list[float]:
    return [v for by_arm in targets.values() for values in by_arm.values() for v in values]


def _label_keys(targets: Mapping[int, figures.Required], texts: Texts) -> list[Key]:
    label = Key("none", _INK, texts("charts.key_label"))
    if not targets:
        return [label]
    return [label, Key("dash", figures.TARGET_COLOUR, texts("charts.key_required"))]


def _invalid_key(cells: Sequence[Cell], texts: Texts) -> tuple[Key, ...]:
    if all(cell.valid for cell in cells):
        return ()
    return (Key("hollow", _QUIET, texts("charts.key_invalid")),)


def _unit(key: str, axis: Axis, texts: Texts) -> str:
    return _join(texts, texts(key), texts("charts.log_axis") if axis.log else "")


def _join(texts: Texts, *parts: str) -> str:
    return texts("word.sentence_gap").join(part for part in parts if part)


def _source(name: str, texts: Texts) -> str:
    key = f"source.{name}"
    return texts(key) if key in texts else clean(name)


def _row(cell: Cell, arms: tuple[str, ...], sources: tuple[str, ...], texts: Texts) -> CellRow:
    absent = texts("word.absent")
    published = cell.workload == _PUBLISHED
    valid = texts("word.valid") if cell.valid else texts("word.invalid")
    return CellRow(
        arm=clean(cell.arm),
        colour=arm_colour(cell.arm, arms),
        level=cell.level,
        ttft=_series(cell.ttft_wave_s, texts),
        throughput=_series(cell.throughput_tokens_per_s, texts),
        prompt_tokens=integer(None if published else cell.prompt_tokens, absent),
        sources=tuple(integer(cell.tokens_by_source.get(name), absent) for name in sources),
        tier_read=absent if cell.tier_read_bytes is None else size(cell.tier_read_bytes),
        disk_read=absent if cell.disk_read_bytes is None else size(cell.disk_read_bytes),
        requests=absent
        if published
        else texts("word.of", part=cell.requests_ok, whole=cell.requests),
        valid=texts("word.as_published") if published else valid,
        is_valid=cell.valid,
    )


def _series(values: Sequence[float | str], texts: Texts) -> str:
    words = [
        texts("word.failed") if isinstance(value, str) else significant(value) for value in values
    ]
    return " · ".join(words) or texts("word.absent")
