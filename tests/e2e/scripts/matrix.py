"""One training in several forms: DDP (BatchNorm, dropout, GradScaler, scheduler), FSDP2, a tensor-parallel pair; with accumulation and evaluation, or beside an
asynchronous checkpoint.

It knows nothing of the watchdog but, with --restore, the one call that resumes. `--never` leaves out whole steps: what a skip must equal.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, SequentialSampler

VOCABULARY, LENGTH, CLASSES, BATCH = 40, 6, 4, 4


class Rows(Dataset):
    """Sample i from its own generator, so that every run sees the same data; those in `bad` get a token id past the table."""

    def __init__(self, count: int, bad: list[int]) -> None:
        self.count, self.bad = count, bad

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        rng = torch.Generator().manual_seed(index)
        ids = torch.randint(0, VOCABULARY, (LENGTH,), generator=rng)
        if index in self.bad:
            ids[4] = VOCABULARY + 11
        return {"ids": ids, "labels": torch.tensor(index % CLASSES)}


class Net(nn.Module):
    def __init__(self, normed: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 8)
        self.norm = nn.BatchNorm1d(8) if normed else nn.Identity()
        self.drop = nn.Dropout(0.3)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, CLASSES)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.drop(self.norm(self.table(ids).mean(1))))))


def say(line: str) -> None:
    """One write, so that the lines of two ranks never mix."""
    os.write(1, f"{line}\n".encode())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", default="ddp", choices=["ddp", "fsdp2", "tp"])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--micro", type=int, default=1)
    parser.add_argument("--bad", type=int, nargs="*", default=[])
    parser.add_argument("--bad-evaluation", type=int, nargs="*")
    parser.add_argument("--evaluate-first", action="store_true", help="before the first step, too, as Lightning does")
    parser.add_argument("--never", type=int, nargs="*", default=[])
    parser.add_argument("--async-save", help="folder of an asynchronous checkpoint that is begun in the second step and awaited at the end")
    parser.add_argument("--restore", action="store_true")
    parser.add_argument("--out")
    return parser.parse_args()


def spread(model: nn.Module, kind: str, world: int) -> nn.Module:
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    if kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        return fully_shard(model, mesh=mesh)
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def digest(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any) -> str:
    """Of this rank's part of everything."""
    sha = hashlib.sha256(repr(scaler.state_dict() if scaler else "").encode())
    state = [value for group in optimizer.state_dict()["state"].values() for _, value in sorted(group.items())]
    for value in [*(value for _, value in sorted(model.state_dict().items())), *state]:
        local = value.to_local() if hasattr(value, "to_local") else value
        sha.update(local.detach().contiguous().numpy().tobytes() if torch.is_tensor(local) else repr(local).encode())
    return sha.hexdigest()


def evaluate(model: nn.Module, rows: Rows) -> None:
    model.eval()
    with torch.no_grad():
        for batch in DataLoader(rows, batch_size=BATCH, sampler=DistributedSampler(rows, shuffle=False)):
            model(batch["ids"])
    model.train()


def main() -> None:
    args = arguments()
    torch.manual_seed(7)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = spread(Net(normed=args.kind == "ddp"), args.kind, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.9)
    scaler = torch.amp.GradScaler("cpu", growth_interval=2) if args.kind == "ddp" else None
    rows = Rows(args.rows, args.bad)
    sampler = SequentialSampler(rows) if args.kind == "tp" else DistributedSampler(rows, shuffle=False)
    loader = DataLoader(rows, batch_size=BATCH, sampler=sampler)
    first_epoch, step = 0, 0
    if args.restore:
        import torch_watchdog_agent

        resumed = torch_watchdog_agent.restore(model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, loader=loader)
        first_epoch, step = resumed.epoch, resumed.step
    saving, beside = None, dist.new_group(backend="gloo") if args.async_save else None  # on the training's own group the two would mix
    if args.evaluate_first:
        evaluate(model, Rows(32, args.bad_evaluation))
    for epoch in range(first_epoch, 2):
        seen = 0
        for batch in loader:
            seen += 1
            window = epoch * (len(loader) // args.micro) + (seen - 1) // args.micro
            if window in args.never:
                continue
            loss = nn.functional.cross_entropy(model(batch["ids"]), batch["labels"]) / args.micro
            (scaler.scale(loss) if scaler else loss).backward()
            say(f"rank {rank} loss {loss.item().hex()}")
            if seen % args.micro:
                continue
            if scaler:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            if step == 2 and args.async_save:
                from torch.distributed import checkpoint

                saving = checkpoint.async_save({"model": model.state_dict()}, checkpoint_id=args.async_save, process_group=beside)
        if args.bad_evaluation is not None:
            evaluate(model, Rows(32, args.bad_evaluation))
    if saving is not None:
        saving.result()
    if args.out:
        Path(args.out).mkdir(exist_ok=True, parents=True)
        (Path(args.out) / f"digest-{rank}").write_text(digest(model, optimizer, scaler))
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.5)  # gloo's threads end first: an exit in between aborts the process now and then, without us too
    say(f"rank {rank} done")


if __name__ == "__main__":
    main()
