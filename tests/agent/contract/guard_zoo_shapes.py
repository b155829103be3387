"""Families that the sweep over transformers brought up: inputs padded inside the model, written in place, and tables that grow. They join guard_zoo's."""

from __future__ import annotations

import random

import torch
from guard_zoo import Batch, Family, family, ids, put
from torch import nn
from torch.nn import functional as F  # noqa: N812

WINDOW = 8


def tokens() -> Batch:
    return {"x": ids(20, random.choice([4, 4, 2, 1]), random.randint(3, 19), low=2)}


def step(model: nn.Module, batch: Batch) -> None:
    model(batch["x"]).sum().backward()


class PaddedInside(nn.Module):
    """Longformer's way: up to a multiple of the window, which no size of the batch tells."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(F.pad(x, (0, -x.shape[1] % WINDOW), value=1))


@family
def padded_inside() -> Family:
    return Family("padded_inside", PaddedInside(), tokens, step, [put("x", 20), put("x", -1)])


class InPlace(nn.Module):
    """FSMT's way: the model writes to the batch's own tensor before it looks it up."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.masked_fill_(x == 2, 1)
        return self.table(x)


@family
def written_in_place() -> Family:
    return Family("written_in_place", InPlace(), tokens, step, [put("x", 20), put("x", -1)])


class Growing(nn.Module):
    """M2M100's way: the table of positions, a buffer, is made longer when a longer batch comes."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.padding = nn.Embedding(20, 8), 1
        self.register_buffer("places", torch.randn(10, 8), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        longest = self.padding + 1 + x.shape[1]
        if longest > len(self.places):
            self.places = torch.randn(longest, 8)
        mask = (x != self.padding).int()
        positions = (mask.cumsum(1) * mask).long() + self.padding
        return self.table(x) + self.places.index_select(0, positions.view(-1)).view(*x.shape, 8)


@family
def growing_positions() -> Family:
    shorter = [0]

    def clean() -> Batch:
        shorter[0] += 1
        return {"x": ids(20, 4, random.randint(3, 6) if shorter[0] <= 12 else random.randint(3, 12), low=2)}

    return Family("growing_positions", Growing(), clean, step, [put("x", 20)])


SHAPED = {"padded_inside", "written_in_place", "growing_positions"}
