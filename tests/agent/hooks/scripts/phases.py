"""A loop whose loader, forward, backward and update each take a time of their own. Prints nothing that is used."""

import json
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

LOAD_S, FORWARD_S, BACKWARD_S, UPDATE_S = 0.01, 0.02, 0.03, 0.04


class Slow(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, _: int) -> torch.Tensor:
        time.sleep(LOAD_S)
        return torch.ones(2)


class SlowSGD(torch.optim.SGD):
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        time.sleep(UPDATE_S)
        super().step()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        time.sleep(FORWARD_S)
        return self.layer(rows)


net = Net()
net.layer.weight.register_hook(lambda gradient: time.sleep(BACKWARD_S))
optimizer = SlowSGD(net.parameters(), lr=1e-3)
for rows in DataLoader(Slow(), batch_size=2):
    net(rows).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print(json.dumps(None))
