"""A batch without a backward tells a rank apart only where the others ran theirs."""

from __future__ import annotations

import math
from dataclasses import replace

from torch_watchdog.job.pace import PaceWatch
from torch_watchdog_proto.messages import StepBlock


def batches(rank: int, *, first: int = 0, known: list[bool], steps: list[int] | None = None, evaluation: bool = False) -> StepBlock:
    """One batch a step (or in the given steps); `known`: whether its backward was seen."""
    of_step = steps or list(range(first, first + len(known)))
    zeros = [0] * len(known)
    return StepBlock(
        rank=rank, attempt=0, pid=100 + rank, first_record=0, micro_step=zeros, micro_of_step=of_step, micro_time_ns=[1] * len(known), loader_ns=zeros,
        loss=[1.0 if one else math.nan for one in known], loss_known=known, evaluation=[evaluation] * len(known),
    )  # fmt: skip


def skipped(*blocks: StepBlock) -> dict[int, int]:
    watch = PaceWatch()
    for block in blocks:
        watch.see(block)
    return watch.skipped()


def test_a_rank_that_left_a_batch_out_alone_is_told_with_the_first_step() -> None:
    """Step 5 of rank 1 holds two batches: the first was left out, the second closed the step."""
    alone = batches(1, known=[True] * 5 + [False, True, False, True], steps=[0, 1, 2, 3, 4, 5, 5, 6, 6])
    assert skipped(batches(0, known=[True] * 9), alone) == {1: 5}


def test_ranks_that_leave_the_same_batch_out_agree() -> None:
    both = [True, False, True]
    assert skipped(batches(0, known=both), batches(1, known=both)) == {}


def test_a_step_that_no_other_rank_has_been_through_tells_nothing_yet() -> None:
    assert skipped(batches(0, known=[True]), batches(1, known=[True, False])) == {}


def test_batches_of_an_evaluation_have_no_backward_and_are_not_left_out() -> None:
    assert skipped(batches(0, known=[True] * 3), batches(1, known=[True]), batches(1, first=1, known=[False, False], evaluation=True)) == {}


def test_a_batch_that_its_rank_ended_in_is_not_left_out() -> None:
    """Of it only the tensors were recorded, whether its backward ran or not: the node gives it no time."""
    assert skipped(batches(0, known=[True] * 2), replace(batches(1, known=[True, False]), micro_time_ns=[1, 0])) == {}


def test_a_rank_whose_losses_are_never_seen_is_not_taken_for_one_that_skips() -> None:
    """Another stage of a pipeline, or a loop whose backward is not heard."""
    assert skipped(batches(0, known=[True] * 3), batches(1, known=[False] * 3)) == {}


def test_news_in_pieces_tells_the_same() -> None:
    whole = batches(1, known=[True, False, True])
    pieces = [batches(1, first=step, known=[known]) for step, known in enumerate(whole.loss_known)]
    others = batches(0, known=[True] * 3)
    assert skipped(others, *pieces) == skipped(others, replace(whole)) == {1: 1}
