"""Shows a connector's directory on a terminal: tables, progress, and the words in them.

Decides nothing and touches no file. Names and texts come from files that anybody may have written,
so they are shown without what could steer a terminal.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from harness.tier.listing import Amount, Description, Entry, Kind, NamespaceUse, TierUse
from harness.tier.upkeep import Checked, Outcome, PrunePlan, Verification

_AGE_NAMES = ("within 1 h", "1 h to 1 d", "1 d to 7 d", "7 d to 30 d", "over 30 d")
_SHORT = 12  # digits of a namespace or digest that are shown
_TROUBLE_SHOWN = 10
_KIND_NAMES = {
    Kind.BLOCK: "blocks",
    Kind.TEMPORARY: "temporary files",
    Kind.RETIRED: "retired directories",
}


def print_head(console: Console, tier: TierUse) -> None:
    """Two lines about the directory."""
    console.print(Text(_shown(str(tier.root)), "bold"), soft_wrap=True)
    head = Text.assemble(
        f"{_counted(len(tier.namespaces), 'namespace')}, ",
        f"{_counted(tier.block_count, 'block')}, ",
        (_size(tier.block_bytes), "bold"),
        (
            f"   {_size(tier.free_bytes)} of {_size(tier.total_bytes)} of the file system free",
            "dim",
        ),
    )
    console.print(head, soft_wrap=True)


def print_list(console: Console, tier: TierUse) -> None:
    """Two lines per namespace, then what else deserves a look."""
    print_head(console, tier)
    table = _table("namespace", "KV cache", ">blocks", ">size", ">last used")
    table.columns[1].no_wrap = False
    for namespace in tier.namespaces:
        facts = namespace.description
        tokens, vllm = facts.block_tokens or "?", _shown(facts.vllm or "?")
        kind = f"{_kv_type(facts)}, {tokens} tokens, vLLM {vllm}"
        table.add_row(
            Text(namespace.name[:_SHORT], "bold cyan"),
            Text.assemble(f"{_layers(facts)}\n", (kind, "dim")),
            f"{namespace.blocks.count:,}",
            _size(namespace.blocks.size_bytes),
            _ago(namespace.blocks.newest_ns),
        )
    _print_table(console, table)
    _print_notes(console, tier)


def print_details(console: Console, tier: TierUse) -> None:
    """Everything known of each namespace."""
    print_head(console, tier)
    for namespace in tier.namespaces:
        console.print()
        console.print(Text(namespace.name, "bold cyan"))
        facts = Table(box=None, show_header=False, padding=(0, 2))
        facts.add_column(style="dim", no_wrap=True)
        facts.add_column(overflow="fold")
        for name, value in _facts(namespace):
            facts.add_row(name, Text(value))
        console.print(facts)
        if namespace.blocks.count:
            _print_ages(console, namespace)
    _print_notes(console, tier)


def print_verified(
    console: Console, tier: TierUse, results: Verification, *, is_deleting: bool
) -> None:
    """Counts per namespace, the first files in trouble, and one line that says it all."""
    table = _table("namespace", ">files", ">fine", ">damaged", ">not readable", ">gone meanwhile")
    for name, of in sorted(results.counts.items()):
        damaged, unreadable = of[Outcome.DAMAGED], of[Outcome.UNREADABLE]
        table.add_row(
            Text(_shown(name[:_SHORT]), "bold cyan"),
            f"{of.total():,}",
            f"{of[Outcome.FINE]:,}",
            Text(f"{damaged:,}", "bold red" if damaged else "dim"),
            Text(f"{unreadable:,}", "bold yellow" if unreadable else "dim"),
            Text(f"{of[Outcome.GONE]:,}", "dim"),
        )
    print_head(console, tier)
    _print_table(console, table)
    console.print()
    trouble = results.trouble
    for result in trouble[:_TROUBLE_SHOWN]:
        line = Text.assemble(
            (result.fault or "not readable", "red" if result.fault else "yellow"),
            f"  {_shown(result.entry.path)}  ",
            (_shown(result.detail), "dim"),
            ("  removed" if result.is_removed else "", "bold"),
        )
        console.print(line, soft_wrap=True)
    if len(trouble) > _TROUBLE_SHOWN:
        console.print(f"... {len(trouble) - _TROUBLE_SHOWN:,} more; --json lists all", style="dim")
    if trouble:
        console.print()
    _print_verdict(console, results, is_deleting=is_deleting)


def _print_verdict(console: Console, results: Verification, *, is_deleting: bool) -> None:
    total = results.total
    files = _counted(total.total(), "file")
    removed = sum(result.is_removed for result in results.trouble)
    if total[Outcome.DAMAGED]:
        remedy = "a server replaces such a file when it needs it; --delete removes it now"
        if is_deleting:
            remedy = f"{removed:,} removed"
        line = f"[bold red]DAMAGED[/bold red] {total[Outcome.DAMAGED]:,} of {files}; {remedy}"
    elif total[Outcome.UNREADABLE]:
        line = (
            f"[bold yellow]NOT ALL READ[/bold yellow] {total[Outcome.UNREADABLE]:,} of {files} "
            "could not be; run as the servers' user, with the kvgate of their version"
        )
    else:
        line = f"[bold green]OK[/bold green] {files}, {_size(results.fine_bytes)}, all as written"
    console.print(line, highlight=False, soft_wrap=True)


def print_pruned(
    console: Console, plan: PrunePlan, results: list[Checked], *, is_dry_run: bool
) -> None:
    """What goes, per namespace and kind, and one line that says what became of it."""
    groups: dict[tuple[str, Kind], Amount] = {}
    for entry in plan.doomed:
        groups.setdefault((entry.namespace, entry.kind), Amount()).add(entry)
    table = _table("namespace", "what", ">files", ">size", ">unused for")
    for (name, kind), amount in sorted(groups.items(), key=lambda group: group[0][0]):
        table.add_row(
            Text(name[:_SHORT], "bold cyan"),
            _KIND_NAMES[kind],
            f"{amount.count:,}",
            _size(amount.size_bytes),
            _span(amount),
        )
    _print_table(console, table)
    console.print()
    stays = f"{_counted(plan.kept.count, 'block')}, {_size(plan.kept.size_bytes)}, stay"
    if not plan.doomed:
        line = f"[bold green]NOTHING TO REMOVE[/bold green] {stays}"
    elif is_dry_run:
        count, size_bytes = len(plan.doomed), sum(entry.size_bytes for entry in plan.doomed)
        line = (
            f"[bold yellow]WOULD REMOVE[/bold yellow] {_counted(count, 'file')}, "
            f"{_size(size_bytes)}; {stays}; add --yes to do it"
        )
    else:
        line = f"{_removed(results)}; {stays}"
    console.print(line, highlight=False, soft_wrap=True)
    for result in [r for r in results if r.outcome is Outcome.KEPT][:3]:
        _note(console, f"{result.entry.path}: {result.detail}")


def _removed(results: list[Checked]) -> str:
    outcomes = Counter(result.outcome for result in results)
    gone = [r.entry.size_bytes for r in results if r.outcome is Outcome.REMOVED]
    line = f"[bold green]REMOVED[/bold green] {_counted(len(gone), 'file')}, {_size(sum(gone))}"
    for outcome, text in (
        (Outcome.USED, "used meanwhile, kept"),
        (Outcome.GONE, "gone already"),
        (Outcome.KEPT, "[bold red]could not be removed[/bold red]"),
    ):
        if outcomes[outcome]:
            line += f"; {outcomes[outcome]:,} {text}"
    return line


@contextmanager
def progress_line(
    console: Console, what: str, files: int, *, is_shown: bool
) -> Iterator[Callable[[int], None]]:
    """A live line on a screen; yields a function to call with each file's bytes."""
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[size]}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not (is_shown and console.is_terminal),
    )
    task = progress.add_task(what, total=files, size="")
    done_bytes = 0

    def advance(size_bytes: int) -> None:
        nonlocal done_bytes
        done_bytes += size_bytes
        progress.update(task, advance=1, size=_size(done_bytes))

    with progress:
        yield advance


def _print_notes(console: Console, tier: TierUse) -> None:
    console.print()
    for namespace in tier.namespaces:
        if problem := namespace.description.problem:
            _note(console, f"{namespace.name[:_SHORT]}: config.json: {problem}")
        elif what := namespace.description.out_of_reach:
            remedy = f"`kvgate tier prune {tier.root} --namespace {namespace.name[:_SHORT]}`"
            _note(console, f"{namespace.name[:_SHORT]}: {what}; {remedy} shows what may go")
    leftovers = Amount()
    for namespace in tier.namespaces:
        for of in (namespace.temporary, namespace.retired):
            leftovers.count += of.count
            leftovers.size_bytes += of.size_bytes
    if leftovers.count:
        remedy = f"`kvgate tier prune {tier.root} --temp` shows which may go"
        what = _counted(leftovers.count, "leftover")
        _note(console, f"{what}, {_size(leftovers.size_bytes)}: {remedy}")
    _print_samples(console, "foreign, never touched", tier.foreign, tier.foreign_count)
    _print_samples(console, "not readable", tier.unreadable, tier.unreadable_count)


def _print_samples(console: Console, what: str, entries: list[Entry], count: int) -> None:
    for entry in entries[:3]:
        _note(console, f"{what}: {entry.path} ({entry.note})")
    if count > 3:
        _note(console, f"{what}: {count - 3:,} more")


def _print_ages(console: Console, namespace: NamespaceUse) -> None:
    table = _table("last used", ">blocks", ">size", "")
    whole = namespace.blocks.size_bytes or 1
    for name, amount in zip(_AGE_NAMES, namespace.ages, strict=True):
        bar = "█" * round(24 * amount.size_bytes / whole)
        if amount.count and not bar:
            bar = "▏"
        style = "" if amount.count else "dim"
        table.add_row(
            Text(name, style),
            Text(f"{amount.count:,}", style),
            Text(_size(amount.size_bytes), style),
            Text(bar, "cyan"),
        )
    _print_table(console, table)


def _note(console: Console, text: str) -> None:
    console.print(Text.assemble(("note ", "yellow"), _shown(text)), soft_wrap=True)


def _print_table(console: Console, table: Table) -> None:
    if table.row_count:
        console.print()
        console.print(table)


def _table(*columns: str) -> Table:
    """A table; a column whose name begins with > is set to the right."""
    table = Table(
        box=box.SIMPLE_HEAD,
        header_style="bold",
        pad_edge=False,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    for column in columns:
        table.add_column(
            column.removeprefix(">"),
            justify="right" if column.startswith(">") else "left",
            no_wrap=True,
        )
    return table


def _facts(namespace: NamespaceUse) -> Iterator[tuple[str, str]]:
    facts = namespace.description
    yield "weights", _shown((facts.weights or "?")[:32])
    yield "model", f"{_layers(facts)}, {_shown(facts.model_dtype or '?')}"
    yield "quantization", _shown(facts.quantization or "?")
    yield "KV cache", f"{_kv_type(facts)}, {_shown(facts.device or '?')}"
    yield "vLLM", _shown(facts.vllm or "?")
    if facts.out_of_reach:
        yield "name", facts.out_of_reach
    block = _block_shape(facts)
    if facts.payload_bytes and facts.block_tokens and facts.block_tokens > 0:
        block += f", {facts.payload_bytes // facts.block_tokens:,} bytes per token"
        block += " and rank" if (facts.tensor_parallel_size or 1) > 1 else ""
    yield "block", block
    blocks = namespace.blocks
    yield "blocks", f"{blocks.count:,}, {_size(blocks.size_bytes)}"
    if len(namespace.ranks) > 1:
        ranks = (f"r{rank}: {of.count:,}" for rank, of in sorted(namespace.ranks.items()))
        yield "by rank", ", ".join(ranks)
    if blocks.count:
        yield "used", f"last {_ago(blocks.newest_ns)}, longest unused {_ago(blocks.oldest_ns)}"
    if namespace.temporary.count:
        of = namespace.temporary
        yield "temporary", f"{_counted(of.count, 'file')}, {_size(of.size_bytes)}"
    if namespace.retired.count:
        of = namespace.retired
        yield "retired", f"{of.count:,}, {_size(of.size_bytes)}; unreachable since a reset"


def _layers(facts: Description) -> str:
    """Layers, KV heads and head size: what people know a model by, beside its weights."""
    numbers = (facts.layer_count, facts.kv_heads, facts.head_size)
    if None in numbers:
        return "?"
    ranks = facts.tensor_parallel_size or 1
    of_ranks = f" × {ranks} ranks" if ranks > 1 else ""
    return f"{numbers[0]} layers × {numbers[1]} heads × {numbers[2]}{of_ranks}"


def _kv_type(facts: Description) -> str:
    """The KV cache's data type; "auto" means the model's."""
    if facts.cache_dtype in (None, "auto"):
        return _shown((facts.model_dtype or "?").removeprefix("torch."))
    return _shown(str(facts.cache_dtype))


def _block_shape(facts: Description) -> str:
    if facts.block_tokens is None or facts.payload_bytes is None:
        return "?"
    return f"{facts.block_tokens} tokens, {_size(facts.payload_bytes)}"


def _size(size_bytes: int) -> str:
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def _counted(count: int, noun: str) -> str:
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun}s"


def _since(time_ns: int | None) -> float:
    return 0.0 if time_ns is None else max(0.0, (time.time_ns() - time_ns) / 1e9)


def _span(amount: Amount) -> str:
    shortest, longest = (_duration(_since(t)) for t in (amount.newest_ns, amount.oldest_ns))
    return shortest if shortest == longest else f"{shortest} to {longest}"


def _ago(time_ns: int | None) -> str:
    if time_ns is None:
        return "-"
    return f"{_duration(_since(time_ns))} ago"


def _duration(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _shown(text: str) -> str:
    """Text from a file or a file's name, without anything that could steer a terminal."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
