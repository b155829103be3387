"""Numbers on their way from the GPU: copied to pinned memory behind the stream, and read when they have arrived. Nothing here waits for the device.

Owns pinned places and events; knows nothing of steps or records. On a CPU a number is there at once.
"""

from __future__ import annotations

import math
import sys
from typing import Any, NamedTuple

from torch_watchdog_agent.streams import current_stream

__all__ = ["Copies", "Figures", "Memory", "Newest", "arrived", "elapsed_ns"]

_MEMORY_INTERVAL_NS = 250_000_000


class Copies:
    """Losses under way: one pinned page, two events a place, all used again and again. `places` must be more than are ever waited for."""

    def __init__(self, places: int) -> None:
        self._count = places
        self._places: Any = None
        self._begins: list[Any] = []
        self._ends: list[Any] = []
        self._next, self._begun = 0, False

    def begin(self) -> None:
        """A forward begins: the stream is marked, so that the device's own time up to the loss can be read. Only once a loss has come from a GPU."""
        if self._begins:
            self._begins[self._next].record(current_stream())
            self._begun = True

    def start(self, loss: Any) -> tuple[Any, Any, Any]:
        """Starts a copy behind what the stream has to do. By the time a place is used again its loss was read or given up."""
        import torch

        if self._places is None:
            self._places = torch.empty(self._count, dtype=torch.float32, device="cpu", pin_memory=True).unbind()
            self._begins, self._ends = ([torch.cuda.Event(enable_timing=True) for _ in range(self._count)] for _ in range(2))
        number = self._next
        self._next = (self._next + 1) % self._count
        self._places[number].copy_(loss.reshape(()), non_blocking=True)
        self._ends[number].record(current_stream())
        begun, self._begun = self._begun, False
        return self._places[number], self._ends[number], self._begins[number] if begun else None


def arrived(loss: Any) -> float | None:
    """The loss as a number (NaN where there was none), or None while it is on its way."""
    if loss is None:
        return math.nan
    if isinstance(loss, float):
        return loss
    pinned, event, _ = loss
    return float(pinned) if event.query() else None


def elapsed_ns(loss: Any) -> int:
    """The device's time from `begin` to an arrived loss; 0 where it was not marked, or is no loss from a GPU."""
    if not isinstance(loss, tuple) or loss[2] is None:
        return 0
    return int(loss[2].elapsed_time(loss[1]) * 1e6)


class Newest:
    """One number of which only the newest counts. While one is on its way, others are let go."""

    def __init__(self) -> None:
        self._pinned: Any = None
        self._event: Any = None
        self._under_way = False
        self._value: float | None = None

    def put(self, number: Any) -> bool:
        """A tensor of one element, or a plain number. One that is spread over ranks is left alone (False): reading it would be a collective."""
        if not hasattr(number, "numel"):
            self._value = float(number)
        elif hasattr(number, "full_tensor") or number.numel() != 1:
            return False
        elif not number.is_cuda:
            self._value = float(number.detach())
        elif not self._under_way:
            self._copy(number.detach())
        return True

    def take(self) -> float | None:
        """The number once it is there, and only once."""
        if self._under_way and self._event.query():
            self._under_way, self._value = False, float(self._pinned)
        value, self._value = self._value, None
        return value

    def _copy(self, number: Any) -> None:
        import torch

        if self._pinned is None:
            self._pinned, self._event = torch.empty((), dtype=torch.float32, device="cpu", pin_memory=True), torch.cuda.Event()
        self._pinned.copy_(number.reshape(()), non_blocking=True)
        self._event.record(current_stream())
        self._under_way = True


class Figures(NamedTuple):
    """The allocator's: allocated, reserved and peak bytes, and how often it had to free its cache and try again."""

    allocated: int = 0
    reserved: int = 0
    peak: int = 0
    retries: int = 0


class Memory:
    """The figures of the current CUDA device. They cost tens of microseconds, so they are read a few times a second, not each step."""

    def __init__(self) -> None:
        self._read_ns = -_MEMORY_INTERVAL_NS
        self._figures = Figures()
        self.uuid = ""  # of the GPU, as NVML writes it; empty while it is not known

    def figures(self, now_ns: int) -> Figures:
        """Zeros where CUDA is not in use."""
        if now_ns - self._read_ns < _MEMORY_INTERVAL_NS:
            return self._figures
        self._read_ns, torch = now_ns, sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            stats = torch.cuda.memory_stats_as_nested_dict()
            allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
            retries = stats.get("num_alloc_retries", 0)
            self._figures = Figures(allocated["current"], reserved["current"], allocated["peak"], retries)
            self.uuid = self.uuid or _uuid(torch)
        return self._figures


def _uuid(torch: Any) -> str:
    found = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    return "" if found is None else f"GPU-{str(found).removeprefix('GPU-')}"
