"""Checks of a batch that is on a device already: a few kernels behind what its stream has to do, and their numbers sent to the host.

Owns how they run, and the legal stand-in that the model gets: the same bits where nothing is wrong, since nobody can know in time whether something is.
Never waits for the device and never writes to a tensor of the batch. Which checks can be made there is in placement.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter
from typing import TypeAlias

import torch

from torch_watchdog_agent.contract.check import MAX_FULL_FLOATS
from torch_watchdog_agent.contract.mailbox import Letter, Mailbox
from torch_watchdog_agent.contract.mailbox import Slot as Sheet
from torch_watchdog_agent.contract.replay import Program
from torch_watchdog_agent.contract.rules import Rule

__all__ = ["NO_CHECKS", "Box", "Computed", "DeviceChecks", "Finite", "Leaves", "Limits", "Look", "Part", "Sent"]

Leaves: TypeAlias = Mapping[str, torch.Tensor]
Box: TypeAlias = tuple[slice, ...]  # () for the whole tensor
Slot: TypeAlias = tuple[torch.device, torch.dtype]
Cells: TypeAlias = Iterator[torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Values that a dtype can hold. `ignored` lies outside of the range. `empties`: not all cells may be this one."""

    low: int | float
    high: int | float
    ignored: int | None = None
    empties: int | None = None

    @property
    def count(self) -> int:
        return 2 if self.ignored is None else 4

    def looked_at(self, values: torch.Tensor, cells: Cells) -> torch.Tensor:
        """The extremes into the cells, and where they alone cannot say, those of the difference to the legal values, which are returned."""
        legal = self._legal(values)
        torch.aminmax(values, out=(next(cells), next(cells)))
        if self.ignored is not None:
            torch.aminmax(legal - values, out=(next(cells), next(cells)))
        return legal

    def _legal(self, values: torch.Tensor) -> torch.Tensor:
        legal = values.clamp(self.low, self.high)
        if values.is_floating_point():
            legal = legal.nan_to_num(nan=float(self.low), posinf=math.inf, neginf=-math.inf)
        return legal if self.ignored is None else torch.where(values == self.ignored, values, legal)

    def are_broken(self, numbers: Sequence[float]) -> bool:
        lowest, highest = numbers[:2]
        if self.empties is not None and lowest == highest == self.empties:
            return True
        if self.ignored is None:
            return not (self.low <= lowest and highest <= self.high)  # NaN is neither
        return bool(numbers[2] or numbers[3])


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a tensor that reaches an operator as it is."""

    key: str
    slot: Slot
    box: Box
    limits: Limits

    @property
    def count(self) -> int:
        return self.limits.count

    def look(self, leaves: Leaves, made: dict[str, torch.Tensor], cells: Cells) -> None:
        leaf = leaves[self.key]
        base = made.get(self.key, leaf)
        legal = self.limits.looked_at(base[self.box] if self.box else base, cells)
        if not self.box:
            made[self.key] = _laid_out_as(leaf, legal)
            return
        made[self.key] = whole = _laid_out_as(leaf, base.clone()) if base is leaf else base
        whole[self.box] = legal

    def is_broken(self, numbers: Sequence[float]) -> bool:
        return self.limits.are_broken(numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """Values computed from the batch. Where they offend nobody knows in time which cell is to blame: the tensors `keys` are filled whole."""

    key: str
    slot: Slot
    program: Program
    limits: Limits
    keys: tuple[str, ...]
    fill: int
    of: Callable[[Sequence[torch.Tensor]], torch.Tensor] = itemgetter(0)  # what of the computed values is held against the limits

    @property
    def count(self) -> int:
        return self.limits.count

    def look(self, leaves: Leaves, made: dict[str, torch.Tensor], cells: Cells) -> None:
        values = self.of(self.program.run({key: made.get(key, leaves[key]) for key in self.keys}))
        wrong = (self.limits.looked_at(values, cells) != values).any()
        for key in self.keys:
            leaf = made.get(key, leaves[key])
            made[key] = _laid_out_as(leaf, torch.where(wrong, bool(self.fill) if leaf.dtype == torch.bool else self.fill, leaf))

    def is_broken(self, numbers: Sequence[float]) -> bool:
        return self.limits.are_broken(numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finite:
    """A float tensor that has held no NaN and no infinity so far. No kernel fails over one: nothing is replaced."""

    key: str
    slot: Slot
    count: int = 2

    def look(self, leaves: Leaves, _: dict[str, torch.Tensor], cells: Cells) -> None:
        torch.aminmax(_sampled(leaves[self.key].detach()), out=(next(cells), next(cells)))

    def is_broken(self, numbers: Sequence[float]) -> bool:
        return not all(math.isfinite(number) for number in numbers)


Look: TypeAlias = Part | Computed | Finite


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """One batch under check. `kept`: its tensors as they were, alive until the numbers are there; `made`: the legal stand-ins."""

    letters: Sequence[Letter]
    kept: Leaves
    made: Leaves

    def arrived(self) -> bool:
        return all(letter.arrived() for letter in self.letters)

    def wait(self) -> None:
        for letter in self.letters:
            letter.wait()


@dataclass(slots=True, eq=False)
class DeviceChecks:
    """For batches of one signature. `uncovered`: rules that are not checked there, and why."""

    looks: list[Look] = field(default_factory=list)
    uncovered: list[tuple[Rule, str]] = field(default_factory=list)
    elsewhere: frozenset[str] = frozenset()
    _layout: list[tuple[Sheet, ...]] = field(default_factory=list)  # the sheets of each device

    def sent(self, leaves: Leaves, mailbox: Mailbox) -> Sent:
        """Starts the checks of this batch."""
        layout = self._layout or self._laid_out()
        sheets = {sheet: torch.empty(sheet[2], dtype=sheet[1], device=sheet[0]) for of_device in layout for sheet in of_device}
        cells = {sheet[:2]: iter(numbers.unbind()) for sheet, numbers in sheets.items()}
        made: dict[str, torch.Tensor] = {}
        for one in self.looks:
            one.look(leaves, made, cells[one.slot])
        letters = [mailbox.send(of_device, [sheets[sheet] for sheet in of_device]) for of_device in layout]
        return Sent(letters=letters, kept={key: leaves[key] for key in self.elsewhere}, made=made)

    def _laid_out(self) -> list[tuple[Sheet, ...]]:
        counts: Counter[Slot] = Counter()
        for one in self.looks:
            counts[one.slot] += one.count
        sheets = [(device, dtype, count) for (device, dtype), count in counts.items()]
        self._layout = [
            tuple(sheet for sheet in sheets if sheet[0] == device) for device in dict.fromkeys(device for device, _, _ in sheets)
        ]
        return self._layout

    def answers(self, sent: Sent) -> list[tuple[Look, list[float]]]:
        """What each look has brought, once all has arrived."""
        numbers = {}
        for of_device, letter in zip(self._layout, sent.letters, strict=True):
            for sheet, page in zip(of_device, letter.take(), strict=True):
                numbers[sheet[:2]] = iter(page)
        return [(one, list(islice(numbers[one.slot], one.count))) for one in self.looks]


NO_CHECKS = DeviceChecks()  # nothing of the batch is on a device


def _laid_out_as(leaf: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """With the strides that the loop's tensor has: a compiled step looks at them. What the user has hung onto the tensor comes along."""
    if tensor.stride() != leaf.stride() and 0 not in leaf.stride():
        tensor = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device).copy_(tensor)
    if leaf.__dict__:
        tensor.__dict__.update(leaf.__dict__)
    return tensor


def _sampled(tensor: torch.Tensor) -> torch.Tensor:
    """As many of a large float tensor's values as are looked at on the CPU."""
    if tensor.numel() <= MAX_FULL_FLOATS:
        return tensor
    stride = -(-tensor.numel() // MAX_FULL_FLOATS)
    return tensor.view(-1)[::stride] if tensor.is_contiguous() else tensor[..., ::stride]
