"""Proofs that a derived index is legal because its leaves are: an abstract replay over value sets, once per signature. Pure.

A set is (root, table): every element equals table[j] for some j, and tensors with the same root have the same j at places that correspond when
broadcast. Root None: one constant everywhere. Where no rule is known nothing is proved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from torch_watchdog_agent.contract.bounds import Range
from torch_watchdog_agent.contract.kinds import outside
from torch_watchdog_agent.contract.nodes import Ref
from torch_watchdog_agent.contract.recipe import PICKS, VIEWS
from torch_watchdog_agent.contract.replay import Concrete, Program
from torch_watchdog_agent.contract.rules import Rule
from torch_watchdog_agent.errors import let_through

__all__ = ["ValueSets", "follows", "possible_values", "value_sets"]

MAX_TABLE = 1 << 20
ValueSets: TypeAlias = Mapping[str, torch.Tensor | None]
_SAME = {"clone", "_to_copy", "detach", "alias", "contiguous", "lift_fresh", "lift_fresh_copy"}
_SPLITS = {"split", "unbind", "split_with_sizes", "chunk"}
_OWN_MEMORY = {"clone", "_to_copy", "contiguous", "lift_fresh_copy", "repeat", "flip", "roll"}
_PLACED = (VIEWS | PICKS | {"flip", "roll", "repeat"}) - _SAME
_BY_ELEMENT = {
    *(
        "add",
        "sub",
        "mul",
        "div",
        "floor_divide",
        "remainder",
        "neg",
        "abs",
        "clamp",
        "clamp_min",
        "clamp_max",
        "minimum",
        "maximum",
        "rsub",
    ),
    *("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "bitwise_and", "bitwise_or", "bitwise_not", "where"),
    *("masked_fill", "log", "exp", "sqrt", "round", "floor", "ceil", "sign", "pow", "trunc"),
}
_ANY_PLACE = {"index", "gather", "index_select", "sort", "amax", "amin", "max", "min", "tril", "triu", "unfold"}
_CONSTANT = {"zeros": 0, "ones": 1, "zeros_like": 0, "ones_like": 1, "new_zeros": 0, "new_ones": 1}
_FILLED = {"full": 1, "full_like": 1, "new_full": 2, "scalar_tensor": 0}


class _UnknownError(Exception):
    """No abstract rule covers this."""


@dataclass(frozen=True, slots=True)
class _Set:
    root: int | None
    table: torch.Tensor


def value_sets(leaf: torch.Tensor, ranges: Sequence[Range]) -> torch.Tensor | None:
    """Every value that a leaf may hold while it keeps the narrowest of the ranges; None: too many to list."""
    if leaf.dtype == torch.bool:
        return torch.tensor([False, True], device="cpu")
    if not ranges or leaf.dtype.is_floating_point or leaf.dtype.is_complex:
        return None
    allowed = min(ranges, key=lambda one: one.high - one.low)
    bounds = torch.iinfo(leaf.dtype)
    if allowed.high - allowed.low >= MAX_TABLE or not (bounds.min <= allowed.low and allowed.high <= bounds.max):
        return None
    values = torch.arange(int(allowed.low), int(allowed.high) + 1, device="cpu").to(leaf.dtype)  # (torch makes no range of uint16)
    if allowed.ignored is not None and bounds.min <= allowed.ignored <= bounds.max:
        values = torch.cat([values, torch.tensor([allowed.ignored], dtype=leaf.dtype, device="cpu")])
    return values


def follows(rule: Rule, program: Program, allowed: Range, sets: ValueSets) -> bool:
    """Whether the rule cannot be broken while every leaf keeps to its set. False where nobody knows."""
    if rule.kind != "range":
        return False
    values = possible_values(program, sets)
    return values is not None and not bool(outside(values, allowed).any())


def possible_values(program: Program, sets: ValueSets) -> torch.Tensor | None:
    """A set that holds every value the index can have; None where no rule covers a step that matters."""
    replay = _Abstract(program, sets)
    for concrete in program.steps:
        replay.run(concrete)
    result = replay.sets.get(program.recipe.outputs[0])
    return None if result is None else result.table


@dataclass(slots=True)
class _Abstract:
    """The abstract replay. `memory` groups numbers that share storage, `sizes` holds how many elements each storage has."""

    program: Program
    leaves: ValueSets
    sets: dict[int, _Set | None] = field(default_factory=dict)
    memory: dict[int, int] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    views: dict[Any, int] = field(default_factory=dict)
    count: int = 0

    def __post_init__(self) -> None:
        for number, key in self.program.recipe.leaves.items():
            table = self.leaves.get(key)
            self.sets[number] = None if table is None else _Set(self.new(), table)
            self.memory[number] = number
        for number, constant in self.program.recipe.constants.items():
            self.sets[number] = self.mixed(constant.reshape(-1)) if constant.numel() else None
            self.memory[number] = number

    def new(self) -> int:
        self.count += 1
        return self.count

    def mixed(self, values: torch.Tensor) -> _Set:
        """Any of these values, at any place."""
        values = values.unique()
        if values.numel() > MAX_TABLE:
            raise _UnknownError
        return _Set(self.new() if values.numel() > 1 else None, values)

    def between(self, low: int, high: int) -> _Set:
        if high - low >= MAX_TABLE or high < low:
            raise _UnknownError
        return _Set(self.new(), torch.arange(low, high + 1, device="cpu"))

    def of(self, argument: Any) -> Any:
        """The set behind an argument; a plain value stays as it is."""
        if not isinstance(argument, Ref):
            return argument
        found = self.sets.get(argument.number)
        if found is None:
            raise _UnknownError
        return found

    def run(self, step: Concrete) -> None:
        try:
            result: _Set | None = _rule_for(step.step.name)(self, step)
        except (_UnknownError, RuntimeError, IndexError, TypeError, ValueError, AttributeError) as error:
            let_through(error)
            result = None
        if step.step.writes:
            self._write(step, result)
        else:
            self._make(step, result)

    def _make(self, step: Concrete, result: _Set | None) -> None:
        name, source = step.step.name, step.args[0] if step.args else None
        shares = isinstance(source, Ref) and name in VIEWS | PICKS and name not in _OWN_MEMORY
        for place, (number, shape) in enumerate(zip(step.step.outputs, step.outputs, strict=False)):
            if number is None:
                continue
            self.sets[number] = result if place == 0 else self._further(name, result)
            self.memory[number] = self.memory.get(source.number, source.number) if shares and isinstance(source, Ref) else number
            self.sizes.setdefault(self.memory[number], torch.Size(shape).numel())

    def _further(self, name: str, result: _Set | None) -> _Set | None:
        """A second output: of a split, other places of the same values; of anything else (positions beside a maximum), unknown."""
        return _Set(self.new(), result.table) if name in _SPLITS and result is not None else None

    def _write(self, step: Concrete, result: _Set | None) -> None:
        """Everything that shares the written memory holds what it held, or what was written; only the latter where all of it was written."""
        written = step.step.writes[0]
        base = self.memory.get(written, written)
        shape = step.inputs[step.step.inputs.index(written)]
        whole = torch.Size(shape).numel() == self.sizes.get(base, -1)
        for number in [number for number, memory in self.memory.items() if memory == base]:
            old = self.sets.get(number)
            if result is None or (old is None and not whole):
                self.sets[number] = None
            else:
                self.sets[number] = (
                    result if whole or old is None else self.mixed(torch.cat([old.table.to(step.dtype), result.table.to(step.dtype)]))
                )
        if whole and result is not None:  # views of the memory are at other places than the tensor that was written
            for number in [number for number, memory in self.memory.items() if memory == base and number != written]:
                self.sets[number] = self.mixed(result.table)


def _placed(state: _Abstract, step: Concrete) -> _Set:
    """A view has the same values at other places: it corresponds only with the same view of the same root."""
    source = state.of(step.args[0])
    if source.root is None:
        return _Set(None, source.table)
    name = (source.root, step.step.name, repr(step.args[1:]), repr(step.kwargs), step.inputs[0])
    if step.step.name in _SPLITS:
        return _Set(state.new(), source.table)
    return _Set(state.views.setdefault(name, state.new()), source.table)


def _same(state: _Abstract, step: Concrete) -> _Set:
    source = state.of(step.args[0])
    dtype = step.kwargs.get("dtype")
    return _Set(source.root, source.table.to(dtype) if dtype is not None else source.table)


def _copied(state: _Abstract, step: Concrete) -> _Set:
    return state.mixed(state.of(step.args[1]).table)


def _filled(state: _Abstract, step: Concrete) -> _Set:
    value = 0 if step.step.name.startswith("zero") else step.args[1]
    return state.of(value) if isinstance(value, Ref) else _Set(None, torch.tensor([value], dtype=step.dtype, device="cpu"))


def _constant(_state: _Abstract, step: Concrete) -> _Set:
    name = step.step.name
    value = _CONSTANT[name] if name in _CONSTANT else step.args[_FILLED[name]]
    return _Set(None, torch.tensor([value], device="cpu").to(step.dtype))


def _arange(state: _Abstract, step: Concrete) -> _Set:
    low, high = (0, step.args[0]) if len(step.args) == 1 else step.args[:2]
    if len(step.args) > 2 and step.args[2] != 1:
        raise _UnknownError
    return state.between(int(low), int(high) - 1)


def _by_element(state: _Abstract, step: Concrete) -> _Set:
    operands = [state.of(argument) for argument in step.args]
    roots = {one.root for one in operands if isinstance(one, _Set)} - {None}
    if len(roots) <= 1:
        tables = [one.table if isinstance(one, _Set) else one for one in operands]
        return _Set(next(iter(roots), None), _applied(step, tables))
    return _independent(state, step, operands)


def _applied(step: Concrete, tables: list[Any]) -> torch.Tensor:
    if not step.step.writes:
        result: torch.Tensor = step.step.func(*tables, **step.kwargs)
        return result
    length = max(table.numel() for table in tables if isinstance(table, torch.Tensor))
    target: torch.Tensor = tables[0].expand(length).clone()
    step.step.func(target, *tables[1:], **step.kwargs)
    return target


def _independent(state: _Abstract, step: Concrete, operands: list[Any]) -> _Set:
    """Operands of which nothing is known together: the hull of what can come out."""
    name = step.step.name.rstrip("_")
    if step.dtype == torch.bool:
        return _Set(state.new(), torch.tensor([False, True], device="cpu"))
    if name == "where":
        return state.mixed(torch.cat([_table_of(one, step.dtype) for one in operands[1:]]))
    if name == "masked_fill":
        return state.mixed(torch.cat([_table_of(operands[0], step.dtype), _table_of(operands[2], step.dtype)]))
    if step.dtype.is_floating_point or not all(isinstance(one, _Set) for one in operands[:2]) or step.kwargs or len(operands) > 2:
        raise _UnknownError
    (x0, x1), (y0, y1) = ((int(one.table.min()), int(one.table.max())) for one in operands[:2])
    corners = {
        "add": (x0 + y0, x1 + y1),
        "sub": (x0 - y1, x1 - y0),
        "minimum": (min(x0, y0), min(x1, y1)),
        "maximum": (max(x0, y0), max(x1, y1)),
        "mul": (min(x0 * y0, x0 * y1, x1 * y0, x1 * y1), max(x0 * y0, x0 * y1, x1 * y0, x1 * y1)),
    }
    if name not in corners:
        raise _UnknownError
    return state.between(*corners[name])


def _table_of(operand: Any, dtype: torch.dtype) -> torch.Tensor:
    return (operand.table if isinstance(operand, _Set) else torch.tensor([operand], device="cpu")).to(dtype)


def _summed(state: _Abstract, step: Concrete) -> _Set:
    table = state.of(step.args[0]).table
    if table.dtype.is_floating_point:
        raise _UnknownError
    inputs, outputs = torch.Size(step.inputs[0]), torch.Size(step.outputs[0])
    terms = inputs[step.args[1]] if step.step.name == "cumsum" else max(1, inputs.numel() // max(1, outputs.numel()))
    low, high = int(table.min()), int(table.max())
    return state.between(min(low, low * terms), max(high, high * terms))


def _position(state: _Abstract, step: Concrete) -> _Set:
    shape = torch.Size(step.inputs[0])
    along = len(step.args) > 1 and isinstance(step.args[1], int)
    return state.between(0, (shape[step.args[1]] if along else shape.numel()) - 1)


def _truth(state: _Abstract, _step: Concrete) -> _Set:
    return _Set(state.new(), torch.tensor([False, True], device="cpu"))


def _anywhere(state: _Abstract, step: Concrete) -> _Set:
    return state.mixed(state.of(step.args[0]).table)


def _joined(state: _Abstract, step: Concrete) -> _Set:
    return state.mixed(torch.cat([state.of(part).table.to(step.dtype) for part in step.args[0]]))


def _padded(state: _Abstract, step: Concrete) -> _Set:
    table = state.of(step.args[0]).table
    value = step.args[2] if len(step.args) > 2 else 0
    return state.mixed(torch.cat([table, torch.tensor([value], device="cpu").to(table.dtype)]))


def _no_rule(_state: _Abstract, _step: Concrete) -> _Set:
    raise _UnknownError


_RULES: dict[str, Callable[[_Abstract, Concrete], _Set]] = {
    **dict.fromkeys(_PLACED, _placed),
    **dict.fromkeys(_SAME, _same),
    **dict.fromkeys(("copy", "copy_"), _copied),
    **dict.fromkeys(("fill", "fill_", "zero", "zero_"), _filled),
    **dict.fromkeys((*_CONSTANT, *_FILLED), _constant),
    **dict.fromkeys(_BY_ELEMENT, _by_element),
    **dict.fromkeys((f"{name}_" for name in _BY_ELEMENT), _by_element),
    **dict.fromkeys(_ANY_PLACE, _anywhere),
    **dict.fromkeys(("cumsum", "sum"), _summed),
    **dict.fromkeys(("argmax", "argmin"), _position),
    **dict.fromkeys(("any", "all", "isnan"), _truth),
    **dict.fromkeys(("cat", "stack"), _joined),
    "arange": _arange,
    "constant_pad_nd": _padded,
}


def _rule_for(name: str) -> Callable[[_Abstract, Concrete], _Set]:
    return _RULES.get(name, _no_rule)
