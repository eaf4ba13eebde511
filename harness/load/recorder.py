"""Request records as JSON lines: appended as each request ends, read back strictly.

A crash loses at most the requests in flight. Several runs may append to one file; records carry
their phase. So may several processes at once: each line is one write at the end of the file, which
a local file system does whole.
"""

from __future__ import annotations

import errno
import json
from pathlib import Path
from types import TracebackType
from typing import Self

from harness.errors import EvidenceError
from harness.records import RecordError, RequestRecord


class RecordWriter:
    """Appends to a file; every line reaches the kernel before `write` returns."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def write(self, record: RequestRecord) -> None:
        """One record, one line. Raises OSError when it could not be written whole."""
        text = json.dumps(record.to_json(), separators=(",", ":"), allow_nan=False)
        line = text.encode("ascii") + b"\n"
        if self._file.write(line) != len(line):
            raise OSError(errno.ENOSPC, "a record was cut short", self._file.name)

    def close(self) -> None:
        """Closes the file; nothing is buffered."""
        self._file.close()


def read_records(
    path: Path, *, is_sealed: bool = True, offset_bytes: int = 0
) -> tuple[RequestRecord, ...]:
    """Records from ``offset_bytes`` on, in the order in which the requests ended.

    ``is_sealed`` False tolerates a torn last line: the writer may have died inside it.

    Raises:
        EvidenceError: a line is not a record, or the last line is torn in a sealed file.
    """
    with path.open("rb") as file:
        file.seek(offset_bytes)
        content = file.read()
    lines = content.split(b"\n")
    torn = lines.pop()
    if torn and is_sealed:
        raise EvidenceError(
            f"{path}: the last line is torn ({len(torn)} bytes without a line end); "
            "the load client died while writing, run the trial again"
        )
    return tuple(_record(line, path, number) for number, line in enumerate(lines, start=1))


def _record(line: bytes, path: Path, number: int) -> RequestRecord:
    try:
        return RequestRecord.from_json(json.loads(line))
    except (ValueError, RecordError) as error:
        raise EvidenceError(f"{path}: record {number} cannot be read: {error}") from error
