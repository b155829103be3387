"""A loss that is not finite: the first module whose output is not, found by the same forward on a copy, and nothing of the run changed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from guard_loop import Loop
from torch import nn
from torch.nn import functional as F  # noqa: N812

from torch_watchdog_agent.contract.guard import Guard
from torch_watchdog_proto.messages import Violation


class Projected(nn.Module):
    """A frozen projection in half precision: no gradient ever passes it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 2, bias=False, dtype=torch.float16)
        self.up.weight = nn.Parameter(torch.tensor([[200.0], [100.0]]).expand(2, 4).half(), requires_grad=False)
        self.norm, self.drop, self.head = nn.BatchNorm1d(2), nn.Dropout(0.2), nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.norm(self.up(x.half()).float())))


class Ratio(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x) / x.sum())


def step(model: nn.Module, batch: Any) -> None:
    F.mse_loss(model(batch[0]), batch[1]).backward()


def rows(count: int = 3) -> list[torch.Tensor]:
    return [torch.rand(count, 4), torch.rand(count, 1)]


def test_a_call_with_copies_of_the_batch_as_a_loop_makes_them_that_moves_it_by_hand_is_made_again_too() -> None:
    torch.manual_seed(0)

    def moved(model: nn.Module, batch: Any) -> None:
        F.mse_loss(model(batch[0].detach().clone()), batch[1]).backward()

    loop = Loop(Projected(), moved)
    for _ in range(4):
        loop.step(rows())
    batch = rows()
    batch[0][1] *= 1000
    loop.guard.handed_over(loop.guard.fetched(batch, indices=[10, 11, 12], worker=None), batch)
    found = loop.guard.not_finite_inside()
    assert found is not None
    assert found.bound is not None
    assert found.bound.module == "up"


def explained(model: nn.Module, batch: Any, *, clean: int = 4) -> Violation | None:
    """What is found where the loop's backward would begin."""
    torch.manual_seed(0)
    loop = Loop(model, step)
    for _ in range(clean):
        loop.step(rows())
    checked = loop.guard.fetched(batch, indices=[10, 11, 12], worker=None)
    loop.guard.handed_over(checked, batch)
    loss = F.mse_loss(model(batch[0]), batch[1])
    assert not bool(torch.isfinite(loss))
    found = loop.guard.not_finite_inside()
    loop.guard.step_ended()
    assert loop.said == []
    return found


def overflowing() -> list[torch.Tensor]:
    batch = rows()
    batch[0][1] = 83.0
    return batch


@pytest.mark.parametrize("clean", [0, 1, 6])
def test_an_overflow_in_half_precision_names_module_dtype_limit_and_sample(clean: int) -> None:
    found = explained(Projected(), overflowing(), clean=clean)
    assert found is not None
    assert (found.kind, found.bound.module, found.bound.op, found.batch.dtype) == ("activation.not_finite", "up", "Linear", "float16")
    assert (found.batch.sample.position_in_batch, found.batch.sample.dataset_index) == (1, 11)
    for word in ("overflow", "65504", "fp16", "float16", "half", "83", "200"):
        assert word in found.cause, word
    assert "bf16" in found.fix
    assert "float32" in found.fix


def test_nothing_of_the_run_is_changed_by_the_second_forward() -> None:
    torch.manual_seed(0)
    model = Projected()
    loop = Loop(model, step)
    loop.train([rows() for _ in range(4)])
    batch = overflowing()
    loop.guard.handed_over(loop.guard.fetched(batch, indices=None, worker=None), batch)
    loss = model(batch[0]).sum()
    before = copy.deepcopy(model.state_dict())
    versions = [tensor._version for tensor in model.state_dict().values()]
    assert loop.guard.not_finite_inside() is not None
    assert all(torch.equal(before[name].nan_to_num(), value.nan_to_num()) for name, value in model.state_dict().items())
    assert [tensor._version for tensor in model.state_dict().values()] == versions
    assert all(not module._forward_hooks for module in model.modules())
    loss.backward()


def test_a_division_between_modules_is_said_to_be_there() -> None:
    batch = rows()
    batch[0].zero_()
    found = explained(Ratio(), batch)
    assert found is not None
    assert found.bound.module == "head"
    assert "between the modules of the model" in found.cause
    assert "division by zero" in found.fix


def test_weights_that_are_not_finite_any_more_are_an_earlier_steps_fault() -> None:
    model = Ratio()
    with torch.no_grad():
        model.body.weight[0, 0] = float("nan")
    found = explained(model, rows(), clean=0)
    assert found is not None
    assert found.bound.module == "body"
    assert "earlier update" in found.cause
    assert found.batch.sample is None and "sample" not in found.summary  # it had been blamed on one of the batch's


def test_a_loss_that_only_the_loss_function_makes_infinite_blames_no_module() -> None:
    batch = rows()
    batch[1][0] = float("inf")
    assert explained(Ratio(), batch) is None


def test_a_mask_of_minus_infinity_is_no_finding() -> None:
    class Masks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.full((4, 4), float("-inf")).triu(1)

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.masks, self.scale, self.head = Masks(), nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights = (x.unsqueeze(-1) * 0 + self.masks(x)).softmax(-1)
            return self.head(self.scale(weights[:, -1]) * float("inf"))

    found = explained(Attends(), rows())
    assert found is not None
    assert found.bound.module == "head"


def test_a_model_that_communicates_is_left_alone() -> None:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    class Gathers(Ratio):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(x := x.clone())
            return super().forward(x)

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        batch = rows()
        batch[0].zero_()
        assert explained(Gathers(), batch) is None
    finally:
        dist.destroy_process_group()


def test_a_call_that_takes_more_than_the_batch_is_not_made_again() -> None:
    model = Ratio()
    loop = Loop(model, lambda model, batch: F.mse_loss(model(batch[0] * 0), batch[1]).backward())
    loop.train([rows() for _ in range(2)])
    assert loop.guard.not_finite_inside() is None


def test_where_the_forward_cannot_be_made_again_a_watch_of_all_modules_that_was_asked_for_names_the_first() -> None:
    torch.manual_seed(0)
    model = Ratio()
    batch = rows()
    guard = Guard(say=print, on_refused=lambda _: None, watch_modules=True)
    assert guard._watch is not None
    try:
        guard.model_seen(model)
        guard.handed_over(guard.fetched(batch, indices=[10, 11, 12], worker=None), batch)
        model.body(batch[0] / 0.0)  # what came to nothing: the loss below is finite
        model(batch[0]).sum().backward()
        guard.loss_is_finite()
        assert guard.not_finite_inside() is None
        assert not bool(torch.isfinite(model(batch[0] * 0).sum()))
        found = guard.not_finite_inside()
    finally:
        guard._watch.close()
        guard._tracer.abandon()
    assert found is not None and found.bound is not None and found.batch.sample is not None
    assert (found.kind, found.bound.module, found.batch.sample.dataset_index) == ("activation.not_finite", "head", 10)
