"""Whether a script has left the loop that trains: asked at places of scripts, in the way that a signal does it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

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
        print("saved")


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


def hangs_in_a_loop_without_an_end(step: Callable[[], None], ask: Callable[[], None]) -> None:
    once = iter((None,))
    with suppress(StopIteration):
        for number in range(4):
            if number == 3:
                while True:
                    ask()
                    next(once)
            step()


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


class Trainer:
    def __init__(self, step: Callable[[], None]) -> None:
        self.step = step

    def fit(self, *, most: int) -> None:
        trains(self.step, most=most)

    def save(self, ask: Callable[[], None]) -> None:
        ask()
        print("step", "fit")


def two_stages(step: Callable[[], None], ask: Callable[[], None]) -> None:
    for _ in range(2):
        trains(step)
    ask()
    for most in range(2):
        trains(step, most=most)


def two_stages_by_a_method(step: Callable[[], None], ask: Callable[[], None]) -> None:
    trainer = Trainer(step)
    trainer.fit(most=2)
    ask()
    trainer.fit(most=3)


def two_stages_inline(step: Callable[[], None], ask: Callable[[], None]) -> None:
    trainer = Trainer(step)
    for _ in range(2):
        trainer.step()
    ask()
    for _ in range(2):
        trainer.step()


def two_stages_of_which_one_may_not_come(step: Callable[[], None], ask: Callable[[], None]) -> None:
    trains(step)
    ask()
    if step is ask:
        [trains(step) for _ in range(2)]


def a_second_stage_in_a_function(step: Callable[[], None], ask: Callable[[], None]) -> None:
    def tune() -> None:
        ask()
        trains(step)

    trains(step)
    tune()


def a_function_for_each_stage(step: Callable[[], None], ask: Callable[[], None]) -> None:
    def stage() -> None:
        for _ in range(2):
            step()
        ask()

    stage()
    stage()


def a_function_that_calls_itself(step: Callable[[], None], ask: Callable[[], None]) -> None:
    def stage(left: int) -> None:
        if left:
            trains(step)
            ask()
            stage(left - 1)

    stage(2)


def what_has_no_name(step: Callable[[], None], ask: Callable[[], None]) -> None:
    stages = [trains, trains]
    stages[0](step)
    ask()
    stages[1](step)


def a_stage_and_what_saves_it(step: Callable[[], None], ask: Callable[[], None]) -> None:
    trainer = Trainer(step)
    trainer.fit(most=2)
    trainer.save(ask)
    print(sum(range(3)))


def inline_and_an_evaluation(step: Callable[[], None], ask: Callable[[], None]) -> None:
    trainer = Trainer(step)
    for _ in range(2):
        trainer.step()
    for _ in range(1):
        trainer.save(ask)


def asked_in(script: Script) -> list[bool]:
    """In a thread of its own: pytest calls tests in loops."""
    loop, told = LoopEnd(), list[bool]()
    thread = threading.Thread(target=script, args=(lambda: loop.stepped(), lambda: told.append(loop.is_over())))
    thread.start()
    thread.join(30)
    return told


@pytest.mark.parametrize(
    "script",
    [
        *(plain, by_a_break, a_while, tries_smaller_batches, behind_the_last_steps_own_call),
        *(a_stage_and_what_saves_it, inline_and_an_evaluation),
    ],
)
def test_a_script_that_no_way_leads_back_into_its_loop_has_trained(script: Script) -> None:
    assert asked_in(script) == [True]


@pytest.mark.parametrize(
    "script", [evaluates, evaluates_in_mid_epoch, hangs_in_a_loop_without_an_end, before_the_next_trial, in_a_generator]
)
def test_a_script_that_may_train_on_has_not(script: Script) -> None:
    told = asked_in(script)
    assert told and not any(told)


@pytest.mark.parametrize(
    "script",
    [
        *(two_stages, two_stages_by_a_method, two_stages_inline, two_stages_of_which_one_may_not_come),
        *(a_second_stage_in_a_function, a_function_for_each_stage, a_function_that_calls_itself, what_has_no_name),
    ],
)
def test_a_script_that_names_behind_its_loop_what_trained_in_it_may_train_on(script: Script) -> None:
    assert asked_in(script)[0] is False


MODULE = """
def epoch(model):
    for _ in range(2):
        step()

def main():
    for _ in range(2):
        epoch(model=1)
    ask()
    {behind}

{main}
"""


@pytest.mark.parametrize("main", ["main()", "import sys; sys.stdout.flush(); _ = main() or 0", "if __name__ != '': main()"])
@pytest.mark.parametrize(("behind", "is_over"), [("print('epoch')", True), ("[epoch(model) for model in range(2)]", False)])
def test_the_same_holds_of_a_main_that_a_script_calls(main: str, behind: str, is_over: bool) -> None:
    code = compile(MODULE.format(main=main, behind=behind), "train.py", "exec")
    assert asked_in(lambda step, ask: exec(code, {"step": step, "ask": ask, "__name__": "__main__"})) == [is_over]


def test_without_a_step_nothing_is_over() -> None:
    assert not LoopEnd().is_over()
