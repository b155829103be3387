"""A rank that a SIGINT ends does not say that its training is over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from torch_watchdog_agent.hooks import active
from torch_watchdog_agent.rank import Rank


@pytest.mark.parametrize(("error", "says_so"), [(None, True), (KeyboardInterrupt(), False), (ValueError("no image"), True)])
def test_only_an_uncaught_interrupt_keeps_a_rank_from_saying_that_its_training_is_over(
    error: BaseException | None, says_so: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    rank: Any = SimpleNamespace(
        interrupted=False, rescuer=MagicMock(), history=MagicMock(), write_contract=MagicMock(), scan=None, preemption=None,
        failed=MagicMock(), _tell_end=lambda: told.append("end"),
    )  # fmt: skip
    monkeypatch.setattr(active, "_rank", rank)
    if error is not None:
        active._note_exception(type(error), error)
    Rank.finish(rank)
    assert told == ["end"] * says_so
