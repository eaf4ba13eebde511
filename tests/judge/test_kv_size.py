"""G1's KV size on several ranks: the connector tells a rank's bytes and the number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.verdicts import ReasonCode, Verdict
from tests.judge.test_judge import effective, judge, reason_codes, verdict_of


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        # The demo campaign: 8192 bytes per token, of one rank or of two with half each.
        ({"kv_bytes_per_token": 8192}, Verdict.PASS),
        ({"kv_bytes_per_token": 8192, "rank_count": 1}, Verdict.PASS),
        ({"kv_bytes_per_token": 4096, "rank_count": 2}, Verdict.PASS),
        ({"kv_bytes_per_token": 8192, "rank_count": 2}, Verdict.STOP),
        ({"kv_bytes_per_token": 4096, "rank_count": 1}, Verdict.STOP),
        ({"kv_bytes_per_token": 8192, "rank_count": "two"}, Verdict.INCONCLUSIVE),
        ({"rank_count": 2}, Verdict.INCONCLUSIVE),
    ],
)
def test_bytes_of_all_ranks_count(tmp_path: Path, facts: dict[str, Any], expected: Verdict) -> None:
    signoff = judge(tmp_path, effective("tiered_dram", connector_config=facts))
    assert verdict_of(signoff, "g1") is expected
    assert (ReasonCode.KV_SIZE_DIFFERS in reason_codes(signoff)) is (expected is Verdict.STOP)
