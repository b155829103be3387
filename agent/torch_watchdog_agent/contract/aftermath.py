"""An exception in a traced step: is it the batch's doing? Owns the suspicion; the exception itself is the proof that something is wrong.

Frameworks check some limits in Python before any operator runs (labels longer than the decoder, one value per channel): no consumer is there to
be refused. A rule whose readings disagreed about the batch, and whose plainest reading says that it is broken, names the cause then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from traceback import walk_tb
from types import TracebackType

import torch

from torch_watchdog_agent.contract.kinds import offending
from torch_watchdog_agent.contract.plan import Finding
from torch_watchdog_agent.contract.replay import DOES_NOT_FIT, Resolve, replayed
from torch_watchdog_agent.contract.rules import LOOKED_AT, Rule
from torch_watchdog_agent.contract.sizes import Reading, Shapes, Size, readings_say
from torch_watchdog_agent.contract.where import Origin
from torch_watchdog_agent.errors import let_through, text_of
from torch_watchdog_proto.messages import BatchFact, BoundFact, Violation

__all__ = ["is_of_the_forward", "not_probabilities", "probability_violation", "suspected"]

_WRAPPER = "/torch/nn/parallel/distributed.py"  # around each forward; what it raises itself is of its own collectives (a model's buffers)
_ELSEWHERE = ("/torch/autograd/", "/torch/distributed/", "/torch/_tensor.py")


def is_of_the_forward(error: BaseException) -> bool:
    """Whether a bad batch can be behind this exception: not memory, not a collective, not backward."""
    if not isinstance(error, (ValueError, RuntimeError, IndexError, AssertionError)) or isinstance(error, torch.OutOfMemoryError):
        return False
    files = [file.replace("\\", "/") for file in _files(error.__traceback__)]
    if files and files[-1].endswith(_WRAPPER):
        return False
    return not any(part in file for file in files for part in _ELSEWHERE)


def _files(traceback: TracebackType | None) -> Sequence[str]:
    return [frame.f_code.co_filename for frame, _ in walk_tb(traceback)]


def suspected(
    alarmed: Sequence[Rule], unsettled: Sequence[Rule], origin: Origin, shapes: Shapes, error: BaseException
) -> tuple[Finding, Resolve] | None:
    """The first rule which the batch breaks by the plainest reading of its sizes: one of the file that raised, or one that had nothing against it."""
    files = set(_files(error.__traceback__))
    resolve = _plainest(shapes)
    for rule in sorted((*alarmed, *unsettled), key=lambda one: one.order):
        certain = rule in alarmed and rule.doubt in (None, LOOKED_AT)  # the program looked at the data, and did not like it either
        if certain or rule.place.source.rpartition(":")[0] in files:
            finding = _broken(rule, origin, resolve)
            if finding is not None:
                return finding, resolve
    return None


def _broken(rule: Rule, origin: Origin, resolve: Resolve) -> Finding | None:
    try:
        allowed = rule.allowed_by(lambda size: resolve(size, ()))
        values = () if rule.kind in ("spread", "reach") else replayed(rule.recipe, origin.leaves, resolve)
        mask = offending(rule.kind, values, allowed, rule.options)
    except DOES_NOT_FIT as error:
        let_through(error)
        return None
    return None if mask is None else Finding(rule=rule, allowed=allowed, values=values, mask=mask)


def _plainest(shapes: Shapes) -> Callable[[Size, Sequence[tuple[int, ...]]], int]:
    def resolve(size: Size, inputs: Sequence[tuple[int, ...]]) -> int:
        said = readings_say(size, shapes, inputs)
        return min(said, key=lambda value: min(map(_strangeness, said[value])))

    return resolve


def _strangeness(reading: Reading) -> int:
    """A size as it is before a constant, a constant before arithmetic."""
    if reading[0] in ("size", "input"):
        return 0 if reading[3] == 0 else 3
    return {"constant": 1, "product": 2, "input product": 2}.get(reading[0], 4)


# Without a doubted batch


def probability_violation(error: BaseException) -> Violation | None:
    """A loss or sampler that takes probabilities and was given something else: the frame that raised still holds its input."""
    text = text_of(error)
    if "all elements of input should be between 0 and 1" not in text:
        return None
    found, caller = _input_of("binary_cross_entropy", error.__traceback__)
    if not isinstance(found, torch.Tensor) or found.device.type != "cpu":
        return None
    return not_probabilities("binary_cross_entropy", found, caller)


def not_probabilities(op: str, given: torch.Tensor, source: str | None) -> Violation:
    """What the model gave to `op`, which takes probabilities."""
    low, high = (float(value) for value in torch.aminmax(given.detach().float()))
    finite = math.isfinite(low) and math.isfinite(high)
    outside = "The values are finite and outside of 0..1: they are logits, the sigmoid is missing. The batch is not to blame."
    sigmoid = "Use binary_cross_entropy_with_logits (BCEWithLogitsLoss), or apply a sigmoid first."
    if op != "binary_cross_entropy":
        outside, sigmoid = "The values are outside of what a probability can be. The batch is not to blame.", "Apply a softmax first."
    return Violation(
        kind="probability.out_of_range",
        summary=f"{op} takes probabilities and was given values from {low:.4g} to {high:.4g}",
        cause=outside if finite else "The model has made values that are not finite.",
        fix=sigmoid if finite else "Look at the layer that makes them.",
        batch=BatchFact(
            key="(made by the model)",
            value=low if low < 0 else high,
            shape=tuple(given.shape),
            dtype=str(given.dtype).removeprefix("torch."),
        ),
        bound=BoundFact(low=0, high=1, op=op, source=source),
        repairable=False,
    )


def _input_of(function: str, traceback: TracebackType | None) -> tuple[object, str | None]:
    """The `input` that a function of this name was called with, and the line outside of torch that led to it."""
    caller: str | None = None
    for frame, line in walk_tb(traceback):
        if frame.f_code.co_name == function:
            return frame.f_locals.get("input"), caller
        if "/torch/" not in frame.f_code.co_filename:
            caller = f"{frame.f_code.co_filename}:{line}"
    return None, caller
