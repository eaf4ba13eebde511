"""The worker processes of one load client: started together, heard together, stopped together.

Knows neither schedules nor records. Used by one thread at a time.
"""

from __future__ import annotations

import select
import time
from pathlib import Path
from typing import Any

from harness.errors import LoadError
from harness.load.worker import WorkerProcess


class WorkerPool:
    """Workers by index, from 0; all print to one log."""

    def __init__(self, *, python: str, log_path: Path) -> None:
        self._python = python
        self._log_path = log_path
        self._workers: list[WorkerProcess] = []

    @property
    def pids(self) -> list[int]:
        """Also the ids of their process groups."""
        return [worker.pid for worker in self._workers]

    def grow(self, count: int, greeting: dict[str, Any], *, ready_s: float) -> None:
        """Starts what is missing to ``count`` workers; none is ever ended for being too many.

        Raises:
            LoadError: a new worker ended or did not answer the greeting in ``ready_s``.
        """
        new = range(len(self._workers), count)
        for _ in new:
            worker = WorkerProcess(python=self._python, log_path=self._log_path)
            self._workers.append(worker)
            worker.send(greeting)
        deadline = time.monotonic() + ready_s
        for index in new:
            if self._workers[index].receive(max(0.0, deadline - time.monotonic())) is None:
                raise LoadError(
                    f"the load worker was not ready in {ready_s} s; see {self._log_path}"
                )

    def send(self, index: int, message: dict[str, Any]) -> None:
        """One message to one worker. Raises LoadError when it is gone."""
        self._workers[index].send(message)

    def receive(self, count: int, timeout_s: float) -> tuple[int, dict[str, Any]] | None:
        """The next message of the first ``count`` workers and whose it is; None when none came.

        Raises LoadError when one of them ended.
        """
        workers = self._workers[:count]
        by_fd = {worker.fileno(): index for index, worker in enumerate(workers)}
        poller = select.poll()
        for fd in by_fd:
            poller.register(fd, select.POLLIN)
        deadline = time.monotonic() + timeout_s
        while True:
            for index, worker in enumerate(workers):
                # What has come whole is taken before the pipes are asked again.
                if (message := worker.take()) is not None:
                    return index, message
            left_s = max(0.0, deadline - time.monotonic())
            heard = poller.poll(left_s * 1000)
            if not heard:
                return None
            for fd, _ in heard:
                workers[by_fd[fd]].read()

    def stop(self) -> None:
        """Ends all and waits for their end. Never raises."""
        for worker in self._workers:
            # All are told before one is waited for.
            worker.close_commands()
        for worker in self._workers:
            worker.stop()
        self._workers.clear()
