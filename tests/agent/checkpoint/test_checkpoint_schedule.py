"""Wherever in its steps a loop moves its rate, a save holds that of so many whole steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torch_watchdog_agent.checkpoint.subjects import Subjects
from torch_watchdog_agent.checkpoint.window import WindowState


class Scheduled:
    """A loop with a rate that halves behind each update, told as a rank tells it."""

    def __init__(self, place: str, *, by_hand: bool) -> None:
        self.place, self.by_hand = place, by_hand
        self.model = nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.scheduler = None if by_hand else torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        self.subjects = Subjects()
        if self.scheduler is not None:
            self.subjects.scheduler_seen(self.scheduler)
        self.window = WindowState(self.subjects, say=print)
        self.updates = 0

    @property
    def rate(self) -> float:
        rate: float = self.optimizer.param_groups[0]["lr"]
        return rate

    def halve(self) -> None:
        if self.scheduler is not None:
            self.scheduler.step()
        else:
            self.optimizer.param_groups[0]["lr"] *= 0.5

    def until_gate(self, *, moves: bool) -> None:
        """From behind the fetch on."""
        if moves:
            self.halve()
        if self.window.schedule.looks:
            self.window.begun()
        self.model(torch.ones(1, 2)).sum().backward()
        self.subjects.optimizer_seen(self.optimizer)

    def updated(self) -> None:
        self.optimizer.step()
        self.updates += 1
        if self.window.schedule.learns:
            self.window.updated()

    def run(self, steps: int) -> None:
        """Up to the gate of the step behind them. What tells is which line of a loop comes first: that of its fetch or that of its update."""
        window, schedule = self.window, self.window.schedule
        if self.place in ("behind", "head", "head but for the first"):
            for number in range(steps + 1):
                schedule.fetching()
                window.opened(updates=self.updates)
                self.until_gate(moves=self.place == "head" or (self.place == "head but for the first" and number > 0))
                schedule.at_gate()
                if number < steps:
                    self.updated()
                    if self.place == "behind":
                        self.halve()
            return
        schedule.fetching()
        window.opened(updates=self.updates)
        for number in range(steps + 1):
            self.until_gate(moves=self.place == "head, fetched behind")
            schedule.at_gate()
            if number < steps:
                self.updated()
                schedule.fetching()
                window.opened(updates=self.updates)
                if self.place == "late" or (self.place == "rarely late" and self.updates % 5 == 0):
                    self.halve()


@pytest.mark.parametrize(
    ("place", "by_hand", "saved", "left_out"),
    [
        ("behind", False, 7, 7),
        ("behind", True, 7, 7),
        ("late", False, 7, 6),  # of a step that is left out: it will be moved again behind the next fetch
        ("late", True, 7, 6),
        ("rarely late", False, 1, 1),
        ("head", False, 7, 7),  # that step is to be done again
        ("head", True, 7, 7),
        ("head but for the first", False, 6, 6),
        ("head but for the first", True, 6, 6),
        ("head, fetched behind", False, 7, 7),
    ],
)
def test_a_save_holds_the_rate_of_so_many_whole_steps_wherever_the_loop_sets_it(
    place: str, saved: int, left_out: int, *, by_hand: bool
) -> None:
    """Behind the update; behind the next fetch, inside the window that follows; at the head of the step that it is for."""
    training = Scheduled(place, by_hand=by_hand)
    training.run(7)
    now = training.rate
    with training.window.rewound():
        assert training.rate == 0.5**saved
    assert training.rate == now
    training.window.restore()
    assert training.rate == 0.5**left_out
    assert training.window.schedule.may_be_late is (place in ("late", "rarely late", "head, fetched behind"))


def test_until_what_comes_behind_the_fetch_is_done_nothing_is_whole() -> None:
    late, behind, by_hand = Scheduled("late", by_hand=False), Scheduled("behind", by_hand=False), Scheduled("behind", by_hand=True)
    for training in (late, behind, by_hand):
        training.run(6)
        assert not training.window.why_odd()
        training.window.opened(updates=6)
    assert "behind its update" in late.window.why_odd() and "behind its update" in late.window.why_moved_on()
    assert not behind.window.why_odd() and not by_hand.window.why_odd()
    assert "rates by hand behind its update" in by_hand.window.why_unusual() and "by hand" not in behind.window.why_unusual()


def test_an_epochs_first_fetch_stands_elsewhere_and_the_loop_is_late_all_the_same() -> None:
    late = Scheduled("late", by_hand=False)
    schedule = late.window.schedule
    for epoch in range(2):
        if epoch:
            schedule.fetching()
            break
        late.run(6)
    assert not schedule.may_be_late and schedule.looks
