"""What `kvgate doctor` makes of a machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.campaign.generated_model import model_config
from harness.campaign.plan import Plan, make_plan
from harness.campaign.reading import load_campaign
from harness.run import doctor


def _plan(name: str) -> Plan:
    campaign, text = load_campaign(name)
    return make_plan(campaign, text, model_config=model_config(campaign.model.generated))


@pytest.mark.parametrize(
    ("text", "found", "fine"),
    [
        ("always [madvise] never\n", "madvise", True),
        ("[always] madvise never\n", "always", True),
        ("always madvise [never]\n", "never", False),
        (None, "unknown", False),
    ],
)
def test_large_pages(tmp_path: Path, text: str | None, found: str, fine: bool) -> None:
    setting = tmp_path / "enabled"
    if text is not None:
        setting.write_text(text)
    (finding,) = doctor._large_pages(_plan("cpu-demo"), setting)
    assert (finding.found, finding.fine, finding.required) == (found, fine, False)


def test_large_pages_are_for_tiers_of_real_servers(tmp_path: Path) -> None:
    assert not list(doctor._large_pages(_plan("sim-rehearsal"), tmp_path / "enabled"))
