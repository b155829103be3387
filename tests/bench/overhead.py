"""What the watchdog costs a small training on the CPU: `watchdog --dir /tmp/runs python tests/bench/overhead.py`, one JSON line.

One watched training whose hooks are switched on and off in blocks, as gpu_step.py does it. The time is the training thread's own on the CPU, so that what
else runs on the machine counts only as far as it spoils the caches. `small`: about 3 ms a step of many little operators, as a model that is bound by its
launches; `large`: the batch is [8, 4096] ids and labels, so that looking at it takes a pass over 512 KB that the step has pushed out of the caches; `bare`:
nearly no model, so that our own code stays in the caches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from measuring import Switch, about, compared, keep
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, IterableDataset

WARM, BLOCK_STEPS = 60, 20
WORDS, WIDTH = 512, 32
SHAPES = {"small": (4, 32), "large": (8, 4096), "bare": (4, 32)}


class Layers(nn.Module):
    """`depth` little layers behind one table; with a batch that is large only every 64th of its ids goes through them."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(depth))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.table(ids)[:, :32]
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels[:, :32].flatten())


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 1)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.table(ids).sum()


class Endless(IterableDataset):
    """Made before, so that the loader costs nothing."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.made = [{key: torch.randint(0, WORDS, shape) for key in ("ids", "labels")} for _ in range(16)]

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while True:
            yield from self.made


def stepping(size: str, depth: int) -> Callable[[], None]:
    torch.manual_seed(0)
    net = Bare() if size == "bare" else Layers(depth)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    batches = iter(DataLoader(Endless(SHAPES[size]), batch_size=None))

    def step() -> None:
        batch = next(batches)
        net(batch["ids"], batch["labels"]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measured(step: Callable[[], None], rounds: int) -> dict[str, Any]:
    """Of a block its median step counts: what else runs here strikes some of them."""
    switch = Switch()
    blocks: dict[bool, list[float]] = {True: [], False: []}
    for number in range(rounds):
        for on in (True, False) if number % 2 else (False, True):
            switch.turn(on=on)
            step()  # what the switch itself brings about is not measured
            blocks[on].append(statistics.median(timed_ms(step) for _ in range(BLOCK_STEPS)))
    switch.turn(on=True)
    return compared(blocks[True], blocks[False])


def timed_ms(step: Callable[[], None]) -> float:
    began_ns = time.thread_time_ns()
    step()
    return (time.thread_time_ns() - began_ns) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--depth", type=int, default=8, help="layers of the model: 8 make about 3 ms a step")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if "torch_watchdog_agent" not in sys.modules:
        parser.error("run it watched: watchdog --dir /tmp/runs python tests/bench/overhead.py")
    torch.set_num_threads(1)
    found = about("watchdog --dir /tmp/runs python tests/bench/overhead.py")
    for size in args.sizes:
        step = stepping(size, args.depth)
        for _ in range(WARM):
            step()
        found[size] = measured(step, args.rounds)
    if args.out:
        keep(found, args.out)
    print(json.dumps({size: found[size] for size in args.sizes}))


if __name__ == "__main__":
    main()
