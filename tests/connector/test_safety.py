"""What must hold whatever lies in a directory: nothing is unpickled, files are private, and
symbolic links below the root lead nowhere.

A link is planted at each level, before the store is opened and while it is in use. What lies behind
it is a valid block of the same name: a store that followed the link would find it.
"""

from __future__ import annotations

import ast
import contextlib
import mmap
import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.connector.blockfile import PAGE_BYTES, BlockHeader, file_bytes, write_block
from harness.connector.eviction import Evictor, iter_block_files
from harness.connector.file_store import FileStore, StoreUnavailable
from harness.connector.keys import block_path
from harness.connector.quota import DirectoryQuota

CONNECTOR = Path(__file__).resolve().parents[2] / "harness" / "connector"
NAMESPACE = "ab" * 16
PAYLOAD_BYTES = 5000
PAYLOAD = bytes(range(250)) * 20
KEY, OTHER_KEY = b"k" * 16, b"o" * 16

# --- nothing of a file is ever executed -------------------------------------

_FORBIDDEN_MODULES = {
    "pickle",
    "_pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "joblib",
    "marshal",
    "shelve",
    "yaml",
    "code",
    "runpy",
}
_FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
_UNPICKLING = {"torch.load", "numpy.load", "torch.jit.load", "torch.package"}


def unsafe_places(source: str) -> list[str]:
    """Imports and calls that could run what a file says, whatever name they go by."""
    tree = ast.parse(source)
    whole_names: dict[str, str] = {}
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        for alias in node.names:
            whole_names[alias.asname or alias.name] = module + alias.name
            if (module + alias.name).split(".")[0] in _FORBIDDEN_MODULES:
                found.append(module + alias.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in _FORBIDDEN_CALLS:
            found.append(node.id)
        if isinstance(node, (ast.Attribute, ast.Name)):
            first, _, rest = ast.unparse(node).partition(".")
            name = whole_names.get(first, first) + (f".{rest}" if rest else "")
            if name in _UNPICKLING:
                found.append(name)
    return found


@pytest.mark.parametrize("path", sorted(CONNECTOR.rglob("*.py")), ids=lambda path: path.name)
def test_nothing_is_unpickled_or_evaluated(path: Path) -> None:
    assert unsafe_places(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import pickle", ["pickle"]),
        ("from pickle import loads as x", ["pickle.loads"]),
        ("def f():\n    import marshal as m", ["marshal"]),
        ("import torch\nx = torch.load(path)", ["torch.load"]),
        ("import torch as t\nx = t.load(path)", ["torch.load"]),
        ("from torch import load\nload(path)", ["torch.load"]),
        ("import numpy as np\nf = np.load", ["numpy.load"]),
        ("eval(text)", ["eval"]),
        ("f = exec", ["exec"]),
        ("json.loads(text); copies.load(x)", []),
        ("from marshalling import x", []),
    ],
)
def test_an_unsafe_place_would_be_found(source: str, found: list[str]) -> None:
    assert unsafe_places(source) == found


# --- modes ------------------------------------------------------------------


@pytest.fixture(params=[0o000, 0o022, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.fixture
def buffer() -> Iterator[memoryview]:
    view = memoryview(mmap.mmap(-1, file_bytes(PAYLOAD_BYTES)))
    view[PAGE_BYTES : PAGE_BYTES + PAYLOAD_BYTES] = PAYLOAD
    yield view
    view.release()


def modes_below(path: Path) -> dict[str, int]:
    """Modes that are not what they must be, by path."""
    found = {}
    for each in [path, *path.rglob("*")]:
        mode = stat.S_IMODE(each.lstat().st_mode)
        if mode != (0o700 if each.is_dir() else 0o600):
            found[str(each.relative_to(path))] = mode
    return found


def test_everything_a_store_makes_is_private(
    tmp_path: Path, umask: int, buffer: memoryview
) -> None:
    store = FileStore(tmp_path / "tier", NAMESPACE, PAYLOAD_BYTES)
    store.open({"some": "layout"})
    store.quota.take(store.file_bytes)
    with store.quota.recount() as correct:
        assert correct is not None
        correct(store.file_bytes)
    assert store.write_from(KEY, buffer)
    assert modes_below(tmp_path / "tier") == {}
    store.clear()
    assert store.write_from(KEY, buffer)
    assert modes_below(tmp_path / "tier" / NAMESPACE / "r0") == {}


def test_parents_of_the_directory_are_private_too(tmp_path: Path, umask: int) -> None:
    """Who may write to a parent can put another directory in the place of ours."""
    FileStore(tmp_path / "a" / "b" / "tier", NAMESPACE, PAYLOAD_BYTES).open({})
    assert modes_below(tmp_path / "a") == {}


def test_a_file_is_private_before_its_first_byte(
    tmp_path: Path, umask: int, buffer: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(tmp_path / "tier", NAMESPACE, PAYLOAD_BYTES)
    genuine = os.pwrite
    modes = set()

    def watched(descriptor: int, *arguments: object) -> int:
        modes.add(stat.S_IMODE(os.fstat(descriptor).st_mode))
        return genuine(descriptor, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "pwrite", watched)
    store.open({})
    store.write_from(KEY, buffer)
    assert modes == {0o600}


def test_a_block_written_from_outside_is_private(tmp_path: Path, umask: int) -> None:
    path = tmp_path / "block.kv"
    write_block(path, BlockHeader(NAMESPACE, KEY, 0, 0), PAYLOAD)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


# --- links ------------------------------------------------------------------

LEVELS = ("namespace", "rank", "bucket", "block")


def part_of(root: Path, level: str) -> Path:
    """What is replaced by a link at ``level``."""
    block = block_path(root, NAMESPACE, KEY)
    return {
        "namespace": block.parents[2],
        "rank": block.parents[1],
        "bucket": block.parent,
        "block": block,
    }[level]


class Scene:
    """A tier, and beside it a directory of somebody else with the same layout and names."""

    def __init__(self, tmp_path: Path) -> None:
        self.root = tmp_path / "tier"
        self.outside = tmp_path / "outside"
        other = FileStore(self.outside, NAMESPACE, PAYLOAD_BYTES)
        other.open({})
        self.theirs = other.path_of(KEY)
        self.theirs.parent.mkdir()
        write_block(self.theirs, BlockHeader(NAMESPACE, KEY, 0, 0), PAYLOAD)
        os.utime(self.theirs, ns=(10**18, 10**18))  # long ago: the first to be evicted
        self.before = self._snapshot()

    def open_store(self) -> FileStore:
        """A store that is in use."""
        store = FileStore(self.root, NAMESPACE, PAYLOAD_BYTES)
        store.open({})
        return store

    def plant(self, level: str) -> None:
        """Puts a link in the place of our part; what was there is moved away."""
        part = part_of(self.root, level)
        part.parent.mkdir(parents=True, exist_ok=True)
        if part.exists():
            part.rename(part.with_name("moved"))
        part.symlink_to(part_of(self.outside, level))

    def assert_untouched(self) -> None:
        """Nothing outside was written, removed, renamed, or marked as used."""
        assert self._snapshot() == self.before

    def _snapshot(self) -> dict[str, tuple[int, int, bytes]]:
        found = {}
        for path in sorted([self.outside, *self.outside.rglob("*")]):
            status = path.lstat()
            content = path.read_bytes() if path.is_file() else b""
            found[str(path)] = (status.st_mode, status.st_mtime_ns, content)
        return found


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


@pytest.mark.parametrize("level", LEVELS)
def test_a_read_does_not_follow_a_link(scene: Scene, level: str, buffer: memoryview) -> None:
    store = scene.open_store()
    scene.plant(level)
    buffer[:] = bytes(len(buffer))
    with pytest.raises(OSError):  # noqa: PT011 (which one depends on the level)
        store.read_into(KEY, buffer)
    assert not any(buffer)
    scene.assert_untouched()


@pytest.mark.parametrize("key", [KEY, OTHER_KEY], ids=["present outside", "absent outside"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_write_does_not_follow_a_link(
    scene: Scene, level: str, key: bytes, buffer: memoryview
) -> None:
    """It fails, or replaces the link by a file of its own."""
    store = scene.open_store()
    scene.plant(level)
    try:
        is_written = store.write_from(key, buffer)
    except OSError:
        is_written = False
    scene.assert_untouched()
    path = block_path(scene.root, NAMESPACE, key)
    if is_written:
        assert stat.S_ISREG(path.lstat().st_mode)
        assert path.resolve().is_relative_to(scene.root.resolve())
    elif level in ("namespace", "rank"):
        assert not scene.theirs.parent.with_name(OTHER_KEY.hex()[:2]).exists()


@pytest.mark.parametrize("level", LEVELS)
def test_a_drop_does_not_follow_a_link(scene: Scene, level: str) -> None:
    store = scene.open_store()
    scene.plant(level)
    store.drop(KEY)
    scene.assert_untouched()


@pytest.mark.parametrize("level", LEVELS)
def test_marking_as_used_does_not_follow_a_link(scene: Scene, level: str) -> None:
    store = scene.open_store()
    scene.plant(level)
    with contextlib.suppress(OSError):
        store.touch([KEY])
    scene.assert_untouched()


@pytest.mark.parametrize("level", ["namespace", "rank", "bucket"])
def test_a_listing_does_not_follow_a_link(scene: Scene, level: str) -> None:
    store = scene.open_store()
    scene.plant(level)
    try:
        found = store.list_bucket(KEY[0])
    except OSError:
        found = frozenset()
    assert found == frozenset()


@pytest.mark.parametrize("level", LEVELS)
def test_a_reset_does_not_follow_a_link(
    scene: Scene, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deletion runs in a thread of its own; it is waited for here."""
    threads: list[threading.Thread] = []
    genuine = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        threads.append(thread)
        genuine(thread)

    store = scene.open_store()
    scene.plant(level)
    monkeypatch.setattr(threading.Thread, "start", start)
    with contextlib.suppress(StoreUnavailable):
        store.clear()
    for thread in threads:
        thread.join()
    scene.assert_untouched()


@pytest.mark.parametrize("level", ["namespace", "rank"])
def test_opening_refuses_a_link(scene: Scene, level: str) -> None:
    scene.root.mkdir()
    scene.plant(level)
    with pytest.raises(StoreUnavailable):
        scene.open_store()
    scene.assert_untouched()


@pytest.mark.parametrize("level", ["namespace", "rank"])
def test_a_probe_does_not_follow_a_link(scene: Scene, level: str) -> None:
    store = scene.open_store()
    scene.plant(level)
    with pytest.raises(OSError):  # noqa: PT011 (which one depends on the level)
        store.probe()
    scene.assert_untouched()


def test_leftovers_of_a_reset_that_are_links_are_not_followed(scene: Scene) -> None:
    store = scene.open_store()
    link = store.directory / NAMESPACE / ".dropped-1-a"
    link.symlink_to(part_of(scene.outside, "rank"))
    scene.open_store()
    scene.assert_untouched()
    assert link.is_symlink()


@pytest.mark.parametrize("has_target", [True, False])
@pytest.mark.parametrize("name", ["config.json", ".usage", ".recount"])
def test_service_files_that_are_links_are_not_followed(
    scene: Scene, tmp_path: Path, name: str, has_target: bool, buffer: memoryview
) -> None:
    """Neither read from nor, with a link to nowhere, created elsewhere."""
    target = tmp_path / "target"
    if has_target:
        target.write_bytes(b"{}\n" + bytes(13))
    link = scene.root / (f"{NAMESPACE}/{name}" if name == "config.json" else name)
    link.parent.mkdir(parents=True)
    link.symlink_to(target)

    def use() -> None:
        store = scene.open_store()
        store.quota.take(store.file_bytes)
        with store.quota.recount() as correct:
            if correct is not None:
                correct(0)

    before = target.read_bytes() if has_target else None
    with contextlib.suppress(OSError, StoreUnavailable):
        use()
    assert (target.read_bytes() if target.exists() else None) == before


@pytest.mark.parametrize("level", LEVELS)
def test_eviction_does_not_see_through_a_link(scene: Scene, level: str) -> None:
    scene.open_store()
    scene.plant(level)
    assert list(iter_block_files(scene.root)) == []


@pytest.mark.parametrize("level", LEVELS)
def test_eviction_does_not_remove_through_a_link(
    scene: Scene, level: str, buffer: memoryview
) -> None:
    """The link takes the place of a file that was listed, of the same age: the worst case."""
    store = scene.open_store()
    store.write_from(KEY, buffer)
    os.utime(store.path_of(KEY), ns=(10**18, 10**18))
    evictor = Evictor(
        DirectoryQuota(scene.root, capacity_bytes=1, reserve_bytes=0),
        high_watermark=1.0,
        low_watermark=1.0,
        is_in_use=lambda _: False,
    )
    evictor.refresh()
    scene.plant(level)
    evictor.make_room(1)
    scene.assert_untouched()


def test_without_a_link_the_same_block_is_found(scene: Scene, buffer: memoryview) -> None:
    """The scene is no dummy: everything above would follow if it looked there."""
    store = FileStore(scene.outside, NAMESPACE, PAYLOAD_BYTES)
    store.open({})
    assert store.read_into(KEY, buffer) == file_bytes(PAYLOAD_BYTES)
    assert store.list_bucket(KEY[0]) == {KEY}
    uses: list[Callable[[], object]] = [lambda: store.touch([KEY]), lambda: store.drop(KEY)]
    for use in uses:
        use()
        with pytest.raises(AssertionError):
            scene.assert_untouched()
        scene.before = scene._snapshot()
