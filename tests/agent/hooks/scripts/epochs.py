"""Where the data goes on, in loops that make more passes over a loader than they have epochs. Prints, for the loop named, the place at each step's boundary."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torch_watchdog_agent.checkpoint.position import LoaderPosition
from torch_watchdog_agent.checkpoint.rng import RngState
from torch_watchdog_agent.hooks.loader import resume_at
from torch_watchdog_agent.hooks.tracks import training_place

EPOCHS = 2

model = nn.Sequential(nn.Embedding(50, 4), nn.Flatten(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = TensorDataset(torch.randint(0, 50, (12, 4)), torch.randint(0, 3, (12,)))
loader, other = DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=4, shuffle=True)
places: list[tuple[int, int, bool]] = []


def place() -> tuple[int, int, bool]:
    here = training_place()
    return here.epoch, here.batches, here.in_turn


def train(batches: Iterable[Any]) -> None:
    for ids, labels in batches:
        nn.functional.cross_entropy(model(ids), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        places.append(place())


def evaluating(batches: Iterable[Any], *, quietly: bool) -> Iterator[Any]:
    """After each batch the whole of the training's data is evaluated; not `quietly`: as by who knows neither eval() nor no_grad()."""
    for batch in batches:
        yield batch
        with torch.set_grad_enabled(not quietly):
            model.train(not quietly)
            for ids, _ in loader:
                model(ids)
        model.train()
        places.append(place())


def looked_at_before() -> None:
    for ids, _ in loader:
        model(ids)
        break
    kept = iter(loader)
    model(next(kept)[0])
    for _ in range(EPOCHS):
        train(loader)


def one_batch_an_epoch() -> None:
    whole = DataLoader(data, batch_size=12, shuffle=True)
    for _ in range(EPOCHS):
        train(whole)


def evaluated_within() -> None:
    for _ in range(EPOCHS):
        train(evaluating(loader, quietly=True))


def evaluated_without_a_word() -> None:
    for _ in range(EPOCHS):
        train(evaluating(loader, quietly=False))


def after_one_that_is_kept() -> None:
    kept = iter(other)
    train(next(kept) for _ in range(2))
    for _ in range(EPOCHS):
        train(loader)
        places.append(place())


def one_inside_the_other() -> None:
    for batch in loader:
        train(other)
        train([batch])


def one_after_the_other() -> None:
    for _ in range(EPOCHS):
        train(loader)
        train(other)


def in_turn() -> None:
    for pair in zip(loader, other, strict=True):
        train(pair)


def twice_at_once() -> None:
    for pair in zip(loader, loader, strict=True):
        train(pair)


def resumed() -> None:
    """Before the training goes on it evaluates on its data, and looks at a batch."""
    train(loader)
    resume_at(other, LoaderPosition(epoch=1, batches=1, rng_at_iter=RngState.capture(), rng=RngState.capture()))
    with torch.no_grad():
        model(torch.cat([ids for ids, _ in other]))
    model(next(iter(other))[0])
    for _ in range(2):
        train(other)


def resumed_at_the_end_of_an_epoch() -> None:
    resume_at(loader, LoaderPosition(epoch=0, batches=3, rng_at_iter=RngState.capture(), rng=RngState.capture()))
    for _ in range(2):
        train(loader)


LOOPS = (
    resumed,
    resumed_at_the_end_of_an_epoch,
    looked_at_before,
    one_batch_an_epoch,
    evaluated_within,
    evaluated_without_a_word,
    after_one_that_is_kept,
    one_inside_the_other,
    one_after_the_other,
    in_turn,
    twice_at_once,
)
{loop.__name__: loop for loop in LOOPS}[sys.argv[1]]()
print(json.dumps(places))
