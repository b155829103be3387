"""A batch teaches when its step has run, and never a bound: what a bad one looked like must not pass for usual afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from guard_loop import Loop
from torch import nn
from torch.nn import functional as F  # noqa: N812


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50, 4), nn.Linear(7, 5)

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([self.table(ids), x], 1))


def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    F.cross_entropy(model(batch["ids"], batch["x"]), batch["y"]).backward()


def clean(rows: int = 4) -> dict[str, torch.Tensor]:
    return {"ids": torch.randint(0, 50, (rows,)), "x": torch.randn(rows, 3), "y": torch.randint(0, 5, (rows,))}


def with_nan() -> dict[str, torch.Tensor]:
    made = clean()
    made["x"][2, 1] = float("nan")
    return made


def ended(loop: Loop, checked: Any, batch: Any) -> None:
    """The step of a batch that was fetched before."""
    loop.guard.handed_over(checked, batch)
    step(loop.model, batch)
    loop.guard.step_ended()


def test_a_batch_that_is_fetched_before_anything_is_learned_does_not_teach_that_nan_is_usual() -> None:
    loop, first, bad = Loop(Mixed(), step), clean(), with_nan()
    checked = loop.guard.fetched(first, indices=None, worker=None)
    ahead = loop.guard.fetched(bad, indices=None, worker=None)  # a loader that prefetches one batch
    ended(loop, checked, first)
    judged = loop.guard.fresh(ahead)
    assert judged.violation is not None
    assert (judged.violation.kind, judged.violation.batch.key) == ("batch.not_finite", "x")
    loop.train([clean() for _ in range(6)])
    later = loop.step(with_nan()).violation
    assert later is not None
    assert later.kind == "batch.not_finite"


def test_a_batch_whose_step_ran_teaches_in_the_end() -> None:
    loop = Loop(Mixed(), step)
    first = clean()
    checked = loop.guard.fetched(first, indices=None, worker=None)
    assert loop.guard._seen.batches == 0
    ended(loop, checked, first)
    assert loop.guard._seen.batches == 1
    assert loop.guard._seen.past_of("ids") is not None
    assert not loop.guard._seen.waiting


@pytest.mark.parametrize("met_at", [0, 1, 4, 12])
def test_a_bad_value_that_a_loop_survives_once_is_no_legal_value_afterwards(met_at: int) -> None:
    """A loop with a try of its own around the step, whose batches are only observed."""
    loop = Loop(Mixed(), step)
    loop.guard._tracer.on_refused = lambda _: False

    def bad(value: int) -> dict[str, torch.Tensor]:
        made = clean()
        made["ids"][1] = value
        return made

    for number in range(20):
        loop.step(bad(5000) if number == met_at else clean())
    found = loop.step(bad(50)).violation
    assert found is not None
    assert found.summary == "ids[1] = 50, allowed 0..49 in embedding (table)"


def test_a_bad_batch_that_is_only_observed_teaches_nothing() -> None:
    loop = Loop(Mixed(), step)
    loop.train([clean() for _ in range(6)])
    for _ in range(2):
        bad = with_nan()
        checked = loop.guard.fetched(bad, indices=None, worker=None)
        assert checked.violation is not None
        ended(loop, checked, bad)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50, 4), nn.Linear(16, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids).flatten(1))


def train_one(model: nn.Module, batch: list[torch.Tensor]) -> None:
    F.cross_entropy(model(batch[0]), batch[1]).backward()


def left_early(batches: list[list[torch.Tensor]]) -> Loop:
    """A loop that has learned, behind `for number, batch in enumerate(validation): if number == 2: break`."""
    loop = Loop(Net(), train_one)
    loop.train(batches[:5])
    assert loop.guard.ahead == 0
    assert not loop.guard.tracing
    loop.model.eval()
    for number, batch in enumerate(batches[5:8]):
        loop.guard.handed_over(loop.guard.fetched(batch, indices=None, worker=None), batch)
        assert loop.guard.tracing
        if number < 2:
            with torch.no_grad():
                loop.model(batch[0])
    loop.model.train()
    return loop


@pytest.mark.parametrize("used_by", ["its step", "nobody"])
def test_a_batch_that_an_evaluation_leaves_unused_puts_no_loop_ahead_of_its_batches(used_by: str) -> None:
    batches = [[torch.randint(0, 50, (4, 4)), torch.randint(0, 5, (4,))] for _ in range(9)]
    loop = left_early(batches)
    checked = loop.guard.fetched(batches[8], indices=None, worker=None)
    loop.guard.handed_over(checked, batches[8])
    if used_by == "its step":
        train_one(loop.model, batches[8])
        assert loop.guard._tracer.mode is not None
        assert checked.batch_id in loop.guard._tracer.mode.tape.used
    loop.guard.step_ended()
    assert loop.guard.ahead == 0


def test_the_last_step_of_a_pass_does_not_teach_that_a_prefetching_loop_has_nothing_in_hand() -> None:
    """Three batches, each fetched before the one before it is used: the third step is traced, too, and there is no fourth."""
    loop = Loop(Net(), train_one)
    batches = [[torch.randint(0, 50, (4, 4)), torch.randint(0, 5, (4,))] for _ in range(3)]

    def fetch(number: int) -> None:
        loop.guard.handed_over(loop.guard.fetched(batches[number], indices=None, worker=None), batches[number])

    fetch(0)
    for number in range(3):
        if number < 2:
            fetch(number + 1)
        train_one(loop.model, batches[number])
        loop.guard.step_ended(drains=number == 2)
        assert loop.guard.ahead == 1


def test_a_batch_that_nothing_has_used_is_no_reason_to_doubt_what_others_need() -> None:
    """Given up in a step of another optimizer, which needs no embedding: the critic's, of three steps for each batch."""
    loop = left_early([[torch.randint(0, 50, (4, 4)), torch.randint(0, 5, (4,))] for _ in range(8)])
    while loop.guard.tracing:
        loop.model.head(torch.ones(1, 16)).sum().backward()
        loop.guard.step_ended()
    bad = [torch.full((4, 4), 99), torch.zeros(4, dtype=torch.int64)]
    assert loop.guard.fetched(bad, indices=None, worker=None).violation is not None
