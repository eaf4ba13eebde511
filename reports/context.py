"""What the sign-off template may show, as documented dataclasses. Every field is ready to print.

Texts are plain and unescaped; the template escapes. Only `Facet.svg` is markup, made by
`reports.svg`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Mark:
    """A verdict as word and shape.

    ``kind``, one of pass, stop, inconclusive and not-run, picks icon and colour. ``local`` is the
    word in the reader's language, empty where that is the word itself.
    """

    kind: str
    word: str
    local: str


@dataclass(frozen=True)
class GateTile:
    """One gate in the overview. ``note``: why it has no verdict, or how many criteria it has."""

    name: str
    title: str
    mark: Mark
    note: str


@dataclass(frozen=True)
class Banner:
    """The answer. ``label`` is empty when the page may be signed."""

    mark: Mark
    sentence: str
    scope: str
    label: str
    campaign: str
    profile: str
    gates: tuple[GateTile, ...]


@dataclass(frozen=True)
class Occurrence:
    """One finding of a reason. ``evidence``: path inside the run directory, or empty.

    ``places``: ids of criteria, checks and gates that name it; ``more_places``: how many are left
    out.
    """

    text: str
    evidence: str
    places: tuple[str, ...]
    more_places: int


@dataclass(frozen=True)
class Following:
    """What merely follows from a reason: one code with its findings. ``more``: left out."""

    code: str
    mark: Mark
    meaning: str
    count: int
    occurrences: tuple[Occurrence, ...]
    more: int


@dataclass(frozen=True)
class ReasonGroup:
    """One root cause: findings of one reason code, its meaning and remedy, and what follows.

    ``more``: how many findings are left out.
    """

    code: str
    mark: Mark
    meaning: str
    remedy: str
    occurrences: tuple[Occurrence, ...]
    more: int
    following: tuple[Following, ...] = ()


@dataclass(frozen=True)
class Headline:
    """One comparison in words; ``where``: arms, level and statistic; ``anchor``: of its row."""

    sentence: str
    where: str
    required: str
    mark: Mark
    anchor: str


@dataclass(frozen=True)
class Decisive:
    """One criterion in the summary of a PASS: its value at each of ``levels`` of `Summary`."""

    title: str
    comparison: str
    values: tuple[str, ...]
    bound: str


@dataclass(frozen=True)
class Summary:
    """Decisive criteria of a PASS. ``levels``: column headings; ``others``: criteria left out."""

    levels: tuple[str, ...]
    rows: tuple[Decisive, ...]
    others: int


@dataclass(frozen=True)
class Result:
    """One criterion at one level, with everything that is known of it.

    ``missed``: the repetitions short of the bound. ``arm``: number of its arm, for the filter.
    """

    id: str
    anchor: str
    title: str
    comparison: str
    arm: int
    level: str
    value: str
    repetitions: str
    interval: str
    confidence: str
    target: str
    floor: str
    override: str
    missed: str
    n: str
    estimator: str
    mark: Mark
    codes: tuple[str, ...]
    trials: tuple[str, ...]
    detail: str


@dataclass(frozen=True)
class GridCell:
    """One level of a line. ``anchor``: its row, where it is not a PASS; empty: nothing there."""

    heading: str
    value: str
    mark: Mark | None
    anchor: str


@dataclass(frozen=True)
class GridLine:
    """One arm, or one arm against its baseline, over the levels."""

    comparison: str
    arm: int
    cells: tuple[GridCell, ...]
    bound: str
    beside: str
    override: str


@dataclass(frozen=True)
class Group:
    """One criterion: a line per comparison, rule and rationale, and every result in full.

    ``is_levelled``: whether its cells stand under the gate's levels, or in one that spans them.
    """

    criterion: str
    title: str
    estimator: str
    rule: str
    decide: str
    rationale: str
    is_levelled: bool
    lines: tuple[GridLine, ...]
    results: tuple[Result, ...]


@dataclass(frozen=True)
class GateBlock:
    """One gate: results that are not a PASS first, then every criterion over ``levels``.

    ``reasons``: why it is not PASS beyond its criteria.
    """

    name: str
    title: str
    mark: Mark
    anchor: str
    levels: tuple[str, ...]
    failed: tuple[Result, ...]
    groups: tuple[Group, ...]
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Facet:
    """One level of a chart; ``svg`` is finished markup."""

    heading: str
    svg: str


@dataclass(frozen=True)
class Key:
    """One entry of a legend. ``shape``: dot, bar, cross, hollow, box, outline; colour: #rrggbb."""

    shape: str
    colour: str
    text: str


@dataclass(frozen=True)
class Chart:
    """Small multiples over the levels. ``shows``, ``hides``: what it does and does not show.

    ``is_folded``: it restates another chart and stays closed until it is opened.
    """

    title: str
    unit: str
    facets: tuple[Facet, ...]
    legend: tuple[Key, ...]
    shows: str
    hides: str
    is_folded: bool = False


@dataclass(frozen=True)
class CellRow:
    """The numbers behind the charts, for one arm at one level; ordered by level and arm."""

    arm: str
    colour: str
    level: int
    ttft: str
    throughput: str
    prompt_tokens: str
    sources: tuple[str, ...]
    tier_read: str
    disk_read: str
    requests: str
    valid: str
    is_valid: bool


@dataclass(frozen=True)
class Measured:
    """Charts and numbers of one workload. ``sources``: headings of `CellRow.sources`."""

    workload: str
    charts: tuple[Chart, ...]
    sources: tuple[str, ...]
    estimator: str
    rows: tuple[CellRow, ...]


@dataclass(frozen=True)
class ArmColumn:
    """One arm in the configuration table. ``argv``: its command line, one argument per entry."""

    arm: str
    colour: str
    role: str
    medium: str
    argv: tuple[str, ...]


@dataclass(frozen=True)
class SettingRow:
    """One key of the effective configuration over all arms.

    ``status``: undeclared, declared, differs (within its bound, or in arms not compared) or same.
    """

    key: str
    values: tuple[str, ...]
    status: str
    word: str


@dataclass(frozen=True)
class Configuration:
    """Arms side by side; ``differing``: undeclared before declared. ``notes``: other findings."""

    arms: tuple[ArmColumn, ...]
    differing: tuple[SettingRow, ...]
    same: tuple[SettingRow, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class CheckRow:
    """One validity check of one trial or pair of arms. ``codes``: reasons, when it failed."""

    name: str
    subject: str
    found: str
    allowed: str
    codes: tuple[str, ...]
    texts: tuple[str, ...]


@dataclass(frozen=True)
class CheckGroup:
    """All passed checks of one name."""

    name: str
    count: int
    rows: tuple[CheckRow, ...]


@dataclass(frozen=True)
class Checks:
    """Failed checks one by one; passed ones by name; last, what the evidence cannot be asked."""

    summary: str
    failed: tuple[CheckRow, ...]
    passed: tuple[CheckGroup, ...]
    not_applicable: tuple[CheckRow, ...] = ()


@dataclass(frozen=True)
class Fact:
    """A name and its value, for provenance and plan."""

    name: str
    value: str


@dataclass(frozen=True)
class Page:
    """Everything on the page, in its order. ``signable``: whether signature lines are printed.

    ``anchors``: place of a reason (id of a criterion, check, gate) to where it is on the page;
    ``why``: the same of a reason's code, which is where its root cause stands.
    ``arms``: names for the filter, in the order of their numbers. ``parties``: supplier, customer.
    """

    language: str
    title: str
    banner: Banner
    facts: tuple[Fact, ...]
    headlines: tuple[Headline, ...]
    parties: tuple[str, str]
    arms: tuple[str, ...]
    anchors: Mapping[str, str]
    why: Mapping[str, str]
    reasons: tuple[ReasonGroup, ...]
    summary: Summary | None
    overrides: tuple[str, ...]
    gates: tuple[GateBlock, ...]
    measured: tuple[Measured, ...]
    configuration: Configuration
    plan: tuple[Fact, ...]
    checks: Checks
    not_tested: tuple[str, ...]
    commands: tuple[str, ...]
    signable: bool
    digests: tuple[Fact, ...]
    provenance: tuple[Fact, ...]
