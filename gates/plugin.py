"""Command line options of the gates, registered as a pytest plugin of the installed package.

A conftest of a package is loaded too late for options when it is named by `--pyargs gates`; an
entry point is not. Holds nothing else, because every pytest of the environment loads it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

NAME = "kvgate"
DEFAULT_CAMPAIGN = "cpu-demo"


def pytest_addoption(parser: pytest.Parser) -> None:
    """--campaign, --evidence and --runs."""
    group = parser.getgroup(NAME)
    group.addoption(
        "--campaign",
        default=DEFAULT_CAMPAIGN,
        help=f"campaign file or name of a bundled one to run live (default: {DEFAULT_CAMPAIGN})",
    )
    group.addoption(
        "--evidence", type=Path, default=None, metavar="RUN", help="judge this saved run instead"
    )
    group.addoption(
        "--runs", type=Path, default=Path("runs"), help="where live runs go (default: runs)"
    )
