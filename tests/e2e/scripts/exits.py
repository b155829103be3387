"""A training in which rank 1, or the worker of its loader, ends in a given way in step 8. Knows nothing of the watchdog."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

FAULT_STEP, BATCH = 8, 3


def end(how: str) -> None:
    if how == "raise":
        raise ValueError("sample 51 is no image")
    if how == "SystemExit":
        raise SystemExit(3)
    if how == "torn-down":  # as gloo's threads do to a process now and then that did not destroy its groups
        libc = ctypes.CDLL(None)
        libc.__cxa_atexit(libc.abort, None, None)
        how = "none"
    status: Any = {"none": None, "text": "no disk"}.get(how.removeprefix("now-"), how.removeprefix("now-"))
    status = int(status) if isinstance(status, str) and status.isdecimal() else status
    (os._exit if how.startswith("now-") else sys.exit)(status)


class Rows(Dataset[tuple[torch.Tensor, int]]):
    def __init__(self, ends: str | None) -> None:
        self.ends = ends

    def __len__(self) -> int:
        return 240

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.ends is not None and index == 2 * BATCH * FAULT_STEP + 1 and os.environ["RANK"] == "1":
            end(self.ends)
        return torch.full((3,), index / 240), index % 2


def main(where: str, how: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if where == "start" and dist.get_rank() == 1:
        try:
            end(how)
        finally:  # nothing is trained yet, and whoever ends takes the group along
            dist.destroy_process_group()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = Rows(how if where == "worker" else None)
    loader = DataLoader(rows, batch_size=BATCH, sampler=DistributedSampler(rows, shuffle=False), num_workers=int(where == "worker"))
    for step, (inputs, labels) in enumerate(loader):
        if step == FAULT_STEP and where == "rank" and dist.get_rank() == 1:
            end(how)
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main(*sys.argv[1:])
