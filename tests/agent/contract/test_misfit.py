"""What raises by itself is named all the same: the tensor of another dtype or shape, the NumPy array, the mask of another length; nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from guard_loop import Loop, Seen
from torch import nn
from torch.nn import functional as F  # noqa: N812

Batch = dict[str, Any]


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 8), nn.Linear(8, 5)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self.embed(ids)
        return self.head(hidden if mask is None else hidden * mask[..., None])


def tag(model: nn.Module, batch: Batch) -> None:
    F.cross_entropy(model(batch["input_ids"], batch.get("attention_mask")).flatten(0, 1), batch["labels"].flatten()).backward()


def clean() -> Batch:
    mask = torch.ones(4, 6, dtype=torch.long)
    return {"input_ids": torch.randint(0, 50, (4, 6)), "attention_mask": mask, "labels": torch.randint(0, 5, (4, 6))}


def met(change: Callable[[Batch], Batch], steps: int) -> Seen:
    loop = Loop(Tagger(), tag)
    for _ in range(steps):
        assert loop.step(clean()).violation is None
    seen = loop.step(change(clean()))
    assert loop.said == []
    return seen


@pytest.mark.parametrize("steps", [0, 1, 5])
@pytest.mark.parametrize(
    ("change", "kind", "key", "words"),
    [
        (lambda b: {**b, "input_ids": b["input_ids"].float()}, "batch.dtype", "input_ids", "int64 or int32"),
        (lambda b: {**b, "input_ids": b["input_ids"].short()}, "batch.dtype", "input_ids", ".long()"),
        (lambda b: {**b, "labels": b["labels"].float()}, "batch.dtype", "labels", "int64"),
        (lambda b: {**b, "labels": b["labels"].int()}, "batch.dtype", "labels", ".long()"),
        (lambda b: {**b, "input_ids": b["input_ids"].numpy()}, "batch.dtype", "input_ids", "as_tensor"),
        (lambda b: {**b, "labels": b["labels"][:, :5]}, "batch.shape", "labels", "(20,)"),
        (lambda b: {**b, "attention_mask": torch.ones(4, 9, dtype=torch.long)}, "batch.shape", "attention_mask", "(4, 6)"),
    ],
)
def test_the_tensor_behind_the_exception_is_named(change: Callable[[Batch], Batch], kind: str, key: str, words: str, steps: int) -> None:
    found = met(change, steps).violation
    assert found is not None
    assert (found.kind, found.batch.key, found.severity) == (kind, key, "critical")
    assert words in found.summary + found.cause + found.fix


def test_the_line_and_the_op_that_raised_are_told() -> None:
    found = met(lambda b: {**b, "labels": b["labels"].float()}, 1).violation
    assert found is not None and found.bound is not None
    assert (found.bound.op, str(found.bound.source).partition(":")[0]) == ("cross_entropy", __file__)


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA error: out of memory"), KeyError("labels"), RuntimeError("the size of my hat must match")]
)
def test_another_exception_names_no_tensor(error: Exception) -> None:
    def fail(model: nn.Module, batch: Batch) -> None:
        raise error

    loop = Loop(Tagger(), fail)
    loop.guard.fetched(clean(), indices=None, worker=None)
    batch = clean()
    loop.guard.handed_over(loop.guard.fetched(batch, indices=None, worker=None), batch)
    assert loop.guard.diagnose(error) is None


def bce(model: nn.Module, batch: Batch) -> None:
    F.binary_cross_entropy_with_logits(model(batch["x"]), batch["y"]).backward()


def test_a_target_that_lacks_a_dimension_is_named_with_both_shapes() -> None:
    loop = Loop(nn.Linear(6, 1), bce)
    assert loop.step({"x": torch.randn(10, 6), "y": torch.rand(10, 1)}).violation is None
    found = loop.step({"x": torch.randn(10, 6), "y": torch.rand(10)}).violation
    assert found is not None
    assert (found.kind, found.batch.key) == ("batch.shape", "y")
    assert "(10, 1)" in found.cause and "(10,)" in found.cause
