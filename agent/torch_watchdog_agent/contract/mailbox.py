"""Numbers on their way from a device to this process. Owns the pinned memory that they arrive in, and the marks behind which they have.

Nothing here waits but `Letter.wait`. Where the tensors are on the CPU a letter has arrived as soon as it is sent: the same code, without a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import torch

from torch_watchdog_agent.streams import current_stream

__all__ = ["Letter", "Mailbox", "Mark", "Slot"]

Slot: TypeAlias = tuple[torch.device, torch.dtype, int]


class Mark(Protocol):
    """A place in what a device has to do. `record` puts it behind all that its stream has been given; it may be put elsewhere once it is reached."""

    def record(self) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


class _Passed:
    """On the CPU everything has been done when its call returns."""

    def record(self) -> None:
        return None

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


class _Event:
    """On a CUDA device. Whoever waits for it sleeps, and keeps no core busy."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._event = device, torch.cuda.Event(blocking=True)

    def record(self) -> None:
        self._event.record(current_stream(self._device))

    def query(self) -> bool:
        return bool(self._event.query())

    def synchronize(self) -> None:
        if not self._event.query():
            self._event.synchronize()


def mark_on(device: torch.device) -> Mark:
    return _Event(device) if device.type == "cuda" else _Passed()


class Letter:
    """Pages of numbers that are sent together, again and again: `take` them once they have arrived, and it may be sent once more."""

    __slots__ = ("_mark", "_pages", "_rest")

    def __init__(self, slots: Sequence[Slot], mark: Mark, rest: list[Letter]) -> None:
        self._pages = [torch.empty(count, dtype=dtype, device="cpu", pin_memory=device.type == "cuda") for device, dtype, count in slots]
        self._mark, self._rest = mark, rest

    def send(self, sheets: Sequence[torch.Tensor]) -> None:
        for page, sheet in zip(self._pages, sheets, strict=True):
            page.copy_(sheet, non_blocking=True)
        self._mark.record()

    def arrived(self) -> bool:
        return self._mark.query()

    def wait(self) -> None:
        """Until the device has come this far, and no further: what was given to it afterwards is not waited for."""
        self._mark.synchronize()

    def take(self) -> list[list[float]]:
        numbers = [page.tolist() for page in self._pages]
        self._rest.append(self)
        return numbers


class Mailbox:
    """Sends small tensors from a device to the host without waiting for it."""

    def __init__(self, mark_on: Callable[[torch.device], Mark] = mark_on) -> None:
        self._mark_on = mark_on
        self._free: dict[tuple[Slot, ...], list[Letter]] = {}

    def send(self, slots: tuple[Slot, ...], sheets: Sequence[torch.Tensor]) -> Letter:
        """Sheets of these slots, all on one device; they travel behind what its stream has been given so far."""
        rest = self._free.setdefault(slots, [])
        letter = rest.pop() if rest else Letter(slots, self._mark_on(slots[0][0]), rest)
        letter.send(sheets)
        return letter
