"""`precursors.py NAME`: eight steps with a binary cross entropy; prints the largest |2p - 1| of each step as the loop itself computes it."""

from __future__ import annotations

import functools
import json
import sys

import torch
from tokenizers import Tokenizer, models
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast

torch.set_num_threads(1)
STEPS = 8
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 6}, unk_token="a")))
middle = torch.nn.Parameter(torch.full((4,), 0.5))
optimizer = torch.optim.SGD([middle], lr=0.0)
criterion = torch.nn.BCELoss()
reaches: list[float] = []


def unbounded(values: torch.Tensor) -> torch.Tensor:
    return middle + values


def bounded(values: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(middle + values)


def scripted(values: torch.Tensor) -> torch.Tensor:
    """TorchScript and a compiler of the user's find the operator as ever."""
    assert torch.jit.script(torch.nn.BCELoss())(torch.tensor([0.5]), torch.tensor([1.0])).item() == F.binary_cross_entropy(
        torch.tensor([0.5]), torch.tensor([1.0])
    )
    compiled = torch.compile(lambda p: F.binary_cross_entropy(p, torch.ones(4)), backend="aot_eager", fullgraph=True)
    compiled(middle + values).backward()
    middle.grad = None
    return middle + values


def collate(tokenizer, rows):
    return torch.stack(rows)


def collate_by_name(rows):
    assert len(tokenizer) == 3
    return torch.stack(rows)


def main(how: str) -> None:
    rows = [torch.full((4,), 0.05 * step * (-1) ** step) for step in range(STEPS)]
    loader = DataLoader(rows, batch_size=1, collate_fn=functools.partial(collate, tokenizer) if how == "unbounded" else collate_by_name)
    for batch in loader:
        chances = globals()[how](batch[0])
        reaches.append(float((2 * chances.detach() - 1).abs().max()))
        criterion(chances, torch.ones(4)).backward()
        optimizer.step()
        optimizer.zero_grad()
    print(json.dumps(reaches))


main(sys.argv[1])
