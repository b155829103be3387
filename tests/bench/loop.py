"""A small training on the CPU whose last line is its median step time in milliseconds. Plain: it knows nothing of the watchdog."""

from __future__ import annotations

import statistics
import sys
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

NUM_WARM_UP_STEPS = 20


def main(num_steps: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    batch, length, vocabulary, width = 8, 64, 1_000, 256
    ids = torch.randint(vocabulary, (batch * num_steps, length))
    model = torch.nn.Sequential(
        torch.nn.Embedding(vocabulary, width), torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.Linear(width, vocabulary)
    )
    optimizer = torch.optim.AdamW(model.parameters())
    times_ms, before_s = [], time.perf_counter()
    for (tokens,) in DataLoader(TensorDataset(ids), batch_size=batch):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        now_s = time.perf_counter()
        times_ms.append((now_s - before_s) * 1e3)
        before_s = now_s
    print(statistics.median(times_ms[NUM_WARM_UP_STEPS:]))


main(int(sys.argv[1]))
