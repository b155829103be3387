"""How an index is computed from the batch: a recipe, cut out of a tape. Owns the backward slice and its canonical form; runs nothing.

The slice follows storages, so that in-place writes are kept. It is made canonical (no copies, no casts between integers, views as reshapes):
a batch of one sample skips copies, and two forms of one recipe would otherwise count as two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from torch_watchdog_agent.contract.nodes import Int, LeafRef, Node, Ref
from torch_watchdog_agent.contract.sizes import Shapes, Size, fresh, merged
from torch_watchdog_agent.contract.tape import HostRead, Site, Tape

__all__ = ["MOVES", "PICKS", "VIEWS", "Argument", "Recipe", "Step", "agreed", "cut", "sizes_in", "sizes_of", "whole_leaf"]

Argument: TypeAlias = Any  # Ref, Size, a plain value, or a list of them
_WHOLE_NUMBERS = (None, torch.int64, torch.int32)
RENAMES = {"detach", "alias", "lift_fresh", "lift_fresh_copy"}
COPIES = {"clone", "contiguous"}
VIEWS = {
    *("view", "_unsafe_view", "reshape", "t", "transpose", "permute", "unsqueeze", "squeeze", "expand", "clone", "detach", "alias"),
    *("contiguous", "lift_fresh", "_reshape_alias", "flatten", "view_as", "movedim", "lift_fresh_copy", "_to_copy"),
}
PICKS = {"slice", "select", "split", "unbind", "split_with_sizes", "chunk", "narrow", "diagonal", "unfold", "as_strided"}
MOVES = VIEWS | PICKS | {"flip", "roll", "repeat", "cat", "stack"}
_FILLS = {
    "full",
    "zeros",
    "ones",
    "empty",
    "new_zeros",
    "new_full",
    "new_ones",
    "new_empty",
    "zeros_like",
    "full_like",
    "empty_like",
    "fill",
}
_PLACES = _FILLS | {"copy", "masked_fill", "where", "eq", "ne", "constant_pad_nd", "scalar_tensor"}  # elements as they are, or a filling


@dataclass(frozen=True, slots=True)
class Step:
    """One operator of a recipe; numbers are the recipe's own."""

    func: Any
    name: str
    args: tuple[Argument, ...]
    kwargs: dict[str, Argument]
    inputs: tuple[int, ...]
    outputs: tuple[int | None, ...]
    writes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """`leaves`: which number is which tensor of the batch. `form` is equal for recipes that differ in sizes only."""

    leaves: dict[int, str]
    constants: dict[int, torch.Tensor]
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]
    batches: frozenset[int]
    form: tuple[Any, ...]
    casts: bool  # a cast was dropped, or is among the steps
    missing: bool = False  # a constant too large to keep

    @property
    def writes(self) -> bool:
        return any(step.writes for step in self.steps)

    @property
    def one_leaf(self) -> str | None:
        """The leaf, where there is one and nothing else goes in."""
        names = set(self.leaves.values())
        return next(iter(names)) if len(names) == 1 and not self.constants and not self.writes else None

    @property
    def is_direct(self) -> bool:
        """The index holds elements of one leaf, as they are."""
        return self.one_leaf is not None and all(step.name in VIEWS | PICKS for step in self.steps) and not self.narrows

    @property
    def moves_only(self) -> bool:
        """Whether every element is one of the batch as it is, elsewhere, or a filling: labels that are shifted and padded."""
        return not self.narrows and all(step.name.rstrip("_") in MOVES | _PLACES for step in self.steps)

    @property
    def narrows(self) -> bool:
        return any(step.name == "_to_copy" and step.kwargs.get("dtype") not in _WHOLE_NUMBERS for step in self.steps)

    @property
    def floats(self) -> bool:
        """Rounding is involved: a CPU may find another index than a GPU."""
        dtypes = [step.kwargs.get("dtype") for step in self.steps]
        return any(isinstance(dtype, torch.dtype) and dtype.is_floating_point for dtype in dtypes)


def cut(tape: Tape, site: Site | HostRead, shapes_of: Callable[[frozenset[int]], Shapes]) -> Recipe:
    """The recipe of a site's values, or of a value that the program looked at. `shapes_of`: the shapes of the batches that it draws on."""
    nodes = _slice(tape, site)
    in_place = any(node.writes for node in nodes)
    kept, renamed, cast = _canonical(tape, nodes, in_place)
    targets = [renamed.get(number, number) for number in site.numbers]
    sources = [number for node in kept for number in node.inputs] + targets
    leaves = {number: tape.leaves[number] for number in sources if number in tape.leaves}  # written in place or not
    batches = frozenset(batch for batch, _ in leaves.values())
    shapes = shapes_of(batches or frozenset([site.batch] if site.batch is not None else []))
    return _renumbered(tape, kept, targets, leaves, batches, shapes, cast)


def _slice(tape: Tape, site: Site | HostRead) -> list[Node]:
    """The nodes that the values depend on, through views and writes, in order."""
    needed, memory, kept = set(site.numbers), {id(storage) for storage in site.storages}, []
    for node in reversed(tape.nodes[: site.position]):
        made = any(number in needed for number in node.outputs)
        if not made and not any(id(tape.storages[number]) in memory for number in node.writes):
            continue
        kept.append(node)
        for number in (*node.inputs, *node.writes):
            needed.add(number)
            memory.add(id(tape.storages[number]))
    return kept[::-1]


def _canonical(tape: Tape, nodes: Sequence[Node], in_place: bool) -> tuple[list[Node], dict[int, int], bool]:
    renamed: dict[int, int] = {}
    kept, cast = [], False
    for node in nodes:
        if node.inputs and _is_renaming(tape, node, in_place):
            renamed[node.outputs[0] or 0] = renamed.get(node.inputs[0], node.inputs[0])
            cast |= node.name == "_to_copy"
            continue
        kept.append(_with_new_names(node, renamed, in_place))
    return kept, renamed, cast


def _is_renaming(tape: Tape, node: Node, in_place: bool) -> bool:
    if node.name in RENAMES:
        return True
    if in_place:
        return False
    if node.name == "_to_copy":
        before, after = tape.shapes[node.inputs[0]][1], node.kwargs.get("dtype")
        return after in (None, before) or (before in _WHOLE_NUMBERS and after in _WHOLE_NUMBERS)
    return node.name in COPIES


def _with_new_names(node: Node, renamed: Mapping[int, int], in_place: bool) -> Node:
    func, name = node.func, node.name
    if not in_place and func in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
        func, name = torch.ops.aten.reshape.default, "reshape"
    return Node(
        func,
        name,
        tuple(_mapped(argument, renamed) for argument in node.args),
        {key: _mapped(argument, renamed) for key, argument in node.kwargs.items()},
        tuple(renamed.get(number, number) for number in node.inputs),
        node.outputs,
        tuple(renamed.get(number, number) for number in node.writes),
    )


def _mapped(argument: Any, names: Mapping[int, int]) -> Any:
    if isinstance(argument, Ref):
        return Ref(names.get(argument.number, argument.number))
    return [_mapped(item, names) for item in argument] if isinstance(argument, list) else argument


def _renumbered(
    tape: Tape,
    nodes: Sequence[Node],
    targets: Sequence[int],
    leaves: Mapping[int, LeafRef],
    batches: frozenset[int],
    shapes: Shapes,
    cast: bool,
) -> Recipe:
    own: dict[int, int] = {}

    def name(number: int) -> int:
        return own.setdefault(number, len(own))

    steps: list[Step] = []
    made: set[int | None] = set()
    constants: dict[int, torch.Tensor] = {}
    missing = False

    def take(numbers: Iterable[int]) -> None:
        """What no step has made, and is no leaf, is a constant."""
        nonlocal missing
        for number in numbers:
            if number not in made and number not in leaves:
                missing |= number not in tape.constants
                constants[name(number)] = tape.constants.get(number, torch.empty(0, device="cpu"))

    for node in nodes:
        take(node.inputs)
        steps.append(_step(node, name, shapes, [tape.shapes[number][0] for number in node.inputs]))
        made.update(node.outputs)
    take(targets)
    named = {name(number): key for number, (_, key) in leaves.items()}
    outputs = tuple(name(number) for number in targets)
    casts = cast or any(step.name == "_to_copy" for step in steps)
    form = (tuple(_form(step) for step in steps), tuple(sorted(named.items())), tuple(sorted(constants)), outputs)
    return Recipe(
        leaves=named, constants=constants, steps=tuple(steps), outputs=outputs, batches=batches, form=form, casts=casts, missing=missing
    )


def _step(node: Node, name: Callable[[int], int], shapes: Shapes, inputs: Sequence[tuple[int, ...]]) -> Step:
    return Step(
        node.func,
        node.name,
        tuple(_sized(argument, name, shapes, inputs) for argument in node.args),
        {key: _sized(argument, name, shapes, inputs) for key, argument in node.kwargs.items()},
        tuple(name(number) for number in node.inputs),
        tuple(None if number is None else name(number) for number in node.outputs),
        tuple(name(number) for number in node.writes),
    )


def _sized(argument: Any, name: Callable[[int], int], shapes: Shapes, inputs: Sequence[tuple[int, ...]]) -> Argument:
    if isinstance(argument, Ref):
        return Ref(name(argument.number))
    if isinstance(argument, Int):
        return fresh(argument.value, shapes, inputs)
    return [_sized(item, name, shapes, inputs) for item in argument] if isinstance(argument, list) else argument


def _form(step: Step) -> tuple[Any, ...]:
    return (
        step.name,
        tuple(_shape_of(a) for a in step.args),
        tuple(sorted((k, _shape_of(v)) for k, v in step.kwargs.items())),
        step.outputs,
    )


def _shape_of(argument: Argument) -> str:
    if isinstance(argument, Size):
        return "size"
    return f"[{','.join(_shape_of(item) for item in argument)}]" if isinstance(argument, list) else str(argument)


def whole_leaf(recipe: Recipe) -> Recipe | None:
    """The whole tensor in place of what a recipe picks out of it; None where the recipe does more than move and pad its elements."""
    key = recipe.one_leaf
    if key is None or any(step.name not in MOVES and step.name != "constant_pad_nd" for step in recipe.steps):
        return None
    return Recipe(leaves={0: key}, constants={}, steps=(), outputs=(0,), batches=recipe.batches, form=("whole", key), casts=recipe.casts)


def sizes_of(recipe: Recipe) -> list[Size]:
    """Every size in the recipe, in order."""
    return [size for step in recipe.steps for argument in (*step.args, *step.kwargs.values()) for size in sizes_in(argument)]


def sizes_in(argument: Argument) -> list[Size]:
    """Every size in one argument of a step."""
    if isinstance(argument, list):
        return [size for item in argument for size in sizes_in(item)]
    return [argument] if isinstance(argument, Size) else []


def agreed(one: Recipe, other: Recipe) -> str | None:
    """Keep in `one` only the readings that fit `other` too. Says what makes the two differ beyond sizes, if anything does."""
    for mine, theirs in zip(sizes_of(one), sizes_of(other), strict=True):
        mine.readings = merged(mine, theirs).readings
        if not mine.readings:
            return "a size in its computation depends on data, not on the batch's shapes"
    for number, constant in one.constants.items():
        again = other.constants[number]
        if constant.shape != again.shape or not torch.equal(constant, again):
            return "values from outside the batch that change from step to step feed it"
    return None
