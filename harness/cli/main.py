"""Command line of kvgate. One verb per command; all it knows comes from the modules it calls."""

from __future__ import annotations

import argparse
import logging
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import harness
from harness import interrupts
from harness.cli.campaign_verbs import add_campaign_verbs
from harness.cli.console import SteadyStream
from harness.cli.parsing import EXIT_USAGE
from harness.cli.run_verbs import add_run_verbs
from harness.cli.tier_verbs import add_tier_verb
from harness.cli.transfer_verbs import add_transfer_verbs
from harness.errors import EvidenceError, HarnessError, PlanError

EXIT_INTERNAL = 70
EXIT_INTERRUPTED = 130

_EPILOG = """\
examples:
  kvgate setup                        make the vLLM CPU environment (once, minutes)
  kvgate plan                         what the bundled cpu-demo campaign would run
  kvgate run                          run it, judge it, write the report
  kvgate run my.toml --gates g3       one gate of your own campaign
  kvgate judge runs/cpu-demo/20261130T120000Z
  kvgate report runs/cpu-demo/20261130T120000Z --locale zh
  kvgate runs                         what is there, and in which state
  kvgate tier ls /mnt/nvme/kv         what a connector's directory holds

exit codes: 0 PASS, 1 STOP, 2 INCONCLUSIVE or NOT RUN, 64 usage, 70 internal error, 130 interrupted
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(EXIT_USAGE, f"{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of the `kvgate` script; returns the exit code."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s %(message)s")
    try:
        with interrupts.handled(to_the_end=True):
            return int(arguments.command(arguments))
    except PlanError as error:
        _complain(*error.problems)
        return EXIT_USAGE
    except EvidenceError as error:  # the directory given is not a run, or not judged yet
        _complain(str(error))
        return EXIT_USAGE
    except HarnessError as error:
        _complain(str(error))
        return EXIT_INTERNAL
    except Exception:
        # A traceback's exit code would be 1, which means STOP.
        _complain(
            f"{traceback.format_exc()}kvgate: internal error, a defect of ours; please report it"
        )
        return EXIT_INTERNAL
    except KeyboardInterrupt:
        _complain("interrupted; servers are stopped, what was recorded is kept")
        return EXIT_INTERRUPTED


def _complain(*problems: str) -> None:
    stream = SteadyStream(sys.stderr)  # a closed terminal must not change the exit code
    for problem in problems:
        stream.write(f"kvgate: {problem}\n")
    stream.flush()


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="kvgate",
        description="Gated acceptance test for tiered KV-cache offload on vLLM.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"kvgate {harness.__version__}")
    verbs = parser.add_subparsers(
        dest="verb", required=True, metavar="COMMAND", parser_class=_Parser
    )

    def verb(name: str, command: object, summary: str, example: str) -> argparse.ArgumentParser:
        sub = verbs.add_parser(
            name,
            help=summary,
            description=summary,
            epilog=f"example:\n  {example}\n",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.set_defaults(command=command)
        return sub

    add_campaign_verbs(verb)
    add_run_verbs(verb)
    add_transfer_verbs(verb)
    add_tier_verb(verb)
    return parser
