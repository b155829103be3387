"""Families whose tensors must agree in number: bags with their last end, ragged rows, placeholders against features. They join guard_zoo's."""

from __future__ import annotations

import random

import torch
from guard_zoo import Bad, Batch, Family, family, ids, put, put_at
from torch import nn
from torch.nn import functional as F  # noqa: N812

IMAGE, PATCHES = 29, 3


class EndedBags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(40, 8, mode="sum", include_last_offset=True), nn.Linear(8, 3)

    def forward(self, values: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return self.head(self.bag(values, ends))


@family
def bags_with_ends() -> Family:
    def clean() -> Batch:
        rows = random.choice([6, 6, 2])
        counts = torch.randint(0, 5, (rows,))
        counts[0] = 3
        ends = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)])
        return {"values": ids(40, int(counts.sum())), "ends": ends, "y": ids(3, rows)}

    def step(model: nn.Module, batch: Batch) -> None:
        F.cross_entropy(model(batch["values"], batch["ends"]), batch["y"]).backward()

    bad = [put("values", 40), put_at("ends", 0, 1), put_at("ends", -1, 999), put_at("ends", -1, 1), put("y", 3)]
    return Family("bags_with_ends", EndedBags(), clean, step, bad)


class Ragged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(30, 8), nn.Linear(8, 1)

    def forward(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        rows = torch.split(self.table(tokens), lengths.tolist())
        return self.head(torch.stack([row.mean(0) for row in rows]))


@family
def ragged() -> Family:
    def clean() -> Batch:
        lengths = torch.randint(1, 6, (random.choice([5, 5, 3]),))
        return {"tokens": ids(30, int(lengths.sum())), "lengths": lengths}

    def step(model: nn.Module, batch: Batch) -> None:
        model(batch["tokens"], batch["lengths"]).sum().backward()

    def longer(batch: Batch) -> Batch:
        batch["lengths"][1] += 2
        return batch

    return Family("ragged", Ragged(), clean, step, [put("tokens", 30), Bad("lengths", longer)])


class Placeholders(nn.Module):
    """Image features take the places of image tokens. `how`: by masked_scatter with the check that libraries make, or by x[mask] = features."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.table, self.image, self.head, self.how = nn.Embedding(30, 8), nn.Linear(4, 8 * PATCHES), nn.Linear(8, 30), how

    def forward(self, tokens: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
        words, features = self.table(tokens), self.image(pixels).reshape(-1, 8)
        here = tokens == IMAGE
        if self.how == "put":
            words = words.clone()
            words[here] = features
            return self.head(words)
        mask = here.unsqueeze(-1).expand_as(words)
        if self.how == "checked" and words[mask].numel() != features.numel():
            raise ValueError(f"image features and image tokens do not match, tokens: {int(here.sum())}, features: {len(features)}")
        return self.head(words.masked_scatter(mask, features))


def placeholders(how: str) -> Family:
    def clean() -> Batch:
        rows, length = random.choice([4, 4, 1, 2, 3]), random.randint(8, 14)
        tokens, images = ids(IMAGE, rows, length), 0
        for row in tokens:
            count = random.choice([0, 1, 1, 2])
            row[1 : 1 + count * PATCHES] = IMAGE
            images += count
        if not images:
            tokens[0, 1 : 1 + PATCHES] = IMAGE
        return {"tokens": tokens, "pixels": torch.randn(max(1, images), 4)}

    def step(model: nn.Module, batch: Batch) -> None:
        model(batch["tokens"], batch["pixels"]).sum().backward()

    def one_more(batch: Batch) -> Batch:
        batch["tokens"][-1, -1] = IMAGE
        return batch

    def cut(batch: Batch) -> Batch:
        batch["tokens"][(batch["tokens"] == IMAGE).nonzero()[0].unbind()] = 1
        return batch

    bad = [put("tokens", 30), Bad("tokens", one_more)] + ([Bad("tokens", cut)] if how != "scattered" else [])
    return Family(f"placeholders_{how}", Placeholders(how), clean, step, bad)


@family
def placeholders_checked() -> Family:
    return placeholders("checked")


@family
def placeholders_scattered() -> Family:
    return placeholders("scattered")


@family
def placeholders_put() -> Family:
    return placeholders("put")


class Masked(nn.Module):
    """`x[mask] = f(x[mask])`: the counts agree by themselves, whatever the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        made = x.clone()
        made[mask] = self.head(x[mask])
        return made


@family
def masked_in_place() -> Family:
    def clean() -> Batch:
        rows, length = random.choice([4, 4, 2]), random.randint(3, 9)
        return {"x": torch.randn(rows, length, 4), "mask": torch.rand(rows, length) > 0.4, "kind": ids(7, rows)}

    def step(model: nn.Module, batch: Batch) -> None:
        (model(batch["x"], batch["mask"]).sum() * F.one_hot(batch["kind"], 7).sum()).backward()

    return Family("masked_in_place", Masked(), clean, step, [put("kind", 7)])


class Clipped(nn.Module):
    """A buffer that is shorter than some batches, on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 1)
        self.register_buffer("scale", torch.rand(6))

    def forward(self, x: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
        near = x[:, :6]
        return self.head(near * self.scale[: x.shape[1]].unsqueeze(-1)).sum() * F.one_hot(kind, 7).sum()


@family
def clipped_on_purpose() -> Family:
    def clean() -> Batch:
        rows, length = random.choice([4, 4, 2]), random.randint(3, 9)
        return {"x": torch.randn(rows, length, 4), "kind": ids(7, rows)}

    def step(model: nn.Module, batch: Batch) -> None:
        model(batch["x"], batch["kind"]).backward()

    return Family("clipped_on_purpose", Clipped(), clean, step, [put("kind", 7)])


COUNTED = {
    "bags_with_ends",
    "ragged",
    "placeholders_checked",
    "placeholders_scattered",
    "placeholders_put",
    "masked_in_place",
    "clipped_on_purpose",
}
