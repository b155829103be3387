"""Numbers on their way from a device to this process. Owns the pinned memory that they arrive in, and the marks behind which they have.

Nothing here waits but `Letter.wait`. Where the tensors are on the CPU a letter has arrived as soon as it is sent: the same code, without a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch

__all__ = ["Letter", "Mailbox", "Mark"]

Slot: TypeAlias = tuple[torch.dtype, int, str]


class Mark(Protocol):
    """A place in what a device has to do."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


class _Passed:
    """On the CPU everything has been done when its call returns."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


def mark_on(device: torch.device) -> Mark:
    """Behind all that the stream at hand has been given. Whoever waits for it sleeps, and keeps no core busy."""
    if device.type != "cuda":
        return _Passed()
    event: Any = torch.cuda.Event(blocking=True)
    event.record(torch.cuda.current_stream(device))
    made: Mark = event
    return made


class Letter:
    """Sheets of numbers that were sent together. `take` them once they have arrived: their memory is used again."""

    __slots__ = ("_done", "_mark", "_sheets")

    def __init__(self, mark: Mark, sheets: Sequence[torch.Tensor], done: Callable[[], None]) -> None:
        self._mark, self._sheets, self._done = mark, sheets, done

    def arrived(self) -> bool:
        return self._mark.query()

    def wait(self) -> None:
        """Until the device has come this far, and no further: what was given to it afterwards is not waited for."""
        self._mark.synchronize()

    def take(self) -> list[list[float]]:
        numbers = [sheet.tolist() for sheet in self._sheets]
        self._done()
        return numbers


class Mailbox:
    """Sends small tensors from a device to the host without waiting for it."""

    def __init__(self, mark_on: Callable[[torch.device], Mark] = mark_on) -> None:
        self._mark_on = mark_on
        self._free: dict[Slot, list[torch.Tensor]] = {}

    def send(self, sheets: Sequence[torch.Tensor]) -> Letter:
        """All on one device; they travel behind what its stream has been given so far."""
        slots = [(sheet.dtype, sheet.numel(), sheet.device.type) for sheet in sheets]
        copies = [self._free[slot].pop() if self._free.get(slot) else _page(slot) for slot in slots]
        for copy, sheet in zip(copies, sheets, strict=True):
            copy.copy_(sheet, non_blocking=True)
        return Letter(self._mark_on(sheets[0].device), copies, partial(self._take_back, slots, copies))

    def _take_back(self, slots: Sequence[Slot], copies: Sequence[torch.Tensor]) -> None:
        for slot, copy in zip(slots, copies, strict=True):
            self._free.setdefault(slot, []).append(copy)


def _page(slot: Slot) -> torch.Tensor:
    dtype, count, device = slot
    return torch.empty(count, dtype=dtype, device="cpu", pin_memory=device == "cuda")
