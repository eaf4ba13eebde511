"""A connector's directory from outside: what it holds, whether its files are whole, what may go.

Needs neither vLLM nor a server, and works beside running ones: files may vanish at any time, and a
file that is being written is a temporary one. Symbolic links below the directory are never
followed, neither to read nor to remove: every path is opened one component at a time. Knows nothing
of screens.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.connector.blockfile import FORMAT_VERSION
from harness.connector.directories import open_below
from harness.connector.keys import CONFIG_NAME, NAMESPACE_VERSION, namespace_of
from harness.connector.quota import USAGE_NAME
from harness.errors import PlanError

# The servers' own names in the root, neither blocks nor foreign.
_SERVICE_NAMES = (USAGE_NAME, ".recount")
_NAMESPACE = re.compile(r"[0-9a-f]{32}")
_LEVELS = (_NAMESPACE, re.compile(r"r(?:0|[1-9][0-9]*)"), re.compile(r"[0-9a-f]{2}"))
_BLOCK = re.compile(r"[0-9a-f]{32}\.kv")
_TEMPORARY = re.compile(r"\..*\.tmp", re.DOTALL)
_RETIRED = re.compile(r"\.dropped-.*", re.DOTALL)
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# Without O_NONBLOCK a pipe in a file's place would hang the reader.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# What opening a component says when it vanished, or when a link took its place.
VANISHED = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_CONFIG_BYTES_MAX = 16 * 2**20
# Upper ends of the classes of `NamespaceUse.ages`, seconds since the last use.
AGES_S = (3600.0, 86400.0, 7 * 86400.0, 30 * 86400.0, float("inf"))
_SAMPLE_COUNT = 20


class Kind(enum.Enum):
    """What lies in a directory. FOREIGN: nothing a connector makes, links included."""

    BLOCK = "block"
    CONFIG = "config"
    TEMPORARY = "temporary"
    RETIRED = "retired"  # blocks of a reset, unreachable, still to be deleted
    FOREIGN = "foreign"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing found. ``parts``: its path below the root. ``note``: why it is what it is."""

    kind: Kind
    parts: tuple[str, ...]
    size_bytes: int = 0
    mtime_ns: int = 0
    note: str = ""

    @property
    def namespace(self) -> str:
        """The name of its namespace; of a file in the root, its own name."""
        return self.parts[0]

    @property
    def path(self) -> str:
        """Its path below the root."""
        return "/".join(self.parts)


@dataclass
class Amount:
    """How many files, their bytes, and when the first and the last of them was used."""

    count: int = 0
    size_bytes: int = 0
    oldest_ns: int | None = None
    newest_ns: int | None = None

    def add(self, entry: Entry) -> None:
        """Counts one more."""
        self.count += 1
        self.size_bytes += entry.size_bytes
        used_ns = entry.mtime_ns
        self.oldest_ns = used_ns if self.oldest_ns is None else min(used_ns, self.oldest_ns)
        self.newest_ns = used_ns if self.newest_ns is None else max(used_ns, self.newest_ns)


@dataclass(frozen=True)
class Description:
    """What config.json says. ``problem``: why it cannot be trusted; what it did not say is None."""

    problem: str = ""
    format_version: int | None = None
    namespace_version: int | None = None  # of what the name is made of
    vllm: str | None = None
    weights: str | None = None  # digest of configuration and samples of the weights
    model_dtype: str | None = None
    cache_dtype: str | None = None
    quantization: str | None = None
    device: str | None = None
    layer_count: int | None = None
    kv_heads: int | None = None
    head_size: int | None = None
    tensor_parallel_size: int | None = None
    block_tokens: int | None = None
    payload_bytes: int | None = None  # of one block and rank

    @property
    def is_foreign_format(self) -> bool:
        """Whether another version of the format wrote the namespace."""
        return self.format_version not in (None, FORMAT_VERSION)

    @property
    def out_of_reach(self) -> str:
        """Why servers of this version never look here; empty when they do."""
        if self.namespace_version in (None, NAMESPACE_VERSION):
            return ""
        found, ours = self.namespace_version, NAMESPACE_VERSION
        return (
            f"a name of version {found}, this kvgate's are of {ours}: its servers never look here"
        )


@dataclass
class NamespaceUse:
    """One namespace: everything that was written by equal model, settings and versions."""

    name: str
    description: Description
    has_config: bool = False
    blocks: Amount = field(default_factory=Amount)
    ranks: dict[int, Amount] = field(default_factory=dict)
    ages: tuple[Amount, ...] = field(default_factory=lambda: tuple(Amount() for _ in AGES_S))
    temporary: Amount = field(default_factory=Amount)
    retired: Amount = field(default_factory=Amount)


@dataclass
class TierUse:
    """A whole directory. ``foreign`` and ``unreadable`` list the first few of ``*_count``."""

    root: Path
    free_bytes: int
    total_bytes: int
    namespaces: list[NamespaceUse] = field(default_factory=list)
    foreign_count: int = 0
    foreign: list[Entry] = field(default_factory=list)
    unreadable_count: int = 0
    unreadable: list[Entry] = field(default_factory=list)

    @property
    def block_count(self) -> int:
        """Blocks of all namespaces."""
        return sum(namespace.blocks.count for namespace in self.namespaces)

    @property
    def block_bytes(self) -> int:
        """Bytes of all block files."""
        return sum(namespace.blocks.size_bytes for namespace in self.namespaces)


def require_tier(root: Path) -> None:
    """Refuses a directory that no connector has written to.

    Raises:
        PlanError: says what was found and what to give instead.
        OSError: the directory cannot be listed.
    """
    expected = 'the "directory" of kv_connector_extra_config'
    if not root.is_dir():
        found = "is not a directory" if root.exists() else "does not exist"
        raise PlanError([f"{root}: {found}; give {expected}"])
    names = sorted(os.listdir(root))
    for name in names:
        if name == USAGE_NAME or _is_namespace(root, name):
            return
    here = root.resolve()
    for above, level in ((here, "one namespace"), (here.parent, "one rank of a namespace")):
        if _is_namespace(above.parent, above.name):
            raise PlanError([f"{root}: is {level} of a tier; give the tier itself: {above.parent}"])
    found = f"found {_some(names)}" if names else "it is empty"
    raise PlanError(
        [
            f"{root}: holds nothing of the kvgate connector: {found}; expected directories named "
            f"by 32 hexadecimal digits, with a {CONFIG_NAME}; give {expected}, or let a server "
            "with the connector answer a request first"
        ]
    )


def walk(root: Path) -> Iterator[Entry]:
    """Everything in a directory, in order of path. What vanishes meanwhile is left out.

    Raises OSError when ``root`` itself cannot be listed.
    """
    with open_below(root) as descriptor:
        yield from _walk_directory(descriptor, ())


def survey(root: Path, *, now_ns: int) -> TierUse:
    """Counts everything in a directory; reads no block. Raises PlanError, OSError."""
    require_tier(root)
    status = os.statvfs(root)
    tier = TierUse(root, status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize)
    namespaces: dict[str, NamespaceUse] = {}

    def of(name: str) -> NamespaceUse:
        if name not in namespaces:
            namespaces[name] = NamespaceUse(name, describe(root, name))
        return namespaces[name]

    for entry in walk(root):
        if entry.kind is Kind.FOREIGN:
            tier.foreign_count += 1
            if tier.foreign_count <= _SAMPLE_COUNT:
                tier.foreign.append(entry)
        elif entry.kind is Kind.UNREADABLE:
            tier.unreadable_count += 1
            if tier.unreadable_count <= _SAMPLE_COUNT:
                tier.unreadable.append(entry)
        elif _NAMESPACE.fullmatch(entry.namespace):
            _count(of(entry.namespace), entry, now_ns)
    for name in sorted(os.listdir(root)):
        if _is_namespace(root, name):  # also one without a file
            of(name)
    tier.namespaces = [namespaces[name] for name in sorted(namespaces)]
    return tier


def resolve_namespaces(tier: TierUse, prefixes: Iterable[str]) -> set[str]:
    """The namespaces that the prefixes name, one each. Pure. Raises PlanError."""
    known = [namespace.name for namespace in tier.namespaces]
    found: set[str] = set()
    problems = []
    for prefix in prefixes:
        fitting = [name for name in known if prefix and name.startswith(prefix)]
        found.update(fitting)
        if len(fitting) != 1:
            what = f"fits {_some(fitting)}" if fitting else f"unknown; there are {_some(known)}"
            problems.append(f"--namespace {prefix}: {what}; give the digits of one")
    if problems:
        raise PlanError(problems)
    return found


def describe(root: Path, namespace: str) -> Description:
    """Reads a namespace's config.json. What is wrong with it is in ``problem``; raises nothing."""
    try:
        descriptor, _, _ = open_regular(root, (namespace, CONFIG_NAME))
        with open(descriptor, "rb") as file:
            content = file.read(_CONFIG_BYTES_MAX + 1)
        if len(content) > _CONFIG_BYTES_MAX:
            return Description(f"larger than {_CONFIG_BYTES_MAX} bytes")
        config = json.loads(content)
    except FileNotFoundError:
        return Description("missing")
    except OSError as error:
        return Description(error.strerror or str(error))
    except (ValueError, RecursionError) as error:
        return Description(f"not JSON: {error}")
    if not isinstance(config, dict):
        return Description(f"a JSON {type(config).__name__}, not an object")
    return _description(config, namespace)


def _walk_directory(directory: int, above: tuple[str, ...]) -> Iterator[Entry]:
    with os.scandir(directory) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        parts = (*above, entry.name)
        below = None
        try:
            status = entry.stat(follow_symlinks=False)
            kind, note = _kind(directory, parts, status)
            if kind is Kind.RETIRED:
                # The reset renamed it, which only its change time tells.
                since_ns = max(status.st_mtime_ns, status.st_ctime_ns)
                yield Entry(kind, parts, _tree_bytes(directory, entry.name), since_ns, note)
            elif kind is not None:
                yield Entry(kind, parts, status.st_size, status.st_mtime_ns, note)
            elif stat.S_ISDIR(status.st_mode):
                below = os.open(entry.name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=directory)
                yield from _walk_directory(below, parts)
        except OSError as error:
            if error.errno not in VANISHED:
                yield Entry(Kind.UNREADABLE, parts, note=error.strerror or str(error))
        finally:
            if below is not None:
                os.close(below)


def _kind(
    directory: int, parts: tuple[str, ...], status: os.stat_result
) -> tuple[Kind | None, str]:
    """The kind of a thing and a note; no kind for a directory to go into, or a server's own."""
    name, level = parts[-1], len(parts) - 1
    if stat.S_ISLNK(status.st_mode):
        return Kind.FOREIGN, "a symbolic link; not followed"
    if stat.S_ISDIR(status.st_mode):
        if level == 1 and _RETIRED.fullmatch(name):
            return Kind.RETIRED, ""
        if level == len(_LEVELS) or not _LEVELS[level].fullmatch(name):
            return Kind.FOREIGN, "a directory that is none of the connector's"
        if level == 0 and not _has_namespace_content(directory, name):
            return Kind.FOREIGN, f"without {CONFIG_NAME} and without a rank's directory"
        return None, ""
    if not stat.S_ISREG(status.st_mode):
        return Kind.FOREIGN, "neither a file nor a directory"
    if level == 0 and name in _SERVICE_NAMES:
        return None, ""
    if level > 0 and _TEMPORARY.fullmatch(name):
        return Kind.TEMPORARY, ""
    if level == 1 and name == CONFIG_NAME:
        return Kind.CONFIG, ""
    if level == len(_LEVELS) and _BLOCK.fullmatch(name):
        if name[:2] == parts[-2]:
            return Kind.BLOCK, ""
        return Kind.FOREIGN, "a block that lies in the wrong directory"
    return Kind.FOREIGN, "a file that is none of the connector's"


def _is_namespace(root: Path, name: str) -> bool:
    if not _NAMESPACE.fullmatch(name):
        return False
    try:
        with open_below(root) as descriptor:
            return _has_namespace_content(descriptor, name)
    except OSError as error:
        return error.errno not in VANISHED  # somebody else's mode keeps us out


def _has_namespace_content(directory: int, name: str) -> bool:
    descriptor = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=directory)
    try:
        return any(n == CONFIG_NAME or _LEVELS[1].fullmatch(n) for n in os.listdir(descriptor))
    finally:
        os.close(descriptor)


def _tree_bytes(directory: int, name: str) -> int:
    total = 0
    for _, _, files, descriptor in os.fwalk(name, dir_fd=directory, onerror=None):
        for file in files:
            with contextlib.suppress(OSError):
                total += os.stat(file, dir_fd=descriptor, follow_symlinks=False).st_size
    return total


def _count(namespace: NamespaceUse, entry: Entry, now_ns: int) -> None:
    if entry.kind is Kind.BLOCK:
        namespace.blocks.add(entry)
        namespace.ranks.setdefault(int(entry.parts[1][1:]), Amount()).add(entry)
        ages = zip(namespace.ages, AGES_S, strict=True)
        next(amount for amount, end_s in ages if age_s(entry, now_ns) <= end_s).add(entry)
    elif entry.kind is Kind.CONFIG:
        namespace.has_config = True
    elif entry.kind is Kind.TEMPORARY:
        namespace.temporary.add(entry)
    elif entry.kind is Kind.RETIRED:
        namespace.retired.add(entry)


def age_s(entry: Entry, now_ns: int) -> float:
    """Seconds since a file was last used. Pure."""
    return (now_ns - entry.mtime_ns) / 1e9


def _description(config: dict[str, Any], namespace: str) -> Description:
    facts = config.get("fingerprint")
    facts = facts if isinstance(facts, dict) else {}

    def text(table: Any, key: str) -> str | None:
        value = table.get(key) if isinstance(table, dict) else None
        return value if isinstance(value, str) else None

    def number(table: dict[str, Any], key: str) -> int | None:
        value = table.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    layers = config.get("layers")
    version = number(config, "format_version")
    problem = ""
    if version != FORMAT_VERSION:
        problem = f"format version {version}, this kvgate knows {FORMAT_VERSION}"
    elif config.get("namespace") != namespace:
        problem = f"describes namespace {config.get('namespace')}"
    elif namespace_of(facts) != namespace:
        problem = "its fingerprint gives another namespace"
    elif (number(config, "payload_bytes") or 0) <= 0:
        problem = "payload_bytes is not a number above 0"
    return Description(
        problem,
        format_version=version,
        # The first version did not say so.
        namespace_version=number(facts, "namespace_version") or (1 if facts else None),
        vllm=text(facts.get("versions"), "vllm"),
        weights=text(facts, "weights"),
        model_dtype=text(facts, "model_dtype"),
        cache_dtype=text(facts, "cache_dtype"),
        quantization=text(facts, "quantization"),
        device=text(facts.get("platform"), "device"),
        layer_count=len(layers) if isinstance(layers, list) else None,
        kv_heads=number(facts, "kv_heads"),
        head_size=number(facts, "head_size"),
        tensor_parallel_size=number(facts, "tensor_parallel_size"),
        block_tokens=number(config, "block_tokens"),
        payload_bytes=number(config, "payload_bytes"),
    )


def open_regular(root: Path, parts: tuple[str, ...]) -> tuple[int, int, tuple[int, int]]:
    """Opens a file to read; returns its descriptor, size in bytes, and (device, inode).

    Raises OSError: it is gone, reached through a link, or no regular file.
    """
    with open_below(root, *parts[:-1]) as parent:
        descriptor = os.open(parts[-1], _FILE, dir_fd=parent)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file")
    return descriptor, status.st_size, (status.st_dev, status.st_ino)


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")
