"""A training loop whose batches lie on a device as far as the guard knows: their values cost a wait there, so it may read them in traced steps only.

The tensors are on the CPU: the guard's own code runs, on a device that answers only when it is waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import guard_loop
import torch
from guard_loop import Loop, Seen

from torch_watchdog_agent.contract import Guard
from torch_watchdog_agent.contract.mailbox import Mailbox
from torch_watchdog_agent.errors import BadBatchError


class Lag:
    """A mark that the device has not come to before somebody waits for it."""

    def __init__(self, waits: list[Lag]) -> None:
        self.waits, self.reached = waits, False

    def record(self) -> None:
        self.reached = False

    def query(self) -> bool:
        return self.reached

    def synchronize(self) -> None:
        self.reached = True
        self.waits.append(self)


class DeviceLoop(Loop):
    """`handed` is what the loop got of the newest batch; `waits` what was waited for."""

    def __init__(self, model: torch.nn.Module, run: Callable[[Any, Any], Any], *, change: bool = True) -> None:
        self.waits: list[Lag] = []
        self.change, self.handed = change, None
        super().__init__(model, run)

    def __post_init__(self) -> None:
        self.guard = Guard(
            say=self.said.append, on_refused=self.refused.append, is_elsewhere=lambda tensor: True,
            mailbox=Mailbox(lambda device: Lag(self.waits)),
        )  # fmt: skip
        guard_loop._guards.append(self.guard)

    def step(self, batch: Any, *, indices: list[int] | None = None, go_on: bool = True) -> Seen:
        seen = Seen(self.guard.fetched(batch, indices=indices, worker=None))
        if seen.checked.violation is not None:
            return seen
        self.handed, under_check = self.guard.started(seen.checked, batch, change=self.change)
        self.guard.handed_over(seen.checked, self.handed)
        try:
            self.run(self.model, self.handed)
        except BadBatchError as error:
            seen.refused = error.violation
        except (IndexError, RuntimeError, ValueError) as error:
            if not go_on:
                raise
            seen.raised, seen.diagnosed = error, self.guard.diagnose(error)
        if under_check is not None:
            assert not under_check.sent.arrived()
            under_check.sent.wait()
            seen.diagnosed = self.guard.said_of(under_check) or seen.diagnosed
        self.guard.step_ended()
        return seen
