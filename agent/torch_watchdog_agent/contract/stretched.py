"""A loss that compares element by element and was given shapes that stretch each other: (10,) against (10, 1) makes 100 differences of 10.

Owns the recognition, at the operator that stretches inside the loss. torch warns of all unequal shapes; told here is only where both are stretched.
"""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Any

import torch

from torch_watchdog_agent.contract.frames import Place
from torch_watchdog_agent.contract.tape import Tape
from torch_watchdog_proto.messages import BatchFact, BoundFact, Violation
from torch_watchdog_proto.names import spoken

__all__ = ["stretched"]

_FUNCTIONAL = f"torch{os.sep}nn{os.sep}functional.py"
_LOSSES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")


def stretched(made: Any, place: Place, tape: Tape) -> Violation | None:
    """A warning where `made` came of a loss's two tensors, and is larger than either."""
    given = _given_to_the_loss() if place.op in _LOSSES else None
    if given is None or made.numel() in (given[0].numel(), given[1].numel()):
        return None
    output, target = given
    taken, wanted, all_pairs = tuple(target.shape), tuple(output.shape), tuple(made.shape)
    key = _key(target, tape) or "the target"
    return Violation(
        kind="batch.shape",
        severity="warning",
        summary=f"{spoken(key)} {taken} against an output {wanted}: {place.op} compares all rows with all others, as {all_pairs}",
        cause=f"Neither shape is the other's: torch stretches both and takes the mean of {made.numel()} differences in place of {output.numel()}. "
        "Nothing raises, and the model learns the mean of the targets.",
        fix="Give both the same shape: output.squeeze(-1), target.unsqueeze(-1) or target.view_as(output).",
        batch=BatchFact(key=key, shape=taken, dtype=str(target.dtype).removeprefix("torch."), device=str(target.device)),
        bound=BoundFact(op=place.op or "", module=place.module, source=place.source),
        repairable=False,
    )


def _given_to_the_loss() -> tuple[torch.Tensor, torch.Tensor] | None:
    """`input` and `target` of the loss under way."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith(_FUNCTIONAL) and frame.f_code.co_name in _LOSSES:
            output, target = frame.f_locals.get("input"), frame.f_locals.get("target")
            return (output, target) if isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor) else None
        frame = frame.f_back
    return None


def _key(target: torch.Tensor, tape: Tape) -> str | None:
    """The tensor of the batch that the target is made of, where it is one."""
    value = tape.value_of(target)
    keys = {key for _, key in value.storage.leaves} if value is not None else set()
    return keys.pop() if len(keys) == 1 else None
