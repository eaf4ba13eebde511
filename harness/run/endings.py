"""Why a run or a trial ended before its plan: from what was raised to what the evidence says."""

from __future__ import annotations

from harness.errors import (
    LoadError,
    PortTaken,
    ServerError,
    ServerExited,
    ServerSilent,
    StartTimeout,
    StorageError,
    Unreachable,
)
from harness.evidence.store import is_disk_full
from harness.records import StopCause

_CAUSES: tuple[tuple[type[BaseException], StopCause], ...] = (
    (KeyboardInterrupt, StopCause.INTERRUPTED),
    (Unreachable, StopCause.SERVER_UNREACHABLE),
    (PortTaken, StopCause.PORT_TAKEN),
    (StartTimeout, StopCause.SERVER_NOT_READY),
    (ServerExited, StopCause.SERVER_ENDED),
    (ServerSilent, StopCause.SERVER_SILENT),
    (ServerError, StopCause.SERVER_UNUSABLE),
    (LoadError, StopCause.LOAD_FAILED),
    # A disk that is full, read-only or broken: what it cost is the same.
    (StorageError, StopCause.DISK_FULL),
)


def cause_of(error: BaseException) -> StopCause:
    """The cause that evidence names for an error; what nobody foresaw is the harness's failure."""
    if is_disk_full(error):
        return StopCause.DISK_FULL
    return next((c for kind, c in _CAUSES if isinstance(error, kind)), StopCause.HARNESS_FAILED)
