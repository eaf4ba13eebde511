"""The verb `tier`: what a connector's directory holds, on a screen or as JSON.

Works beside running servers and needs no vLLM. Decides nothing about files; see `harness.tier`.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.cli.console import SteadyStream, steady_console
from harness.cli.parsing import VerbMaker
from harness.cli.tier_screen import (
    print_details,
    print_head,
    print_list,
    print_pruned,
    print_verified,
    progress_line,
)
from harness.errors import PlanError, StorageError
from harness.tier.listing import (
    AGES_S,
    Amount,
    Entry,
    TierUse,
    resolve_namespaces,
    survey,
)
from harness.tier.upkeep import (
    Checked,
    Outcome,
    Verification,
    check_files,
    plan_prune,
    remove,
)

EXIT_DAMAGED = 1
EXIT_UNREADABLE = 2
EXIT_INTERRUPTED = 130

_EXITS = """\
exit codes: 0 fine, 1 a damaged file was found (verify), 2 something could not be read or removed,
64 usage, 70 internal error, 130 interrupted
"""
_EXAMPLES = {
    "ls": "  kvgate tier ls /mnt/nvme/kv\n",
    "stat": "  kvgate tier stat /mnt/nvme/kv\n  kvgate tier stat /mnt/nvme/kv --namespace 3f9c\n",
    "verify": "  kvgate tier verify /mnt/nvme/kv\n  kvgate tier verify /mnt/nvme/kv --delete\n",
    "prune": (
        "  kvgate tier prune /mnt/nvme/kv --max-bytes 200GiB        what would go\n"
        "  kvgate tier prune /mnt/nvme/kv --max-bytes 200GiB --yes  remove it\n"
        "  kvgate tier prune /mnt/nvme/kv --older-than 7d --temp --yes\n"
        "  kvgate tier prune /mnt/nvme/kv --namespace 3f9c --yes\n"
    ),
}
_PRUNE_TEXT = """\
Shows what would go; --yes removes it, the least recently used first. With several options, blocks
go that --older-than names, then more until --max-bytes holds, all among those of --namespace.
--namespace alone means all its blocks; its config.json and directories stay, for running servers.
A block that a server uses meanwhile stays. What is foreign is never touched.
"""
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_UNITS |= {f"{unit}I": size for unit, size in _UNITS.items() if unit}
_DECIMAL_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "B": 1}
_AGE_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def add_tier_verb(verb: VerbMaker) -> None:
    """Adds `tier` with its four actions."""
    parser = verb(
        "tier",
        None,
        "look into a connector's directory: ls, stat, verify, prune",
        "kvgate tier ls /mnt/nvme/kv",
    )
    parser.epilog = f"{parser.epilog}\n{_EXITS}"
    actions = parser.add_subparsers(
        dest="action", required=True, metavar="ACTION", parser_class=type(parser)
    )

    def action(
        name: str,
        command: Callable[[argparse.Namespace], int],
        summary: str,
        text: str = "",
    ) -> argparse.ArgumentParser:
        sub = actions.add_parser(
            name,
            help=summary,
            description=f"{summary}\n\n{text}".strip(),
            epilog=f"examples:\n{_EXAMPLES[name]}\n{_EXITS}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.add_argument(
            "directory",
            type=Path,
            metavar="DIR",
            help='the "directory" of kv_connector_extra_config',
        )
        if name != "ls":
            sub.add_argument(
                "--namespace",
                action="append",
                metavar="DIGITS",
                help="only this namespace, by its first digits; may be given again",
            )
        sub.add_argument("--json", action="store_true", help="print one JSON object")
        sub.set_defaults(command=_quietly(command))
        return sub

    action("ls", _ls, "list namespaces: model, blocks, bytes, last use")
    action("stat", _stat, "everything known of each namespace, and how long blocks lie unused")
    sub = action("verify", _verify, "read every block file and check that it is whole")
    sub.add_argument("--delete", action="store_true", help="remove the damaged files")
    sub = action("prune", _prune, "remove blocks that nobody needs", _PRUNE_TEXT)
    sub.add_argument(
        "--max-bytes",
        type=_bytes,
        metavar="SIZE",
        help="leave at most this: 200GiB, 500MB, 1048576",
    )
    sub.add_argument(
        "--older-than", type=_seconds, metavar="AGE", help="unused for longer: 90m, 12h, 7d, 4w"
    )
    sub.add_argument(
        "--temp",
        action="store_true",
        help="leftovers of crashes and resets: abandoned temporary files, retired directories",
    )
    sub.add_argument("--yes", action="store_true", help="remove; without it, only show")


# --- the four actions -------------------------------------------------------


def _ls(arguments: argparse.Namespace) -> int:
    tier = _survey(arguments)
    if arguments.json:
        _print_json(_tier_json(tier))
    else:
        print_list(steady_console(), tier)
    return _exit_code(tier)


def _stat(arguments: argparse.Namespace) -> int:
    tier = _survey(arguments)
    if arguments.json:
        _print_json(_tier_json(tier))
    else:
        print_details(steady_console(), tier)
    return _exit_code(tier)


def _verify(arguments: argparse.Namespace) -> int:
    tier = _survey(arguments)
    names = {namespace.name for namespace in tier.namespaces}
    file_count = sum(n.blocks.count + n.has_config for n in tier.namespaces)
    console = steady_console()
    results = Verification({name: Counter() for name in names})
    with _interruptible() as interruption, _storage_errors(arguments.directory):
        progress = progress_line(console, "verifying", file_count, is_shown=not arguments.json)
        with progress as advance:
            for result in check_files(arguments.directory, names, delete=arguments.delete):
                results.add(result)
                advance(result.entry.size_bytes)
    total = results.total
    if arguments.json:
        content = {
            "directory": str(arguments.directory),
            "is_complete": not interruption,
            "fine_bytes": results.fine_bytes,
            **_counts_json(total, _CHECKED),
            "removed_count": sum(result.is_removed for result in results.trouble),
            "namespaces": [
                {"name": name, **_counts_json(counts, _CHECKED)}
                for name, counts in sorted(results.counts.items())
            ],
            "trouble": [_checked_json(result) for result in results.trouble],
        }
        _print_json(content)
    else:
        print_verified(console, tier, results, is_deleting=arguments.delete)
    if interruption:
        _complain(f"interrupted: {total.total():,} of {file_count:,} files were checked")
        return EXIT_INTERRUPTED
    if total[Outcome.DAMAGED]:
        return EXIT_DAMAGED
    return EXIT_UNREADABLE if total[Outcome.UNREADABLE] else _exit_code(tier)


def _prune(arguments: argparse.Namespace) -> int:
    chosen = (arguments.max_bytes, arguments.older_than, arguments.namespace)
    if chosen == (None, None, None) and not arguments.temp:
        raise PlanError(
            [
                "tier prune: found nothing that says what to remove; give --max-bytes, "
                "--older-than, --namespace or --temp"
            ]
        )
    tier = _survey(arguments)
    names = None if arguments.namespace is None else {n.name for n in tier.namespaces}
    with _storage_errors(arguments.directory):
        plan = plan_prune(
            arguments.directory,
            now_ns=time.time_ns(),
            namespaces=names,
            older_than_s=arguments.older_than,
            max_bytes=arguments.max_bytes,
            with_temporary=arguments.temp,
        )
    console = steady_console()
    results: list[Checked] = []
    with _interruptible() as interruption:
        if arguments.yes:
            count, is_shown = len(plan.doomed), not arguments.json
            with progress_line(console, "removing", count, is_shown=is_shown) as advance:
                for result in remove(arguments.directory, plan):
                    results.append(result)
                    advance(result.entry.size_bytes)
    removed = [result.entry for result in results if result.outcome is Outcome.REMOVED]
    stuck = [result for result in results if result.outcome is Outcome.KEPT]
    if arguments.json:
        content = {
            "directory": str(arguments.directory),
            "is_dry_run": not arguments.yes,
            "is_complete": not interruption,
            "planned": _entries_json(plan.doomed),
            "removed": _entries_json(removed),
            "stays": dataclasses.asdict(plan.kept),
            **_counts_json(Counter(result.outcome for result in results), _REMOVED),
            "trouble": [_checked_json(result) for result in stuck],
        }
        _print_json(content)
    else:
        print_head(console, tier)
        print_pruned(console, plan, results, is_dry_run=not arguments.yes)
    if interruption:
        _complain(f"interrupted: {len(results):,} of {len(plan.doomed):,} files were gone through")
        return EXIT_INTERRUPTED
    return EXIT_UNREADABLE if stuck else _exit_code(tier)


@contextmanager
def _interruptible() -> Iterator[list[str]]:
    """Ends its block at a Ctrl-C, without an error; the list then says so.

    What was done is still worth showing.
    """
    interruption: list[str] = []
    try:
        yield interruption
    except KeyboardInterrupt as error:
        interruption.append(str(error) or "SIGINT")


def _quietly(command: Callable[[argparse.Namespace], int]) -> object:
    """The command; a Ctrl-C ends it without talk of servers and runs, of which it has none."""

    def run(arguments: argparse.Namespace) -> int:
        try:
            return command(arguments)
        except KeyboardInterrupt:
            _complain("interrupted")
            return EXIT_INTERRUPTED

    return run


def _complain(text: str) -> None:
    stream = SteadyStream(sys.stderr)
    stream.write(f"kvgate: {text}\n")
    stream.flush()


def _survey(arguments: argparse.Namespace) -> TierUse:
    """The directory, cut down to the namespaces that were asked for."""
    with _storage_errors(arguments.directory):
        tier = survey(arguments.directory, now_ns=time.time_ns())
    if getattr(arguments, "namespace", None) is not None:
        names = resolve_namespaces(tier, arguments.namespace)
        tier.namespaces = [n for n in tier.namespaces if n.name in names]
    return tier


@contextmanager
def _storage_errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{directory}: cannot be read: {error.strerror or error}; files are private to the "
            "servers' user (0600): run as that user, and check that the file system is mounted"
        ) from error


def _exit_code(tier: TierUse) -> int:
    return EXIT_UNREADABLE if tier.unreadable_count else 0


# --- options ----------------------------------------------------------------


def _bytes(text: str) -> int:
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", text.strip())
    unit = found[2].upper() if found else "?"
    size = _DECIMAL_UNITS.get(unit) or _UNITS.get(unit.removesuffix("B"))
    if found is None or size is None:
        raise argparse.ArgumentTypeError(
            f"found {text!r}; allowed: bytes, or a number with KiB, MiB, GiB, TiB, kB, MB, GB, TB"
        )
    return int(float(found[1]) * size) if "." in found[1] else int(found[1]) * size


def _seconds(text: str) -> float:
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([smhdw])", text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(
            f"found {text!r}; allowed: a number with s, m, h, d or w, such as 7d"
        )
    return float(found[1]) * _AGE_UNITS[found[2]]


# --- JSON -------------------------------------------------------------------

_CHECKED = (Outcome.FINE, Outcome.DAMAGED, Outcome.UNREADABLE, Outcome.GONE)
_REMOVED = (Outcome.REMOVED, Outcome.USED, Outcome.KEPT, Outcome.GONE)


def _print_json(content: dict[str, Any]) -> None:
    stream = SteadyStream(sys.stdout)  # its reader may have seen enough
    stream.write(json.dumps(content, indent=1) + "\n")
    stream.flush()


def _tier_json(tier: TierUse) -> dict[str, Any]:
    content = {
        "directory": str(tier.root),
        "block_count": tier.block_count,
        "block_bytes": tier.block_bytes,
        **_plain(dataclasses.asdict(tier)),
    }
    del content["root"]
    for key in ("foreign", "unreadable"):
        content[key] = [{"path": e.path, "note": e.note} for e in getattr(tier, key)]
    for namespace in content["namespaces"]:
        namespace["ages"] = [
            {"unused_s_max": None if end == float("inf") else end, **amount}
            for end, amount in zip(AGES_S, namespace["ages"], strict=True)
        ]
    return content


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, enum.Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


def _counts_json(counts: Counter[Outcome], outcomes: Iterable[Outcome]) -> dict[str, int]:
    return {f"{outcome.value}_count": counts[outcome] for outcome in outcomes}


def _checked_json(result: Checked) -> dict[str, Any]:
    return {
        "path": result.entry.path,
        "outcome": result.outcome.value,
        "fault": result.fault or None,
        "detail": result.detail,
        "is_removed": result.is_removed,
    }


def _entries_json(entries: Iterable[Entry]) -> dict[str, Any]:
    amount = Amount()
    kinds: Counter[str] = Counter()
    for entry in entries:
        amount.add(entry)
        kinds[entry.kind.value] += 1
    return {**dataclasses.asdict(amount), "kinds": dict(kinds)}
