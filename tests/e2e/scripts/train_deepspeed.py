"""A plain DeepSpeed loop on CPUs as a user might have written it; --load and --restore are its two ways to resume.

Two parameter groups, dropout and a scheduler are there because each is a way to lose bit-identity.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

VOCABULARY, LENGTH, CLASSES = 40, 6, 3


class Rows(Dataset):
    """Sample i from its own generator, so that every run sees the same data; `bad` gets a token id past the table."""

    def __init__(self, count: int, bad: int | None) -> None:
        self.count, self.bad = count, bad

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        rng = torch.Generator().manual_seed(index)
        ids = torch.randint(0, VOCABULARY, (LENGTH,), generator=rng)
        if index == self.bad:
            ids[4] = VOCABULARY + 11
        return {"ids": ids, "labels": torch.tensor(index % CLASSES)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 8)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.table(ids).mean(1)))


def say(line: str) -> None:
    """One write, so that the lines of two ranks never mix."""
    os.write(1, f"{line}\n".encode())


def digest(engine: Any) -> str:
    base = engine.optimizer.optimizer if hasattr(engine.optimizer, "optimizer") else engine.optimizer
    kept = [value for state in base.state.values() for value in state.values()]
    sha = hashlib.sha256()
    for tensor in [*engine.module.state_dict().values(), *kept]:
        sha.update(torch.as_tensor(tensor).contiguous().numpy().tobytes())
    return sha.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--bad", type=int)
    parser.add_argument("--never", type=int)
    parser.add_argument("--load")
    parser.add_argument("--restore", action="store_true")
    parser.add_argument("--out")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(7)
    deepspeed.init_distributed(dist_backend="gloo")
    rank = dist.get_rank()
    model = Net()
    optimizer = torch.optim.AdamW([{"params": model.table.parameters(), "lr": 0.1}, {"params": model.head.parameters(), "lr": 0.05}])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.9)
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": args.stage}, "zero_allow_untested_optimizer": True}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)
    rows = Rows(48, args.bad)
    loader = DataLoader(rows, batch_size=4, sampler=DistributedSampler(rows, shuffle=False))
    step = 0
    if args.load or args.restore:
        import torch_watchdog_agent

        if args.load:
            engine.load_checkpoint(args.load)
        resumed = torch_watchdog_agent.restore(model=None if args.load else engine, loader=loader, path=args.load)
        step = resumed.step
        say(f"rank {rank} resumed, DeepSpeed says {engine.global_steps}")
    for batch in loader:
        if step == args.never:
            args.never = None
            continue
        loss = nn.functional.cross_entropy(engine(batch["ids"]), batch["labels"])
        engine.backward(loss)
        engine.step()
        say(f"rank {rank} step {step} loss {loss.item().hex()}")
        step += 1
    if args.out:
        Path(args.out).mkdir(exist_ok=True)
        (Path(args.out) / f"digest-{rank}").write_text(digest(engine))
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.5)  # gloo's threads end first: an exit in between aborts the process now and then, without us too


if __name__ == "__main__":
    main()
