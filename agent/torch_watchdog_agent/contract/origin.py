"""Which element of the batch an element of a derived index came from: a replay of element ids beside the values. Only after a failure."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from torch_watchdog_agent.contract.nodes import Ref
from torch_watchdog_agent.contract.recipe import MOVES, PICKS, Recipe, Step
from torch_watchdog_agent.contract.replay import DOES_NOT_FIT, Resolve, bound, filled
from torch_watchdog_agent.errors import let_through

__all__ = ["element_ids"]

_BY_INDEX = {"index", "gather", "index_select", "masked_select"}
NOWHERE = -1


def element_ids(recipe: Recipe, leaves: Mapping[str, torch.Tensor], key: str, resolve: Resolve) -> torch.Tensor:
    """For each element of the index, the flat position in leaf `key` that it came from; -1 where it came from elsewhere."""
    values: dict[int, torch.Tensor] = {}
    ids: dict[int, torch.Tensor] = {}
    for number, name in recipe.leaves.items():
        values[number] = leaves[name].clone()
        count = leaves[name].numel()
        ids[number] = (torch.arange(count, device="cpu") if name == key else torch.full((count,), NOWHERE, device="cpu")).view(
            leaves[name].shape
        )
    for number, constant in recipe.constants.items():
        values[number], ids[number] = constant.clone(), torch.full(constant.shape, NOWHERE, dtype=torch.int64, device="cpu")
    for step in recipe.steps:
        _follow(step, values, ids, resolve)
    return ids[recipe.outputs[0]]


def _follow(step: Step, values: dict[int, torch.Tensor], ids: dict[int, torch.Tensor], resolve: Resolve) -> None:
    inputs = [tuple(values[number].shape) for number in step.inputs]
    args = [filled(argument, inputs, resolve) for argument in step.args]
    kwargs = {key: filled(value, inputs, resolve) for key, value in step.kwargs.items()}
    before = {number: values[number].shape for number in step.writes}
    made = step.func(*(bound(a, values) for a in args), **{key: bound(a, values) for key, a in kwargs.items()})
    outs = [made] if isinstance(made, torch.Tensor) else list(made)
    try:
        moved = _moved(step, args, kwargs, values, ids, outs)
    except DOES_NOT_FIT as error:
        let_through(error)
        moved = [torch.full(out.shape, NOWHERE, dtype=torch.int64, device="cpu") for out in outs]
    for number, out, origin in zip(step.outputs, outs, moved, strict=False):
        if number is not None:
            values[number] = out
            if number not in before:
                ids[number] = origin


def _moved(
    step: Step,
    args: list[object],
    kwargs: dict[str, object],
    values: Mapping[int, torch.Tensor],
    ids: Mapping[int, torch.Tensor],
    outs: list[torch.Tensor],
) -> list[torch.Tensor]:
    name = step.name.rstrip("_")
    without_dtype = {key: bound(a, ids) for key, a in kwargs.items() if key != "dtype"}
    if name in _BY_INDEX and isinstance(args[0], Ref):
        made = step.func(ids[args[0].number], *(bound(a, values) for a in args[1:]))
    elif name in MOVES | PICKS | {"copy"}:
        made = step.func(*(bound(a, ids) for a in args), **without_dtype)
    elif name == "constant_pad_nd":
        made = step.func(bound(args[0], ids), args[1], NOWHERE)
    elif name == "masked_fill":
        made = step.func(bound(args[0], ids), bound(args[1], values), NOWHERE)
    elif name == "where":
        made = torch.where(bound(args[0], values), _ids_of(args[1], ids), _ids_of(args[2], ids))
    elif name in ("fill", "zero"):
        made = bound(args[0], ids).fill_(NOWHERE)
    elif step.writes:
        made = bound(args[0], ids)
    else:
        made = _aligned(step, ids, outs[0])
    return [made] if isinstance(made, torch.Tensor) else list(made)


def _ids_of(argument: object, ids: Mapping[int, torch.Tensor]) -> torch.Tensor:
    return ids[argument.number] if isinstance(argument, Ref) else torch.tensor(NOWHERE, device="cpu")


def _aligned(step: Step, ids: Mapping[int, torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    """Arithmetic keeps places: the first input with a known origin gives it."""
    for number in step.inputs:
        origin = ids[number]
        if origin.dim() <= out.dim() and bool((origin >= 0).any()):
            try:
                return origin.expand(out.shape).clone()
            except RuntimeError as error:
                let_through(error)
                continue
    return torch.full(out.shape, NOWHERE, dtype=torch.int64, device="cpu")
