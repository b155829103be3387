"""How hand-overs and gates number the windows of a loop."""

from __future__ import annotations

import pytest

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


def test_a_loop_that_feeds_itself_says_so_from_its_first_gate_on_and_may_begin_its_window_before_the_gate() -> None:
    loop = Loop()
    assert not loop.feeds_itself
    loop.at_gate(ADAM)
    loop.gate_done(applied=True)
    assert loop.feeds_itself and not loop.is_training
    assert (loop.begins_itself(), loop.begins_itself()) == (True, False)
    assert loop.is_training and loop.at_gate(ADAM) == 1
    loop.gate_done(applied=True)
    assert not loop.is_training
    loop.handed_over()
    assert not loop.feeds_itself


def test_an_evaluation_from_a_loader_does_not_end_the_windows_of_a_loop_that_feeds_itself() -> None:
    loop = Loop()
    numbers = []
    for step in range(4):
        if step == 1:
            loop.handed_over(evaluation=True)
        numbers.append(loop.at_gate(ADAM))
        loop.gate_done(applied=True)
    assert (numbers, loop.updates_applied) == ([0, 1, 2, 3], 4)
    assert loop.feeds_itself


def test_backwards_are_progress_where_no_batch_is_seen() -> None:
    loop = Loop()
    before = loop.progress
    loop.backward_begun()
    assert loop.progress > before


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


def run_ahead(loop: Loop, batches: int, ahead: int = 1) -> list[int]:
    """One pass of a loop that fetches `ahead` batches before it uses one; returns the numbers of its gates."""
    numbers = []
    for fetched in range(batches + ahead):
        if fetched < batches:
            loop.handed_over()
        else:
            loop.pass_ended()
        if fetched >= ahead:
            numbers.append(loop.at_gate(ADAM))
            loop.gate_done(applied=True)
    return numbers


def test_steps_after_the_end_of_a_prefetching_loader_are_windows_of_their_own() -> None:
    loop = Loop()
    assert run_ahead(loop, 5) + run_ahead(loop, 4) == list(range(9))
    assert loop.updates_applied == 9


def test_a_loader_that_is_several_batches_ahead_drains_as_many_windows() -> None:
    assert run_ahead(Loop(), 7, ahead=3) == list(range(7))


def step(loop: Loop, optimizer: int = ADAM, *, vetoed: bool = False) -> int:
    number = loop.at_gate(optimizer)
    loop.gate_done(applied=not vetoed, vetoed=vetoed)
    return number


def test_several_steps_for_one_batch_stay_in_its_window_to_the_last() -> None:
    loop = Loop()
    for _ in range(2):
        loop.handed_over()
        assert step(loop) == step(loop)
    loop.handed_over()
    assert step(loop) == 2
    loop.pass_ended()
    assert step(loop) == 2
    assert loop.updates_applied == 3


def test_a_loop_that_fetches_ahead_and_steps_several_times_for_a_batch_drains_windows_of_as_many() -> None:
    loop = Loop()
    numbers = []
    for fetched in range(6):
        if fetched < 5:
            loop.handed_over()
        else:
            loop.pass_ended()
        if fetched:
            numbers += [step(loop), step(loop)]
    assert numbers == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_an_optimizer_that_is_gone_leaves_no_habits_to_one_that_gets_its_number() -> None:
    loop = Loop()
    for _ in range(2):
        loop.handed_over()
        step(loop), step(loop), step(loop)
    loop.optimizer_gone(ADAM)
    loop.pass_ended()
    assert [step(loop) for _ in range(3)] == [1, 2, 3]


def test_each_update_after_the_loader_has_ended_is_counted() -> None:
    """Phase 1 from a DataLoader, phase 2 on tensors in memory, with two optimizers; and again."""
    loop = Loop()
    numbers = []
    for _ in range(2):
        for _ in range(3):
            loop.handed_over()
            numbers += [step(loop), step(loop), step(loop, SGD)]
        loop.pass_ended()
        for _ in range(2):
            numbers.append(loop.at_gate(ADAM))
            assert loop.is_new_at_gate and not loop.drains
            loop.gate_done(applied=True)
            numbers.append(loop.at_gate(SGD))
            assert not loop.is_new_at_gate
            loop.gate_done(applied=True)
    assert numbers == [*[0] * 3, *[1] * 3, *[2] * 3, 3, 3, 4, 4, *[5] * 3, *[6] * 3, *[7] * 3, 8, 8, 9, 9]
    assert loop.updates_applied == 10


def test_each_update_after_the_loader_was_left_is_counted() -> None:
    for unused in (False, True):  # whether the loop has left it with a batch in hand
        loop = Loop()
        for _ in range(3):
            loop.handed_over()
            step(loop)
        if unused:
            loop.handed_over()
        loop.pass_left(batches=3 + unused)
        assert [step(loop) for _ in range(3)] == [3, 4, 5] and loop.updates_applied == 6


def test_an_iterator_a_batch_is_no_loader_that_was_left() -> None:
    loop = Loop()
    for _ in range(3):
        loop.handed_over()
        loop.pass_left(batches=1)
        assert step(loop) == step(loop)
    assert loop.updates_applied == 3


def test_a_vetoed_window_leaves_out_what_its_batch_usually_gives_rise_to_and_no_more() -> None:
    """The loop has left its loader before the end (`break`), with the last batch vetoed."""
    loop = Loop()
    for _ in range(2):
        loop.handed_over()
        step(loop), step(loop), step(loop, SGD)
    loop.handed_over()
    vetoed = [step(loop, vetoed=True), step(loop, vetoed=True), step(loop, SGD, vetoed=True)]
    assert vetoed + [step(loop), step(loop, SGD), step(loop)] == [2, 2, 2, 3, 3, 4]
    assert loop.updates_applied == 4


def test_more_steps_than_usual_for_a_batch_that_is_not_vetoed_stay_in_its_window() -> None:
    loop = Loop()
    numbers = []
    for steps in (1, 2, 5):
        loop.handed_over()
        numbers += [step(loop) for _ in range(steps)]
    assert numbers == [0, 1, 1, 2, 2, 2, 2, 2]


def test_steps_beyond_those_that_a_batch_usually_gives_rise_to_are_told_of() -> None:
    """Of a loop that keeps its iterator and takes nothing from it any more, nobody says that they have no batch."""
    for usual in (1, 3):
        loop = Loop()
        for _ in range(3):
            loop.handed_over()
            [step(loop) for _ in range(usual)]
            [step(loop, SGD) for _ in range(usual)]
            assert loop.more_than_usual == 0 or loop.updates_applied == 1  # of the first batch nobody knows what is usual
        [step(loop) for _ in range(5)]
        assert (loop.updates_applied, loop.more_than_usual) == (3, 5)
        loop.handed_over()
        [step(loop) for _ in range(usual)]
        loop.pass_ended()
        [step(loop) for _ in range(7)]
        assert loop.more_than_usual == 5


def test_one_batch_that_is_trained_on_for_ever_is_told_of() -> None:
    loop = Loop()
    loop.handed_over()
    loop.pass_left(batches=1)
    [step(loop) for _ in range(100)]
    assert (loop.updates_applied, loop.more_than_usual) == (1, 99)


def test_a_batch_is_used_in_the_window_of_its_hand_over_unless_the_loop_is_ahead() -> None:
    loop = Loop()
    for _ in range(3):
        for _ in range(4):
            loop.handed_over()
        loop.at_gate(ADAM)
        loop.gate_done(applied=True)
    assert (loop.windows_ahead(None), loop.windows_ahead(0), loop.windows_ahead(1)) == (0, 0, 1)
    run_ahead(ahead := Loop(), 5)
    assert ahead.windows_ahead(None) == 1
    ahead.fed_elsewhere = True
    assert ahead.windows_ahead(None) == 0


def test_a_frameworks_steps_are_counted_from_its_beginning_whatever_the_script_did_before() -> None:
    loop = Loop()
    ended = []
    for begins_at in (0, 0, 100):
        run_ahead(loop, 3, ahead=0)
        loop.steps_begin_at(begins_at)
        run_ahead(loop, 2, ahead=0)
        loop.handed_over()
        ended.append((loop.steps_ended(0), loop.steps_ended(1), loop.steps_ended(2)))
        loop.gate_done(applied=True)
    assert ended == [(2, 2, 1), (2, 2, 1), (102, 102, 101)]
    assert loop.step == 17


def test_a_window_in_which_only_the_second_optimizer_applies_its_update_counts_as_one() -> None:
    """A GradScaler leaves out the step of the first."""
    loop = Loop()
    loop.handed_over()
    assert loop.at_gate(1) == 0 and loop.gate_done(applied=False)
    assert loop.at_gate(2) == 0 and not loop.gate_done(applied=True)
    assert loop.updates_applied == 1
    loop.handed_over()
    assert loop.at_gate(1) == 1 and loop.gate_done(applied=False)
    assert (loop.step, loop.updates_applied) == (1, 1)


def test_what_a_loop_has_in_hand_is_what_its_first_window_held_beyond_the_others() -> None:
    """And no more than a traced step has shown: a batch may have been left unused."""

    def trained(batches_before: int, windows: int) -> Loop:
        loop = Loop()
        [loop.handed_over() for _ in range(batches_before)]
        for _ in range(windows):
            loop.handed_over()
            loop.at_gate(ADAM)
            loop.gate_done(applied=True)
        return loop

    ahead, usual, young = trained(1, 4), trained(0, 4), trained(1, 1)
    assert [ahead.in_hand(shown) for shown in (None, 0, 1, 2)] == [1, 0, 1, 1]
    assert [usual.in_hand(shown) for shown in (None, 1)] == [0, 0]
    assert [young.in_hand(shown) for shown in (None, 1)] == [0, 1]
    ahead.pass_ended()
    assert ahead.in_hand(1) == 1
    ahead.at_gate(ADAM)
    ahead.gate_done(applied=True)
    assert ahead.in_hand(1) == 0  # the last of them


def trained(loop: Loop, windows: list[str]) -> list[int]:
    """How many batches are in hand behind each gate: of a loop that does this in each window, and is not traced. h: a batch is handed over, b: a backward,
    e: its pass ends."""
    found = []
    for window in windows:
        for what in window:
            {"h": loop.handed_over, "b": loop.backward_begun, "e": loop.pass_ended}[what]()
        loop.at_gate(ADAM)
        loop.gate_done(applied=True)
        found.append(loop.in_hand(None))
    return found


def test_a_short_last_step_of_a_pass_is_no_sign_of_batches_in_hand() -> None:
    """Eight micro-batches a step, of ten in a pass; and as many as the loop likes."""
    assert trained(Loop(), ["hb" * 8, "hb" * 2, "ehb" + "hb" * 7, "hb" * 2]) == [0, 0, 0, 0]
    assert trained(Loop(), ["hb" * 5, "hb" * 2, "hb" * 4, "hb"]) == [0, 0, 0, 0]


def test_a_batch_in_hand_is_one_that_has_had_no_backward() -> None:
    ahead = ["hhb" + "hb" * 4, "hb" * 5, "hb" + "eb"]  # five a step, of twelve; the next one is fetched before a batch is used
    assert trained(Loop(), [*ahead, *ahead])[:2] == [1, 1]
    assert trained(Loop(), [*ahead, *ahead])[3:5] == [1, 1]


def test_backwards_tell_nothing_where_a_batch_has_several() -> None:
    several = ["hhbb" + "hbb" * 4, "hbb" * 5]
    assert trained(Loop(), several) == [0, 1]  # by what the first window held beyond the others


@pytest.mark.parametrize("micro_step", ["hbb", "h"])
def test_the_last_step_of_a_pass_is_not_the_usual_one_where_backwards_tell_nothing_either(micro_step: str) -> None:
    """Six micro-batches a step, of twenty in a pass: with two backwards each, or one for all of them."""
    end = "" if "b" in micro_step else "b"
    windows = [micro_step * 6 + end, micro_step * 6 + end, micro_step * 6 + end, micro_step * 2 + end]
    again = ["e" + windows[0], *windows[1:]]
    assert trained(Loop(), [*windows, *again, *again])[4:] == [0] * 8


@pytest.mark.parametrize("micro_step", ["hbb", "h"])
def test_fewer_batches_a_step_from_a_later_pass_on_are_no_batches_in_hand(micro_step: str) -> None:
    """Accumulation over four micro-batches in the first pass and over two from then on: with two backwards each, or one for all of them."""
    end = "" if "b" in micro_step else "b"
    long, short = micro_step * 4 + end, micro_step * 2 + end
    assert trained(Loop(), [long, long, "e" + short, *3 * [short], "e" + short, short])[1:] == [0] * 7
    assert trained(Loop(), [long, "e" + short, short, short])[1:] == [0] * 3  # a pass of one step


def test_a_pass_of_a_long_and_a_short_step_leaves_no_batches_in_hand() -> None:
    assert trained(Loop(), ["hbb" * 6, "hbb" * 2, "e" + "hbb" * 6, "hbb" * 2]) == [0] * 4


def test_what_is_in_hand_in_a_first_pass_is_so_in_a_later_one_of_longer_steps() -> None:
    ahead = ["hhbb", "hbb", "hbb", "ebb"]
    assert trained(Loop(), [*ahead, *ahead])[1:7] == [1, 1, 0, 1, 1, 1]
