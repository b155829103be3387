"""A state between an update and the next fetch is whole only where nothing can be missing."""

from __future__ import annotations

from torch_watchdog_agent.rescue.whole import WholeWindow

ONE, TWO = object(), object()


class Training:
    def __init__(self) -> None:
        self.schedule = 0
        self.window = WholeWindow(lambda: self.schedule)

    def step(self, *optimizers: object, scheduler: int = 0) -> WholeWindow:
        self.window.over()
        for optimizer in optimizers:
            self.window.stepped(optimizer)
        self.schedule += scheduler
        return self.window


def test_a_window_like_those_before_it_is_whole() -> None:
    training = Training()
    training.step(ONE, scheduler=1)
    assert training.step(ONE, scheduler=1).missing([ONE]) == ""


def test_nobody_knows_what_belongs_to_the_first_one() -> None:
    assert "first update" in Training().step(ONE).missing([ONE, TWO])


def test_a_scheduler_that_has_not_stepped_yet_is_missed() -> None:
    training = Training()
    training.step(ONE, scheduler=1)
    assert "scheduler" in training.step(ONE).missing([ONE])


def test_of_two_optimizers_both_must_have_stepped() -> None:
    training = Training()
    training.step(ONE, TWO)
    assert "optimizers" in training.step(ONE).missing([ONE, TWO])


def test_an_optimizer_that_steps_seldom_may_be_about_to() -> None:
    """A critic in each batch, a generator in each fifth: nobody can tell the fifth batch from the fourth."""
    training = Training()
    for _ in range(4):
        training.step(ONE)
    assert "optimizers" in training.step(ONE).missing([ONE, TWO])


def test_batches_that_update_nothing_are_part_of_the_window_that_does() -> None:
    training = Training()
    training.step()
    training.step(ONE, scheduler=1)
    training.step()
    assert training.step(ONE, scheduler=1).missing([ONE]) == ""


def test_a_scheduler_that_steps_once_an_epoch_is_missed_in_no_single_step() -> None:
    training = Training()
    for _ in range(2):
        training.step(ONE)
        assert training.step(ONE).missing([ONE]) == ""
        training.window.over()
        training.schedule += 1
    training.step(ONE)
    assert training.step(ONE).missing([ONE]) == ""
