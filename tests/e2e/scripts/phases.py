"""Steps of up to five times the length of others, an evaluation after every eighth, and a checkpoint for which the other rank waits 16 seconds."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader


def evaluate(model: nn.Module) -> None:
    with torch.no_grad():
        for ids, _ in DataLoader([(torch.tensor([1, 2]), 0)] * 8, batch_size=4):
            model(ids)
            time.sleep(0.5)


def save_checkpoint() -> None:
    time.sleep(16)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(8, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows = [(torch.tensor([index % 10, 1]), index % 2) for index in range(128)]
    for step, (ids, labels) in enumerate(DataLoader(rows, batch_size=4)):
        time.sleep(0.05 * (1 + step * 7 % 5))  # as long as its sequences would be
        nn.functional.cross_entropy(model(ids), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 8 == 7:
            evaluate(model.module)
        if step == 20:
            if os.environ["RANK"] == "0":
                save_checkpoint()
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
