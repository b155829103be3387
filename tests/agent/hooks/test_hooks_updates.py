"""What belongs to an update: it is done when the optimizer's step is over, behind any closure; and every scheduler of torch's is known."""

from __future__ import annotations

from pathlib import Path

import pytest
from listening import listen_to

pytestmark = pytest.mark.e2e  # scripts with torch in processes of their own

pytest.importorskip("torch")


def test_a_step_is_told_as_done_when_its_weights_are_what_it_leaves_behind(folder: Path) -> None:
    assert listen_to(folder, "closures.py").printed == {"plain": [True] * 3, "closure": [True] * 3, "lbfgs": [True] * 3}


def test_every_kind_of_scheduler_is_part_of_the_state(folder: Path) -> None:
    assert listen_to(folder, "schedulers.py").printed == [[], 0]
