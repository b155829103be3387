"""Steps so short that hundreds come between two looks: what has begun and ended meanwhile is told all the same, with the step at which it was seen."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from streams_made import Watch, batches

from torch_watchdog_proto.messages import StepBlock, StepTable, TensorColumns

STEPS, BEGINS = 1200, 610
each_second = pytest.mark.parametrize("each_second", [1, 7, 40, 100, 256])


def watched(each_second: int, made: Callable[[int, int, int], dict[str, Any]], *, ranks: int = 2) -> Watch:
    """`made`: of rank, first step and the step after the last, what else the blocks hold. One look a second."""
    watch = Watch(probability_edge={"near": 0.3}, ids_creep={"enabled": True})
    for first in range(0, STEPS, each_second):
        last = min(STEPS, first + each_second)
        watch.second(
            *(batches(rank, [(step, 1.0) for step in range(first, last)], **made(rank, first, last)) for rank in range(ranks)),
        )
    return watch


def column(first: int, last: int, of_step: Callable[[int], float]) -> tuple[float, ...]:
    return tuple(of_step(step) for step in range(first, last))


def ids(first: int, last: int, *, high: Callable[[int], float], ignored: Callable[[int], int], bound: float) -> TensorColumns:
    rows, ignoring = tuple(range(last - first)), tuple(ignored(step) for step in range(first, last))
    return TensorColumns(
        key="labels", dtype="int64", rows=rows, low=(0.0,) * len(rows), high=column(first, last, high), negatives=ignoring, ignored=ignoring,
        finite=(True,) * len(rows), shapes=((100,),) * len(rows), bound_low=0.0, bound_high=bound,
    )  # fmt: skip


def told_of(watch: Watch) -> list[tuple[str, int | None, int | None]]:
    return [(finding.about.name, finding.sign.rank, finding.sign.step) for finding in watch.found if finding.change == "fires"]


def few_labels(lasts: int) -> Callable[[int, int, int], dict[str, Any]]:
    def made(rank: int, first: int, last: int) -> dict[str, Any]:
        def ignored(step: int) -> int:
            return 99 if rank == 1 and BEGINS <= step < BEGINS + lasts else 40

        return {"tensors": (ids(first, last, high=lambda step: 3, ignored=ignored, bound=9),)}

    return made


@each_second
def test_twenty_batches_with_hardly_a_label_are_told_within_them(each_second: int) -> None:
    ((name, rank, step),) = told_of(watched(each_second, few_labels(20)))
    assert (name, rank) == ("supervision", 1)
    assert step is not None and BEGINS + 6 <= step < BEGINS + 20


@each_second
def test_four_such_batches_are_no_finding(each_second: int) -> None:
    assert told_of(watched(each_second, few_labels(4))) == []


@each_second
def test_one_id_past_the_tokenizer_is_told(each_second: int) -> None:
    def made(rank: int, first: int, last: int) -> dict[str, Any]:
        high = {BEGINS: 101.0} if rank == 1 else {}
        return {
            "tokens": 100,
            "tensors": (ids(first, last, high=lambda step: high.get(step, 5 + step % 2), ignored=lambda step: 0, bound=103),),
        }

    ((name, rank, step),) = told_of(watched(each_second, made))
    assert (name, rank) == ("ids_past_tokenizer", 1)
    assert step is not None and BEGINS <= step < BEGINS + 64


@each_second
def test_a_scale_that_falls_a_thousandfold_and_is_set_back_is_told_at_its_fall(each_second: int) -> None:
    def scale(step: int) -> float:
        return 65536 / 2 ** min(14, max(0, step - BEGINS)) if step < BEGINS + 24 else 65536.0

    ((name, rank, step),) = told_of(watched(each_second, lambda rank, first, last: {"scale": column(first, last, scale)}))
    assert (name, rank) == ("scaler_collapse", None)
    assert step is not None and BEGINS + 10 <= step < BEGINS + 24


@each_second
def test_probabilities_that_came_near_to_their_edge_and_went_back_are_told(each_second: int) -> None:
    def made(rank: int, first: int, last: int) -> dict[str, Any]:
        return {
            "reach": column(first, last, lambda step: 0.2 + 0.02 * (step - BEGINS) if rank == 1 and BEGINS <= step < BEGINS + 36 else 0.2)
        }

    ((name, rank, step),) = told_of(watched(each_second, made))
    assert (name, rank) == ("probability_edge", 1)
    assert step is not None and BEGINS + 10 <= step < BEGINS + 36


@each_second
def test_ids_that_rose_towards_the_end_of_their_table_are_told(each_second: int) -> None:
    def made(rank: int, first: int, last: int) -> dict[str, Any]:
        def high(step: int) -> float:
            return 10.0 + 5 * (step - BEGINS) if BEGINS <= step < BEGINS + 84 else 10.0 + step % 2

        return {"tensors": (ids(first, last, high=high, ignored=lambda step: 0, bound=499),)}

    told = told_of(watched(each_second, made))
    assert sorted((name, rank) for name, rank, _ in told) == [("ids_creep", 0), ("ids_creep", 1)]
    assert all(step is not None and BEGINS + 40 <= step < BEGINS + 84 for _, _, step in told)


def test_what_a_look_costs_is_bounded_however_many_steps_have_come() -> None:
    """CPU time of a look after 8,192 steps at once; it took 40 ms when this was written."""
    watch = Watch()
    for first in (0, 8192):
        for rank in range(2):
            steps = range(first, first + 8192)
            one = batches(rank, [(step, 1.0) for step in steps], **few_labels(0)(rank, first, first + 8192))
            watch.engine.take_steps(StepTable.of((one,)), watch.now)
        watch.now += 1
        begun = time.process_time()
        watch.engine.judge(watch.now)
        assert time.process_time() - begun < 1.0


def made_of(ranks: int) -> list[StepBlock]:
    return [batches(rank, [(step, 1.0) for step in range(64)], scale=(1024.0,) * 64) for rank in range(ranks)]


def test_the_rules_look_as_often_as_the_ranks_allow() -> None:
    looks = []
    for ranks in (2, 2048, 8192):
        watch = Watch()
        for one in made_of(ranks):
            watch.engine.take_steps(StepTable.of((one,)), watch.now)
        looks.append(sum(1 for _ in watch.engine._view.take_waiting()))
    assert looks == [8, 4, 1]
