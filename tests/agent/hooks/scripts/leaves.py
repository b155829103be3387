"""A loop that leaves its loader before the end, or seems to: `leaves.py HOW`. Prints how many updates it has made, an inner step of a batch not counted."""

from __future__ import annotations

import json
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

INNER = 3
model = nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.rand(32, 3)), batch_size=4)
updates = 0


def step(rows: torch.Tensor, *, counts: bool = True) -> None:
    global updates
    optimizer.zero_grad()
    model(rows).sum().backward()
    optimizer.step()
    updates += counts


def looking_on(batches):
    yield from batches


def in_memory(count: int = 4) -> None:
    for _ in range(count):
        step(torch.rand(2, 3))


def after_the_update(batches) -> None:
    for number, (rows,) in enumerate(batches):
        step(rows)
        if number == 2:
            break


def before_use() -> None:
    for number, (rows,) in enumerate(loader):
        if number == 3:
            break
        step(rows)
    in_memory()


def one_iterator_a_batch() -> None:
    """As a critic is trained several times on a batch."""
    for _ in range(4):
        (rows,) = next(iter(loader))
        for inner in range(INNER):
            step(rows, counts=not inner)


def in_a_cycle() -> None:
    """Only the collector finds the iterator, some time later, and on each rank at another time: it is not known that the loader was left."""
    held: list[object] = [iter(loader)]
    held.append(held)
    (rows,) = next(held[0])
    step(rows)
    del held
    import gc

    for turn in range(4):
        if turn == 2:
            gc.collect()
        step(rows, counts=False)


def evaluated_in_between() -> None:
    for _ in range(2):
        for (rows,) in loader:
            step(rows)
        with torch.no_grad():
            for (rows,) in DataLoader(TensorDataset(torch.rand(8, 3)), batch_size=4):
                model(rows)
                break


HOW = {
    "after_the_update": lambda: (after_the_update(loader), in_memory()),
    "in_a_generator": lambda: (after_the_update(looking_on(loader)), in_memory()),
    "before_use": before_use,
    "one_iterator_a_batch": one_iterator_a_batch,
    "in_a_cycle": in_a_cycle,
    "evaluated_in_between": evaluated_in_between,
}
HOW[sys.argv[1]]()
print(json.dumps(updates))
