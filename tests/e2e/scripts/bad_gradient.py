"""A training of two ranks (DistributedDataParallel, or FSDP2 with --fsdp) that never looks at its gradients, and in which one batch of rank 1 makes one of them
NaN while every loss stays finite. --clean: no batch does. Knows nothing of the watchdog.
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SPOILED = 41  # an odd sample: rank 1's, step 10


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spoiled = 0 * torch.sqrt(self.gain[0] * 0) if x.max() > 50 else 0 * self.gain[0]  # 0 times the slope of a root at 0
        return x.clamp(-5, 5) * self.gain + spoiled


def sharded(net: nn.Module) -> nn.Module:
    """On the CPU: without a mesh, GPUs are taken where there are any."""
    return fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(Gain(), nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    model = sharded(net) if "--fsdp" in sys.argv else DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    rows = torch.randn(200, 8, generator=torch.Generator().manual_seed(1))
    if "--clean" not in sys.argv:
        rows[SPOILED] = 100.0
    data = TensorDataset(rows, torch.zeros(200, 1))
    for step, (x, y) in enumerate(DataLoader(data, batch_size=2, sampler=DistributedSampler(data, shuffle=False))):
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        held = [getattr(one, "_local_tensor", one).double().sum().item() for one in model.parameters()]
        os.write(1, f"rank {dist.get_rank()} step {step} loss {loss.item().hex()} {sum(held).hex()}\n".encode())
        if "--clean" not in sys.argv:
            time.sleep(0.05)
    dist.destroy_process_group()
    time.sleep(0.5)  # gloo's threads may still be at it


if __name__ == "__main__":
    main()
