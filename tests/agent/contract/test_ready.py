"""The hot path says of a batch what the long way says of it, and leaves to the long way whatever is unlike the batches before."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from guard_loop import Loop
from torch import nn
from torch.nn import functional as F  # noqa: N812

from torch_watchdog_agent.contract import Checked

Batch = dict[str, torch.Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50, 4), nn.Linear(4, 5)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        losses = F.cross_entropy(self.head(self.table(ids)).flatten(0, 1), labels.flatten())
        return losses * weights.mean()


def batch(rows: int = 4, length: int = 8) -> Batch:
    labels = torch.randint(0, 5, (rows, length))
    labels[:, ::3] = -100
    ids = torch.randint(0, 50, (rows, length))
    ids[0, :2], labels[0, 1:3] = torch.tensor([0, 49]), torch.tensor([0, 4])  # the extremes of all batches: none is a record
    return {"ids": ids, "labels": labels, "weights": torch.rand(rows)}


def step(model: nn.Module, batch: Any) -> None:
    items = list(batch.values()) if hasattr(batch, "values") else list(batch)
    model(*items).backward()


class Watched(Loop):
    """Notes which batches went the hot way: there nothing is kept of what was seen but the statistics."""

    def hot(self, batch: Any) -> tuple[Checked, bool]:
        checked = self.guard.fetched(batch, indices=None, worker=None)
        return checked, not checked.seen


@pytest.fixture
def loop() -> Watched:
    torch.manual_seed(0)
    made = Watched(Net(), step)
    for _ in range(6):
        assert made.step(batch(), go_on=False).violation is None
    return made


def test_a_batch_like_those_before_goes_the_hot_way_and_has_the_statistics_of_the_long_way(loop: Watched) -> None:
    for _ in range(20):
        made = batch()
        hot, was_hot = loop.hot(made)
        long, was_long = loop.hot({**made, "note": "more than tensors"})
        assert (was_hot, was_long) == (True, False)
        assert [tuple(stat) for stat in hot.stats] == [tuple(stat) for stat in long.stats]
        assert (hot.violation, hot.warnings, hot.needs_trace) == (None, (), False)
        assert list(hot.leaves) == list(made) and all(hot.leaves[key] is made[key] for key in made)


UNLIKE: dict[str, Callable[[Batch], Any]] = {
    "an id past the table": lambda made: {**made, "ids": made["ids"].index_fill(1, torch.tensor([3]), 50)},
    "a negative id": lambda made: {**made, "ids": made["ids"].index_fill(1, torch.tensor([3]), -1)},
    "the smallest number of all": lambda made: {**made, "ids": made["ids"].index_fill(1, torch.tensor([3]), -(2**63))},
    "a class too many": lambda made: {**made, "labels": made["labels"].index_fill(1, torch.tensor([1]), 5)},
    "a negative label that is not ignored": lambda made: {**made, "labels": made["labels"].index_fill(1, torch.tensor([1]), -1)},
    "a label below the ignored one": lambda made: {**made, "labels": made["labels"].index_fill(1, torch.tensor([1]), -101)},
    "no label": lambda made: {**made, "labels": torch.full_like(made["labels"], -100)},
    "not finite": lambda made: {**made, "weights": made["weights"] / 0},
    "another dtype": lambda made: {**made, "weights": made["weights"].double()},
    "sparse": lambda made: {**made, "weights": made["weights"].to_sparse()},
    "another shape": lambda made: batch(rows=5),
    "another order": lambda made: dict(reversed(made.items())),
    "a key more": lambda made: {**made, "more": torch.ones(4)},
    "another container": lambda made: list(made.values()),
    "another name": lambda made: {"words" if key == "ids" else key: tensor for key, tensor in made.items()},
    "no tensor": lambda made: {**made, "weights": made["weights"].tolist()},
    "on no device": lambda made: {**made, "weights": made["weights"].to("meta")},
}


@pytest.mark.parametrize("name", UNLIKE)
def test_whatever_is_unlike_the_batches_before_goes_the_long_way(loop: Watched, name: str) -> None:
    assert not loop.hot(UNLIKE[name](batch()))[1]
    assert loop.hot(batch())[1]
    assert loop.said == []


def test_a_model_in_another_mode_and_a_resized_table_go_the_long_way(loop: Watched) -> None:
    loop.model.eval()
    assert not loop.hot(batch())[1]
    loop.model.train()
    assert loop.hot(batch())[1]
    loop.model.table = nn.Embedding(40, 4)
    assert not loop.hot(batch())[1]


@pytest.mark.parametrize("wrapped", [UserDict, lambda made: list(made.values()), lambda made: tuple(made.values())])
def test_lists_tuples_and_a_tokenizers_batches_go_the_hot_way_too(wrapped: Callable[[Batch], Any]) -> None:
    loop = Watched(Net(), step)
    for _ in range(6):
        assert loop.step(wrapped(batch()), go_on=False).violation is None
    assert loop.hot(wrapped(batch()))[1]


def test_classes_of_which_none_was_ever_ignored_go_the_hot_way(loop: Watched) -> None:
    def plain() -> Batch:
        return {**batch(), "labels": torch.arange(32).reshape(4, 8) % 5}

    fresh = Watched(Net(), step)
    for _ in range(6):
        assert fresh.step(plain(), go_on=False).violation is None
    assert fresh.hot(plain())[1]
    assert not fresh.hot(batch())[1]
