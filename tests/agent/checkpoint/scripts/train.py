"""A small training in every flavour that a checkpoint must carry: run straight through, with a save in the middle, or resumed.

Writes what the tests compare: the loss of every step and the final parameters, both by their bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
from pathlib import Path

import loader_position
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from torch_watchdog_agent.checkpoint import on_checkpoint, restore, save_at
from torch_watchdog_agent.checkpoint.manifest import commit
from torch_watchdog_agent.checkpoint.subjects import Subjects

EPOCHS = 2
RANK, WORLD = 0, 1

# Gloo's destructor now and then waits for a thread that waits for the GIL, with or without a checkpoint: so nothing is freed before the end.
_alive: list[object] = []


class Rows(Dataset):
    """Rows that are drawn with noise from the generators that workers and main process have."""

    def __len__(self) -> int:
        return 24 * WORLD

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.randn(8) + random.random() + float(np.random.rand())
        return torch.arange(8.0) * (index % 7) / 8 + noise / 10, torch.tensor(index % 4)


class Net(nn.Module):
    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16) if norm else nn.LayerNorm(16)
        self.drop = nn.Dropout(0.2)
        self.unused = nn.Linear(3, 3)
        self.last = nn.Linear(16, 4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(torch.relu(self.norm(self.first(rows)))))


class Outer(nn.Module):
    """What a framework wraps around the user's model."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.loss = nn.CrossEntropyLoss()


def build_model(kind: str, norm: bool) -> nn.Module:
    net = Net(norm=norm and not kind.startswith("fsdp"))
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(net, find_unused_parameters=True)
    if kind == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (WORLD,))  # without one, GPUs are taken where there are any
        fully_shard(net.first, mesh=mesh)
        return fully_shard(net, mesh=mesh)
    if kind == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(net, use_orig_params=True, device_id=torch.device("cpu"))
    return net


def build_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if name == "plain-sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05)
    if name == "lbfgs":
        return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1]},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    if name == "zero":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=0.01)
    return torch.optim.AdamW(groups, lr=0.01)


def build_loader(workers: int) -> DataLoader:
    rows = Rows()
    sampler = DistributedSampler(rows, num_replicas=WORLD, rank=RANK) if WORLD > 1 else None
    return DataLoader(rows, batch_size=4, shuffle=sampler is None, sampler=sampler, num_workers=workers)


def digest(tensors: list[torch.Tensor]) -> str:
    whole = hashlib.sha256()
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        whole.update(local.detach().contiguous().numpy().tobytes())
    return whole.hexdigest()


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    optimizer = getattr(optimizer, "optim", optimizer)  # the part of a ZeroRedundancyOptimizer that lies on this rank
    params = [param for group in optimizer.param_groups for param in group["params"]]
    entries = [value for param in params for _, value in sorted(optimizer.state.get(param, {}).items())]
    single = [item for value in entries for item in (value if isinstance(value, list) else [value])]
    return [torch.as_tensor(value) for value in single if value is not None]


def poison(tensor: torch.Tensor) -> None:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    local.view(-1)[-1] = float("nan")


def save(args: argparse.Namespace, subjects: Subjects, step: int) -> None:
    position = loader_position.position()
    path = Path(args.dir) / f"step-{step}"
    part = save_at(
        path,
        subjects,
        updates_applied=step,
        position=position,
        rng=position.rng,
        rank=RANK,
        world_size=WORLD,
        say=lambda line: print(line, file=sys.stderr),
    )
    parts = [part]
    if WORLD > 1:
        parts = [None] * WORLD
        dist.all_gather_object(parts, part)
    if RANK == 0:
        files = [{"name": file.name, "size": file.size, "sha256": file.sha256} for one in parts for file in one.files]
        finite = all(one.finite for one in parts)
        manifest = {
            "updates_applied": step,
            "step": step,
            "job": "test",
            "attempt": 0,
            "ranks": list(range(WORLD)),
            "world_size": WORLD,
            "files": files,
            "finite": finite,
            "format": part.format,
        }
        commit(path, manifest, good=finite)
    if WORLD > 1:
        dist.barrier()


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", default="plain")
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--scaler", action="store_true")
    parser.add_argument("--outer", action="store_true")
    parser.add_argument("--callback", action="store_true")
    parser.add_argument("--no-norm", action="store_true")
    parser.add_argument("--no-loader", action="store_true")
    parser.add_argument("--nan", action="store_true")
    parser.add_argument("--save-after", type=int, nargs="*", default=())
    parser.add_argument("--stop-after", type=int, default=10**6)
    parser.add_argument("--dir")
    parser.add_argument("--resume")
    parser.add_argument("--out", required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--store")
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    global RANK, WORLD
    args = parse(argv)
    RANK, WORLD = args.rank, args.world
    torch.set_num_threads(1)
    if WORLD > 1:
        dist.init_process_group("gloo", init_method=f"file://{args.store}", rank=RANK, world_size=WORLD)
    seed = 7 if not args.resume else 99  # a resumed run must not depend on its own seed
    torch.manual_seed(seed + RANK if args.kind == "apart" else seed)
    random.seed(seed)
    np.random.seed(seed)
    model = build_model(args.kind, not args.no_norm)
    outer = Outer(model) if args.outer and not args.resume else None
    optimizer = build_optimizer(args.optimizer, model)
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5])],
        milestones=[3],
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3, enabled=args.scaler)
    loader = build_loader(args.workers)
    subjects = Subjects()
    subjects.optimizer_seen(optimizer)
    for seen in (*scheduler._schedulers, scheduler):
        subjects.scheduler_seen(seen)
    subjects.scaler_seen(scaler)
    if args.kind in ("ddp", "fsdp1"):
        subjects.model_seen(model)
    if args.callback:
        on_checkpoint(lambda folder: (folder / f"mine-{RANK}.txt").write_text("mine") and None)
    run(args, model, optimizer, scheduler, scaler, loader, subjects)
    _alive.extend((outer, model, optimizer))
    if WORLD > 1:
        dist.barrier()


def run(args, model, optimizer, scheduler, scaler, loader, subjects) -> None:
    start, step, losses = 0, 0, {}
    if args.resume:
        resumed = restore(
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            scaler=scaler,
            loader=None if args.no_loader else loader,
            path=args.resume,
        )
        start, step = resumed.epoch, resumed.step
    if step in args.save_after:
        save(args, subjects, step)
    for epoch in range(start, EPOCHS):
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        for rows, labels in loader_position.counted(loader, epoch):
            if step >= args.stop_after:
                break

            def closure(rows=rows, labels=labels):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(rows), labels)
                scaler.scale(loss).backward()
                return loss

            if args.optimizer == "lbfgs":
                loss = optimizer.step(closure)
            else:
                loss = closure()
                scaler.step(optimizer)
                scaler.update()
            scheduler.step()
            losses[step] = loss.detach().numpy().tobytes().hex()
            step += 1
            if args.nan and RANK == WORLD - 1 and step in args.save_after:
                poison(next(model.parameters()).detach())
            if step in args.save_after:
                save(args, subjects, step)
    state = [*model.parameters(), *model.buffers(), *optimizer_tensors(optimizer)]
    result = {
        "losses": losses,
        "state": digest(state),
        "lr": [g["lr"] for g in optimizer.param_groups],
        "scale": scaler.state_dict(),
        "draw": [random.random(), float(np.random.rand()), float(torch.rand(()))],
    }
    Path(f"{args.out}.{RANK}.json").write_text(json.dumps(result))
