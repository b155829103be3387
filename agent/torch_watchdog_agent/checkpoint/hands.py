"""Whether the loop itself changes parameters in the middle of its steps, and not only its optimizers: adversarial training, a momentum encoder.

Learned by their content in the first windows, since torch does not count a write through `.data`. Reads, and never writes; waits for the device only in
those windows, which are traced steps in any case.
"""

from __future__ import annotations

from typing import Any

from torch_watchdog_agent.checkpoint.buffers import local_of
from torch_watchdog_agent.checkpoint.subjects import Subjects

__all__ = ["Hands"]

_LEARNING_WINDOWS = 3


class Hands:
    """`in_step`: the parameter that a backward has met changed; `at_gate`: the one that the gate has. Empty where nothing is known of such."""

    def __init__(self, subjects: Subjects) -> None:
        self._subjects, self._windows_left = subjects, _LEARNING_WINDOWS
        self.in_step = self.at_gate = ""
        self._before: list[tuple[str, float]] = []

    def opened(self) -> None:
        """A window begins. That of the first update has no optimizer yet, and teaches nothing."""
        self._before = []
        if self._windows_left and self._subjects.optimizers():
            self._windows_left -= 1
            self._before = _content(self._subjects)

    def why(self) -> str:
        """Why the parameters in the middle of a step need not be those of its start, or nothing."""
        return f"its loop itself changes {self.in_step} in the middle of a step" if self.in_step else ""

    def look(self, *, at_gate: bool = False) -> None:
        """Before a backward, or at the gate."""
        if not self._before:
            return
        changed = next((name for (name, was), (_, now) in zip(self._before, _content(self._subjects), strict=False) if was != now), "")
        self.in_step = self.in_step or changed
        if at_gate:
            self.at_gate, self._before = self.at_gate or changed, []


def _content(subjects: Subjects) -> list[tuple[str, float]]:
    """One number for each parameter of the models, by its name. Nothing while a CUDA graph is captured."""
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return []
    with torch.no_grad(), _disable_current_modes():
        named = [(name, local_of(param.detach())) for model in subjects.models() for name, param in model.named_parameters()]
        by_kind: dict[Any, list[tuple[str, Any]]] = {}
        for name, tensor in named:
            if tensor.is_floating_point() and tensor.numel() and tensor.device.type != "meta":
                by_kind.setdefault((tensor.device, tensor.dtype), []).append((name, tensor))
        return [
            pair for kind in by_kind.values() for pair in zip([name for name, _ in kind], _norms([one for _, one in kind]), strict=True)
        ]


def _norms(tensors: list[Any]) -> list[float]:
    """Of those of one device and dtype; a NaN, which equals nothing, as a number that does."""
    import torch

    norms: list[float] = torch.stack([norm.double() for norm in torch._foreach_norm(tensors)]).nan_to_num(nan=-1.0).tolist()
    return norms
