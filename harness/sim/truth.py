"""What really happened to each request, as only the server knows: JSON lines, apart from HTTP."""

from __future__ import annotations

import array
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from harness.records import Record


@dataclass(frozen=True)
class TruthRecord(Record):
    """One numbered request. Times are monotonic nanoseconds of the machine, as the harness's own.

    ``first_token_ns``: when the engine gave the token away, before anything held it back.
    """

    number: int
    prompt_digest: str
    prompt_tokens: int
    received_ns: int
    first_token_ns: int | None
    last_token_ns: int | None
    token_ids: tuple[int, ...]
    tokens_by_source: dict[str, int]
    bytes_by_tier: dict[str, int]
    faults: tuple[str, ...]
    simulated: bool = True


def prompt_digest(token_ids: Sequence[int]) -> str:
    """Names a prompt."""
    return hashlib.sha256(array.array("I", token_ids).tobytes()).hexdigest()[:16]


class TruthWriter:
    """Appends one line per request, at once."""

    def __init__(self, path: Path) -> None:
        self._file: TextIO = path.open("a", encoding="ascii")

    def write(self, record: TruthRecord) -> None:
        """One line."""
        self._file.write(json.dumps(record.to_json(), sort_keys=True) + "\n")
        self._file.flush()


def read_truth(lines: Iterable[str]) -> list[TruthRecord]:
    """Raises ValueError."""
    return [TruthRecord.from_json(json.loads(line)) for line in lines]
