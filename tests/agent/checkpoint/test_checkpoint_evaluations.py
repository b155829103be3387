"""Whether a job may stop in an evaluation: only where nothing that the next step begins with is lost by it."""

from __future__ import annotations

import pytest
import torch

from torch_watchdog_agent.checkpoint.evaluations import Evaluations
from torch_watchdog_agent.checkpoint.subjects import Subjects


def evaluated(evaluations: Evaluations, *, moved: bool = False, draws: bool = False) -> None:
    evaluations.asks(lambda: moved)
    if draws:
        torch.rand(1)
    evaluations.over()


@pytest.mark.parametrize(("moved", "draws"), [(False, False), (True, False), (False, True)])
def test_one_must_have_been_seen_to_its_end_and_have_moved_nothing(moved: bool, draws: bool) -> None:
    evaluations = Evaluations(Subjects())
    assert evaluations.may_be_left()  # there is none
    evaluations.asks(lambda: False)
    assert not evaluations.may_be_left() and not evaluations.why()
    evaluations.over()
    evaluated(evaluations, moved=moved, draws=draws)
    assert evaluations.may_be_left() and not evaluations.why()
    evaluations.asks(lambda: False)
    assert evaluations.may_be_left() is not (moved or draws)
    assert bool(evaluations.why()) is moved  # what a failed rank's state lacks; of random numbers it has those of the moment


def test_a_rate_that_follows_the_loss_is_known_by_its_scheduler() -> None:
    subjects = Subjects()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    subjects.scheduler_seen(scheduler)
    evaluations = Evaluations(subjects)
    evaluated(evaluations)
    evaluations.asks(lambda: False)
    assert not evaluations.may_be_left() and "behind an evaluation" in evaluations.why()
