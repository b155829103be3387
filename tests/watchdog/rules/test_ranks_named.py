"""Sentences that name ranks: short however many there are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from torch_watchdog.job.first_failure import FirstFailure, RankEnd
from torch_watchdog.job.hangs import Hung
from torch_watchdog.rules.death import judge
from torch_watchdog.rules.loss import Divergence, NotFinite
from torch_watchdog.rules.named import named


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([3], "rank 3"),
        ([3, 5], "ranks 3 and 5"),
        (range(8), "ranks 0, 1, 2, 3, 4, 5, 6 and 7"),
        (range(9), "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 1 more"),
    ],
)
def test_ranks_are_named(ranks: Sequence[int], words: str) -> None:
    assert named(ranks) == words


def test_a_sentence_is_as_short_for_thousands_of_ranks_as_for_nine() -> None:
    """Each of them had been named: 90,000 characters, on the terminal, in the incident and in its event."""
    many = tuple(range(1, 16_384))
    end = RankEnd(rank=0, node="a", pid=1, exit_code=0, step=9, finished=True)
    sentences = [
        Divergence(first=NotFinite(5, 0, 1, math.nan), ranks=many, everywhere=False).summary,
        Divergence(first=NotFinite(5, 0, 1, math.nan), ranks=many, everywhere=False).cause,
        Hung(ranks=(0,), why="it is stopped", waiting=many, sure=True, stacks="").words,
        judge(FirstFailure(culprits=(end,), victims=many, desync=True)).summary,
        judge(FirstFailure(culprits=tuple(replace(end, rank=rank, exit_code=1) for rank in many), victims=(0,))).summary,
    ]
    assert max(map(len, sentences)) < 250
    assert all(" more" in one for one in sentences)
