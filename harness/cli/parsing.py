"""What every verb shares: how its parser is made."""

from __future__ import annotations

import argparse
from collections.abc import Callable

# Makes the parser of a verb from its name, command, summary and example.
VerbMaker = Callable[[str, object, str, str], argparse.ArgumentParser]
