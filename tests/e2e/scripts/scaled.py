"""Mixed precision's GradScaler, with clipping, from a scale at which the first steps overflow. `--nan STEP`: from then on rank 1's loss is NaN."""

from __future__ import annotations

import argparse
import math
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nan", type=int, default=1000)
    nan_from = parser.parse_args().nan
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(8, 2)))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), torch.amp.GradScaler("cpu", init_scale=2.0**127)
    rows = [(torch.tensor([index % 10, 1]), index % 2) for index in range(480)]
    for step, (ids, labels) in enumerate(DataLoader(rows, batch_size=4)):
        loss = 64 * nn.functional.cross_entropy(model(ids), labels)
        if step >= nan_from and os.environ["RANK"] == "1":
            loss = loss * math.nan
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        time.sleep(0.02)  # so that an order to stop can come before the end
        os.write(1, f"step {step} norm {float(norm)} scale {scaler.get_scale():g}\n".encode())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
