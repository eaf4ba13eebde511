"""The gate against the deadlock of vLLM 0.20, in its own arithmetic."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from harness.connector.admission_gate import AdmissionGate


def test_nothing_parked_leaves_the_decision_to_vllm() -> None:
    assert AdmissionGate(lambda: 0).admits("a", 10**6)


def test_what_parked_requests_still_need_is_kept_free() -> None:
    gate = AdmissionGate(lambda: 10)
    gate.park("a", 4)
    assert (gate.admits("b", 6), gate.admits("b", 7)) == (True, False)
    assert gate.admits("a", 10), "a request does not wait for itself"
    gate.unpark("a")
    gate.unpark("a")
    assert gate.admits("b", 7)


@given(
    total=st.integers(1, 60),
    requests=st.lists(
        st.tuples(st.integers(1, 30), st.integers(0, 30)).map(lambda t: (t[0], min(t))), max_size=12
    ),
)
def test_admitted_requests_can_always_finish_one_after_the_other(
    total: int, requests: list[tuple[int, int]]
) -> None:
    """(needed, loaded) blocks: whoever was let in gets its rest, in order, however many wait."""
    free = total
    gate = AdmissionGate(lambda: free)
    parked: list[tuple[str, int, int]] = []
    for number, (needed, loaded) in enumerate(requests):
        name = str(number)
        # vLLM itself lets nothing in that could not run alone, nor a load that does not fit now.
        if needed > total or loaded > free or not gate.admits(name, needed):
            continue
        free -= loaded
        gate.park(name, needed - loaded)
        parked.append((name, needed, loaded))
    for name, needed, loaded in parked:
        gate.unpark(name)
        assert needed - loaded <= free, "stranded"
        free += loaded
