"""A training as a user might have written it; the end-to-end tests compare its losses and parameters bit by bit.

Knows nothing of the watchdog but, with --restore, the one call that resumes. Dropout, BatchNorm, momentum, a scheduler and shuffling are there because each is
a way to lose bit-identity.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler, default_collate

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
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.norm(self.table(ids).mean(1))))


def say(line: str) -> None:
    """One write, so that the lines of two ranks never mix."""
    os.write(1, f"{line}\n".encode())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--batch", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--resident", action="store_true", help="the loader's collation moves the batch to the device")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--context")
    parser.add_argument("--bad", type=int)
    parser.add_argument("--never", type=int, help="leave out this step: the reference for a veto")
    parser.add_argument("--restore", action="store_true")
    parser.add_argument(
        "--fixed-buckets",
        action="store_true",
        help="DDP sorts its buckets anew after its first step: from three ranks on that alone makes any resumed run differ in last bits",
    )
    parser.add_argument("--out", help="folder for the final digests")
    parser.add_argument("--meet", help="folder: after step 3 rank 0 writes `here` and waits for `go`")
    parser.add_argument("--ends-by-signal", action="store_true", help="SIGTERM and SIGUSR1 end the loop after the step at hand")
    parser.add_argument("--trail", help="folder for a file a rank that says how the script ended")
    return parser.parse_args()


def begin(backend: str, *, timeout_s: float = 600.0) -> None:
    """A second attempt under a name of its own in the store: as torch does it by itself its ranks may find the addresses of the first, and hang."""
    attempt, timeout = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), datetime.timedelta(seconds=timeout_s)
    if attempt == "0":
        dist.init_process_group(backend, timeout=timeout)
        return
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world, is_master=False, timeout=timeout)
    dist.init_process_group(backend, store=dist.PrefixStore(f"attempt-{attempt}", store), rank=rank, world_size=world, timeout=timeout)


def meet(folder: Path) -> None:
    """The test does something in the middle of the run, then lets it go on."""
    (folder / "here").touch()
    deadline = time.monotonic() + 60
    while not (folder / "go").exists() and time.monotonic() < deadline:
        time.sleep(0.02)


class EndsBySignal:
    """As a careful script does it: the ranks agree on the step after which they end."""

    def __init__(self, rank: int) -> None:
        self.rank, self.got = rank, 0
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self.note)

    def note(self, number: int, frame: object) -> None:
        say(f"rank {self.rank} got signal {number}")
        self.got = 1

    def agreed(self) -> bool:
        flag = torch.tensor(self.got)
        dist.all_reduce(flag, dist.ReduceOp.MIN)
        return bool(flag)


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """All parameters, buffers and the optimizer's tensors, as bytes."""
    sha = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        sha.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
    for state in optimizer.state_dict()["state"].values():
        for name, value in sorted(state.items()):
            sha.update(name.encode() + (value.cpu().contiguous().numpy().tobytes() if torch.is_tensor(value) else repr(value).encode()))
    return sha.hexdigest()


def main() -> None:
    args = arguments()
    torch.manual_seed(7)
    torch.set_num_threads(1)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        begin("gloo" if args.device == "cpu" else "nccl")
    device = torch.device(args.device, int(os.environ.get("LOCAL_RANK", 0))) if args.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    model: nn.Module = Net().to(device)
    plain = model
    if world > 1:
        model = DistributedDataParallel(model, find_unused_parameters=args.fixed_buckets)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.9)
    rows = Rows(args.rows, args.bad)
    sampler = DistributedSampler(rows, shuffle=True) if world > 1 else RandomSampler(rows)
    collate = (lambda samples: {key: value.to(device) for key, value in default_collate(samples).items()}) if args.resident else None
    loader = DataLoader(
        rows, batch_size=args.batch, sampler=sampler, num_workers=args.workers, multiprocessing_context=args.context, collate_fn=collate
    )
    first_epoch, step, ends = 0, 0, EndsBySignal(rank) if args.ends_by_signal else None
    if args.restore:
        import torch_watchdog_agent

        resumed = torch_watchdog_agent.restore(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
        if resumed is not None:
            first_epoch, step = resumed.epoch, resumed.step
            say(f"rank {rank} resumed at {resumed.step} updates, epoch {resumed.epoch}")
    try:
        for epoch in range(first_epoch, args.epochs):
            if world > 1:
                sampler.set_epoch(epoch)
            for batch in loader:
                if step == args.never:
                    args.never = None
                    continue
                ids, labels = batch["ids"].to(device, non_blocking=True), batch["labels"].to(device, non_blocking=True)
                loss = nn.functional.cross_entropy(model(ids), labels)
                loss.backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                say(f"rank {rank} step {step} loss {loss.item().hex()}")
                step += 1
                if step == 4 and args.meet and rank == 0:
                    meet(Path(args.meet))
                if ends is not None and ends.agreed():
                    break
            if ends is not None and ends.agreed():
                break
    finally:
        if args.trail:
            with open(os.path.join(args.trail, f"finally-{rank}"), "w") as file:
                file.write(str(step))
    if args.trail:
        with open(os.path.join(args.trail, f"after-{rank}"), "w") as file:
            file.write(str(step))
    if args.out:
        os.makedirs(args.out, exist_ok=True)
        with open(os.path.join(args.out, f"digest-{rank}"), "w") as file:
            file.write(digest(plain, optimizer))
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()
        time.sleep(0.5)  # gloo's threads end first: an exit in between aborts the process now and then, without us too
    say(f"rank {rank} done")


if __name__ == "__main__":
    main()
