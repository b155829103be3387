"""A loop that steps its scheduler behind the data of each epoch and evaluates then. Prints what would be saved of it there, and the most updates of a step.

The first argument: how many batches it takes an epoch, of three.
"""

from __future__ import annotations

import itertools
import json
import sys
from contextlib import nullcontext

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torch_watchdog_agent.hooks.active import rank
from torch_watchdog_agent.hooks.tracks import training_place

model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=8.0)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
loader = DataLoader(TensorDataset(torch.rand(6, 2)), batch_size=2, shuffle=True)
found: list[tuple[bool, float, float, int, int]] = []


def look() -> None:
    """Whether it is behind the data, the rate that is saved and the rate that the run goes on with, and the place that is saved."""
    here, place = rank(), training_place()
    behind = here.window.is_behind_the_end(here.loop.updates_applied, place)
    with here.window.rewound(0, buffers=False) if behind else nullcontext():
        saved = optimizer.param_groups[0]["lr"]
    found.append((behind, saved, optimizer.param_groups[0]["lr"], place.epoch, place.batches))


for _ in range(2):
    for number, (rows,) in enumerate(itertools.islice(loader, int(sys.argv[1])) if len(sys.argv) > 1 else loader):
        if number == 1:
            look()
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    scheduler.step()
    look()
    model.eval()
    for rows, *_ in DataLoader(loader.dataset, batch_size=3):  # gradients are on: it looks like a training
        model(rows)
        look()
    look()
    model.train()
print(json.dumps([found, rank().rescuer.steps.most_steps]))
