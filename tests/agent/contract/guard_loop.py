"""A training loop around a Guard, as the hooks make it, for the guard's tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from torch_watchdog_agent.contract import Checked, Guard
from torch_watchdog_agent.errors import BadBatchError
from torch_watchdog_proto.messages import Violation

torch.set_num_threads(1)


_guards: list[Guard] = []


def abandon_all() -> None:
    """A guard may still be tracing where a test ends: a process has one guard, a test run has many."""
    while _guards:
        _guards.pop()._tracer.abandon()


@dataclass
class Seen:
    """What became of one batch: `checked` at hand-over, `refused` inside the traced step, `raised` by the training itself."""

    checked: Checked
    refused: Violation | None = None
    raised: BaseException | None = None
    diagnosed: Violation | None = None

    @property
    def violation(self) -> Violation | None:
        return self.checked.violation or self.refused or self.diagnosed


@dataclass
class Loop:
    """Runs `step(model, batch)` under a guard, with an optimizer where one is given."""

    model: nn.Module
    run: Callable[[nn.Module, Any], Any]
    optimizer: torch.optim.Optimizer | None = None
    said: list[str] = field(default_factory=list)
    refused: list[Violation] = field(default_factory=list)
    noticed: list[Violation] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.guard = Guard(say=self.said.append, on_refused=self.refused.append, on_noticed=self.noticed.append)
        _guards.append(self.guard)

    def step(self, batch: Any, *, indices: list[int] | None = None, go_on: bool = True) -> Seen:
        """One step. A batch that is refused at hand-over is not trained on; with `go_on` an exception of the training is kept."""
        seen = Seen(self.guard.fetched(batch, indices=indices, worker=None))
        if seen.checked.violation is not None:
            return seen
        self.guard.handed_over(seen.checked, batch)
        try:
            self.run(self.model, batch)
        except BadBatchError as error:
            seen.refused = error.violation
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            if not go_on:
                raise
            seen.raised, seen.diagnosed = error, self.guard.diagnose(error)
        self.guard.step_ended()
        if self.optimizer is not None and seen.violation is None and seen.raised is None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return seen

    def train(self, batches: Any) -> list[Seen]:
        return [self.step(batch) for batch in batches]
