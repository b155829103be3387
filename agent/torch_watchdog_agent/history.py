"""Turns what the hooks see into ring records: tensors of a batch, its loss once that is known, and the step's times and memory.

Owns the losses that are still on their way from the GPU; never waits for one. Knows torch tensors only by the few methods used here.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch_watchdog_agent.loop import Loop
from torch_watchdog_agent.recorder import Recorder
from torch_watchdog_proto.record import MicroStep, StepDone, TensorSeen

__all__ = ["History"]

_MAX_PENDING_LOSSES = 64
_MEMORY_INTERVAL_NS = 250_000_000


@dataclass(slots=True)
class _OpenMicroStep:
    step: int
    micro_step: int
    time_ns: int
    loader_ns: int
    evaluation: bool
    loss: Any = None  # a float, or (pinned tensor, event) while the copy is under way


class History:
    """What has been recorded of this rank. Without a recorder everything is dropped."""

    def __init__(self, recorder: Recorder | None, loop: Loop) -> None:
        self._recorder, self._loop = recorder, loop
        self._pending: deque[_OpenMicroStep] = deque()
        self._losses: list[Any] = []  # of the backwards since the last fetch
        self._last_gate_ns = time.monotonic_ns()
        self._copies, self._memory = _Copies(), _Memory()

    def forget(self) -> None:
        self._recorder = None
        self._pending.clear()
        self._losses.clear()

    def said(self, text: str) -> None:
        self.note(text, level=1)

    def note(self, text: str, *, level: int) -> None:
        if self._recorder is not None:
            self._recorder.note(text, level=level)

    def batch(self, stats: Iterable[Any], *, loader_ns: int, evaluation: bool) -> None:
        """One batch handed over: its tensors are written now, the micro-step when its loss is known."""
        if self._recorder is None:
            return
        step, micro_step = self._loop.step, self._loop.micro_step
        for stat in stats:
            self._recorder.write(
                TensorSeen(
                    key_id=self._recorder.key_id(stat.key), dtype=stat.dtype, step=step, micro_step=micro_step, low=float(stat.low),
                    high=float(stat.high), negatives=stat.negatives, ignored=stat.ignored, finite=stat.finite, shape=tuple(stat.shape),
                )
            )  # fmt: skip
        if len(self._pending) == _MAX_PENDING_LOSSES:
            oldest = self._pending.popleft()
            oldest.loss = None  # nobody will wait for it
            self._write(self._recorder, oldest, math.nan)
        self._pending.append(_OpenMicroStep(step, micro_step, time.time_ns(), loader_ns, evaluation))

    def loss_seen(self, loss: Any) -> float | None:
        """The local loss, before any all-reduce. On a GPU it is copied to pinned memory behind the stream, and read when it has arrived.

        Returns it where it is known at once.
        """
        if loss.numel() != 1 or len(self._losses) >= len(self._pending) or not self._loop.is_open(self._pending[-1].step):
            return None
        self._losses.append(self._copies.start(loss.detach()) if loss.is_cuda else float(loss.detach()))
        return None if loss.is_cuda else self._losses[-1]

    def flush(self, *, ending: bool = False) -> None:
        """Writes the micro-steps whose loss has arrived, or will not come any more, in order. `ending`: none will come for the open window."""
        self._assign()
        while self._pending and self._recorder is not None:
            first = self._pending[0]
            loss = _arrived(first.loss)
            if loss is None or (first.loss is None and not ending and not first.evaluation and self._loop.is_open(first.step)):
                return
            self._write(self._recorder, self._pending.popleft(), loss)

    def _assign(self) -> None:
        """Gives the losses since the last fetch to the batches that wait for one.

        A loop that took all micro-batches of a step first runs their backwards in the same order. Where there are fewer, the first batches were given up.
        """
        losses, self._losses = self._losses, []
        if losses:
            waiting = [
                micro for micro in self._pending if micro.loss is None and not micro.evaluation and micro.step == self._pending[-1].step
            ]
            for micro, loss in zip(waiting[-len(losses) :], losses, strict=False):
                micro.loss = loss

    @staticmethod
    def _write(recorder: Recorder, micro: _OpenMicroStep, loss: float) -> None:
        recorder.write(
            MicroStep(
                step=micro.step, micro_step=micro.micro_step, time_ns=micro.time_ns, loader_ns=micro.loader_ns, loss=loss,
                loss_known=micro.loss is not None, evaluation=micro.evaluation,
            )
        )  # fmt: skip

    def step_done(self, step: int, *, vetoed: bool) -> None:
        now_ns = time.monotonic_ns()
        self.flush()
        if self._recorder is not None:
            allocated, reserved, peak = self._memory.figures(now_ns)
            self._recorder.write(
                StepDone(
                    step=step, time_ns=time.time_ns(), step_ns=now_ns - self._last_gate_ns, micro_steps=self._loop.trained_on,
                    allocated_bytes=allocated, reserved_bytes=reserved, peak_bytes=peak, vetoed=vetoed,
                    updates_applied=self._loop.updates_applied,
                )
            )  # fmt: skip
        self._last_gate_ns = now_ns


class _Copies:
    """Losses on their way from the GPU: one pinned page, one event a place, all used again and again."""

    def __init__(self) -> None:
        self._places: Any = None
        self._events: list[Any] = []
        self._next = 0

    def start(self, loss: Any) -> tuple[Any, Any]:
        """Starts a copy behind what the stream has to do. By the time a place is used again its loss was read or given up."""
        import torch

        if self._places is None:
            self._places = torch.empty(2 * _MAX_PENDING_LOSSES, dtype=torch.float32, pin_memory=True).unbind()
            self._events = [torch.cuda.Event() for _ in self._places]
        place, event = self._places[self._next], self._events[self._next]
        self._next = (self._next + 1) % len(self._places)
        place.copy_(loss.reshape(()), non_blocking=True)
        event.record()
        return place, event


def _arrived(loss: Any) -> float | None:
    """The loss as a number (NaN where there was none), or None while it is on its way."""
    if loss is None:
        return math.nan
    if isinstance(loss, float):
        return loss
    pinned, event = loss
    return float(pinned) if event.query() else None


class _Memory:
    """The allocator's figures. They cost tens of microseconds, so they are read a few times a second, not each step."""

    def __init__(self) -> None:
        self._read_ns = -_MEMORY_INTERVAL_NS
        self._figures = 0, 0, 0

    def figures(self, now_ns: int) -> tuple[int, int, int]:
        """Allocated, reserved and peak bytes of the current CUDA device; zeros where CUDA is not in use."""
        torch = sys.modules.get("torch")
        if torch is not None and now_ns - self._read_ns >= _MEMORY_INTERVAL_NS and torch.cuda.is_initialized():
            self._read_ns = now_ns
            stats = torch.cuda.memory_stats_as_nested_dict()
            allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
            self._figures = allocated["current"], reserved["current"], allocated["peak"]
        return self._figures
