"""Shows a run on the terminal: a live line on a screen, plain lines in a log file or CI."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO, cast

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from harness.campaign.sections import Arm
from harness.records import TrialFacts


class SteadyStream:
    """A text stream that goes silent when its reader is gone.

    A closed terminal or pipe must not end a run amid its orderly stop, nor change its exit code.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes, or does nothing once the reader is gone."""
        with self._silenced():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flushes, or does nothing once the reader is gone."""
        with self._silenced():
            self._stream.flush()

    def isatty(self) -> bool:
        """Whether a person looks at it."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """The descriptor below."""
        return self._stream.fileno()

    @property
    def encoding(self) -> str:
        """The encoding below."""
        return self._stream.encoding

    @contextlib.contextmanager
    def _silenced(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError):
            # What is still buffered would fail again when Python ends, with exit code 120.
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)


def steady_console(stream: TextIO | None = None) -> Console:
    """A console on standard output that survives its terminal."""
    return Console(file=cast(TextIO, SteadyStream(stream or sys.stdout)))


class ConsoleObserver:
    """Implements `harness.run.campaign_run.Observer` with rich."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = console.is_terminal
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed}/{task.total}"),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[detail]}[/dim]"),
            console=console,
            transient=True,
        )
        self._task: TaskID | None = None
        self._started = time.monotonic()
        self._trials_of_arm: dict[str, int] = {}

    def __enter__(self) -> Self:
        if self._live:
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live:
            self._progress.stop()

    def run_started(self, path: Path, trials: Sequence[TrialFacts]) -> None:
        """Announces the run directory and the number of trials."""
        self._console.print(f"run {escape(str(path))}: {len(trials)} trials", highlight=False)
        self._task = self._progress.add_task("starting", total=len(trials), detail="")

    def arm_started(self, arm: Arm) -> None:
        """A server is about to start."""
        self._line(f"[bold]{arm.name}[/bold]  {arm.role}{f', {arm.medium}' if arm.medium else ''}")
        self._describe(f"{arm.name}: server")

    def trial_started(self, facts: TrialFacts) -> None:
        """A trial begins."""
        self._describe(f"{facts.arm}: {facts.workload} c{facts.concurrency} r{facts.repetition}")

    def progress(self, text: str) -> None:
        """A detail of what is going on, shown on a screen only."""
        if self._task is not None:
            self._progress.update(self._task, detail=escape(text))

    def trial_ended(self, facts: TrialFacts, duration_s: float) -> None:
        """A trial is sealed."""
        if self._task is not None:
            self._progress.advance(self._task)
        name = f"{facts.workload} c{facts.concurrency} r{facts.repetition}"
        self._line(f"  {self._clock()}  {name:<24}{duration_s:7.1f} s")

    def note(self, text: str) -> None:
        """Something the operator should read."""
        self._line(f"[yellow]note[/yellow] {escape(text)}")

    def _clock(self) -> str:
        elapsed = int(time.monotonic() - self._started)
        return f"{elapsed // 60:3d}:{elapsed % 60:02d}"

    def _describe(self, text: str) -> None:
        if self._task is not None:
            self._progress.update(self._task, description=text, detail="")

    def _line(self, text: str) -> None:
        self._console.print(text, highlight=False)
