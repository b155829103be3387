"""loss.not_finite and grad.not_finite: which came first, whose it was, and what a GradScaler settles by itself."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from streams_made import block

from torch_watchdog.job.losses import LossWatch
from torch_watchdog.rules.loss import Divergence
from torch_watchdog_proto.messages import StepBlock

NAN = math.nan


def verdict(*blocks: StepBlock, seen: int = 9, ranks: int = 2) -> Divergence | None:
    watch = LossWatch({})
    for one in blocks:
        watch.see(one, now=0.0)
    return watch.verdict(dict.fromkeys(range(ranks), seen), now=0.1, at_end=False)


def found(*blocks: StepBlock, ranks: int = 2) -> Divergence:
    divergence = verdict(*blocks, ranks=ranks)
    assert divergence is not None
    return divergence


def test_the_first_rank_is_told() -> None:
    first = found(block(1, 5, loss=NAN), block(0, 6, loss=NAN), block(1, 6, loss=NAN))
    assert (first.kind, first.origin, first.first.step) == ("loss.not_finite", 1, 5)


def test_of_a_process_that_trains_alone_no_other_rank_and_no_all_reduce_is_told() -> None:
    first = found(block(0, 5, loss=NAN), ranks=1)
    assert first.cause == "the loss was nan at step 5: an update with it spoils every parameter"
    assert first.fix.startswith("look at what it was given in step")


def test_all_ranks_at_once_are_told_without_one() -> None:
    first = found(block(0, 5, loss=NAN), block(1, 5, loss=math.inf))
    assert (first.origin, first.first.step) == (None, 5)


def test_a_gradient_before_the_losses_is_what_came_first() -> None:
    blocks = [block(rank, 5, grad_norm=(NAN,)) for rank in range(2)] + [block(rank, 6, loss=NAN) for rank in range(2)]
    first = found(*blocks)
    assert (first.kind, first.origin, first.first.step) == ("grad.not_finite", None, 5)
    assert "all 2 ranks, step 5: the norm of the gradients is nan, the losses were finite" in first.summary


def test_a_loss_in_the_step_of_the_gradient_is_what_came_first() -> None:
    first = found(block(1, 5, loss=NAN, grad_norm=(NAN,)), block(0, 5, grad_norm=(NAN,)))
    assert (first.kind, first.origin) == ("loss.not_finite", 1)


def test_a_norm_of_a_shard_names_who_holds_it_and_blames_nobody() -> None:
    first = found(block(0, 5, grad_norm=(NAN,), norms_of_shard=True), block(1, 5, grad_norm=(0.5,), norms_of_shard=True), block(1, 6))
    assert (first.kind, first.origin, first.first.step) == ("grad.not_finite", None, 5)
    assert first.summary == "rank 0, step 5: the norm of its shard of the gradients is nan, the losses were finite"
    assert "lies in the shard of rank 0, and any rank's batch may have made it" in first.cause


def test_norms_of_shards_that_are_none_on_any_rank_are_told_together() -> None:
    first = found(*(block(rank, 5, grad_norm=(NAN,), norms_of_shard=True) for rank in range(2)))
    assert "all 2 ranks, step 5: the norm of their shards of the gradients is nan" in first.summary
    assert first.cause.endswith("spoils every parameter")


def test_a_norm_that_no_loop_computed_is_no_sign() -> None:
    assert verdict(block(0, 5), block(1, 5)) is None


def test_a_step_that_was_left_out_spoils_nothing() -> None:
    assert verdict(block(0, 5, grad_norm=(NAN,), vetoed=(True,))) is None


def test_under_a_scaler_a_few_losses_in_a_row_are_its_own_matter() -> None:
    bad = [block(0, step, loss=math.inf, scale=(1024.0,)) for step in range(3)]
    assert verdict(*bad, block(0, 3, scale=(1024.0,)), *[replace(one, micro_of_step=(step,)) for step, one in enumerate(bad, 4)]) is None


def test_under_a_scaler_losses_that_stay_bad_are_told_from_the_first_of_them_on() -> None:
    scaled = [block(0, step, loss=loss, scale=(1024.0,)) for step, loss in enumerate([1.0, math.inf, 1.0, NAN, NAN, NAN, NAN, NAN])]
    told = found(*scaled)
    assert (told.origin, told.first.step) == (0, 3)


GATE_ONLY: dict[str, Any] = dict.fromkeys(
    ("micro_step", "micro_of_step", "micro_time_ns", "loader_ns", "loss", "loss_known", "evaluation", "forward_ns", "scale", "tensors"), ()
)


def gate(rank: int, step: int, norm: float) -> StepBlock:
    """A report that ends between a batch and its gate, or whose losses are still on their way from a GPU."""
    return replace(block(rank, step, grad_norm=(norm,)), **GATE_ONLY)


def test_under_a_scaler_a_norm_that_comes_in_a_block_of_its_own_is_its_own_matter() -> None:
    assert verdict(block(0, 4, scale=(1024.0,)), gate(0, 5, math.inf), block(0, 5, scale=(512.0,))) is None


def test_a_norm_that_comes_before_the_word_of_a_scaler_is_its_own_matter() -> None:
    assert verdict(gate(0, 0, math.inf), gate(1, 0, math.inf), *[block(rank, 0, scale=(65536.0,)) for rank in range(2)]) is None


def test_a_norm_in_a_block_of_its_own_is_told_where_no_scaler_is() -> None:
    assert found(gate(0, 5, NAN), gate(1, 5, NAN), block(0, 5), block(1, 5)).kind == "grad.not_finite"
