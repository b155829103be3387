"""For loops that hide from the hooks: the same three moments, marked by hand. Each is a plain pass-through where no launch of ours watches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torch_watchdog_agent.hooks.active import guarded, rank
from torch_watchdog_agent.hooks.passes import outer_iteration
from torch_watchdog_agent.rank import VETOED

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

__all__ = ["Watched", "attach", "step", "watch"]

Batch = TypeVar("Batch")


class Watched(Generic[Batch]):
    """An iterable of batches whose every batch is looked at before the loop gets it. All else is as the iterable has it."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return outer_iteration(self, lambda: iter(self._batches))

    def __len__(self) -> int:
        if not isinstance(self._batches, Sized):
            raise TypeError(f"object of type {type(self._batches).__name__!r} has no len()")
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:
        if name == "_batches":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self._batches, name)


def watch(batches: Iterable[Batch]) -> Watched[Batch]:
    """Iterate the result in place of `batches`: a generator, a list, or a loader that changes what torch's DataLoader made.

    Each batch is looked at when the loop gets it, and is held there where the model cannot take it. Length and attributes are those of `batches`.

        for ids, labels in torch_watchdog_agent.watch(my_batches()):
            loss = torch.nn.functional.cross_entropy(model(ids), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    """
    return Watched(batches)


def step() -> bool:
    """Call right before parameters change, where no `Optimizer.step` of torch does it. False: leave this update out, every rank does.

        for ids, labels in torch_watchdog_agent.watch(my_batches()):
            loss = torch.nn.functional.cross_entropy(model(ids), labels)
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            if torch_watchdog_agent.step():
                update(model, gradients)

    May raise SystemExit, where the job stops here.
    """
    return _stepped() is not False


@guarded("step")
def _stepped() -> bool:
    here = rank()
    number = here.enter_gate(None) if here is not None else None
    if here is None or number is None:
        return True
    if number == VETOED:
        return False
    here.leave_gate(number)
    return True


def attach(*, model: nn.Module | None = None, optimizer: Optimizer | None = None) -> None:
    """Names a model and an optimizer that no hook has seen yet: for module paths in a diagnosis, and for the checkpoint.

    A model that no optimizer trains (an average, a teacher) is not saved for it. May be called again, where there are several.

        model = build_model()
        optimizer = build_optimizer(model)
        torch_watchdog_agent.attach(model=model, optimizer=optimizer)
        for ids, labels in torch_watchdog_agent.watch(my_batches()):
            train_step(model, optimizer, ids, labels)
    """
    _attached(model, optimizer)


@guarded("attach")
def _attached(model: nn.Module | None, optimizer: Optimizer | None) -> None:
    here = rank()
    if here is None:
        return
    if model is not None:
        here.subjects.model_seen(model)
        here.guard.model_seen(model)
    if optimizer is not None:
        here.subjects.optimizer_seen(optimizer)
