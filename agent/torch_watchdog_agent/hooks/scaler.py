"""GradScaler: part of the state that a checkpoint needs, the reason why a loss may be seen multiplied, a sign of health by its scale, and who may leave out
the update that our gate stands before.
"""

from __future__ import annotations

import functools
import weakref
from types import ModuleType
from typing import Any

from torch_watchdog_agent.hooks.active import guarded, rank
from torch_watchdog_agent.hooks.optimizer import after_scaler

__all__ = ["patch", "unscaled"]

_raw: list[tuple[Any, Any]] = []  # the last (scaled, raw) pair, weakly


def patch(module: ModuleType) -> None:
    initialise, scale, step, update = (getattr(module.GradScaler, name) for name in ("__init__", "scale", "step", "update"))

    @functools.wraps(initialise)
    def seen(self: Any, *args: Any, **kwargs: Any) -> None:
        initialise(self, *args, **kwargs)
        _made(self)

    @functools.wraps(scale)
    def scaling(self: Any, outputs: Any) -> Any:
        scaled = scale(self, outputs)
        _scaled(self, outputs, scaled)
        return scaled

    @functools.wraps(step)
    def stepping(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        return after_scaler(lambda: step(self, optimizer, *args, **kwargs), optimizer, lambda: _has_overflowed(self, optimizer))

    @functools.wraps(update)
    def updating(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = update(self, *args, **kwargs)
        _updated(self)
        return result

    for name, ours in (("__init__", seen), ("scale", scaling), ("step", stepping), ("update", updating)):
        setattr(module.GradScaler, name, ours)


def unscaled(loss: Any) -> Any:
    """The loss as it was before a GradScaler multiplied it."""
    if _raw and _raw[0][0]() is loss:
        return _raw[0][1]() if _raw[0][1]() is not None else loss
    return loss


def _has_overflowed(scaler: Any, optimizer: Any) -> bool:
    """Asked only where it called no update, before which it has waited for these very numbers itself."""
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    return any(bool(one.item()) for one in found.values())


@guarded("scaler")
def _made(scaler: Any) -> None:
    here = rank()
    if here is not None:
        here.subjects.scaler_seen(scaler)


@guarded("scaler")
def _scaled(scaler: Any, raw: Any, scaled: Any) -> None:
    if hasattr(raw, "numel") and raw is not scaled:
        _raw[:] = [(weakref.ref(scaled), weakref.ref(raw))]
    here, scale = rank(), getattr(scaler, "_scale", None)  # one that is not enabled has none
    if here is None or scale is None or here.history.scale_is_known:
        return
    here.history.scale_seen(scale)  # the very first step may overflow, and is one of a scaler all the same


@guarded("scaler")
def _updated(scaler: Any) -> None:
    here, scale = rank(), getattr(scaler, "_scale", None)
    if here is not None and scale is not None:
        here.history.scale_seen(scale)
