"""The norm of gradients that is computed on request: what it is of, and that it changes nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from torch_watchdog_agent.gradients import norm_of


def optimizer_of(*gradients: torch.Tensor | None) -> torch.optim.Optimizer:
    """Each parameter with its gradient."""
    parameters = [torch.nn.Parameter(torch.zeros(3) if one is None else torch.zeros_like(one)) for one in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    return torch.optim.SGD(parameters, lr=0.1)


def value(optimizer: torch.optim.Optimizer) -> float:
    norm = norm_of(optimizer)
    assert norm is not None and not norm.is_of_shard
    return float(norm.value)


def test_it_is_what_clipping_would_have_computed_and_changes_no_gradient() -> None:
    gradients = [torch.randn(5, 3), torch.randn(7), None, torch.zeros(0)]
    before = [one if one is None else one.clone() for one in gradients]
    optimizer = optimizer_of(*gradients)
    found = value(optimizer)
    parameters = optimizer.param_groups[0]["params"]
    assert all(one is None or torch.equal(one, parameter.grad) for one, parameter in zip(before, parameters, strict=True))
    assert found == pytest.approx(float(torch.nn.utils.clip_grad_norm_(parameters, 1.0)))


def test_gradients_of_half_precision_do_not_overflow_their_norm() -> None:
    assert value(optimizer_of(torch.full((9,), 60000.0, dtype=torch.float16), torch.ones(2, dtype=torch.bfloat16))) == pytest.approx(
        180000, rel=0.01
    )


def test_one_element_that_is_none_makes_it_none() -> None:
    assert math.isnan(value(optimizer_of(torch.ones(4), torch.tensor([0.0, math.nan]))))


def test_without_gradients_there_is_none_and_sparse_ones_are_left_out() -> None:
    assert norm_of(optimizer_of(None)) is None
    assert norm_of(optimizer_of(torch.eye(3).to_sparse())) is None


def test_gradients_that_their_optimizer_unscales_by_itself_are_unscaled() -> None:
    optimizer = optimizer_of(torch.full((4,), 1024.0))
    optimizer.grad_scale = torch.tensor(1024.0)
    assert value(optimizer) == pytest.approx(2.0)


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[object]:
    """Of one rank that takes itself for the first of two: nothing here is a collective."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def test_of_a_sharded_gradient_it_is_the_shards_own(mesh: object) -> None:
    part = DTensor.from_local(torch.full((4,), 3.0), mesh, [Shard(0)], run_check=False)
    norm = norm_of(optimizer_of(part))
    assert norm is not None and norm.is_of_shard
    assert float(norm.value) == pytest.approx(6.0) and type(norm.value) is torch.Tensor


def test_of_a_gradient_that_every_rank_holds_it_is_the_whole(mesh: object) -> None:
    whole = DTensor.from_local(torch.full((4,), 3.0), mesh, [Replicate()], run_check=False)
    norm = norm_of(optimizer_of(whole))
    assert norm is not None and not norm.is_of_shard


@pytest.mark.parametrize("mark", ["_fsdp_flattened", "_is_flat_param"])
def test_of_a_parameter_that_the_first_fsdp_has_flattened_it_is_a_shards(mark: str) -> None:
    optimizer = optimizer_of(torch.ones(4))
    setattr(optimizer.param_groups[0]["params"][0], mark, True)
    norm = norm_of(optimizer)
    assert norm is not None and norm.is_of_shard
