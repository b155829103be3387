"""Computes an index again from a batch, by its recipe, on the CPU. Owns the running of recipes; judges nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from torch_watchdog_agent.contract.nodes import Ref
from torch_watchdog_agent.contract.recipe import Argument, Recipe, Step
from torch_watchdog_agent.contract.sizes import Shapes, Size, resolved
from torch_watchdog_agent.errors import let_through

__all__ = ["DOES_NOT_FIT", "Concrete", "Program", "Resolve", "as_recorded", "bound", "filled", "instantiated", "replayed", "resolver"]

DOES_NOT_FIT = (RuntimeError, IndexError, KeyError, TypeError, ValueError)  # what is raised where a recipe does not fit a batch
Tensors: TypeAlias = Mapping[str, torch.Tensor]
Resolve: TypeAlias = Callable[[Size, Sequence[tuple[int, ...]]], int]


@dataclass(frozen=True, slots=True)
class Concrete:
    """A step with its sizes filled in for one signature, and the shapes that went in and came out."""

    step: Step
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    dtype: torch.dtype


def as_recorded(size: Size, _inputs: Sequence[tuple[int, ...]]) -> int:
    """The integer that was recorded: every fresh size has it among its readings."""
    return next(int(reading[1]) for reading in size.readings if reading[0] == "constant")


def replayed(recipe: Recipe, leaves: Tensors, resolve: Resolve) -> tuple[torch.Tensor, ...]:
    """The values of the recipe for this batch. Leaves are never written to."""
    values = _start(recipe, leaves, copy=recipe.writes)
    for step in recipe.steps:
        _run(step, values, resolve)
    return tuple(values[number] for number in recipe.outputs)


def resolver(shapes: Shapes) -> Resolve:
    """Sizes as all their readings agree for a batch of these shapes; AmbiguousSizeError where they do not."""
    return lambda size, inputs: resolved(size, shapes, inputs)


def _start(recipe: Recipe, leaves: Tensors, *, copy: bool) -> dict[int, torch.Tensor]:
    values = {number: leaves[key] for number, key in recipe.leaves.items()} | recipe.constants
    return {number: tensor.clone() for number, tensor in values.items()} if copy else values


def _run(step: Step, values: dict[int, torch.Tensor], resolve: Resolve) -> Concrete:
    inputs = tuple(tuple(values[number].shape) for number in step.inputs)
    args = tuple(filled(argument, inputs, resolve) for argument in step.args)
    kwargs = {key: filled(argument, inputs, resolve) for key, argument in step.kwargs.items()}
    made = step.func(*(bound(argument, values) for argument in args), **{key: bound(argument, values) for key, argument in kwargs.items()})
    outs = [made] if isinstance(made, torch.Tensor) else list(made)
    values.update({number: tensor for number, tensor in zip(step.outputs, outs, strict=False) if number is not None})
    return Concrete(step, args, kwargs, inputs, tuple(tuple(tensor.shape) for tensor in outs), outs[0].dtype)


def filled(argument: Argument, inputs: Sequence[tuple[int, ...]], resolve: Resolve) -> Any:
    """An argument with its sizes as `resolve` says that they are, beside inputs of these shapes."""
    if isinstance(argument, Size):
        return resolve(argument, inputs)
    return [filled(item, inputs, resolve) for item in argument] if isinstance(argument, list) else argument


def bound(argument: Any, values: Mapping[int, Any]) -> Any:
    """An argument with the tensors it refers to."""
    if isinstance(argument, Ref):
        return values[argument.number]
    return [bound(item, values) for item in argument] if isinstance(argument, list) else argument


def instantiated(recipe: Recipe, leaves: Tensors, shapes: Shapes, *, by_shape: bool = False) -> list[Concrete]:
    """The steps with their sizes filled in for a batch of these shapes. Runs on meta tensors where the recipe allows, else on the batch.

    With `by_shape` never on the batch: raises where sizes depend on what it holds.
    """
    try:
        return _instantiated(recipe, {key: leaves[key].to("meta") for key in recipe.leaves.values()}, shapes, "meta")
    except (NotImplementedError, RuntimeError, TypeError) as error:
        let_through(error)
        if by_shape:
            raise
        return _instantiated(recipe, leaves, shapes, "cpu")


def _instantiated(recipe: Recipe, leaves: Tensors, shapes: Shapes, device: str) -> list[Concrete]:
    values = _start(recipe, leaves, copy=recipe.writes)
    values.update({number: constant.to(device) for number, constant in recipe.constants.items()} if device == "meta" else {})
    resolve = resolver(shapes)
    steps = [_run(_on_meta(step) if device == "meta" and not step.inputs else step, values, resolve) for step in recipe.steps]
    return [
        replace(concrete, step=step, kwargs={key: value for key, value in concrete.kwargs.items() if key != "device"})
        for step, concrete in zip(recipe.steps, steps, strict=True)
    ]


def _on_meta(step: Step) -> Step:
    return replace(step, kwargs={**step.kwargs, "device": torch.device("meta")})


class Program:
    """A recipe made ready for one signature: nothing is resolved any more when it runs."""

    __slots__ = ("recipe", "steps")

    def __init__(self, recipe: Recipe, steps: Sequence[Concrete]) -> None:
        self.recipe, self.steps = recipe, tuple(steps)

    def run(self, leaves: Tensors) -> tuple[torch.Tensor, ...]:
        values = _start(self.recipe, leaves, copy=self.recipe.writes)
        for concrete in self.steps:
            args = [bound(argument, values) for argument in concrete.args]
            kwargs = {key: bound(argument, values) for key, argument in concrete.kwargs.items()}
            made = concrete.step.func(*args, **kwargs)
            outs = (made,) if isinstance(made, torch.Tensor) else made
            for number, tensor in zip(concrete.step.outputs, outs, strict=False):
                if number is not None:
                    values[number] = tensor
        return tuple(values[number] for number in self.recipe.outputs)
