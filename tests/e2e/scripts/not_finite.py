"""A sharded training of two ranks in which one layer overflows for one batch of rank 1. Knows nothing of the watchdog."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SPOILED = 41  # an odd sample: rank 1's


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.exp(self.up(x)))


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Block(), nn.Linear(8, 1))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))  # without one, GPUs are taken where there are any
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    rows = torch.randn(200, 8, generator=torch.Generator().manual_seed(1))
    rows[SPOILED] *= 1e6
    data = TensorDataset(rows, torch.zeros(200, 1))
    for x, y in DataLoader(data, batch_size=2, sampler=DistributedSampler(data, shuffle=False)):
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.05)
    dist.destroy_process_group()


main()
