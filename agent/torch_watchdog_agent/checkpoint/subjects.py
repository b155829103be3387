"""What makes up the training state of this process, found without a line of user code.

Owns the list of optimizers, schedulers, scalers and models that the hooks have seen, all held weakly, and the search for the models where
no hook saw one. Knows nothing of files or ranks. State that the user's own code holds is not found; `not_covered` says so.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch_watchdog_agent.finalizing import unless_finalizing
from torch_watchdog_agent.living import instances_of


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """The living objects of one moment, in an order that is the same on every rank."""

    models: tuple[Any, ...]
    optimizers: tuple[Any, ...]
    schedulers: tuple[Any, ...]
    scalers: tuple[Any, ...]


def _to_nobody(_: int) -> None:
    """Nobody asks."""


class Subjects:
    """Collects what the hooks see. The `*_seen` calls cost well under a microsecond once an object is known."""

    def __init__(self, *, optimizer_gone: Callable[[int], None] = _to_nobody) -> None:
        """`optimizer_gone`: told the number of one that is no more."""
        self.generation = 0  # changes whenever an object came or went: whoever derived something from the lists derives it anew
        self._optimizers = _Seen(self._changed, gone=optimizer_gone)
        self._schedulers = _Seen(self._changed)
        self._scalers = _Seen(self._changed)
        self._models = _Seen(self._changed)
        self._found: tuple[int, tuple[weakref.ref[Any], ...]] = (-1, ())

    def optimizer_seen(self, optimizer: Any) -> int:
        """Its number for as long as it lives, a wrapper's the same."""
        if optimizer not in self._optimizers:
            optimizer = inner_optimizer(optimizer)
            self._optimizers.add(optimizer)
        return id(optimizer)

    def scheduler_seen(self, scheduler: Any) -> None:
        self._schedulers.add(scheduler)

    def scaler_seen(self, scaler: Any) -> None:
        if is_on(scaler):
            self._scalers.add(scaler)

    def model_seen(self, module: Any) -> None:
        self._models.add(bare_model(module))

    def optimizers(self) -> tuple[Any, ...]:
        return tuple(self._optimizers)

    def schedulers(self) -> tuple[Any, ...]:
        """The outermost schedulers: one that a SequentialLR or ChainedScheduler drives is part of that one's state."""
        seen = tuple(self._schedulers)
        if not seen:
            return ()
        inner = {id(child) for scheduler in seen for child in inner_schedulers(scheduler)}
        return tuple(scheduler for scheduler in seen if id(scheduler) not in inner)

    def scheduled(self) -> int:
        """What all of them have counted so far. Asked in each step, and most trainings have none or one."""
        return sum([_counted(one) for one in self.schedulers()]) if self._schedulers.refs else 0

    def scalers(self) -> tuple[Any, ...]:
        return tuple(self._scalers)

    def models(self) -> tuple[Any, ...]:
        """The outermost modules that hold the optimizers' parameters; searched for once per change of the lists."""
        generation, refs = self._found
        if generation != self.generation:
            refs = tuple(weakref.ref(model) for model in _covering_models(tuple(self._models), self.optimizers()))
            self._found = (self.generation, refs)
        return tuple([model for ref in refs if (model := ref()) is not None])

    def now(self) -> TrainingState:
        return TrainingState(models=self.models(), optimizers=self.optimizers(), schedulers=self.schedulers(), scalers=self.scalers())

    def not_covered(self) -> tuple[str, ...]:
        """What a checkpoint of ours does not hold, in words."""
        return ("anything that the script itself holds: EMA copies, counters, best scores, its own numpy or torch generators",)

    def _changed(self) -> None:
        self.generation += 1


class _Seen:
    """Objects in the order they were first seen, each once, none kept alive."""

    def __init__(self, changed: Callable[[], None], *, gone: Callable[[int], None] = _to_nobody) -> None:
        self.refs: dict[int, weakref.ref[Any]] = {}
        self._changed, self._gone = changed, gone

    def add(self, item: Any) -> None:
        key = id(item)
        if item in self:
            return
        self.refs[key] = weakref.ref(item, unless_finalizing(lambda _: self._forget(key)))
        self._changed()

    def __contains__(self, item: Any) -> bool:
        return id(item) in self.refs

    def _forget(self, key: int) -> None:
        self.refs.pop(key, None)
        self._gone(key)
        self._changed()

    def __iter__(self) -> Iterator[Any]:
        return iter([item for ref in list(self.refs.values()) if (item := ref()) is not None])


def _counted(scheduler: Any) -> int:
    """A scheduler of the user's own may keep anything under that name; a ChainedScheduler keeps no count of its own."""
    epoch = getattr(scheduler, "last_epoch", None)
    if epoch is None:
        return sum([_counted(child) for child in inner_schedulers(scheduler)])
    return int(epoch) if isinstance(epoch, int | float) and math.isfinite(epoch) else 0


def bare_model(module: Any) -> Any:
    """The user's own module under DDP and torch.compile wrappers. FSDP stays: its shards can only be named from outside."""
    from torch.nn.parallel import DistributedDataParallel

    while True:
        if isinstance(module, DistributedDataParallel):
            module = module.module
        elif "_orig_mod" in getattr(module, "_modules", {}):
            module = module._orig_mod
        else:
            return module


def is_on(scaler: Any) -> bool:
    """False for `GradScaler(enabled=False)`, which has no state: a script may hand it to restore() or not."""
    return bool(getattr(scaler, "_enabled", True))


def is_half_done(scaler: Any) -> bool:
    """Whether an optimizer has stepped, or was kept from it, and the scaler's own `update()` is still to come."""
    notes = getattr(scaler, "_per_optimizer_states", None) or {}
    return any(getattr(one.get("stage"), "name", "") == "STEPPED" for one in list(notes.values()))


def inner_optimizer(optimizer: Any) -> Any:
    """The optimizer under a wrapper such as accelerate's, which is an Optimizer itself and passes everything on."""
    from torch.optim import Optimizer

    inner = optimizer.__dict__.get("optimizer")
    return inner if isinstance(inner, Optimizer) else optimizer


def inner_schedulers(scheduler: Any) -> tuple[Any, ...]:
    """The schedulers that this one drives, at any depth."""
    children = scheduler.__dict__.get("_schedulers") or ()
    return tuple(found for child in children for found in (child, *inner_schedulers(child)))


def parameters_in_order(optimizer: Any) -> list[Any]:
    """As its `state_dict()` numbers them."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def parameters_of(optimizers: tuple[Any, ...]) -> dict[int, Any]:
    """By id, each once."""
    return {id(param): param for optimizer in optimizers for param in parameters_in_order(optimizer)}


def _covering_models(seen: tuple[Any, ...], optimizers: tuple[Any, ...]) -> tuple[Any, ...]:
    """Prefer what a DDP or FSDP hook saw, where one module holds everything; otherwise search the interpreter's objects."""
    wanted = parameters_of(optimizers)
    outermost = _without_contained(seen)
    if not wanted or (len(outermost) == 1 and wanted.keys() <= _parameter_ids(outermost[0])):
        return outermost
    return _fewest_that_cover(tuple(wanted), _without_contained((*outermost, *_outermost_holders(set(wanted)))))


def _parameter_ids(model: Any) -> set[int]:
    return {id(param) for param in model.parameters()}


def _without_contained(models: tuple[Any, ...]) -> tuple[Any, ...]:
    inside = {id(child) for model in models for child in model.modules() if child is not model}
    unique = {id(model): model for model in models if id(model) not in inside}
    return tuple(unique.values())


def _outermost_holders(wanted: set[int]) -> tuple[Any, ...]:
    """All modules of the interpreter from which a wanted parameter can be reached and which no other module contains."""
    from torch.nn import Module

    modules = [item for item in instances_of(Module) if "_modules" in item.__dict__]
    parents: dict[int, list[Any]] = {}
    for module in modules:
        for child in module._modules.values():
            parents.setdefault(id(child), []).append(module)
    todo = [module for module in modules if any(id(param) in wanted for param in module._parameters.values())]
    seen: set[int] = set()
    roots: list[Any] = []
    while todo:
        module = todo.pop(0)
        if id(module) not in seen:
            seen.add(id(module))
            todo += parents.get(id(module), ())
            roots += () if id(module) in parents else (module,)
    return tuple(bare_model(root) for root in roots)


def _fewest_that_cover(wanted: tuple[int, ...], candidates: tuple[Any, ...]) -> tuple[Any, ...]:
    """Greedy: the module that holds most of what is missing, the smaller one of two alike; then in the order of their first parameter."""
    missing: set[int] = set(wanted)
    chosen: list[Any] = []
    rest = sorted(candidates, key=lambda model: (len(_parameter_ids(model)), type(model).__qualname__))
    while missing and rest:
        best = max(rest, key=lambda model: len(missing & _parameter_ids(model)))
        if not missing & _parameter_ids(best):
            break
        chosen.append(best)
        rest.remove(best)
        missing -= _parameter_ids(best)
    place = {key: index for index, key in enumerate(wanted)}
    return tuple(sorted(chosen, key=lambda model: min(place.get(key, len(place)) for key in _parameter_ids(model))))
