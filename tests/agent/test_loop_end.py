"""Whether a script has left the loop that trains: asked at places of scripts, in the way that a signal does it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from torch_watchdog_agent.loop_end import LoopEnd

Script = Callable[[Callable[[], None], Callable[[], None]], None]


def trains(step: Callable[[], None], *, most: int = 3) -> None:
    for number in range(10):
        if number == most:
            break
        step()


def plain(step: Callable[[], None], ask: Callable[[], None]) -> None:
    for _ in range(2):
        for _ in range(3):
            step()
        if False:
            ask()
    with open("/dev/null"):
        ask()


def by_a_break(step: Callable[[], None], ask: Callable[[], None]) -> None:
    trains(step)
    try:
        ask()
    finally:
        trains(lambda: None)


def a_while(step: Callable[[], None], ask: Callable[[], None]) -> None:
    left = 3
    while left:
        left -= 1
        step()
    [ask() for _ in range(1)]


def tries_smaller_batches(step: Callable[[], None], ask: Callable[[], None]) -> None:
    """As accelerate's find_executable_batch_size: only an exception leads back."""

    def run() -> None:
        trains(step)
        ask()

    while True:
        try:
            return run()
        except MemoryError:
            continue


def behind_the_last_steps_own_call(step: Callable[[], None], ask: Callable[[], None]) -> None:
    step()
    ask()


def evaluates(step: Callable[[], None], ask: Callable[[], None]) -> None:
    for _ in range(2):
        trains(step)
        ask()


def evaluates_in_mid_epoch(step: Callable[[], None], ask: Callable[[], None]) -> None:
    for number in range(4):
        step()
        if number == 3:
            ask()


def before_the_next_trial(step: Callable[[], None], ask: Callable[[], None]) -> None:
    def trial() -> None:
        trains(step)
        ask()

    for _ in range(2):
        trial()


def in_a_generator(step: Callable[[], None], ask: Callable[[], None]) -> None:
    def steps() -> Iterator[None]:
        for _ in range(2):
            step()
            yield

    for _ in steps():
        ask()


def asked_in(script: Script) -> list[bool]:
    """In a thread of its own: pytest calls tests in loops."""
    loop, told = LoopEnd(), list[bool]()
    thread = threading.Thread(target=script, args=(lambda: loop.stepped(), lambda: told.append(loop.is_over())))
    thread.start()
    thread.join(30)
    return told


@pytest.mark.parametrize("script", [plain, by_a_break, a_while, tries_smaller_batches, behind_the_last_steps_own_call])
def test_a_script_that_no_way_leads_back_into_its_loop_has_trained(script: Script) -> None:
    assert asked_in(script) == [True]


@pytest.mark.parametrize("script", [evaluates, evaluates_in_mid_epoch, before_the_next_trial, in_a_generator])
def test_a_script_that_may_train_on_has_not(script: Script) -> None:
    told = asked_in(script)
    assert told and not any(told)


def test_without_a_step_nothing_is_over() -> None:
    assert not LoopEnd().is_over()
