"""A plain loop, one of whose gradients holds no numbers."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader

torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
empty = torch.nn.Parameter(torch.zeros(3, device="meta"))
optimizer = torch.optim.SGD([empty, *model.parameters()], lr=0.1)
for rows in DataLoader(torch.randn(12, 3), batch_size=2):
    model(rows).square().mean().backward()
    empty.grad = torch.zeros(3, device="meta")
    optimizer.step()
    optimizer.zero_grad()
print("trained", sum(one.double().sum().item() for one in model.parameters()).hex())
