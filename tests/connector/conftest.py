"""What the connector's tests share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from .rig import Make, Rig


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes rigs, with the arguments of ``Rig``; closes them afterwards."""
    rigs: list[Rig] = []

    def build(*args: Any, **kwargs: Any) -> Rig:
        rigs.append(Rig(*args, **kwargs))
        return rigs[-1]

    yield build
    for rig in rigs:
        rig.close()
