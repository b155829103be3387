"""A training in which one rank fails in a given way; each rank writes what its state was after every update.

Knows nothing of the watchdog. With --check it loads a checkpoint into the same model and prints its digest, in the words of the training.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from train import CLASSES, Net, begin, digest, say

BATCH = 3


class Rows(Dataset):
    """Sample i from its own generator, so that every run sees the same data. `stall`: after so many samples there comes no other.

    `bad`: the sample with a token past the table.
    """

    def __init__(self, stall: int | None) -> None:
        self.stall, self.bad = stall, -1
        self.given = 0

    def __len__(self) -> int:
        return 240

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.given == self.stall:
            time.sleep(3600)
        self.given += 1
        rng = torch.Generator().manual_seed(index)
        ids = torch.randint(0, 40, (6,), generator=rng)
        if index == self.bad:
            ids[2] = 77
        return ids, torch.tensor(index % CLASSES)


class Shaped(nn.Module):
    """The net of the other tests, fed with one tensor."""

    def __init__(self, *, buffers: bool = True) -> None:
        super().__init__()
        self.net = Net()
        if not buffers:
            self.net.norm = nn.Identity()  # type: ignore[assignment]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.net(ids)


def fail(how: str) -> None:
    if how == "raise":
        say(f"rank {dist.get_rank()} raises {time.time_ns()}")
        raise ValueError("a fault of the script's own")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit3":
        sys.exit(3)
    if how == "exit3-now":
        os._exit(3)
    if how == "segv":
        ctypes.string_at(0)
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    while how == "loop":
        pass
    if how == "sleep":
        time.sleep(3600)
    if how == "native":
        ctypes.PyDLL(None).pause()  # and keeps the interpreter's lock
    if how == "barrier":
        dist.barrier()


def batches(loader: DataLoader, first_epoch: int, behind: Callable[[], None]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for epoch in range(first_epoch, 100):
        loader.sampler.set_epoch(epoch)
        yield from loader
        behind()


def evaluate(model: nn.Module, loader: DataLoader, fault: str) -> None:
    """On the data of the training, as for its accuracy there."""
    model.eval()
    with torch.no_grad():
        for number, (ids, labels) in enumerate(loader):
            print(f"rank {dist.get_rank()} fault {time.time():.3f}", flush=True)
            if number == 2 and fault:
                fail(fault)
            dist.all_reduce(nn.functional.cross_entropy(model(ids), labels))
    model.train()


def wait_elsewhere(how: str, group: object) -> None:
    """Where the healthy ranks wait, besides a gradient's collective."""
    if how == "barrier":
        dist.barrier()
    elif how == "all_reduce":
        dist.all_reduce(torch.ones(1))
    elif how == "group":
        dist.barrier(group=group)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", default="")
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--at", type=int, default=5)
    parser.add_argument("--both", action="store_true", help="all ranks fail")
    parser.add_argument("--bad", action="store_true", help="another rank's batch of that step holds a token past the table")
    parser.add_argument("--place", default="forward", choices=["forward", "after", "step", "evaluation"])
    parser.add_argument("--wait", default="", choices=["", "barrier", "all_reduce", "group"])
    parser.add_argument("--freeze", action="store_true", help="the other ranks stop, so that nothing can be asked of them")
    parser.add_argument("--teardown", type=float, default=None, help="destroy the process group in a finally, after so many seconds")
    parser.add_argument("--answer", default="", choices=["", "return", "exit-now"], help="what the others do over the error that they get")
    parser.add_argument("--thread", action="store_true", help="with a thread that never ends, as a tracker's")
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument(
        "--no-buffers", action="store_true", help="the ranks meet in backward first, not in the forward that shares the buffers"
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--fewer", type=int, default=0, help="the failing rank has so many steps less")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--attempts", type=int, default=1, help="fail only in attempts before this one")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds a step")
    parser.add_argument("--timeout", type=float, default=600.0, help="of the process group")
    parser.add_argument("--restore", action="store_true")
    parser.add_argument("--check")
    return parser.parse_args()


def build(args: argparse.Namespace) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(7)
    plain = Shaped(buffers=not args.no_buffers)
    model: nn.Module = plain
    if args.fsdp:
        from torch.distributed._composable.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))  # without one, GPUs are taken where there are any
    elif dist.is_initialized():
        model = DistributedDataParallel(plain)
    return plain, model, torch.optim.Adam(model.parameters(), lr=0.01)


def check(args: argparse.Namespace) -> None:
    import torch_watchdog_agent

    plain, _, optimizer = build(args)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.9)
    resumed = torch_watchdog_agent.restore(model=plain, optimizer=optimizer, scheduler=scheduler, path=args.check)
    print(resumed.step, digest(plain, optimizer), scheduler.last_epoch)


def train(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    begin("gloo", timeout_s=args.timeout)
    if args.thread:
        threading.Thread(target=threading.Event().wait).start()
    rank = dist.get_rank()
    plain, model, optimizer = build(args)
    other = dist.new_group([0, 1]) if args.wait == "group" else None
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.9)
    stalls = args.fault == "loader" and rank == args.rank
    rows = Rows(BATCH * args.at if stalls else None)
    if args.bad:
        other_rank = 1 - args.rank
        rows.bad = list(DistributedSampler(rows, rank=other_rank))[BATCH * args.at]
    loader = DataLoader(rows, batch_size=BATCH, sampler=DistributedSampler(rows), num_workers=args.workers)
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    done, first_epoch = 0, 0
    if args.restore:
        import torch_watchdog_agent

        resumed = torch_watchdog_agent.restore(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
        if resumed is not None:
            done, first_epoch = resumed.step, resumed.epoch
            say(f"rank {rank} resumed {done} {digest(plain, optimizer)} {scheduler.last_epoch}")
    failing = args.fault and (rank == args.rank or args.both) and attempt + 1 <= args.attempts
    steps = args.steps - (args.fewer if rank == args.rank else 0)
    if args.place == "step" and failing:
        theirs, count = optimizer.step, iter(range(10**9))
        optimizer.step = lambda: (fail(args.fault) if next(count) == args.at else None, theirs())  # type: ignore[method-assign]

    def behind() -> None:
        if args.place == "evaluation":
            evaluate(plain, loader, args.fault if failing else "")

    trail = Path(f"trail-{attempt}-{rank}").open("w")  # noqa: SIM115 - as long as the process lives
    try:
        for step, (ids, labels) in enumerate(batches(loader, first_epoch, behind), start=done):
            if step == steps:
                break
            if step == args.at - stalls:
                print(f"rank {rank} fault {time.time():.3f}", flush=True)
            if args.freeze and rank != args.rank and step == args.at:
                fail("stop")
            if failing and step == args.at and args.place == "forward":
                if args.both:
                    dist.barrier()  # at the same moment, so that none can be rescued from the other's failure
                if args.fault == "leave":
                    break
                for _ in range(3 if args.fault == "repeat" else 0):  # in vain: the others take what it sends for their next steps
                    nn.functional.cross_entropy(model(ids), labels).backward()
                fail("raise" if args.fault == "repeat" else args.fault)
            loss = nn.functional.cross_entropy(model(ids), labels)
            loss.backward()
            optimizer.step()
            if failing and step == args.at and args.place == "after":
                fail(args.fault)
            scheduler.step()
            optimizer.zero_grad()
            if not args.fsdp:
                trail.write(f"{step + 1} {digest(plain, optimizer)} {scheduler.last_epoch}\n")
                trail.flush()
            wait_elsewhere(args.wait, other)
            time.sleep(args.pause)
    except BaseException:
        print(f"rank {rank} free {time.time():.3f}", flush=True)
        raise
    finally:
        if args.teardown is not None:
            if rank == args.rank:
                time.sleep(args.teardown)
            dist.destroy_process_group()
    say(f"rank {rank} done {step}")
    if args.teardown is None:
        dist.barrier()
        dist.destroy_process_group()
        time.sleep(0.5)


def answering(args: argparse.Namespace) -> None:
    try:
        train(args)
    except RuntimeError:
        if not args.answer:
            raise
        if args.answer == "exit-now":
            os._exit(1)


@record
def recorded(args: argparse.Namespace) -> None:
    train(args)


if __name__ == "__main__":
    given = arguments()
    if given.check:
        check(given)
    elif os.environ.get("RECORD"):
        recorded(given)
    else:
        answering(given)
