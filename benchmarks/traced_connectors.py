"""Both connectors with a stamp at each station of a restored request. Runs inside vLLM.

Lines of ``$KVGATE_STAMPS``: monotonic ns, station, request id, and on arrival the prompt's first
token ids, by which the load client's record is found. Stations follow vLLM's own hooks, so they
are the same for every connector: arrived, planned (device blocks were given, the load is on its
way), loaded (the worker says so), scheduled (the request runs).
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import IO, Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from harness.connector.connector import KvgateTierConnector

NAMED_TOKENS = 6


class _Stamps:
    _file: IO[str] | None = None
    _in_step: ClassVar[set[str]] = set()

    def _stamp(self, station: str, request_id: str, text: str = "") -> None:
        now = time.monotonic_ns()
        if self._file is None:
            path = Path(os.environ["KVGATE_STAMPS"])
            self._file = path.open("a", buffering=1)
        self._file.write(f"{now} {station} {request_id} {text}\n")

    def on_new_request(self, request: Any) -> None:
        first = list(request.all_token_ids[:NAMED_TOKENS])
        self._stamp("arrived", request.request_id, ",".join(map(str, first)))
        super().on_new_request(request)  # type: ignore[misc]

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        tokens, waits = super().get_num_new_matched_tokens(request, num_computed_tokens)  # type: ignore[misc]
        if tokens and not waits:
            self._in_step.add(request.request_id)
        return tokens, waits

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)  # type: ignore[misc]
        self._stamp("planned" if num_external_tokens else "scheduled", request.request_id)
        if num_external_tokens and request.request_id in self._in_step:
            # Nothing is waited for: the same step copies and computes.
            self._in_step.discard(request.request_id)
            for station in ("loaded", "scheduled"):
                self._stamp(station, request.request_id)

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        found = super().get_finished(finished_req_ids)  # type: ignore[misc]
        for request_id in found[1] or ():
            self._stamp("loaded", request_id)
        return found


class TracedTierConnector(_Stamps, KvgateTierConnector):
    """Ours."""


class TracedOffloadingConnector(_Stamps, OffloadingConnector):
    """vLLM's."""
