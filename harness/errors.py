"""Errors of the harness itself. What goes wrong in the system under test is evidence, no error.

    HarnessError
    ├── PlanError            campaign, criteria or command line: exit 64
    ├── ServerError          a server under test could not be used
    │   ├── StartTimeout
    │   ├── ServerExited
    │   ├── ServerSilent
    │   ├── PortTaken
    │   └── Unreachable
    ├── LoadError            the load client itself failed
    ├── StorageError         a disk refused what had to be written
    └── EvidenceError        saved evidence cannot be used
        ├── Unsealed
        └── DigestMismatch

A message says what failed, the value found, the value allowed, where to look and what to do next.
"""

from __future__ import annotations


class HarnessError(Exception):
    """Root of all errors raised by the harness."""


class PlanError(HarnessError):
    """The campaign, the criteria or the plan cannot be run. Carries every problem at once."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


class ServerError(HarnessError):
    """A server under test could not be started, reached or stopped."""


class StartTimeout(ServerError):
    """The server was not ready before its deadline."""


class ServerExited(ServerError):
    """The server process ended by itself."""


class ServerSilent(ServerError):
    """The server lives and does not answer within its deadline."""


class PortTaken(ServerError):
    """What answers on the server's port cannot be shown to be the server that was started."""


class Unreachable(ServerError):
    """A server that somebody else runs does not answer, or not us."""


class StorageError(HarnessError):
    """A disk refused evidence, a verdict or a report; what was sealed before is untouched."""


class LoadError(HarnessError):
    """The load client failed; says nothing about the server."""


class EvidenceError(HarnessError):
    """Saved evidence cannot be read or trusted."""


class Unsealed(EvidenceError):
    """The run or trial was never sealed, so its evidence is incomplete."""


class DigestMismatch(EvidenceError):
    """Sealed evidence was altered, removed or added to. Carries one line per file."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))
