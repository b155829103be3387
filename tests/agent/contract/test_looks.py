"""A program that looks at the batch before it uses it: held where it cannot have seen what is wrong, left to its own mending where it can."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from guard_loop import Loop
from torch import nn

ROWS, CLASSES = 30, 9
Look = Callable[[dict[str, torch.Tensor]], Any]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(ROWS, 8), nn.Linear(8, CLASSES)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids).mean(1))


def batch(seed: int) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {"ids": torch.randint(1, ROWS, (3, 5), generator=rng), "labels": torch.randint(0, CLASSES, (3,), generator=rng)}


def broken(seed: int) -> dict[str, torch.Tensor]:
    made = batch(seed)
    made["ids"][1, 2] = ROWS + 3
    return made


def loop(look: Look) -> Loop:
    def run(model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
        look(batch)
        nn.functional.cross_entropy(model(batch["ids"]), batch["labels"]).backward()

    model = Net()
    return Loop(model, run, torch.optim.SGD(model.parameters(), lr=0.1))


UNSEEN: dict[str, Look] = {
    "one element": lambda batch: batch["ids"][0, 0].item(),
    "how many are no padding": lambda batch: int((batch["ids"] != 0).sum()),
    "the last column": lambda batch: batch["ids"][:, -1].sum().item(),
    "whether one is a certain token": lambda batch: bool((batch["ids"] == 7).any()),
    "two of them": lambda batch: (batch["ids"][0, 0].item(), (batch["ids"][:, :2] > 3).sum().item()),
}
SEEN: dict[str, Look] = {
    "the largest": lambda batch: batch["ids"].max().item(),
    "the element itself": lambda batch: batch["ids"][1, 2].item(),
    "whether all are legal": lambda batch: bool((batch["ids"] < ROWS).all()),
    "the sum": lambda batch: batch["ids"].sum().item(),
}


@pytest.mark.parametrize("look", UNSEEN.values(), ids=UNSEEN)
def test_a_batch_is_held_where_the_program_sees_the_same_as_of_a_legal_one(look: Look) -> None:
    training = loop(look)
    assert all(seen.violation is None for seen in training.train(batch(seed) for seed in range(8)))
    seen = training.step(broken(99))
    assert seen.checked.violation is not None
    assert (seen.checked.violation.batch.value, seen.checked.violation.batch.element) == (ROWS + 3, (1, 2))


def test_a_bad_label_is_held_in_a_loop_that_counts_its_labels() -> None:
    training = loop(lambda batch: int((batch["labels"] != -100).sum()))
    training.train(batch(seed) for seed in range(8))
    made = batch(99)
    made["labels"][2] = CLASSES
    violation = training.step(made).checked.violation
    assert violation is not None
    assert (violation.batch.key, violation.batch.value) == ("labels", CLASSES)


@pytest.mark.parametrize("look", SEEN.values(), ids=SEEN)
def test_a_batch_is_refused_in_its_step_where_the_program_sees_the_bad_value(look: Look) -> None:
    training = loop(look)
    training.train(batch(seed) for seed in range(8))
    seen = training.step(broken(99))
    assert seen.checked.violation is None
    assert seen.refused is not None


def test_a_program_that_mends_what_it_sees_is_never_alarmed() -> None:
    def mend(batch: dict[str, torch.Tensor]) -> None:
        if batch["ids"].max().item() >= ROWS:
            batch["ids"].clamp_(max=ROWS - 1)

    training = loop(mend)
    training.train(batch(seed) for seed in range(8))
    seen = training.step(broken(99))
    assert (seen.violation, seen.raised) == (None, None)


def test_a_look_that_depends_on_an_earlier_look_is_not_trusted() -> None:
    """Its computation holds a number of the traced batch, so that it cannot be computed again for another one."""

    def look(batch: dict[str, torch.Tensor]) -> None:
        first = batch["ids"][0, 0].item()
        int((batch["ids"] == first).sum())

    training = loop(look)
    training.train(batch(seed) for seed in range(8))
    seen = training.step(broken(99))
    assert seen.checked.violation is None
    assert seen.refused is not None


def test_a_look_that_came_in_some_steps_only_counts() -> None:
    count = iter(range(1000))
    training = loop(lambda batch: batch["ids"].max().item() if next(count) % 2 else None)
    training.train(batch(seed) for seed in range(8))
    assert training.step(broken(99)).checked.violation is None
