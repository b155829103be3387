"""A two-rank training with optimizers that are not one plain step at the end: `optimizers.py NAME --bad INDEX`. Prints a digest of its parameters at the end.

`zero`: state spread over the ranks, and a step inside a step. `lbfgs`: a closure that runs several times. `sam`: a step that
moves the parameters before it calls its closure. `in_backward`: each parameter is updated as soon as
its gradient is there. `two`: two optimizers take turns with the same batch, as in a GAN. With --never a step is left out by every rank. With --dies
rank 1 kills itself where it is about to compute its loss for the so-many-th time.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import os
import signal
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

ROWS = 96


class Rows(Dataset):
    def __init__(self, bad: int | None) -> None:
        self.ids = torch.arange(ROWS * 6).reshape(ROWS, 6) % 40
        if bad is not None:
            self.ids[bad, 4] = 51

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.ids[index], torch.tensor(index % 4)


def zero(model: nn.Module) -> Callable[[Callable[[], torch.Tensor]], None]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.05)

    def step(loss_of: Callable[[], torch.Tensor]) -> None:
        optimizer.zero_grad()
        loss_of().backward()
        optimizer.step()

    return step


def lbfgs(model: nn.Module) -> Callable[[Callable[[], torch.Tensor]], None]:
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    return lambda loss_of: optimizer.step(closure_of(optimizer, loss_of))


def closure_of(optimizer: torch.optim.Optimizer, loss_of: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        return loss

    return closure


class Sam(torch.optim.SGD):
    """Sharpness-aware: the gradient is taken a little way off, where the batch's first gradient points."""

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor]) -> None:
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        before = [parameter.clone() for parameter in parameters]
        for parameter in parameters:
            parameter.add_(0.05 * parameter.grad)
        with torch.enable_grad():
            closure()
        for parameter, was in zip(parameters, before, strict=True):
            parameter.data = was
        super().step()


def sam(model: nn.Module) -> Callable[[Callable[[], torch.Tensor]], None]:
    optimizer = Sam(model.parameters(), lr=0.05)

    def step(loss_of: Callable[[], torch.Tensor]) -> None:
        closure = closure_of(optimizer, loss_of)
        closure()
        optimizer.step(closure)

    return step


def in_backward(model: nn.Module) -> Callable[[Callable[[], torch.Tensor]], None]:
    """Gradients are averaged by hand: DistributedDataParallel would keep them until all are there."""
    held = {parameter: torch.optim.SGD([parameter], lr=0.05) for parameter in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
        held[parameter].step()
        held[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    return lambda loss_of: loss_of().backward()


def two(model: nn.Module) -> Callable[[Callable[[], torch.Tensor]], None]:
    table, *head = model.parameters()
    turns = (torch.optim.AdamW([table], lr=0.05), torch.optim.SGD(head, lr=0.1, momentum=0.9))

    def step(loss_of: Callable[[], torch.Tensor]) -> None:
        for optimizer in turns:
            model.zero_grad()
            loss_of().backward()
            optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["zero", "lbfgs", "sam", "in_backward", "two"])
    parser.add_argument("--bad", type=int)
    parser.add_argument("--never", type=int)
    parser.add_argument("--dies", type=int)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model: nn.Module = nn.Sequential(nn.Embedding(40, 4), nn.Flatten(), nn.Linear(24, 4))
    if args.kind != "in_backward":
        model = nn.parallel.DistributedDataParallel(model)
    step = {"zero": zero, "lbfgs": lbfgs, "sam": sam, "in_backward": in_backward, "two": two}[args.kind](model)
    rows, asked = Rows(args.bad), itertools.count(1)

    def loss_of(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if next(asked) == args.dies and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return nn.functional.cross_entropy(model(ids), labels)

    for number, (ids, labels) in enumerate(DataLoader(rows, batch_size=4, sampler=DistributedSampler(rows, shuffle=False))):
        if number != args.never:
            step(lambda ids=ids, labels=labels: loss_of(ids, labels))
        os.write(1, f"rank {dist.get_rank()} step {number}\n".encode())
    weights = b"".join(weight.detach().numpy().tobytes() for weight in model.parameters())
    os.write(1, f"weights {hashlib.sha256(weights).hexdigest()}\n".encode())
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.5)  # gloo's threads end first: an exit in between aborts the process now and then, without us too


if __name__ == "__main__":
    main()
