"""HSDP: two copies of the model, each sharded over half of the ranks (FSDP2 over a mesh); some are killed before an update, or all train to the end.

Each rank writes a digest of its own shards, optimizer state included, after every update. Knows nothing of the watchdog but `restore()`: with --check it
loads a checkpoint and prints the digests only.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from failing import Rows, Shaped
from torch import nn
from torch.distributed._composable.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, DistributedSampler
from train import say


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of what this rank holds."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        state = optimizer.state.get(parameter, {})
        for tensor in (parameter, *(state[name] for name in ("exp_avg", "exp_avg_sq") if name in state)):
            found.update(tensor.detach().to_local().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def wait_for_the_others(updates: int) -> None:
    """All have made as many updates as this rank."""
    deadline = time.monotonic() + 30
    trails = [Path(f"trail-{rank}") for rank in range(dist.get_world_size())]
    while time.monotonic() < deadline and not all(f"{updates} " in trail.read_text() for trail in trails):
        time.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kill", type=int, nargs="*", default=[])
    parser.add_argument("--at", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--check")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(7)
    model = Shaped()
    fully_shard(model, mesh=init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("copies", "shards")))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if args.check:
        import torch_watchdog_agent

        resumed = torch_watchdog_agent.restore(model=model, optimizer=optimizer, path=args.check)
        say(f"rank {rank} restored {resumed.step} {digest(model, optimizer)}")
        dist.destroy_process_group()
        return
    loader = DataLoader(Rows(None), batch_size=3, sampler=DistributedSampler(Rows(None)))
    with Path(f"trail-{rank}").open("w") as trail:
        for step, (ids, labels) in enumerate(loader):
            if step == args.steps:
                break
            if step == args.at and rank in args.kill:
                wait_for_the_others(args.at)
                os.kill(os.getpid(), signal.SIGKILL)
            nn.functional.cross_entropy(model(ids), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            trail.write(f"{step + 1} {digest(model, optimizer)}\n")
            trail.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
