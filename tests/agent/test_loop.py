"""How hand-overs and gates number the windows of a loop."""

from __future__ import annotations

from torch_watchdog_agent.loop import Loop

ADAM, SGD = 1, 2


def test_a_batch_after_a_gate_opens_the_next_window() -> None:
    loop = Loop()
    steps = []
    for _ in range(3):
        assert loop.handed_over()
        steps.append(loop.at_gate(ADAM))
        assert loop.gate_done(applied=True)
    assert steps == [0, 1, 2]
    assert loop.updates_applied == 3


def test_micro_batches_share_a_window() -> None:
    loop = Loop()
    assert [loop.handed_over() for _ in range(3)] == [True, False, False]
    assert (loop.step, loop.micro_step) == (0, 2)


def test_two_optimizers_of_one_window_share_its_gate_and_count_once() -> None:
    loop = Loop()
    loop.handed_over()
    assert (loop.at_gate(ADAM), loop.gate_done(applied=True)) == (0, True)
    assert (loop.at_gate(SGD), loop.gate_done(applied=True)) == (0, False)
    assert loop.updates_applied == 1


def test_without_a_loader_the_same_optimizer_again_opens_the_next_window() -> None:
    loop = Loop()
    numbers = []
    for _ in range(2):
        for optimizer in (ADAM, SGD):
            numbers.append(loop.at_gate(optimizer))
            loop.gate_done(applied=True)
    assert numbers == [0, 0, 1, 1]


def test_a_vetoed_window_is_numbered_but_not_counted_as_an_update() -> None:
    loop = Loop()
    loop.handed_over()
    loop.at_gate(ADAM)
    loop.gate_done(applied=False)
    loop.handed_over()
    assert (loop.step, loop.updates_applied) == (1, 0)


def test_batches_of_an_evaluation_belong_to_the_window_that_follows() -> None:
    loop = Loop()
    loop.handed_over()
    loop.at_gate(ADAM)
    loop.gate_done(applied=True)
    for _ in range(4):  # evaluation, then the next training batch
        loop.handed_over()
    assert loop.at_gate(ADAM) == 1
