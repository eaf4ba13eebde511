"""The drills of the connector: what is done to a serving server, and what may come of it.

A drill's ``inject`` is a context: the fault is there while its body runs. ``check`` looks at what
the metrics gained and fails when something that happened is in none of them. Right answers, a live
engine and the exact oracle afterwards are for every drill and not repeated here.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from harness.connector.blockfile import BlockHeader, parse_header, read_block, write_block
from tests.live.connector_rig import BLOCKS, RESTORED_TOKENS, SESSIONS, Delta, Rig, replace_file
from tests.live.vllm_server import BLOCK_TOKENS, prompt, wait_until

CONCURRENCIES = (1, 4, 8)
# Session -> its damaged block: the head, one inside, one behind the middle, the tail.
DAMAGED = {0: 0, 2: 3, 4: 5, 6: 7}
FRESH_PER_WAVE = 2
_FRESH_FIRST = 100

Inject = Callable[[Rig, int], AbstractContextManager[None]]
_Counter = tuple[str, Mapping[str, str]]
Check = Callable[[Delta, int], None]


@dataclass(frozen=True)
class Drill:
    """One way to break something. ``has_fresh``: sessions never stored before are asked too."""

    name: str
    rig: str
    happens: str
    allowed: str
    inject: Inject
    check: Check
    has_fresh: bool = False
    output_tokens: int = 16
    concurrencies: tuple[int, ...] = CONCURRENCIES
    wave: int = len(SESSIONS)  # sessions asked; at least as many as requests at once
    shown: tuple[_Counter, ...] = ()  # counters for the page, with labels

    def counters(self, delta: Delta) -> dict[str, int]:
        """What the page shows of the metrics: every failure, and ``shown``."""
        chosen = {
            name + "".join(f"{{{text}}}" for text in labels.values()): int(delta(name, **labels))
            for name, labels in self.shown
        }
        return {**delta.failures(), **chosen}

    def sessions(self, concurrency: int) -> list[int]:
        """What is asked while the fault is there."""
        known = list(SESSIONS[: max(self.wave, concurrency)])
        return known + fresh_sessions(self, concurrency) if self.has_fresh else known


def fresh_sessions(drill: Drill, concurrency: int) -> list[int]:
    """Sessions of this cell alone."""
    cell = DRILLS.index(drill) * len(CONCURRENCIES) + CONCURRENCIES.index(concurrency)
    first = _FRESH_FIRST + cell * FRESH_PER_WAVE
    return list(range(first, first + FRESH_PER_WAVE))


def all_sessions() -> list[int]:
    """Every session that any drill asks."""
    fresh = [
        s for d in DRILLS if d.has_fresh for c in d.concurrencies for s in fresh_sessions(d, c)
    ]
    return [*SESSIONS, *fresh]


# Files.


def _on_files(damage: Callable[[Rig, Path, Path], None]) -> Inject:
    """Does something to one file of each session of ``DAMAGED``; also gets another block's file."""

    @contextlib.contextmanager
    def inject(rig: Rig, _concurrency: int) -> Iterator[None]:
        for session, block in DAMAGED.items():
            files = rig.files(session)
            damage(rig, files[block], files[(block + 1) % BLOCKS])
        yield

    return inject


def _delete(_rig: Rig, path: Path, _other: Path) -> None:
    path.unlink()


def _truncate(_rig: Rig, path: Path, _other: Path) -> None:
    replace_file(path, path.read_bytes()[: 4096 + 12_345])


def _flip(_rig: Rig, path: Path, _other: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    replace_file(path, bytes(content))


def _empty(_rig: Rig, path: Path, _other: Path) -> None:
    replace_file(path, b"")


def _wrong_key(_rig: Rig, path: Path, other: Path) -> None:
    replace_file(path, other.read_bytes())


def _foreign(_rig: Rig, path: Path, _other: Path) -> None:
    header, payload = read_block(path)
    foreign = "f0" * 16
    write_block(path, BlockHeader(foreign, header.key, len(payload), 0), payload)
    assert parse_header(path.read_bytes()).namespace == foreign


def _damage_is_counted(delta: Delta, concurrency: int) -> None:
    assert delta("verify_failed_blocks") == len(DAMAGED)
    _loads_failed(delta, concurrency, "damaged")
    assert set(delta.failures()) <= {"load_failed_blocks{damaged}", "verify_failed_blocks"}


def _missing_is_counted(delta: Delta, concurrency: int) -> None:
    assert delta("missing_files") == len(DAMAGED)
    _loads_failed(delta, concurrency, "gone")
    assert set(delta.failures()) <= {"load_failed_blocks{gone}", "missing_files"}


def _loads_failed(delta: Delta, concurrency: int, reason: str) -> None:
    failed = delta("load_failed_blocks", reason=reason)
    if concurrency == 1:
        assert failed == len(DAMAGED), delta.failures()
    # In a queue a request's files may be read ahead: a bad one is then known before the request
    # is scheduled, and shortens its hit instead of failing its load.
    assert failed <= len(DAMAGED), delta.failures()


# The directory.


@contextlib.contextmanager
def _read_only(rig: Rig, _concurrency: int) -> Iterator[None]:
    mount = rig.directory.parent
    # Busy while a file is open for writing; the next try comes between two writes.
    wait_until(lambda: _remount(mount, "ro"), "a mount that is read-only")
    try:
        yield
        rig.server.wait_durable()
    finally:
        assert _remount(mount, "rw")


def _remount(mount: Path, how: str) -> bool:
    return subprocess.run(["mount", "-o", f"remount,{how}", str(mount)]).returncode == 0


def _writes_fail_and_are_counted(delta: Delta, _concurrency: int) -> None:
    assert delta("dropped_store_blocks", reason="io_error") >= 1
    assert delta("io_errors", op="write") >= 1
    assert delta("breaker_opened") >= 1
    assert delta("load_failed_blocks") == 0  # what forbids writing does not forbid reading


@contextlib.contextmanager
def _full(rig: Rig, _concurrency: int) -> Iterator[None]:
    filler = rig.directory.parent / "filler"
    with filler.open("wb") as file, contextlib.suppress(OSError):
        while True:
            file.write(b"\0" * 65536)
            file.flush()
    try:
        yield
        rig.server.wait_durable()
    finally:
        filler.unlink()


@contextlib.contextmanager
def _full_and_empty(rig: Rig, concurrency: int) -> Iterator[None]:
    # Also what earlier drills stored: it would be evicted and make room.
    for path in rig.directory.glob("*/r*/*/*.kv"):
        path.unlink()
    with _full(rig, concurrency):
        yield


def _room_was_made(delta: Delta, _concurrency: int) -> None:
    assert delta("evicted_blocks", tier="disk") >= 1
    assert delta("stored_blocks", tier="disk") >= 1
    _is_not_sick(delta)


def _drops_are_counted(delta: Delta, _concurrency: int) -> None:
    assert delta("dropped_store_blocks", reason="no_space") >= 1
    _is_not_sick(delta)


def _is_not_sick(delta: Delta) -> None:
    """A full disk is not a sick one."""
    assert delta("io_errors") == 0
    assert delta("breaker_opened") == 0


@contextlib.contextmanager
def _renamed(rig: Rig, _concurrency: int) -> Iterator[None]:
    away = rig.directory.with_name("away")
    rig.directory.rename(away)
    try:
        yield
        rig.server.wait_durable()
        # Made anew, it would fill whatever lies below a lost mount.
        assert not rig.directory.exists()
    finally:
        if rig.directory.exists():
            shutil.rmtree(rig.directory)
        away.rename(rig.directory)


def _absence_is_counted(delta: Delta, _concurrency: int) -> None:
    assert delta("load_failed_blocks") >= 1
    assert delta("io_errors") >= 1
    assert delta("breaker_opened") >= 1


# A sick file system, played by the double.


@contextlib.contextmanager
def _slow(rig: Rig, _concurrency: int) -> Iterator[None]:
    with rig.fault(read="slow 2"):
        yield
    assert rig.hits("read")


def _slowness_is_counted(delta: Delta, _concurrency: int) -> None:
    overdue = delta("load_failed_blocks", reason="overdue")
    assert delta("hit_tokens", tier="disk") + overdue > 0
    assert (overdue > 0) == (delta("breaker_opened") > 0)


@contextlib.contextmanager
def _hang(rig: Rig, _concurrency: int) -> Iterator[None]:
    with rig.fault(read="hang", list="hang", probe="hang"):
        yield


def _hang_is_counted(delta: Delta, _concurrency: int) -> None:
    assert delta("load_failed_blocks", reason="overdue") >= 1
    assert delta("breaker_opened") >= 1


@contextlib.contextmanager
def _io_errors(rig: Rig, _concurrency: int) -> Iterator[None]:
    with rig.fault(read="fail", probe="fail"):
        yield


def _io_errors_are_counted(delta: Delta, _concurrency: int) -> None:
    assert delta("load_failed_blocks", reason="unreadable") >= 1
    assert delta("io_errors", op="read") >= 1
    assert delta("breaker_opened") >= 1


@contextlib.contextmanager
def _aborts(rig: Rig, concurrency: int) -> Iterator[None]:
    """Clients leave while their loads are under way; then the wave follows."""
    seen = rig.hits("read")
    are_all_loading = threading.Event()

    def is_time_to_leave() -> bool:
        if rig.hits("read") > seen and _in_flight(rig) == concurrency:
            are_all_loading.set()  # from now on they are fewer
        return are_all_loading.is_set()

    with rig.fault(read="hang"), ThreadPoolExecutor(concurrency) as pool:
        sessions = SESSIONS[:concurrency]
        clients = [
            pool.submit(rig.server.ask_and_leave, prompt(s, BLOCKS), leave=is_time_to_leave)
            for s in sessions
        ]
        for client in clients:
            client.result()
        wait_until(lambda: _in_flight(rig) == 0, "requests that were let go")
    yield


def _in_flight(rig: Rig) -> int:
    metrics = rig.server.metrics(step=False)
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    return int(sum(number for (name, _), number in metrics.items() if name in names))


def _aborts_are_no_failures(delta: Delta, _concurrency: int) -> None:
    # That all of them were loading, and that none was left, is awaited above.
    assert delta.failures() == {}
    assert delta("hit_tokens", tier="disk") > 0


# Room.


@contextlib.contextmanager
def _nothing(_rig: Rig, _concurrency: int) -> Iterator[None]:
    yield


def _loads_do_not_fail(delta: Delta, _concurrency: int) -> None:
    assert delta("hit_tokens", tier="disk") == len(SESSIONS) * RESTORED_TOKENS
    assert delta("load_failed_blocks") == 0
    assert set(delta.failures()) <= {"dropped_store_blocks{no_slot}"}


def _preemptions_happened(delta: Delta, _concurrency: int) -> None:
    assert delta("vllm:num_preemptions_total") >= 1
    assert delta("hit_tokens", tier="disk") >= BLOCK_TOKENS
    assert delta("load_failed_blocks") == 0


_EVICTED: _Counter = ("evicted_blocks", {"tier": "disk"})
_PREEMPTED: _Counter = ("vllm:num_preemptions_total", {})
_RECOMPUTED = "the block is recomputed and stored again"
DRILLS: Sequence[Drill] = (
    Drill(
        "file deleted", "plain", "one file of each of 4 sessions removed",
        f"{_RECOMPUTED}; counted as `gone`", _on_files(_delete), _missing_is_counted,
    ),
    Drill(
        "file truncated", "plain", "one file of each of 4 sessions cut off inside its payload",
        f"{_RECOMPUTED}; counted as `damaged`", _on_files(_truncate), _damage_is_counted,
    ),
    Drill(
        "bit flipped", "plain", "one payload bit of one file of each of 4 sessions",
        f"{_RECOMPUTED}; counted as `damaged`", _on_files(_flip), _damage_is_counted,
    ),
    Drill(
        "zero length", "plain", "one file of each of 4 sessions emptied",
        f"{_RECOMPUTED}; counted as `damaged`", _on_files(_empty), _damage_is_counted,
    ),
    Drill(
        "wrong key inside", "plain", "the whole valid file of another block under the name",
        f"{_RECOMPUTED}; counted as `damaged`", _on_files(_wrong_key), _damage_is_counted,
    ),
    Drill(
        "foreign fingerprint", "plain", "a valid file that says it is of another configuration",
        f"{_RECOMPUTED}; counted as `damaged`", _on_files(_foreign), _damage_is_counted,
    ),
    Drill(
        "directory read-only", "mount", "its file system remounted read-only",
        "hits go on; new blocks are not stored, counted; writing is retried by a probe",
        _read_only, _writes_fail_and_are_counted, has_fresh=True,
    ),
    Drill(
        "directory full", "mount", "a foreign file takes all space of its small tmpfs",
        "blocks used longest ago make room; requests unaffected, the directory not taken for sick",
        _full, _room_was_made, has_fresh=True, shown=(_EVICTED,),
    ),
    Drill(
        "directory full, nothing to evict", "mount", "the same, and all block files deleted before",
        "recomputed; new blocks are not stored, counted; the directory not taken for sick",
        _full_and_empty, _drops_are_counted, has_fresh=True,
    ),
    Drill(
        "directory renamed away", "mount", "the root vanishes, as with a lost mount, and returns",
        "recomputed; the directory rests, is not made anew, and is used again when back",
        _renamed, _absence_is_counted, has_fresh=True,
    ),
    Drill(
        "slow", "sick", "each read takes 2 s, a load may take 10 s",
        "loaded late, or recomputed at the deadline and the directory rests",
        _slow, _slowness_is_counted, wave=4,
    ),
    Drill(
        "hanging", "sick", "reads, listings and probes do not return",
        "recomputed at the deadline; the directory rests until a probe returns",
        _hang, _hang_is_counted,
    ),
    Drill(
        "I/O errors", "sick", "every read and probe ends with EIO",
        "recomputed; the directory rests after three errors in a row",
        _io_errors, _io_errors_are_counted,
    ),
    Drill(
        "client abort during load", "sick", "as many clients leave while their files are read",
        "the requests end, pins and blocks come free, the next ones hit",
        _aborts, _aborts_are_no_failures,
    ),
    Drill(
        "DRAM pool of 3 blocks", "small", "a session is 8 blocks; more are populated meanwhile",
        "hits stream from disk; stores may be dropped for want of a slot, counted",
        _nothing, _loads_do_not_fail, has_fresh=True,
    ),
    Drill(
        "preemption", "tight", "the device cache has no room for the answers of all",
        "preempted requests continue and end right", _nothing, _preemptions_happened,
        output_tokens=200, concurrencies=(4, 8), shown=(_PREEMPTED,),
    ),
)  # fmt: skip
