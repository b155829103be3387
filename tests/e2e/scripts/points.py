"""A training for fault points: after every update each rank says the digest of its parameters, which DDP keeps the same on all ranks.

Knows nothing of the watchdog but, with `--fault off`, a part of it to break. `--fault`: what rank 1 does in front of step 5.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from train import Net, Rows, begin, say

FAULT_STEP = 5
SLEEP_S = 8


def fault(how: str) -> None:
    if how == "raise":
        raise ValueError("a fault of the script's own")
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "native":  # and keeps the interpreter's lock: nothing can be asked of this rank meanwhile
        Path("native").touch()
        ctypes.PyDLL(None).sleep(SLEEP_S)
    if how == "off":  # as if a hook of the watchdog's had met a failure of its own in this rank
        sys.modules["torch_watchdog_agent.turned_off"].turned_off("loader")
    if how in ("meet", "off"):
        Path("here").touch()
        deadline = time.monotonic() + 60
        while not Path("go").exists() and time.monotonic() < deadline:
            time.sleep(0.02)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bad", type=int)
    parser.add_argument("--fault", default="")
    parser.add_argument("--rows", type=int, default=48)
    args = parser.parse_args()
    torch.manual_seed(7)
    torch.set_num_threads(1)
    begin("gloo", timeout_s=60)
    rank = dist.get_rank()
    plain = Net()
    model = DistributedDataParallel(plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rows = Rows(args.rows, args.bad)
    loader = DataLoader(rows, batch_size=3, sampler=DistributedSampler(rows))
    for step, batch in enumerate(loader):
        if step == FAULT_STEP and rank == 1:
            fault(args.fault)
        nn.functional.cross_entropy(model(batch["ids"]), batch["labels"]).backward()
        optimizer.step()
        optimizer.zero_grad()
        sha = hashlib.sha256(b"".join(parameter.detach().numpy().tobytes() for parameter in plain.parameters()))
        say(f"rank {rank} step {step} parameters {sha.hexdigest()[:16]}")
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.5)  # gloo's threads end first
    say(f"rank {rank} done")


if __name__ == "__main__":
    main()
