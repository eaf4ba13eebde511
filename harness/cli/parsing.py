"""What every verb shares: how its parser is made, and the exit code of a wrong input."""

from __future__ import annotations

import argparse
from collections.abc import Callable

EXIT_USAGE = 64

# Makes the parser of a verb from its name, command, summary and example.
VerbMaker = Callable[[str, object, str, str], argparse.ArgumentParser]
