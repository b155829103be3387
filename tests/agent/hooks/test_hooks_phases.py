"""Where the time of a step goes: loading, forward, backward, update, each by marks of the loop itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from listening import listen_to

pytest.importorskip("torch")
MS = 1_000_000


def test_loading_forward_backward_and_update_of_each_step_are_told_apart(folder: Path) -> None:
    """Each takes longer than the one before it in `phases.py`; what is around them is the loop's own."""
    heard = listen_to(folder, "phases.py")
    assert len(heard.phases) == 3
    for phase in heard.phases:
        backward_only = phase.backward_ns - phase.update_ns
        assert phase.loader_ns >= 20 * MS  # two samples
        assert phase.forward_ns >= 20 * MS
        assert backward_only >= 30 * MS
        assert phase.update_ns >= 40 * MS
        assert phase.loader_ns + phase.forward_ns + phase.backward_ns <= phase.step_ns
