"""A training on GPUs in which one rank fails in a given way. Knows nothing of the watchdog.

Deterministic, so that a run without the fault tells what the state was after each update; with --check it prints that of a checkpoint.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
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
from torch.utils.data import DataLoader, Dataset, DistributedSampler

ROWS, LENGTH, CLASSES, WIDTH = 512, 32, 10, 256
SLOW_ROW_S = 0.03  # sixteen of them are a batch


class Rows(Dataset):
    """`seconds` is what a row takes at most, another part of it for each."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.seconds:
            time.sleep(self.seconds * (index % 97) / 97)
        rng = torch.Generator().manual_seed(index)
        return torch.randint(0, ROWS, (LENGTH,), generator=rng), torch.tensor(index % CLASSES)


class Net(nn.Module):
    def __init__(self, num_layers: int, *, buffers: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)
        last = nn.BatchNorm1d if buffers else nn.Identity
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH), last(WIDTH)) for _ in range(num_layers)]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.table(ids).mean(1)))


def digest(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LRScheduler) -> str:
    """Of parameters, buffers, the optimizer's state and learning rate, and the scheduler's place."""
    sha = hashlib.sha256(repr((scheduler.last_epoch, [group["lr"] for group in optimizer.param_groups])).encode())
    for entries in (model.state_dict(), *optimizer.state_dict()["state"].values()):
        for name, value in sorted(entries.items()):
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            sha.update(name.encode() + whole.detach().cpu().contiguous().numpy().tobytes())
    return sha.hexdigest()


def fail(how: str, device: torch.device) -> None:
    """What fails on the device does so when the device comes to it."""
    if how == "raise":
        raise ValueError("a fault of the script's own")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit3":
        sys.exit(3)
    if how == "segv":
        ctypes.string_at(0)
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    while how == "loop":
        pass
    wrong = torch.tensor([ROWS + 7], device=device)
    if how == "embedding":
        nn.functional.embedding(wrong, torch.zeros(ROWS, 8, device=device))
    if how == "label":
        nn.functional.cross_entropy(torch.zeros(8, CLASSES, device=device), torch.full((8,), CLASSES, device=device))
    if how == "gather":
        torch.zeros(8, 5, device=device).gather(1, wrong[:, None])
    if how == "bce":
        nn.functional.binary_cross_entropy(torch.full((4,), 1.5, device=device), torch.ones(4, device=device))


def build(
    args: argparse.Namespace, device: torch.device
) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(7)
    plain = Net(150 if args.model == "deep" else 8, buffers=args.model == "bn").to(device)
    model: nn.Module = plain
    if args.model in ("fsdp2", "hsdp") and dist.is_initialized():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        ranks = dist.get_world_size()
        shape, names = ((2, ranks // 2), ("copies", "shards")) if args.model == "hsdp" else ((ranks,), ("shards",))
        mesh = init_device_mesh("cuda", shape, mesh_dim_names=names)
        for layer in plain.body:
            fully_shard(layer, mesh=mesh)
        fully_shard(plain, mesh=mesh)
    elif dist.is_initialized():
        model = DistributedDataParallel(plain, device_ids=[device.index])
    kind = {"foreach": args.optimizer == "foreach", "fused": args.optimizer == "fused"}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **kind)
    return plain, model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def check(args: argparse.Namespace) -> None:
    import torch_watchdog_agent

    plain, _, optimizer, scheduler = build(args, torch.device("cuda", 0))
    resumed = torch_watchdog_agent.restore(model=plain, optimizer=optimizer, scheduler=scheduler, path=args.check)
    is_in_place = resumed.batches == resumed.step  # one batch a step, in the first pass
    print("checked", resumed.step, digest(plain, optimizer, scheduler) if is_in_place else f"at_batch_{resumed.batches}")


def train(args: argparse.Namespace) -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=args.timeout))
    rank = dist.get_rank()
    plain, model, optimizer, scheduler = build(args, device)
    rows = Rows(SLOW_ROW_S if args.model == "slow" and rank == 0 else 0.0)
    loader = DataLoader(rows, batch_size=16, sampler=DistributedSampler(rows))
    trail = Path(f"trail-{rank}").open("w") if args.trail else None  # noqa: SIM115 - as long as the process lives
    for step, (ids, labels) in enumerate(loader):
        if step == args.steps:
            break
        if step == args.at and args.fault:
            print(f"rank {rank} fault {time.time():.3f}", flush=True)
            if rank == 1:
                fail(args.fault, device)
        loss = nn.functional.cross_entropy(model(ids.to(device, non_blocking=True)), labels.to(device, non_blocking=True))
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if args.sync:
            loss.item()
        if trail is not None:
            trail.write(f"{step + 1} {digest(plain, optimizer, scheduler)}\n")
            trail.flush()
    torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", default="")
    parser.add_argument("--at", type=int, default=30)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--model", default="ddp", choices=["ddp", "bn", "deep", "slow", "fsdp2", "hsdp"])
    parser.add_argument("--optimizer", default="foreach", choices=["foreach", "fused"])
    parser.add_argument("--sync", action="store_true")
    parser.add_argument("--trail", action="store_true")
    parser.add_argument("--timeout", type=float, default=600.0)
    parser.add_argument("--check")
    return parser.parse_args()


if __name__ == "__main__":
    given = arguments()
    check(given) if given.check else train(given)
