"""Batches that were handed over before anybody could know whether they are good: they lie on a GPU, and it is still looking at them.

Owns when the answer is asked for: before backward is launched, so that no rank can be past the gate of a step that this one must still hold. What is waited
for there was given to the device before the forward, so the forward keeps it busy meanwhile. Everything here runs on the training thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch_watchdog_agent.errors import let_through
from torch_watchdog_agent.streams import current_stream
from torch_watchdog_proto.messages import Violation

if TYPE_CHECKING:
    from torch_watchdog_agent.contract.guard import Checked, Guard, UnderCheck

__all__ = ["Unread", "is_captured"]


class Unread:
    """The batches of one rank that are under check. `found` is called with what is wrong with one; it may raise."""

    def __init__(self, guard: Guard, *, say: Callable[[str], None], found: Callable[[Violation], None], change: bool) -> None:
        self._guard, self._say, self._found, self._change = guard, say, found, change
        self.under_check: deque[UnderCheck] = deque()
        self._stream: Any = None
        self._told = False

    def __bool__(self) -> bool:
        return bool(self.under_check)

    def handed_over(self, batch: object, checked: Checked) -> object:
        """Starts the check of what lies on a device. Returns the batch that the loop should get."""
        if not checked.on_device.looks or is_captured() or self._is_on_the_side():
            return batch
        batch, under_check = self._guard.started(checked, batch, change=self._change)
        if under_check is not None:
            self.under_check.append(under_check)
        return batch

    def settle(self, *, wait: bool) -> bool:
        """Acts on the answers that have come; with `wait` on all. True where one had. A device that has failed meanwhile says so to the training itself."""
        if wait and (self.under_check or self._stream is None):
            self._stream = _stream()
        if not self.under_check or is_captured():
            return False
        before = len(self.under_check)
        while self.under_check:
            first = self.under_check[0]
            try:
                if wait:
                    first.sent.wait()
                elif not first.sent.arrived():
                    break
            except RuntimeError as error:
                let_through(error)
                self.under_check.clear()
                break
            self.under_check.popleft()
            violation = self._guard.said_of(first)
            if violation is not None:
                self._found(violation)
        return len(self.under_check) < before

    def _is_on_the_side(self) -> bool:
        """Whether this batch is handed over on another stream than the training's: a stand-in made here might be used before it is whole."""
        beside = self._stream is not None and self._stream != _stream()
        if beside:
            self._stream = None  # the next backward tells which one it is by now
        if beside and not self._told:
            self._told = True
            self._say("batches on a GPU come on another CUDA stream than the training's: their values are checked in traced steps only")
        return beside


def _stream() -> Any:
    """The CUDA stream of this thread; None without CUDA."""
    import torch

    return current_stream() if torch.cuda.is_initialized() else None


def is_captured() -> bool:
    """Whether a CUDA graph is being captured: what is launched now will run many times, and nothing may be waited for."""
    import torch

    return torch.cuda.is_initialized() and bool(torch.cuda.is_current_stream_capturing())
