"""A plain loop in a process whose rank cannot be made."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, TensorDataset

import torch_watchdog_agent.hooks.active


def refuse(*_: object, **__: object) -> None:
    raise ValueError("no rank here")


torch_watchdog_agent.hooks.active.Rank = refuse
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for (rows,) in DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2):
    model(rows).sum().backward()
    optimizer.step()
print("trained")
