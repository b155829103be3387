"""A tiny training of two ranks that comes out the same every time; knows nothing of the watchdog. `chaos_train.py OUT STEPS`.

`OUT/began-R` is there once rank R trains; `OUT/digest-R` holds, after the last step, what its parameters and losses were to the last bit.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

PAUSE_S = 0.02


class Rows(Dataset):
    def __init__(self, rank: int, count: int) -> None:
        self.rank, self.count = rank, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        rng = torch.Generator().manual_seed(10 * number + self.rank)
        return torch.randint(0, 32, (4, 6), generator=rng), torch.randint(0, 3, (4,), generator=rng)


def main(out: Path, steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(32, 8), nn.Flatten(), nn.Dropout(0.1), nn.Linear(48, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    digest = hashlib.sha256()
    for ids, labels in DataLoader(Rows(rank, steps), batch_size=None):
        loss = nn.functional.cross_entropy(model(ids), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        digest.update(loss.detach().numpy().tobytes())
        (out / f"began-{rank}").touch()
        time.sleep(PAUSE_S)
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    dist.barrier()
    (out / f"digest-{rank}").write_text(digest.hexdigest())
    dist.destroy_process_group()
    time.sleep(0.5)  # gloo's threads may still be at it
    print(f"rank {os.environ['RANK']} has trained")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
