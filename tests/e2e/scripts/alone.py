"""A training of one process that fails in a given way: nothing of it is left to save but what it holds itself.

Knows nothing of the watchdog but, with --restore, the one call that resumes.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler
from train import Net, Rows, digest, say


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bad", type=int, help="a sample with a token id past the table, which the loop reads before the model does")
    parser.add_argument(
        "--fails", default="", choices=["", "forward", "backward", "step", "before-scheduler", "by-hand", "after", "accumulated", "exit"]
    )
    parser.add_argument("--restore", action="store_true")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.manual_seed(7)
    torch.set_num_threads(1)
    rows = Rows(48, args.bad)
    loader = DataLoader(rows, batch_size=3, sampler=RandomSampler(rows))
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.9)
    step = first_epoch = 0
    if args.restore:
        import torch_watchdog_agent

        resumed = torch_watchdog_agent.restore(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
        if resumed is not None:
            step, first_epoch = resumed.step, resumed.epoch
            say(f"resumed at {step}")

    def fails(where: str, *_: object) -> None:
        if args.fails == where and step == 5:
            if where == "exit":
                sys.exit(3)
            raise ValueError("a fault of the script's own")

    optimizer.register_step_post_hook(lambda *_: fails("step"))
    model.drop.register_forward_hook(lambda *_: fails("forward"))  # behind the BatchNorm, whose buffers have changed by then
    for _ in range(first_epoch, 2):
        micro = 0
        for batch in loader:
            if batch["ids"].max().item() < 0:
                continue
            loss = nn.functional.cross_entropy(model(batch["ids"]), batch["labels"])
            loss.backward()
            fails("backward")
            if args.fails == "by-hand" and step == 5:
                with torch.no_grad():
                    model.head.weight.add_(1.0)
            fails("by-hand")
            micro += 1
            if micro % 2:
                continue
            fails("accumulated")
            fails("exit")
            optimizer.step()
            fails("before-scheduler")
            scheduler.step()
            optimizer.zero_grad()
            fails("after")
            step += 1
            say(f"step {step} loss {loss.item().hex()} {digest(model, optimizer)}")
    say("done")


if __name__ == "__main__":
    main()
