"""What the connector's drills share: the reference, a server with a tier, and the exact oracle.

The servers compute a prompt one block at a time (``--max-num-batched-tokens``), so a block that is
recomputed sees the same shapes as when it was computed first. Where the platform's kernels then
give the same bits, which ``make_reference`` finds out, even recomputed answers are compared bit for
bit. Elsewhere they are compared by first token and log-probability, and what is restored afterwards
must still equal itself from every medium.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.connector.blockfile import read_block
from harness.connector.keys import block_path, chain_keys
from tests.live.vllm_server import (
    BLOCK_TOKENS,
    CONNECTOR,
    Answer,
    Metrics,
    Server,
    is_close,
    prompt,
    serve,
    transfer,
    value,
    wait_until,
)

SESSIONS = tuple(range(8))
BLOCKS = 8
RESTORED_TOKENS = BLOCKS * BLOCK_TOKENS
ARGUMENTS = ("--max-num-batched-tokens", str(BLOCK_TOKENS), "--max-num-seqs", "16")
OUTPUT_TOKENS = 16
PREFIX = "kvgate:tier_"
FAILURES = (
    ("load_failed_blocks", "reason"),
    ("dropped_store_blocks", "reason"),
    ("io_errors", "op"),
    ("verify_failed_blocks", ""),
    ("missing_files", ""),
    ("breaker_opened", ""),
)


@dataclass(frozen=True)
class Reference:
    """Answers of a server without connector, from its device prefix cache, one at a time.

    ``is_recompute_exact``: whether KV that was computed alone, or among eight, gives the same bits
    when it is then asked alone. ``noise``: largest difference of first log-probabilities between
    full prefills, alone or among eight, and these answers.
    """

    answers: Mapping[int, Answer]
    is_recompute_exact: bool
    noise: float


def make_reference(model: Path, log: Path, sessions: Iterable[int]) -> Reference:
    """Asks every session twice; the first eight once more, and computes those again at once."""
    wanted = list(sessions)
    first = [prompt(s, BLOCKS) for s in SESSIONS]
    with serve(model, log, None, arguments=ARGUMENTS) as server:
        cold = {s: server.ask(prompt(s, BLOCKS)) for s in wanted}
        answers = {s: server.ask(prompt(s, BLOCKS)) for s in wanted}
        repeats = server.ask_all(first)
        server.reset(external=False)
        crowd = server.ask_all(first, len(SESSIONS))
        after_crowd = server.ask_all(first)
    known = [answers[s] for s in SESSIONS]
    assert repeats == known, "one request at a time differs from itself: no exact oracle here"
    assert {a.cached_tokens for a in answers.values()} == {RESTORED_TOKENS}
    prefills = [*cold.values(), *crowd]
    return Reference(
        answers,
        after_crowd == known and all(_has_equal_output(cold[s], answers[s]) for s in wanted),
        max(
            abs(a.logprobs[0] - b.logprobs[0])
            for a, b in zip(prefills, [*answers.values(), *known], strict=True)
        ),
    )


def _has_equal_output(first: Answer, second: Answer) -> bool:
    return (first.token_ids, first.logprobs) == (second.token_ids, second.logprobs)


@dataclass(frozen=True)
class Delta:
    """What the metrics gained between two scrapes."""

    before: Metrics
    after: Metrics

    def __call__(self, name: str, **labels: str) -> float:
        """Growth of a counter, by its full name or by its short one without prefix and suffix."""
        full = name if ":" in name else f"{PREFIX}{name}_total"
        return value(self.after, full, **labels) - value(self.before, full, **labels)

    def failures(self) -> dict[str, int]:
        """Every failure counter that grew, with its reason."""
        grown: dict[str, int] = {}
        for name, label in FAILURES:
            for (series, pairs), number in self.after.items():
                if series != f"{PREFIX}{name}_total":
                    continue
                gain = number - self.before.get((series, pairs), 0.0)
                reason = f"{{{dict(pairs)[label]}}}" if label in dict(pairs) else ""
                if gain:
                    grown[name + reason] = grown.get(name + reason, 0) + int(gain)
        return grown


class Rig:
    """A server with a tier, and the files of ``SESSIONS`` as they were stored first."""

    def __init__(
        self, server: Server, directory: Path, reference: Reference, control: Path | None
    ) -> None:
        self.server = server
        self.directory = directory
        self.reference = reference
        self._control = control
        self.namespace = server.ready_line()["namespace"]
        self._pristine: dict[Path, bytes] = {}

    def files(self, session: int) -> list[Path]:
        """The block files of a session, in prompt order, present or not."""
        keys = chain_keys(self.namespace, prompt(session, BLOCKS), BLOCK_TOKENS)
        return [block_path(self.directory, self.namespace, key) for key in keys]

    def populate(self) -> None:
        """Stores ``SESSIONS`` on disk and remembers the files."""

        def is_complete() -> bool:
            # A pool smaller than a session drops stores; they are made up for by asking again.
            self.ask(SESSIONS)
            self.server.wait_durable()
            self.server.reset(external=True)
            return all(path.is_file() for s in SESSIONS for path in self.files(s))

        wait_until(is_complete, "all sessions on disk")
        self._pristine = {p: p.read_bytes() for s in SESSIONS for p in self.files(s)}

    def make_pristine(self) -> None:
        """Every file as it was stored first, the index aware of it, host and device empty."""
        for path, content in self._pristine.items():
            if not path.is_file() or path.read_bytes() != content:
                replace_file(path, content)

        def is_known() -> bool:
            self.server.reset(external=True)
            return all(a.cached_tokens == RESTORED_TOKENS for a in self.ask(SESSIONS))

        wait_until(is_known, "all sessions found on disk")
        self.server.wait_durable()
        self.server.reset(external=True)

    def ask(self, sessions: Sequence[int], concurrency: int = 1) -> list[Answer]:
        """Each session's answer."""
        return self.server.ask_all([prompt(s, BLOCKS) for s in sessions], concurrency)

    def wrong(
        self, sessions: Sequence[int], answers: Sequence[Answer], *, is_restored: bool
    ) -> list[int]:
        """The sessions with a wrong answer, asked one at a time: bit for bit.

        Args:
            is_restored: nothing was computed anew since the first store. Else only the platforms
                where that makes no difference are compared so, others as in a crowd.
        """
        if not (is_restored or self.reference.is_recompute_exact):
            return self.wrong_in_a_crowd(sessions, answers)
        wanted = [self.reference.answers[s] for s in sessions]
        return [
            session
            for session, answer, right in zip(sessions, answers, wanted, strict=True)
            if not _has_equal_output(answer, right)
        ]

    def wrong_in_a_crowd(self, sessions: Sequence[int], answers: Sequence[Answer]) -> list[int]:
        """The same by first token and log-probability, within twice the noise of prefills."""
        bound = 2 * self.reference.noise + 0.05
        wanted = [self.reference.answers[s] for s in sessions]
        return [
            session
            for session, answer, right in zip(sessions, answers, wanted, strict=True)
            if not is_close(answer, right, noise=bound)
        ]

    def changed_files(self) -> list[Path]:
        """Files of ``SESSIONS`` whose payload is not bit for bit what was stored first."""
        return [
            path
            for path, content in self._pristine.items()
            if not path.is_file() or path.read_bytes()[4096:] != content[4096:]
        ]

    @contextlib.contextmanager
    def fault(self, **kinds: str) -> Iterator[None]:
        """Makes operations of the double sick for the time of the block; see its module."""
        assert self._control is not None
        for kind, text in kinds.items():
            replace_file(self._control / kind, text.encode())
        try:
            yield
        finally:
            for kind in kinds:
                (self._control / kind).unlink(missing_ok=True)

    def hits(self, kind: str) -> int:
        """How many operations met a fault of the double so far."""
        assert self._control is not None
        with contextlib.suppress(FileNotFoundError):
            return (self._control / f"{kind}.hit").stat().st_size
        return 0


@contextlib.contextmanager
def tier_server(
    model: Path,
    root: Path,
    reference: Reference,
    extra: Mapping[str, Any],
    *,
    directory: Path | None = None,
    connector: tuple[str, str] = CONNECTOR,
    device_blocks: int | None = None,
    name: str = "server",
) -> Iterator[Rig]:
    """A server with a tier in ``directory`` (below ``root`` when not given)."""
    directory = directory or root / "tier"
    control = root / "control"
    control.mkdir(exist_ok=True)
    settings = {
        "host_pool_bytes": 64 << 20,
        "directory": str(directory),
        "reset_scope": "host",
        **extra,
    }
    with serve(
        model,
        root / f"{name}.log",
        transfer(settings, connector),
        device_blocks=device_blocks,
        arguments=ARGUMENTS,
        environment={"KVGATE_SICK_STORE": str(control)},
    ) as server:
        yield Rig(server, directory, reference, control)


def replace_file(path: Path, content: bytes) -> None:
    """Puts a whole file in place of another, atomically."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    partial = path.with_name(f"{path.name}.new")
    partial.write_bytes(content)
    partial.chmod(0o600)
    os.replace(partial, path)


def torn_files(directory: Path, namespace: str) -> list[Path]:
    """Files under a block's name that are not that block."""
    found: list[Path] = []
    for path in directory.rglob("*.kv"):
        try:
            header, _payload = read_block(path)
        except Exception:
            found.append(path)
            continue
        if header.namespace != namespace or header.key.hex() != path.stem:
            found.append(path)
    return found


def partial_files(directory: Path) -> list[Path]:
    """Files that were being written."""
    return list(directory.rglob(".*.tmp"))


def describe_noise(reference: Reference) -> str:
    """One sentence for the page."""
    rounded = math.ceil(reference.noise * 100) / 100
    noise = f"differed by up to {rounded:g}" if rounded else "did not differ"
    kv = "is bit-identical" if reference.is_recompute_exact else "differs by rounding"
    return (
        f"First log-probabilities of prefills {noise} among themselves; answers given among\n"
        f"others were compared within twice that and 0.05. Recomputed KV {kv} on this machine."
    )
