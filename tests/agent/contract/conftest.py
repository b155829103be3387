"""Every test of the guard leaves the dispatch stack as it found it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from guard_loop import abandon_all


@pytest.fixture(autouse=True)
def no_mode_is_left_behind() -> Iterator[None]:
    yield
    abandon_all()
