"""Which checks of a batch can be made on its device, and which cannot and why. Decides once per signature, without reading a tensor of the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

import torch

from torch_watchdog_agent.contract.bounds import BIG, Range
from torch_watchdog_agent.contract.check import extremes
from torch_watchdog_agent.contract.discharge import follows, value_sets
from torch_watchdog_agent.contract.kinds import ctc_frames_needed, ctc_labels_read
from torch_watchdog_agent.contract.ondevice import Box, Computed, DeviceChecks, Finite, Leaves, Limits, Part
from torch_watchdog_agent.contract.origin import element_ids
from torch_watchdog_agent.contract.plan import Check, Plan
from torch_watchdog_agent.contract.recipe import MOVES, VIEWS
from torch_watchdog_agent.contract.replay import Concrete, Program, resolver
from torch_watchdog_agent.contract.signature import shapes_of

__all__ = ["stand_ins", "taken_from"]

MAX_MAPPED_ELEMENTS = 1 << 22
MAX_STEPS = 32  # operators that may be run for each batch to compute its indices
FILLS = (0, 1)
# Operators that launch kernels, and neither wait for their result nor depend on data in their shapes.
PLAIN = MOVES | {
    *("add", "sub", "rsub", "mul", "neg", "abs", "clamp", "clamp_min", "clamp_max", "minimum", "maximum", "remainder", "floor_divide"),
    *("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "bitwise_and", "bitwise_or", "bitwise_not"),
    *("where", "masked_fill", "cumsum", "sum", "arange", "full", "zeros", "ones", "full_like", "zeros_like", "ones_like", "new_full"),
    *("new_zeros", "new_ones", "empty", "empty_like", "new_empty", "copy", "fill", "zero", "constant_pad_nd", "slice", "select"),
    *("split", "unbind", "split_with_sizes", "chunk", "narrow", "round", "floor", "ceil", "trunc", "div", "bucketize"),
}
_ONLY = "on a device only in traced steps: "
NOT_ALONE = _ONLY + "its alarm needs the operator's word"
NOT_CHEAP = _ONLY + "computing it from the batch would cost too much there, or wait for the device"
NO_FILL = _ONLY + "nothing is known that could stand in for the batch"
ON_DATA = _ONLY + "its sizes depend on what the batch holds"
NOT_A_RANGE = _ONLY + "it is no range of values"


def stand_ins(leaves: Leaves, elsewhere: frozenset[str]) -> dict[str, torch.Tensor]:
    """The tensors with empty ones on the CPU in place of those that cannot be read: a plan needs their shapes only."""
    return {key: torch.zeros(t.shape, dtype=t.dtype, device="cpu") if key in elsewhere else t for key, t in leaves.items()}


def taken_from(plan: Plan, own: Leaves, shaped: Leaves, elsewhere: frozenset[str], finite: frozenset[str]) -> DeviceChecks:
    """Takes the checks of unreadable tensors out of a plan. `shaped`: its stand-ins; `finite`: float tensors that should hold no NaN."""
    whole = replace(plan, by_leaf=dict(plan.by_leaf), derived=list(plan.derived))
    placing = _Placing(whole, own, shaped, DeviceChecks(elsewhere=elsewhere))
    for key in sorted(elsewhere & plan.by_leaf.keys()):
        placing.leaf(key, plan.by_leaf.pop(key))
    for check in plan.derived:
        if _reads(check, elsewhere):
            placing.derived(check)
    sets = placing.value_sets()
    for check in plan.proved:
        if _reads(check, elsewhere & placing.partial) and not follows(check.rule, check.program, check.allowed, sets):
            placing.derived(check)
    placing.checks.uncovered += [(rule, ON_DATA) for rule in plan.broken if not elsewhere.isdisjoint(rule.recipe.leaves.values())]
    plan.broken = [rule for rule in plan.broken if elsewhere.isdisjoint(rule.recipe.leaves.values())]
    plan.derived = [check for check in plan.derived if not _reads(check, elsewhere)]
    plan.proved = [check for check in plan.proved if not _reads(check, elsewhere)]
    looked_at = {one.key for one in placing.checks.looks}
    for key in sorted((elsewhere & finite) - looked_at):
        if own[key].is_floating_point() and own[key].element_size() > 1 and own[key].numel():
            placing.checks.looks.append(Finite(key=key, slot=(own[key].device, own[key].dtype)))
    return placing.checks


def _reads(check: Check, keys: frozenset[str] | set[str]) -> bool:
    return any(key in keys for key in check.rule.recipe.leaves.values())


class _Placing:
    """One signature's checks on their way to the device."""

    def __init__(self, plan: Plan, own: Leaves, shaped: Leaves, checks: DeviceChecks) -> None:
        self._plan, self._own, self._shaped, self.checks = plan, own, shaped, checks
        self._steps = MAX_STEPS
        self.partial: set[str] = set()  # tensors of which some cell may still hold anything: what the plan proved from them may not follow

    def value_sets(self) -> dict[str, torch.Tensor]:
        """The values that tensors may hold once the device has looked at them whole, or the host has."""
        sets = {}
        for key, leaf in self._shaped.items():
            ranges = [one.allowed for one in self._plan.by_leaf.get(key, ()) if one.rule.kind == "range"]
            if key in self.checks.elsewhere:
                limits = [one.limits for one in self.checks.looks if isinstance(one, Part) and one.key == key and not one.box]
                ranges = [Range(low=one.low, high=one.high, ignored=one.ignored) for one in limits]
            values = value_sets(leaf, ranges)
            if values is not None:
                sets[key] = values
        return sets

    def leaf(self, key: str, of_leaf: Sequence[Check]) -> None:
        """The checks of one tensor: its ranges, then whether a label is left."""
        for check in sorted(of_leaf, key=lambda one: one.rule.kind != "range"):
            if not check.rule.acts_alone:
                self.partial.add(key)
                self._not_covered(check, NOT_ALONE)
            elif check.rule.kind == "some":
                self._some(key, check)
            else:
                self._range(key, check)

    def _range(self, key: str, check: Check) -> None:
        leaf = self._own[key]
        box = self._box(check) if _takes_limits(leaf.dtype) else None
        if box != ():
            self.partial.add(key)
        if box is None:
            self.derived(check)
        elif check.allowed.low > check.allowed.high:
            self._not_covered(check, NOT_A_RANGE)
        else:
            self.checks.looks.append(Part(key=key, slot=(leaf.device, leaf.dtype), box=box, limits=_limits(leaf.dtype, check.allowed)))

    def _some(self, key: str, check: Check) -> None:
        """The extremes of the same part say it as well."""
        box = self._box(check)
        for place, one in enumerate(self.checks.looks):
            if isinstance(one, Part) and one.key == key and one.box == box:
                self.checks.looks[place] = replace(one, limits=replace(one.limits, empties=check.rule.ignored))
                return
        self._not_covered(check, NOT_A_RANGE)

    def derived(self, check: Check) -> None:
        """Values that have to be computed from the batch."""
        why = self._why_not_computed(check)
        if why is not None:
            return self._not_covered(check, why)
        keys, steps = tuple(dict.fromkeys(check.rule.recipe.leaves.values())), check.program.steps
        fill = next((value for value in FILLS if self._is_legal(keys, value)), None)
        if fill is None:
            return self._not_covered(check, NO_FILL)
        self._steps -= len(steps)
        leaf = self._own[keys[0]]
        program = _on(leaf.device, check.program)
        for of, dtype, allowed in _ctc(check, leaf) if check.rule.kind == "ctc" else [(itemgetter(0), _dtype(check, leaf), check.allowed)]:
            limits, slot = _limits(dtype, allowed), (leaf.device, dtype)
            self.checks.looks.append(Computed(key=keys[0], slot=slot, program=program, limits=limits, keys=keys, fill=fill, of=of))
        return None

    def _why_not_computed(self, check: Check) -> str | None:
        leaves = [self._own[key] for key in check.rule.recipe.leaves.values()]
        if not check.rule.acts_alone:
            return NOT_ALONE
        flat = check.rule.kind == "ctc" and (leaves[0].dim() != 2 or len({leaf.dtype for leaf in leaves}) > 1)
        if check.rule.kind not in ("range", "ctc") or flat or check.allowed.low > check.allowed.high:
            return NOT_A_RANGE
        steps = check.program.steps
        plain = all(step.step.name in PLAIN or step.step.name.rstrip("_") in PLAIN for step in steps)
        one_device = len({leaf.device for leaf in leaves}) == 1
        return None if plain and one_device and len(steps) <= self._steps and _takes_limits(_dtype(check, leaves[0])) else NOT_CHEAP

    def _is_legal(self, keys: Sequence[str], value: int) -> bool:
        """Whether these tensors filled with that value pass every check."""
        leaves = {key: torch.full_like(leaf, value) if key in keys else leaf for key, leaf in self._shaped.items()}
        seen = {key: extremes(leaf, self._plan.ignored.get(key, -100)) for key, leaf in leaves.items()}
        findings, failed = self._plan.findings(leaves, seen)
        return not failed and not any(set(keys) & set(finding.rule.recipe.leaves.values()) for finding in findings)

    def _box(self, check: Check) -> Box | None:
        """The part of the tensor that reaches the operator, where it is a block. Its other cells are not ours to change."""
        recipe, key = check.rule.recipe, check.rule.recipe.one_leaf
        if key is None or recipe.narrows or any(step.name not in MOVES and step.name != "constant_pad_nd" for step in recipe.steps):
            return None
        leaf = self._shaped[key]
        if all(step.name in VIEWS for step in recipe.steps):
            return ()
        if leaf.numel() > MAX_MAPPED_ELEMENTS:
            return None
        places = element_ids(recipe, self._shaped, key, resolver(shapes_of(self._shaped)))
        reached = torch.zeros(leaf.numel(), dtype=torch.bool, device="cpu")
        reached[places[places >= 0]] = True
        return _block(reached.reshape(leaf.shape))

    def _not_covered(self, check: Check, why: str) -> None:
        self.checks.uncovered.append((check.rule, why))


def _dtype(check: Check, leaf: torch.Tensor) -> torch.dtype:
    return check.program.steps[-1].dtype if check.program.steps else leaf.dtype


def _ctc(check: Check, labels: torch.Tensor) -> Iterator[tuple[Callable[[Sequence[torch.Tensor]], torch.Tensor], torch.dtype, Range]]:
    """Labels that are read are classes, and no row needs more frames than it has."""
    yield lambda values: ctc_labels_read(values[0], values[2]), labels.dtype, check.allowed
    if not check.rule.options["endless_is_zero"]:
        enough = Range(low=0, high=BIG)
        yield lambda values: values[1] - ctc_frames_needed(values[0], values[2]).to(values[1].dtype), labels.dtype, enough


def _takes_limits(dtype: torch.dtype) -> bool:
    return dtype != torch.bool and not dtype.is_complex and (not dtype.is_floating_point or dtype.itemsize > 1)


def _limits(dtype: torch.dtype, allowed: Range) -> Limits:
    """As far as the dtype can hold them."""
    if dtype.is_floating_point:
        return Limits(low=float(allowed.low), high=float(allowed.high))
    can = torch.iinfo(dtype)
    low, high, ignored = max(can.min, int(allowed.low)), min(can.max, int(allowed.high)), allowed.ignored
    if ignored is not None and (low <= ignored <= high or not can.min <= ignored <= can.max):
        ignored = None
    return Limits(low=low, high=high, ignored=ignored)


def _block(reached: torch.Tensor) -> Box | None:
    if bool(reached.all()):
        return ()
    box = tuple(_span(reached, dim) for dim in range(reached.dim()))
    return box if bool(reached[box].all()) else None


def _span(reached: torch.Tensor, dim: int) -> slice:
    along = reached.movedim(dim, 0).reshape(reached.shape[dim], -1).any(1).nonzero()
    return slice(int(along.min()), int(along.max()) + 1) if along.numel() else slice(0, 0)


def _on(device: torch.device, program: Program) -> Program:
    """The same program with its constants, and the tensors that it makes from nothing, on that device."""
    constants = {number: _sent_to(device, constant) for number, constant in program.recipe.constants.items()}
    return Program(replace(program.recipe, constants=constants), [_made_on(device, step) for step in program.steps])


def _sent_to(device: torch.device, constant: torch.Tensor) -> torch.Tensor:
    if device.type != "cuda":
        return constant.to(device)
    return torch.empty_like(constant, device="cpu", pin_memory=True).copy_(constant).to(device, non_blocking=True)


def _made_on(device: torch.device, step: Concrete) -> Concrete:
    takes_device = any(argument.name == "device" for argument in step.step.func._schema.arguments)
    kwargs: dict[str, Any] = {**step.kwargs, "device": device} if takes_device and not step.step.inputs else step.kwargs
    return replace(step, kwargs=kwargs)
