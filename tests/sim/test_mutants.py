"""The simulation finds every deliberate bug of the protocol, soon."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from driver import problem_of
from mutants import MUTANTS
from plan import draw

SCHEDULES = 12_000


@pytest.mark.parametrize("name", MUTANTS)
def test_a_deliberate_bug_is_found(name: str) -> None:
    found = (problem_of(draw(seed), seed, **MUTANTS[name]) for seed in range(SCHEDULES))
    assert any(problem is not None for problem in found), f"{name} holds in {SCHEDULES} schedules"
