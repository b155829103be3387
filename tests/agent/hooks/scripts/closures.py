"""Steps with and without a closure. Prints, of each, whether the weights were what the step left behind when the watchdog was told that it was done."""

import json

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torch_watchdog_agent.hooks.active import rank

rows = DataLoader(TensorDataset(torch.arange(12.0).reshape(6, 2), torch.ones(6, 1)), batch_size=2)
net = nn.Linear(2, 1)
told: list[list[float]] = []
found: dict[str, list[bool]] = {}


def seen(**_: object) -> None:
    told.append(net.weight.detach().flatten().tolist())


for name, optimizer in {
    "plain": torch.optim.SGD(net.parameters(), lr=1e-3),
    "closure": torch.optim.SGD(net.parameters(), lr=1e-3),
    "lbfgs": torch.optim.LBFGS(net.parameters(), lr=1e-3, max_iter=3),
}.items():
    for inputs, targets in rows:
        rank().rescuer.after_gate = seen

        def closure(
            inputs: torch.Tensor = inputs, targets: torch.Tensor = targets, optimizer: torch.optim.Optimizer = optimizer
        ) -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(net(inputs), targets)
            loss.backward()
            return loss

        told.clear()
        if name == "plain":
            closure()
            optimizer.step()
        else:
            optimizer.step(closure)
        found.setdefault(name, []).append(told == [net.weight.detach().flatten().tolist()])
print(json.dumps(found))
