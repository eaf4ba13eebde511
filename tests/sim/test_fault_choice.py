"""Which requests and moments a fault hits."""

from __future__ import annotations

import pytest

from harness.records import RecordError
from harness.sim.config import campaign_problem, parse_config
from harness.sim.faults import Fault, FaultName, Faults


def hit(fault: Fault, *, seed: int = 0, now_s: float = 0.0) -> list[int]:
    """Numbers of the first twelve requests that it hits."""
    faults = Faults([fault], seed=seed)
    return [n for n in range(12) if faults.of_request(n, now_s)]


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        pytest.param(Fault(FaultName.GZIP), list(range(12)), id="all by default"),
        pytest.param(Fault(FaultName.GZIP, from_request=10), [10, 11], id="from one on"),
        pytest.param(Fault(FaultName.GZIP, to_request=2), [0, 1], id="up to one"),
        pytest.param(Fault(FaultName.GZIP, from_request=2, every=4), [2, 6, 10], id="one in four"),
        pytest.param(Fault(FaultName.GZIP, share=0.0), [], id="a share of nothing"),
        pytest.param(Fault(FaultName.GZIP, from_s=1.0), [], id="not yet"),
    ],
)
def test_requests_are_hit_by_number_share_and_time(fault: Fault, expected: list[int]) -> None:
    assert hit(fault) == expected


def test_a_share_is_drawn_from_the_seed() -> None:
    half = Fault(FaultName.GZIP, share=0.5)
    assert 0 < len(hit(half)) < 12
    assert hit(half) == hit(half)
    assert hit(half, seed=1) != hit(half, seed=2)


def test_a_request_without_a_number_is_never_hit() -> None:
    assert Faults([Fault(FaultName.GZIP)], seed=0).of_request(None, 0.0) == {}


def test_a_fault_of_the_server_begins_with_an_arrival() -> None:
    faults = Faults([Fault(FaultName.STALL, from_request=3, to_request=5)], seed=0)
    active = [n for n in range(8) if faults.active(FaultName.STALL, n, 0.0)]
    assert active == [3, 4, 5]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        pytest.param({"faults": [{"name": "x"}]}, "x", id="an unknown fault"),
        pytest.param({"dialect": "1.0"}, "dialect", id="an unknown dialect"),
        pytest.param({"time_scale": 0.0}, "time_scale", id="time stands still"),
        pytest.param({"disk_curve": [[2, 1.0], [1, 2.0]]}, "disk_curve", id="a falling curve"),
        pytest.param({"speed": 1}, "speed", id="an unknown key"),
        pytest.param({"medium": "disk"}, "medium", id="a key that the campaign has elsewhere"),
    ],
)
def test_a_bad_table_is_named(content: dict[str, object], named: str) -> None:
    problem = campaign_problem(content)
    assert problem is not None
    assert named in problem


def test_a_good_table_has_no_problem() -> None:
    assert campaign_problem({"faults": [{"name": "gzip", "every": 2}]}) is None
    assert parse_config({"faults": [{"name": "gzip"}]}).faults == (Fault(FaultName.GZIP),)
    with pytest.raises(RecordError):
        parse_config({"faults": [{"name": "gzip", "every": 0}]})
