"""A training of two ranks that draws its batches itself and knows no loader: rank 0 draws, for all. `--raise-in WHERE`: rank 1 does in its step 9.

Prints its end: parameters and buffers, rates, rank 0's random numbers.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from train import digest

import torch_watchdog_agent


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--raise-in", choices=("draw", "backward"))
    args = parser.parse_args()
    torch.manual_seed(7)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    rows, targets = torch.randn(40, 4), torch.randint(3, (40,))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    resumed = torch_watchdog_agent.restore(model=model, optimizer=optimizer, scheduler=scheduler)

    def fails(where: str) -> None:
        if rank == 1 and resumed is None and (step, where) == (9, args.raise_in):
            raise ValueError("its own")

    for step in range(0 if resumed is None else resumed.step, 16):
        fails("draw")
        drawn = torch.randint(len(rows), (2, 6))
        dist.broadcast(drawn, 0)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(rows[drawn[rank]]), targets[drawn[rank]])
        fails("backward")
        loss.backward()
        optimizer.step()
        scheduler.step()
    if rank == 0:
        print("end", digest(model.module, optimizer), optimizer.param_groups[0]["lr"].hex(), torch.rand(1).item().hex())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
