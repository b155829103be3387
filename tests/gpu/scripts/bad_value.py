"""A training of a few steps in which one value of one batch is more than its operator takes. The user's side: knows nothing of the watchdog.

`--resident`: the loader's collation moves the batch to the device; else the loop does. Prints whether the CUDA context works at the end.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, default_collate

STEPS, FIRST = 9, 0
Batch = dict[str, torch.Tensor]
Change = tuple[str, tuple[int, ...], float]


@dataclass(frozen=True)
class Kind:
    """`sample(rng)` makes one sample; `bad` is (tensor, place in the batch, value); `loss(net, batch)` uses the batch."""

    rows: int
    sample: Callable[[torch.Generator], Batch]
    bad: Change
    loss: Callable[[Any, Batch], torch.Tensor]


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.table, self.wide = nn.Embedding(100, 8), nn.Embedding(100, width)
        self.bag = nn.EmbeddingBag(100, 8)
        self.grid = nn.Parameter(torch.rand(8, 5))
        self.classes = nn.Linear(4, 5)
        self.frames = nn.Parameter(torch.rand(50, 2, 20))


def whole(high: int, *shape: int, key: str = "i", low: int = 0) -> Callable[[torch.Generator], Batch]:
    return lambda rng: {key: torch.randint(low, high, shape, generator=rng)}


def labelled(high: int, *shape: int, features: tuple[int, ...]) -> Callable[[torch.Generator], Batch]:
    return lambda rng: {"x": torch.rand(features, generator=rng), "y": torch.randint(0, high, shape, generator=rng)}


def floats(*shape: int, key: str = "p") -> Callable[[torch.Generator], Batch]:
    return lambda rng: {key: torch.rand(shape, generator=rng) * 0.8 + 0.1}


def scores_and_targets(rng: torch.Generator) -> Batch:
    return {"p": torch.rand((), generator=rng), "t": torch.randint(0, 2, (), generator=rng).float()}


def transcripts(rng: torch.Generator) -> Batch:
    return {"y": torch.randint(1, 20, (6,), generator=rng), "frames": torch.tensor(50), "length": torch.tensor(6)}


def seconds(rng: torch.Generator) -> Batch:
    return {"t": torch.randint(0, 100, (), generator=rng).float()}


def written(net: Net, b: Batch) -> torch.Tensor:
    grid = net.grid * 1.0
    grid[b["i"]] = 0
    return grid.sum()


def hot(net: Net, b: Batch) -> torch.Tensor:
    return (F.one_hot(b["i"], 5).float() * net.grid[0]).sum()


def ctc(net: Net, b: Batch) -> torch.Tensor:
    return F.ctc_loss(net.frames.log_softmax(-1), b["y"], b["frames"], b["length"])


def drawn(net: Net, b: Batch) -> torch.Tensor:
    return net.table(torch.multinomial(b["p"], 1)).sum()


KINDS: dict[str, Kind] = {
    "embedding": Kind(4, whole(100, 6), ("i", (2, 3), 100), lambda net, b: net.table(b["i"]).sum()),
    "embedding_neg": Kind(4, whole(100, 6), ("i", (2, 3), -1), lambda net, b: net.table(b["i"]).sum()),
    "embedding_large": Kind(64, whole(100, 512), ("i", (20, 300), 100), lambda net, b: net.wide(b["i"]).detach().sum() + net.grid.sum()),
    "embedding_bwd": Kind(64, whole(100, 512), ("i", (20, 300), 100), lambda net, b: net.wide(b["i"]).sum()),
    "embedding_bag": Kind(4, whole(100, 6), ("i", (2, 3), 100), lambda net, b: net.bag(b["i"]).sum()),
    "ce_label": Kind(8, labelled(5, features=(4,)), ("y", (5,), 5), lambda net, b: F.cross_entropy(net.classes(b["x"]), b["y"])),
    "ce_label_neg": Kind(8, labelled(5, features=(4,)), ("y", (5,), -1), lambda net, b: F.cross_entropy(net.classes(b["x"]), b["y"])),
    "ce_2d": Kind(
        2,
        labelled(5, 16, 16, features=(5, 16, 16)),
        ("y", (1, 3, 4), 255),
        lambda net, b: F.cross_entropy(b["x"] * net.grid.mean(), b["y"]),
    ),
    "gather": Kind(8, whole(5, 1), ("i", (3, 0), 7), lambda net, b: net.grid.gather(1, b["i"]).sum()),
    "scatter": Kind(8, whole(5, 1), ("i", (3, 0), 7), lambda net, b: ((net.grid * 1.0).scatter_(1, b["i"], 1.0)).sum()),
    "index": Kind(2, whole(8), ("i", (1,), 9), lambda net, b: net.grid[b["i"]].sum()),
    "index_put": Kind(2, whole(8), ("i", (1,), 9), written),
    "index_select": Kind(2, whole(8), ("i", (1,), 9), lambda net, b: net.grid.index_select(0, b["i"]).sum()),
    "index_add": Kind(2, whole(8), ("i", (1,), 9), lambda net, b: (net.grid * 1.0).index_add_(0, b["i"], net.grid[:2]).sum()),
    "take": Kind(2, whole(40), ("i", (1,), 99), lambda net, b: net.grid.take(b["i"]).sum()),
    "one_hot": Kind(2, whole(5), ("i", (1,), 7), hot),
    "one_hot_neg": Kind(2, whole(5), ("i", (1,), -100), hot),
    "bce": Kind(2, scores_and_targets, ("p", (1,), 1.5), lambda net, b: F.binary_cross_entropy(b["p"], b["t"]) * net.grid.mean()),
    "bce_target": Kind(
        2, scores_and_targets, ("t", (1,), 2.0), lambda net, b: F.binary_cross_entropy((b["p"] * net.grid.mean()).sigmoid(), b["t"])
    ),
    "multinomial_nan": Kind(1, floats(3), ("p", (0, 1), float("nan")), drawn),
    "multinomial_neg": Kind(1, floats(3), ("p", (0, 1), -1.0), drawn),
    "ctc": Kind(2, transcripts, ("y", (0, 3), 25), ctc),
    "nan_to_int": Kind(2, seconds, ("t", (1,), float("nan")), lambda net, b: net.table(b["t"].long()).sum()),
    "bincount": Kind(2, whole(8), ("i", (1,), -1), lambda net, b: torch.bincount(b["i"], minlength=8).float() @ net.grid.sum(1)),
}


def samples(kind: Kind, bad_step: int) -> list[Batch]:
    rng = torch.Generator().manual_seed(0)
    rows = [kind.sample(rng) for _ in range(kind.rows * STEPS)]
    key, (row, *place), value = kind.bad
    sample = rows[bad_step * kind.rows + row]
    sample[key] = sample[key].clone()
    sample[key][tuple(place)] = value
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--resident", action="store_true")
    parser.add_argument("--bad-step", type=int, default=6)
    args = parser.parse_args()
    kind = KINDS[args.kind]
    torch.manual_seed(0)
    net = Net(768).to(args.device)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def moved(batch: Batch) -> Batch:
        return {key: tensor.to(args.device) for key, tensor in batch.items()}

    collate = (lambda rows: moved(default_collate(rows))) if args.resident else default_collate
    try:
        for batch in DataLoader(samples(kind, args.bad_step), batch_size=kind.rows, collate_fn=collate):
            kind.loss(net, batch if args.resident else moved(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
        print("trained to the end", flush=True)
    finally:
        print("context", "works" if float(torch.ones(4, device=args.device).sum()) == 4.0 else "is wrong", flush=True)


if __name__ == "__main__":
    main()
