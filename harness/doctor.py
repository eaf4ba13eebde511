"""Is this machine able to run a campaign? Looks only; each finding says what to do."""

from __future__ import annotations

import mmap
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from harness.arms import allowed_cores, tier_root, vllm_python
from harness.plan import Plan

GIB = 2**30
# One CPU server with the demo model holds 2 to 3 GiB in three processes; measured, rounded up.
SERVER_MEMORY_BYTES = 4 * GIB


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
    return [
        _python(),
        *_vllm(plan, home),
        _memory(plan),
        _disk(plan, runs_root),
        *_direct_io(plan, runs_root),
        _cores(plan),
        _shared_memory(),
        _open_files(),
        _loopback(),
    ]


def _python() -> Finding:
    found = ".".join(map(str, sys.version_info[:3]))
    return Finding("python", found, ">= 3.11", sys.version_info >= (3, 11), True)


def _vllm(plan: Plan, home: Path) -> Iterator[Finding]:
    pythons = {
        str(vllm_python(plan.campaign, arm, home))
        for arm in plan.campaign.arms.values()
        if arm.kind == "vllm"
    }
    for python in sorted(pythons):
        found, fine = "no interpreter there", False
        if Path(python).is_file():
            code = "import importlib.util as u; print(u.find_spec('vllm') is not None)"
            result = subprocess.run(
                [python, "-c", code], capture_output=True, text=True, timeout=60
            )
            fine = result.stdout.strip() == "True"
            found = "vllm is installed" if fine else "no vllm in that environment"
        remedy = "run `kvgate setup`, or set server.python in the campaign"
        yield Finding("vllm", found, f"vllm importable by {python}", fine, True, remedy)


def _memory(plan: Plan) -> Finding:
    pools = [arm.host_pool_bytes or 0 for arm in plan.campaign.arms.values()]
    needed = SERVER_MEMORY_BYTES + max(pools, default=0) + (plan.sizes.device_kv_bytes or 0)
    available = psutil.virtual_memory().available
    return Finding(
        "memory",
        f"{available / GIB:.1f} GiB available",
        f">= {needed / GIB:.1f} GiB",
        available >= needed,
        True,
        "stop other work, or choose a smaller host_pool_bytes",
    )


def disk_bytes_needed(plan: Plan) -> int:
    """Bytes of tier files and evidence a run writes; tier files are removed as each arm ends."""
    disk_arms = [a for a in plan.campaign.arms.values() if a.medium == "disk"]
    # Measured, warm-up, arrival and control sessions all leave their blocks on the medium.
    work = plan.campaign.cold_recovery
    sessions = work.sessions + work.levels[-1] + 3
    files = sessions * plan.sizes.session_kv_bytes if disk_arms else 0
    return int(files * 1.05) + 200 * 2**20


def _disk(plan: Plan, runs_root: Path) -> Finding:
    needed = disk_bytes_needed(plan)
    free = shutil.disk_usage(_existing(runs_root)).free
    return Finding(
        "disk",
        f"{free / GIB:.1f} GiB free",
        f">= {needed / GIB:.1f} GiB under the runs directory",
        free >= needed,
        True,
        "free space, or give another directory with --runs",
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


def _cores(plan: Plan) -> Finding:
    needed, found = plan.campaign.server.cpu_cores or 1, len(allowed_cores())
    remedy = "lower server.cpu_cores in the campaign"
    return Finding("cores", str(found), f">= {needed}", found >= needed, True, remedy)


def _shared_memory() -> Finding:
    free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
    remedy = "enlarge /dev/shm (docker: --shm-size=2g)"
    return Finding(
        "/dev/shm", f"{free / GIB:.1f} GiB free", ">= 0.5 GiB", free >= GIB // 2, True, remedy
    )


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


def _existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path
