"""Rules that warn before an operator fails, or where none ever will: each fires in time, and is silent on what only looks like it."""

from __future__ import annotations

import random

import pytest
from streams_made import Watch, block, labels

RNG = random.Random(0)


def around(middle: float, by: float) -> float:
    return middle + RNG.uniform(-by, by)


# ids past the tokenizer, in a padded table


def with_ids(highs: list[float], *, tokens: int = 50257, bound: float = 50303) -> Watch:
    """Rank 1 has these highest ids; the ids of rank 0 are right."""
    watch = Watch()
    for step, high in enumerate(highs):
        ids = (labels(900, bound=bound, key="ids"), labels(high, bound=bound, key="ids"))
        watch.second(*(block(rank, step, tensors=(ids[rank],), tokens=tokens) for rank in range(2)))
    return watch


def test_an_id_past_the_tokenizer_in_a_padded_table_is_told_with_both_numbers() -> None:
    watch = with_ids([50256.0] * 20 + [50261.0])
    assert watch.told == [("ids_past_tokenizer", 1, "fires")]
    said = watch.found[0].sign.said
    assert "ids holds 50261; the tokenizer has ids up to 50256, and the table was padded to 50304 rows (1 of the newest 21 batches)" in said


def test_it_is_over_when_no_batch_of_the_window_holds_one() -> None:
    assert with_ids([50261.0] + [800.0] * 100).told == [("ids_past_tokenizer", 1, "fires"), ("ids_past_tokenizer", 1, "resolves")]


@pytest.mark.parametrize(
    ("tokens", "bound", "high"),
    [(50257, 50303, 50256.0), (0, 50303, 50290.0), (50257, 65023, 60000.0), (50257, 49999, 49999.0), (50257, 511, 511.0)],
    ids=["the last token", "no tokenizer known", "a table of another vocabulary", "a table that is shorter", "positions"],
)
def test_ids_that_are_right_or_of_another_table_are_not_told(tokens: int, bound: float, high: float) -> None:
    assert with_ids([high] * 80, tokens=tokens, bound=bound).told == []


# probabilities near their edge


def given(reaches: list[float]) -> Watch:
    """Rank 1 gives these, rank 0 stays in the middle."""
    watch = Watch()
    watch.seconds(len(reaches), lambda step: (block(rank, step, reach=(reaches[step] if rank else 0.3,)) for rank in range(2)))
    return watch


def test_probabilities_that_come_nearer_to_the_edge_are_told_before_they_pass_it() -> None:
    watch = given([0.2 + 0.004 * step + RNG.uniform(-0.002, 0.002) for step in range(198)])
    assert watch.told == [("probability_edge", 1, "fires")]
    step = watch.found[0].sign.step
    assert step is not None and 145 < step < 190
    assert "from the edge of 0..1, 0.002 nearer each step: past it in about" in watch.found[0].sign.said


@pytest.mark.parametrize(
    "reaches",
    [
        [around(0.8, 0.1) for _ in range(200)],
        [1 - 1e-7] * 200,
        [1 - 0.9 * 0.5 ** (step / 80) for step in range(200)],
        [min(0.7, 0.4 + 0.004 * step) + RNG.uniform(0, 0.01) for step in range(200)],
        [0.0] * 200,
    ],
    ids=["noise", "saturated", "slower and slower", "comes nearer and stays", "none"],
)
def test_probabilities_that_keep_their_distance_are_not_told(reaches: list[float]) -> None:
    assert given(reaches).told == []
