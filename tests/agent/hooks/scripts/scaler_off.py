"""A plain loop with two GradScalers: one that is turned off, as scripts do for full precision, and one that works."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader

torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
off, on = torch.amp.GradScaler("cpu", enabled=False), torch.amp.GradScaler("cpu", init_scale=8.0)
for rows in DataLoader(torch.randn(12, 3), batch_size=2):
    for scaler in (off, on):
        scaler.scale(model(rows).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
print("trained", sum(one.double().sum().item() for one in model.parameters()).hex())
