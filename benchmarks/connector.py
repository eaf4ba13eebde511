"""The bundled connector against its bounds and against vLLM's own tiers, on this machine.

live: real CPU vLLM; ours, the peer (docs/peer.md), recompute and a device prefix hit in one run.
micro: restores against a plain memcpy and a plain O_DIRECT reader. scheduler: time and memory of
the index. stages: where a restore from host memory spends its time, ours and the peer's. The last
lines say which bounds were kept; exit 1 when one was missed, 2 when nothing could be measured. What
the parts do exactly: docs/connector_benchmark.md.

Run: python -m benchmarks.connector [--only live] [--passes 5] [--concurrency 1,4,8]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.connector_report import Report, say
from harness import interrupts
from harness.campaign.arms import default_home
from harness.errors import HarnessError

PARTS = ("micro", "scheduler", "live", "stages")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the chosen parts; returns the exit code."""
    options = _parse(arguments)
    parts = [options.only] if options.only else list(PARTS)
    report = Report()
    with interrupts.handled():
        try:
            if {"live", "stages"} & set(parts):
                _check_vllm()
            root = _root(options.directory)
            with tempfile.TemporaryDirectory(prefix="kvgate-bench-", dir=root) as place:
                _check_direct(Path(place))
                for part in parts:
                    say(f"--- {part}")
                    _run(part, report, options, Path(place))
        except HarnessError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("interrupted; servers and files are gone", file=sys.stderr)
            return 130
    say("")
    return 0 if report.print() else 1


def _run(part: str, report: Report, options: argparse.Namespace, place: Path) -> None:
    # Each part's imports are its own: the micro part needs no load client.
    if part == "live":
        from benchmarks.connector_live import run_live

        run_live(
            report,
            passes=options.passes,
            rounds=options.rounds,
            levels=options.concurrency,
            directory=place,
        )
    elif part == "stages":
        from benchmarks.connector_stages import run_stages

        run_stages(rounds=2 * options.rounds, levels=options.concurrency, directory=place)
    elif part == "micro":
        from benchmarks.connector_micro import run_micro

        run_micro(report, passes=options.passes, directory=place)
    else:
        from benchmarks.connector_scheduler import run_scheduler

        run_scheduler(report)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.connector",
        description="Measures the bundled connector against its bounds and against vLLM's own "
        "tiers. Use an otherwise idle machine.",
    )
    parser.add_argument("--only", choices=PARTS, help="one part instead of all")
    parser.add_argument(
        "--passes", type=_positive, default=5, help="passes of live and micro (default 5)"
    )
    parser.add_argument(
        "--rounds",
        type=_positive,
        default=4,
        help="readings of each tier per pass and concurrency (default 4)",
    )
    parser.add_argument(
        "--concurrency",
        type=_levels,
        default=(1, 4, 8),
        help="levels, separated by commas, at most 8 (default 1,4,8)",
    )
    parser.add_argument(
        "--directory",
        type=Path,
        help="where disk files go, below a directory of this run's own; must support O_DIRECT "
        "(default: the temporary directory)",
    )
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is not above 0")
    return value


def _levels(text: str) -> tuple[int, ...]:
    levels = tuple(sorted({_positive(item) for item in text.split(",")}))
    if levels[-1] > 8:
        raise argparse.ArgumentTypeError(f"{levels[-1]} is above 8, the sessions of a pass")
    return levels


def _root(directory: Path | None) -> Path:
    root = directory.resolve() if directory is not None else Path(tempfile.gettempdir())
    if not root.is_dir():
        raise HarnessError(f"--directory {root}: no such directory")
    return root


def _check_direct(place: Path) -> None:
    """Raises HarnessError where reads could come from the page cache."""
    path = place / "probe"
    path.write_bytes(bytes(4096))
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError as error:
        raise HarnessError(
            f"{place.parent} does not support O_DIRECT ({error.strerror}); choose a directory on "
            "a local disk with --directory"
        ) from error
    finally:
        path.unlink()


def _check_vllm() -> None:
    named = os.environ.get("KVGATE_VLLM_PYTHON")
    python = Path(named) if named else default_home() / "vllm" / "bin" / "python"
    if not python.is_file():
        raise HarnessError(
            f"no vLLM environment: {python} is missing; run `kvgate setup`, or set KVGATE_HOME to "
            "where it was run, or leave the live parts out with --only micro"
        )


if __name__ == "__main__":
    sys.exit(main())
