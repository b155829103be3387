"""How far Python is ahead of the device when a rescue comes, and what that means for the state that can be saved.

The device has done `updates`; Python has launched more, and has moved on what it keeps itself: step counters of the optimizers, schedulers, generators.
Owns which of that can be put back. What cannot makes the state one that is not saved, and says why.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from torch_watchdog_agent.checkpoint.subjects import TrainingState, parameters_of
from torch_watchdog_proto.sentences import count

if TYPE_CHECKING:
    from torch_watchdog_agent.checkpoint.window import WindowState
    from torch_watchdog_agent.loop import Loop
    from torch_watchdog_agent.rescue.device import DeviceGate

__all__ = ["Ahead", "on_device"]

_POLL_S = 0.002


def on_device(state: TrainingState) -> bool:
    """Whether the updates run on a GPU."""
    return any(param.is_cuda for param in parameters_of(state.optimizers).values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """`updates` are done on the device and `launched` were launched. `windows_back`: how many windows were begun after `updates`.

    `opened`: the newest update whose window the device has seen the start of: what was copied there is in its copy.
    """

    updates: int
    launched: int
    windows_back: int
    opened: int = 0
    problem: str = ""

    @classmethod
    def behind(cls, gate: DeviceGate | None, loop: Loop, window: WindowState, *, fetches: bool, within_s: float) -> Self:
        """Behind a closed gate; an update that has passed it on the device comes to its end first. `fetches`: the training thread is at a fetch, or stands
        behind it: nothing of a window that begins now is launched."""
        if gate is None:
            return cls(updates=0, launched=loop.updates_applied, windows_back=0, problem="there is no gate on its device")
        deadline = time.monotonic() + within_s
        before = -1
        while (not gate.is_between_updates or gate.done != before) and time.monotonic() < deadline:
            before = gate.done
            time.sleep(_POLL_S)
        problem = "" if gate.is_between_updates else "its update was under way on the device, and a half step is never saved"
        problem = "an update of it ran in a captured graph, past the gate" if gate.missed else problem
        done, launched = gate.done, loop.updates_applied
        back = window.begun_after(done) if launched > done or (loop.is_training and not fetches) else 0
        return cls(updates=done, launched=launched, windows_back=back, opened=gate.opened_last, problem=problem)

    def why_not(self, state: TrainingState, window: WindowState) -> str:
        """Why the state after `updates` cannot be had, or nothing."""
        if self.problem:
            return self.problem
        if not self.updates:
            return "no update had been applied yet"
        if self.launched > self.updates and not self.windows_back:
            return f"Python was {count(self.launched - self.updates, 'update')} ahead of its device, and what that step began with is not kept so long"
        if self.windows_back and self.opened != self.updates + 1:
            return "its device had not come to the start of the next step"
        if self.windows_back and (why := window.why_no_buffers(self.updates)):
            return why
        if len({param.device for param in parameters_of(state.optimizers).values()}) > 1:
            return "its parameters are on several devices, and the gate is on one"
        if self.launched > self.updates and any(_counts_unknown(optimizer) for optimizer in state.optimizers):
            return "its optimizer keeps more than a step counter outside the device, and had moved it on"
        return ""

    def mend(self, state: TrainingState) -> None:
        """Sets the optimizers' step counters that live outside the device back. This rank applies no update any more."""
        behind = self.launched - self.updates
        if not behind:
            return
        for optimizer in state.optimizers:
            for entries in optimizer.state.values():
                step = entries.get("step")
                if isinstance(step, int | float):
                    entries["step"] = step - behind
                elif step is not None and not step.is_cuda:
                    step.sub_(behind)


def _counts_unknown(optimizer: Any) -> bool:
    """Numbers of the optimizer's state that are not on the device, besides its step counter."""
    names = {
        name
        for entries in optimizer.state.values()
        for name, value in entries.items()
        if (isinstance(value, int | float) or (hasattr(value, "is_cuda") and not value.is_cuda)) and name != "step"
    }
    return bool(names)
