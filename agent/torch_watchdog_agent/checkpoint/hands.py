"""Whether the loop itself changes parameters in the middle of its steps, and not only its optimizers: adversarial training, a momentum encoder.

Learned by their content in the first windows, since torch does not count a write through `.data`. Reads, and never writes; waits for the device only in
those windows, which are traced steps in any case.
"""

from __future__ import annotations

import itertools
from typing import Any, TypeAlias

from torch_watchdog_agent.checkpoint.buffers import local_of
from torch_watchdog_agent.checkpoint.subjects import Subjects
from torch_watchdog_agent.errors import of_a_signal

__all__ = ["Hands"]

_Mark: TypeAlias = tuple[float, float, int]  # of a parameter: its content, and how often it was written to by torch's own count

_LEARNING_WINDOWS = 3
_MOST_UPDATES = 8  # of one window that are looked at: where each parameter has an optimizer of its own there are hundreds


class Hands:
    """`in_step`: the parameter that a backward has met changed; `at_gate`: the one that the gate has; `behind`: the one that was changed between an update and
    the next window, uncounted. Empty where nothing is known of such."""

    def __init__(self, subjects: Subjects) -> None:
        self._subjects, self._windows_left = subjects, _LEARNING_WINDOWS
        self.in_step = self.at_gate = self.behind = ""
        self._params: list[tuple[str, Any]] = []
        self.before: list[float] = []  # what the parameters held as the window opened; empty where nobody is to look
        self._updated: list[_Mark] = []  # behind the newest update
        self._updates = 0  # of this window

    def opened(self) -> None:
        """A window begins. That of the first update has no optimizer yet, and teaches nothing."""
        if self._updated:
            both = zip(self._params, self._updated, self._marks(), strict=False)
            changed = (name for (name, _), was, is_now in both if was != is_now and was[2] == is_now[2])
            self.behind = self.behind or next(changed, "")
        self._params, self.before, self._updated, self._updates = [], [], [], 0
        if self._windows_left and self._subjects.optimizers():
            self._windows_left -= 1
            self._params = _looked_at(self._subjects)
            self.before = self._content()

    def why(self) -> str:
        """Why the parameters in the middle of a step need not be those of its start, or nothing."""
        return f"its loop itself changes {self.in_step} in the middle of a step" if self.in_step else ""

    def look(self, *, at_gate: bool = False) -> None:
        """Before a backward, or at the gate; while something is held from `before`."""
        if not self.before:
            return
        both = zip(self._params, _pairs(self.before), _pairs(self._content()), strict=False)
        changed = next((name for (name, _), was, is_now in both if was != is_now), "")
        self.in_step = self.in_step or changed
        if at_gate:
            self.at_gate = self.at_gate or changed
            self.before = []

    def updated(self) -> None:
        """An update has been applied. What else belongs to its step may be still to come (weights that are clipped through `.data`)."""
        if self._params:
            self._updates += 1
            self._updated = self._marks() if self._updates <= _MOST_UPDATES else []

    def _marks(self) -> list[_Mark]:
        versions = [-1 if param.is_inference() else param._version for _, param in self._params]
        return [(*content, version) for content, version in zip(_pairs(self._content()), versions, strict=False)]

    def _content(self) -> list[float]:
        try:
            return _content(self._params)
        except Exception as error:  # a kind of tensor that has no norm (float8): nothing is learned
            if of_a_signal(error):
                raise
            self._windows_left = 0
            return []


def _looked_at(subjects: Subjects) -> list[tuple[str, Any]]:
    """By device and dtype. The objects as they are between two steps: a model that is sharded has others, whole ones, in its forward and backward (FSDP2),
    or other content in the same (FSDP1, which is left out)."""
    from torch.nn.parameter import is_lazy

    named = {id(param): (name, param) for model in subjects.models() for name, param in model.named_parameters()}
    found = [
        (name, param)
        for name, param in named.values()
        if not is_lazy(param)
        and param.is_floating_point()
        and param.numel()
        and param.device.type != "meta"
        and not hasattr(param, "_unpadded_unsharded_size")
    ]
    return sorted(found, key=lambda pair: (str(pair[1].device), str(pair[1].dtype)))


def _content(params: list[tuple[str, Any]]) -> list[float]:
    """Two numbers for each: its norm and its sum, exact enough that a step of half an ulp in one of a million elements is seen, whatever its dtype. Nothing
    while a CUDA graph is captured."""
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return []
    found: list[float] = []
    with torch.no_grad(), _disable_current_modes():
        for _, kind in itertools.groupby(params, key=lambda pair: pair[1].device):
            numbers = [number for _, param in kind for number in _norm_and_sum(local_of(param.detach()))]
            found += torch.stack(numbers).nan_to_num(nan=-1.0).tolist()  # of NaN, which equals nothing, one that does
    return found


def _pairs(numbers: list[float]) -> list[tuple[float, float]]:
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def _norm_and_sum(values: Any) -> tuple[Any, Any]:
    import torch

    return torch.linalg.vector_norm(values, dtype=torch.float64), values.sum(dtype=torch.float64)
