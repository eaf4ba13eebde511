"""Quota and eviction on real files."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from harness.connector import partial_files
from harness.connector.eviction import Evictor, iter_block_files
from harness.connector.keys import block_path
from harness.connector.partial_files import is_abandoned, partial_name
from harness.connector.quota import USAGE_NAME, DirectoryQuota, Room

from .rig import used_bytes

FILE_BYTES = 1000
OLD, NEW = "aa" * 16, "bb" * 16


def _quota(directory: Path, capacity: int | None, reserve: int = 0) -> DirectoryQuota:
    return DirectoryQuota(directory, capacity_bytes=capacity, reserve_bytes=reserve)


def _evictor(quota: DirectoryQuota, high: float = 1.0, low: float = 1.0) -> Evictor:
    return Evictor(
        quota, high_watermark=high, low_watermark=low, is_in_use=lambda path: "dd" in path
    )


def _put(directory: Path, number: int, age: int, namespace: str = NEW) -> Path:
    """A file whose last use was ``age`` seconds after 1970-01-12."""
    path = block_path(directory, namespace, bytes([number]) * 16)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(FILE_BYTES))
    os.utime(path, (10**6 + age, 10**6 + age))
    return path


def test_room_is_granted_up_to_the_capacity_to_the_byte(tmp_path: Path) -> None:
    quota = _quota(tmp_path, 2000)
    assert [quota.take(1000) for _ in range(3)] == [Room.GRANTED, Room.GRANTED, Room.OVER_CAPACITY]
    quota.cancel(1000)
    assert (quota.take(1001), quota.take(1000)) == (Room.OVER_CAPACITY, Room.GRANTED)


def test_free_space_is_left_alone(tmp_path: Path) -> None:
    status = os.statvfs(tmp_path)
    free = status.f_bavail * status.f_frsize
    assert _quota(tmp_path, None, reserve=2 * free).take(1) is Room.NO_FREE_SPACE
    assert _quota(tmp_path, None, reserve=0).take(1) is Room.GRANTED


def test_two_users_share_one_count(tmp_path: Path) -> None:
    quotas = [_quota(tmp_path, 300 * 10) for _ in range(2)]

    def take_many(quota: DirectoryQuota) -> int:
        return sum(quota.take(10) is Room.GRANTED for _ in range(200))

    with ThreadPoolExecutor(2) as pool:
        assert sum(pool.map(take_many, quotas)) == 300
    assert used_bytes(tmp_path) == 3000


def test_recount_keeps_what_was_taken_meanwhile(tmp_path: Path) -> None:
    quota = _quota(tmp_path, None)
    quota.take(500)
    quota.keep(500)
    quota.take(8)
    with quota.recount() as correct:
        assert correct is not None
        quota.take(30)
        with _quota(tmp_path, None).recount() as other:
            assert other is None, "one process counts at a time"
        correct(7000)
    quota.take(0)
    assert quota.used_bytes == 7038, "what was found, what is being written, what came meanwhile"


def test_what_is_given_back_does_not_hide_what_came_during_a_recount(tmp_path: Path) -> None:
    """An unlisted file goes and a new one comes into a part listed already: 700 bytes are there."""
    mine, other = _quota(tmp_path, None), _quota(tmp_path, None)
    other.take(700)
    other.keep(700)
    with mine.recount() as correct:
        assert correct is not None
        other.give_back(200)
        other.take(200)
        other.keep(200)
        correct(500)
    assert mine.used_bytes == 700


def test_a_count_lost_during_a_recount_stays_lost(tmp_path: Path) -> None:
    quota = _quota(tmp_path, None)
    quota.take(700)
    quota.keep(700)
    with quota.recount() as correct:
        assert correct is not None
        (tmp_path / USAGE_NAME).write_bytes(b"")
        correct(700)
    assert (quota.used_bytes, quota.is_count_lost) == (700, True)


def test_a_recount_finds_a_file_both_counted_and_pending_or_neither(tmp_path: Path) -> None:
    """Between the two a recount of the same process would forget a file not yet written."""
    quota = _quota(tmp_path, None)
    count = os.open(tmp_path / USAGE_NAME, os.O_RDWR | os.O_CREAT)

    def is_count_locked() -> bool:
        try:
            fcntl.flock(count, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(count, fcntl.LOCK_UN)
        return False

    try:
        with ThreadPoolExecutor(1) as pool:
            with quota._lock:
                taken = pool.submit(quota.take, FILE_BYTES)
                limit = time.monotonic() + 20
                while quota.used_bytes != FILE_BYTES:
                    assert time.monotonic() < limit, "never counted"
                assert is_count_locked()
                assert not taken.done()
            assert taken.result() is Room.GRANTED
        assert not is_count_locked()
    finally:
        os.close(count)


def test_a_damaged_count_is_started_anew(tmp_path: Path) -> None:
    (tmp_path / USAGE_NAME).write_bytes(b"abc")
    quota = _quota(tmp_path, 100)
    assert quota.take(60) is Room.GRANTED
    assert quota.used_bytes == 60


@pytest.mark.parametrize("damage", [b"", b"abc"])
def test_a_lost_count_is_made_good_with_the_next_file(tmp_path: Path, damage: bytes) -> None:
    """Somebody truncates the count while the server runs: the bound still holds."""
    files = [_put(tmp_path, number, number) for number in range(1, 5)]
    quota = _quota(tmp_path, 4 * FILE_BYTES)
    evictor = _evictor(quota)
    evictor.refresh()
    (tmp_path / USAGE_NAME).write_bytes(damage)
    assert evictor.make_room(FILE_BYTES) == (Room.GRANTED, [str(files[0])])
    assert quota.used_bytes == 4 * FILE_BYTES
    assert not quota.is_count_lost
    assert evictor.make_room(FILE_BYTES) == (Room.GRANTED, [str(files[1])])


def test_giving_back_does_not_hide_a_lost_count_from_others(tmp_path: Path) -> None:
    """`kvgate tier prune` counts nothing anew; a server must still see that the count is lost."""
    files = [_put(tmp_path, number, number) for number in range(1, 5)]
    quota = _quota(tmp_path, 4 * FILE_BYTES)
    evictor = _evictor(quota)
    evictor.refresh()
    (tmp_path / USAGE_NAME).write_bytes(b"abc")
    _quota(tmp_path, None).give_back(FILE_BYTES)
    assert evictor.make_room(FILE_BYTES) == (Room.GRANTED, [str(files[0])])
    assert quota.used_bytes == 4 * FILE_BYTES


def test_the_longest_unused_goes_first_whatever_its_namespace(tmp_path: Path) -> None:
    files = [_put(tmp_path, 1, 5), _put(tmp_path, 2, 3, OLD), _put(tmp_path, 3, 4)]
    quota = _quota(tmp_path, 3 * FILE_BYTES)
    evictor = _evictor(quota)
    evictor.refresh()
    assert quota.used_bytes == 3 * FILE_BYTES
    assert evictor.make_room(FILE_BYTES) == (Room.GRANTED, [str(files[1])])
    assert evictor.make_room(FILE_BYTES) == (Room.GRANTED, [str(files[2])])
    assert [path.exists() for path in files] == [True, False, False]


def test_a_file_used_since_it_was_listed_stays(tmp_path: Path) -> None:
    first, second = _put(tmp_path, 1, 1), _put(tmp_path, 2, 2)
    evictor = _evictor(_quota(tmp_path, 2 * FILE_BYTES))
    evictor.refresh()
    os.utime(first)
    assert evictor.make_room(FILE_BYTES)[1] == [str(second)]


def test_a_file_in_use_stays(tmp_path: Path) -> None:
    used, other = _put(tmp_path, 0xDD, 1), _put(tmp_path, 2, 2)
    evictor = _evictor(_quota(tmp_path, 2 * FILE_BYTES))
    evictor.refresh()
    assert evictor.make_room(FILE_BYTES) == (Room.GRANTED, [str(other)])
    assert evictor.make_room(FILE_BYTES) == (Room.OVER_CAPACITY, [])
    assert used.exists()


def test_watermarks(tmp_path: Path) -> None:
    for number in range(1, 21):
        _put(tmp_path, number, number)
    quota = _quota(tmp_path, 22 * FILE_BYTES)
    evictor = _evictor(quota, high=0.95, low=0.5)  # 20.9 and 11 files
    evictor.refresh()
    assert evictor.make_room(FILE_BYTES)[1:] == ([f"{_p(tmp_path, n)}" for n in range(1, 11)],)
    assert quota.used_bytes == 11 * FILE_BYTES
    assert evictor.make_room(FILE_BYTES) == (Room.GRANTED, []), "not again before the high mark"


def _p(directory: Path, number: int) -> Path:
    return block_path(directory, NEW, bytes([number]) * 16)


def test_a_wrong_count_refuses_nothing(tmp_path: Path) -> None:
    quota = _quota(tmp_path, 5 * FILE_BYTES)
    for _ in range(5):
        quota.take(FILE_BYTES)
        quota.keep(FILE_BYTES)
    assert _evictor(quota).make_room(FILE_BYTES) == (Room.GRANTED, []), "there is no file at all"


def test_no_room_when_nothing_can_go(tmp_path: Path) -> None:
    assert _evictor(_quota(tmp_path, FILE_BYTES - 1)).make_room(FILE_BYTES) == (
        Room.OVER_CAPACITY,
        [],
    )


def test_links_are_neither_listed_nor_followed(tmp_path: Path) -> None:
    inside, outside = tmp_path / "tier", tmp_path / "outside"
    kept = _put(outside, 1, 1)
    path = _put(inside, 2, 2)
    (inside / OLD).symlink_to(outside / NEW)
    (inside / NEW / "r1").symlink_to(outside / NEW / "r0")
    (inside / NEW / "r0" / "01").symlink_to(kept.parent)
    path.with_name("03" * 16 + ".kv").symlink_to(kept)
    assert [file.path for file in iter_block_files(inside)] == [str(path)]


@pytest.fixture
def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_refresh_removes_what_dead_writers_left_and_counts_the_rest(
    tmp_path: Path, dead_pid: int
) -> None:
    block = _put(tmp_path, 1, 1)
    mine = block.with_name(partial_name("ab"))
    dead = block.with_name(mine.name.replace(f".{os.getpid()}.", f".{dead_pid}."))
    elsewhere = block.with_name(f".ab.00000000.{dead_pid}.0a.tmp")
    old = block.with_name(".anything.tmp")
    for path in (mine, dead, elsewhere, old):
        path.write_bytes(bytes(10))
    os.utime(old, (1, 1))
    quota = _quota(tmp_path, None)
    _evictor(quota).refresh()
    assert [path.exists() for path in (block, mine, dead, elsewhere, old)] == [
        True, True, False, True, False,
    ]  # fmt: skip
    assert quota.used_bytes == FILE_BYTES + 2 * 10


def test_abandoned_names(dead_pid: int) -> None:
    now_ns = 2**62
    assert not is_abandoned(partial_name("x"), now_ns)
    assert is_abandoned(f".x.{partial_files._place()}.{dead_pid}.00.tmp", now_ns)
    assert not is_abandoned(".x.tmp", now_ns)
    assert is_abandoned(".x.tmp", 0)
