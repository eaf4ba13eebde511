"""A connector whose directory can be made slow, hanging or failing at run time, by files.

Load it as ``"kv_connector": "SickStoreConnector"`` with ``"kv_connector_module_path":
"tests.doubles.sick_store"``, the repository on PYTHONPATH, and the control directory in the
variable KVGATE_SICK_STORE. A file there says what is wrong with one kind of operation:

    read   file contents        list   everything that only looks at names and times
    write  new files            probe  the round trip of a health check

Its content is ``slow SECONDS`` (each operation), ``hang`` (until the content changes), ``fail``
(EIO), or for ``write`` also ``half`` (writes half of the file, then hangs). Without the file all is
well. ``<kind>.hit`` grows by a byte with each operation that met its fault.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from pathlib import Path

from harness.connector.blockfile import PAGE_BYTES
from harness.connector.connector import KvgateTierConnector
from harness.connector.file_store import FileStore

CONTROL = "KVGATE_SICK_STORE"
_POLL_S = 0.01


def _fault(kind: str) -> str:
    try:
        return (Path(os.environ[CONTROL]) / kind).read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return ""


def _meet(kind: str) -> None:
    """Suffers the fault of a kind of operation, if it has one."""
    fault = _fault(kind)
    if not fault:
        return
    with (Path(os.environ[CONTROL]) / f"{kind}.hit").open("ab") as hits:
        hits.write(b".")
    if fault == "fail":
        raise OSError(errno.EIO, "made to fail by its control file")
    if fault.startswith("slow "):
        time.sleep(float(fault.removeprefix("slow ")))
    while fault in ("hang", "half") and _fault(kind) == fault:
        time.sleep(_POLL_S)


class SickStore(FileStore):
    """``FileStore`` that meets the faults of its control directory first."""

    def check_present(self) -> None:
        _meet("list")
        super().check_present()

    def probe(self) -> None:
        _meet("probe")
        super().probe()

    def bucket_changes(self) -> list[int]:
        _meet("list")
        return super().bucket_changes()

    def list_bucket(self, bucket: int) -> frozenset[bytes]:
        _meet("list")
        return super().list_bucket(bucket)

    def has(self, key: bytes) -> bool:
        _meet("list")
        return super().has(key)

    def touch(self, keys: Sequence[bytes]) -> None:
        _meet("list")
        super().touch(keys)

    def read_into(self, key: bytes, buffer: memoryview) -> int:
        _meet("read")
        return super().read_into(key, buffer)

    def write_from(self, key: bytes, buffer: memoryview) -> bool:
        if _fault("write") != "half":
            _meet("write")
        return super().write_from(key, buffer)

    def _write_file(self, name: str, bucket: int, content: memoryview) -> None:
        if _fault("write") == "half":
            half = len(content) // 2 // PAGE_BYTES * PAGE_BYTES
            super()._write_file(name, bucket, content[:half])
            _meet("write")
            raise OSError(errno.EIO, "let go after half a file")
        super()._write_file(name, bucket, content)


class SickStoreConnector(KvgateTierConnector):
    """``KvgateTierConnector`` on such a directory."""

    store_class = SickStore
