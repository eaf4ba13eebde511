"""Whose socket answers, on a /proc made by hand."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from harness.server.listeners import Listeners, holder_of, listeners_of

HEADER = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt uid timeout\n"
LOOPBACK, ANY, OTHER = "0100007F", "00000000", "0200000A"  # 127.0.0.1, 0.0.0.0, 10.0.0.2
MAPPED, ANY6 = "0000000000000000FFFF00000100007F", "0" * 32
PORT = 8000


def row(address: str, inode: int, *, state: str = "0A", port: int = PORT) -> str:
    zeros = "0" * len(address)
    return f"   0: {address}:{port:04X} {zeros}:0000 {state} 0:0 0:0 0 0 0 {inode} 1 0\n"


def fake_proc(
    root: Path, *, tcp: str = "", tcp6: str | None = "", held: dict[int, list[int]]
) -> Path:
    net = root / "self" / "net"
    net.mkdir(parents=True)
    (net / "tcp").write_text(HEADER + tcp)
    if tcp6 is not None:
        (net / "tcp6").write_text(HEADER + tcp6)
    for pid, inodes in held.items():
        (root / str(pid) / "fd").mkdir(parents=True)
        (root / str(pid) / "comm").write_text("vllm\n")
        for number, inode in enumerate(inodes):
            (root / str(pid) / "fd" / str(number)).symlink_to(f"socket:[{inode}]")
    return root


def ours(*inodes: int) -> Listeners:
    return Listeners(ours=frozenset(map(str, inodes)))


def foreign(*inodes: int) -> Listeners:
    return Listeners(foreign=frozenset(map(str, inodes)))


@pytest.mark.parametrize(
    ("tcp", "tcp6", "held", "expected"),
    [
        pytest.param(row(LOOPBACK, 1), "", {10: [1]}, ours(1), id="of the server itself"),
        pytest.param(row(LOOPBACK, 1), "", {11: [1]}, ours(1), id="of a child of it"),
        pytest.param(row(LOOPBACK, 1), "", {99: [1]}, foreign(1), id="of somebody else"),
        pytest.param(row(LOOPBACK, 1), "", {}, foreign(1), id="of nobody that can be seen"),
        pytest.param("", row(ANY6, 1), {10: [1]}, ours(1), id="IPv6 for both"),
        pytest.param("", row(MAPPED, 1), {99: [1]}, foreign(1), id="IPv6, mapped address"),
        pytest.param(row(LOOPBACK, 1), None, {10: [1]}, ours(1), id="a kernel without IPv6"),
        pytest.param(
            row(LOOPBACK, 1) + row(LOOPBACK, 2),
            "",
            {10: [1], 99: [2]},
            Listeners(frozenset("1"), frozenset("2")),
            id="shared, SO_REUSEPORT",
        ),
        pytest.param(
            row(LOOPBACK, 1), row(ANY6, 2), {10: [1], 99: [2]}, ours(1), id="theirs is less exact"
        ),
        pytest.param(
            row(ANY, 1) + row(LOOPBACK, 2), "", {10: [1], 99: [2]}, foreign(2), id="ours is less so"
        ),
        pytest.param(row(OTHER, 1), "", {99: [1]}, Listeners(), id="another address"),
        pytest.param(row(LOOPBACK, 1, port=81), "", {99: [1]}, Listeners(), id="another port"),
        pytest.param(row(LOOPBACK, 1, state="01"), "", {99: [1]}, Listeners(), id="a connection"),
        pytest.param("", "", {10: [1]}, Listeners(), id="nothing listens"),
    ],
)
def test_who_answers_on_the_port(
    tcp: str, tcp6: str | None, held: dict[int, list[int]], expected: Listeners, tmp_path: Path
) -> None:
    proc = fake_proc(tmp_path, tcp=tcp, tcp6=tcp6, held=held)
    assert listeners_of(PORT, [10, 11], proc=proc) == expected


def test_a_process_that_cannot_be_looked_into_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proc = fake_proc(tmp_path, tcp=row(LOOPBACK, 1), held={10: [1]})
    listed = os.listdir

    def refuse(path: Path) -> list[str]:
        if path == proc / "10" / "fd":
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr("harness.server.listeners.os.listdir", refuse)
    found = listeners_of(PORT, [10], proc=proc)
    assert found == Listeners(unreadable=f"{proc}/10/fd: not permitted")


def test_a_proc_without_sockets_is_said(tmp_path: Path) -> None:
    found = listeners_of(PORT, [10], proc=tmp_path)
    assert found == Listeners(unreadable=f"{tmp_path}/self/net/tcp: No such file or directory")


def test_the_holder_is_named(tmp_path: Path) -> None:
    proc = fake_proc(tmp_path, held={7: [3], 8: [4]})
    assert holder_of("4", proc=proc) == "process 8 (vllm)"
    assert holder_of("5", proc=proc) == "a process that cannot be read"
