"""The gate: wraps the outermost `Optimizer.step` of every optimizer class, where torch itself wraps it for its profiler.

With a closure the gate is inside, after the closure's backward; a veto leaves the step by a private exception that the wrapper catches. Not where the batch
has had its backward before (SAM): such a step may change parameters before it calls its closure.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch_watchdog_agent.gradients import norm_of
from torch_watchdog_agent.hooks.active import guarded, rank
from torch_watchdog_agent.rank import VETOED

__all__ = ["after_scaler", "left_out", "patch"]


class _Vetoed(Exception):  # noqa: N818  not an error: the way out of a closure
    def __init__(self, result: Any) -> None:
        super().__init__("the watchdog skips this step")
        self.result = result


left_out: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers whose newest step was vetoed
_any_left_out = False  # whether there ever was one
_gates_met = 0
_steps_under_way = 0  # a step inside a step (ZeRO, wrappers) is not a gate of its own


def patch(module: ModuleType) -> None:
    theirs = module.Optimizer.profile_hook_step

    def gated_step(step: Callable[..., Any]) -> Callable[..., Any]:
        hooked = theirs(step)

        @functools.wraps(hooked)
        def at_the_gate(self: Any, *args: Any, **kwargs: Any) -> Any:
            if _steps_under_way or _compiling():
                return hooked(self, *args, **kwargs)
            return _gate(hooked, self, args, kwargs)

        return at_the_gate

    module.Optimizer.profile_hook_step = staticmethod(gated_step)


def _compiling() -> bool:
    import torch  # by now it is whole; while this hook is put in place it is not

    return bool(torch.compiler.is_compiling())


def _gate(step: Callable[..., Any], optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    closure = kwargs.pop("closure", args[0] if args else None)
    entered: list[int | None] = []
    if callable(closure) and not _batch_is_used():
        closure = _gated(optimizer, closure, entered)
    elif (number := _enter(optimizer)) == VETOED:
        return None
    else:
        entered.append(number)
    try:
        result = _step(step, optimizer, closure, args, kwargs)
    except _Vetoed as veto:
        return veto.result
    _leave(entered[0] if entered else None)  # a closure may have run several times, and the update comes behind the last
    return result


@guarded("optimizer")
def _batch_is_used() -> bool:
    here = rank()
    return here is not None and here.history.has_seen_loss


def _step(step: Callable[..., Any], optimizer: Any, closure: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    global _steps_under_way
    _steps_under_way += 1
    try:
        return step(optimizer, closure, *args[1:], **kwargs) if closure is not None else step(optimizer, *args, **kwargs)
    finally:
        _steps_under_way -= 1


def _gated(optimizer: Any, closure: Callable[[], Any], entered: list[int | None]) -> Callable[[], Any]:
    """The closure with the gate behind its first run; optimizers that run it again (LBFGS) have passed by then. `entered` gets the window's number."""

    def run() -> Any:
        result = closure()
        if not entered:
            entered.append(_enter(optimizer))
            if entered[0] == VETOED:
                raise _Vetoed(result)
        return result

    return run


@guarded("optimizer")
def _enter(optimizer: Any) -> int | None:
    global _gates_met
    _gates_met += 1
    here = rank()
    if here is None:
        return None
    number = here.enter_gate(optimizer)
    if number == VETOED or _any_left_out:
        _mark(optimizer, number)
    if here.config.watch_gradients and number is not None and number != VETOED:
        _watch_gradients(optimizer)
    return number


@guarded("gradients")
def _watch_gradients(optimizer: Any) -> None:
    here = rank()
    if here is not None and not here.history.has_been_told_norm():
        here.history.norm_made(norm_of(optimizer))


def _mark(optimizer: Any, number: int | None) -> None:
    global _any_left_out
    _any_left_out |= number == VETOED
    (left_out.add if number == VETOED else left_out.discard)(optimizer)


def after_scaler(step: Callable[..., Any], optimizer: Any, had_overflowed: Callable[[], bool]) -> Any:
    """`step` is a GradScaler's: where it calls no update of the optimizer, the gate that is in there comes behind it."""
    before = _gates_met
    result = step()
    if _gates_met == before and not _steps_under_way and not _compiling():
        _gate_without_update(optimizer, had_overflowed)
    return result


@guarded("scaler")
def _gate_without_update(optimizer: Any, had_overflowed: Callable[[], bool]) -> None:
    here = rank()
    if here is not None and had_overflowed():  # else the update was made past our gate (a compiled step)
        _mark(optimizer, here.gate_without_update(optimizer))


@guarded("optimizer")
def _leave(number: int | None) -> None:
    here = rank()
    if here is not None and number is not None:
        here.leave_gate(number)
