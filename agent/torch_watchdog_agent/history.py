"""Turns what the hooks see into ring records: tensors of a batch, its loss once that is known, and the step's times and memory.

Owns the losses that are still on their way from the GPU; never waits for one. Knows torch tensors only by the few methods used here.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch_watchdog_agent.arriving import Copies, Memory, Newest, arrived, elapsed_ns
from torch_watchdog_agent.loop import Loop
from torch_watchdog_agent.recorder import UNKNOWN, Recorder
from torch_watchdog_proto.record import DeviceNamed, GradientsSharded, MicroStep, StepDone, TensorSeen, TokenizerSeen

if TYPE_CHECKING:
    from torch_watchdog_agent.contract.check import TensorStat
    from torch_watchdog_agent.gradients import Norm

__all__ = ["History"]

_MAX_PENDING_LOSSES = 64
_NAME_EVERY = 4096  # steps, a GPU or tokenizer: a ring forgets
_new = tuple.__new__  # a NamedTuple's own makes a frame of Python
_NO_BOUNDS: Mapping[str, tuple[float, float]] = {}


@dataclass(slots=True)
class _OpenMicroStep:
    step: int
    micro_step: int
    time_ns: int
    loader_ns: int
    evaluation: bool
    loss: Any = None  # a float, or what `Copies` gave while the copy is under way
    forward_ns: int = 0


class History:
    """What has been recorded of this rank. Without a recorder everything is dropped."""

    def __init__(self, recorder: Recorder | None, loop: Loop) -> None:
        self._recorder, self._loop = recorder, loop
        self._pending: deque[_OpenMicroStep] = deque()
        self._losses: list[tuple[Any, int]] = []  # of the backwards since the last fetch, each with the forward's time
        self._last_gate_ns = time.monotonic_ns()
        self._handed_ns = self._backward_since_ns = self._backward_ns = 0
        self.update_since_ns = 0  # set at the gate, where the update begins
        self._copies, self._memory = Copies(2 * _MAX_PENDING_LOSSES), Memory()
        self._norms, self._scales, self._scale = Newest(), Newest(), 0.0
        self._was_told_norm, self._made_norm = False, None  # the second: a tensor, of this step so far
        self._has_shards = False  # of gradients, and not the whole
        self._reach, self._tokens = Newest(), 0
        self._steps_done = 0
        self.scale_is_known = False
        self._signs = False  # of a norm, a scale or probabilities: many loops have none

    def forget(self) -> None:
        self._recorder = None
        self._pending.clear()
        self._losses.clear()

    @property
    def device_words(self) -> memoryview | None:
        """Shared memory for the rank's words with its GPU."""
        return None if self._recorder is None else self._recorder.device_words

    def said(self, text: str) -> None:
        self.note(text, level=1)

    def note(self, text: str, *, level: int) -> None:
        if self._recorder is not None:
            self._recorder.note(text, level=level)

    def batch(
        self, stats: Iterable[TensorStat], *, loader_ns: int, evaluation: bool, legal: Mapping[str, tuple[float, float]] = _NO_BOUNDS
    ) -> None:
        """One batch handed over: its tensors are written now, the micro-step when its loss is known. `legal`: the ranges that keys must keep."""
        if self._recorder is None:
            return
        step, micro_step = self._loop.step, self._loop.micro_step
        write, key_id = self._recorder.write, self._recorder.key_id
        for key, dtype, shape, low, high, negatives, ignored, finite in stats:
            number = key_id(key, legal.get(key, UNKNOWN))
            if number is not None:
                write(_new(TensorSeen, (number, dtype, step, micro_step, low, high, negatives, ignored, finite, shape)))
        if len(self._pending) == _MAX_PENDING_LOSSES:
            oldest = self._pending.popleft()
            oldest.loss = None  # nobody will wait for it
            self._write(self._recorder, oldest, math.nan)
        self._pending.append(_OpenMicroStep(step, micro_step, time.time_ns(), loader_ns, evaluation))
        if not evaluation:
            self._copies.begin()
            self._handed_ns = time.monotonic_ns()

    def loss_seen(self, loss: Any) -> float | None:
        """The local loss, before any all-reduce. On a GPU it is copied to pinned memory behind the stream, and read when it has arrived.

        Returns it where it is known at once.
        """
        if loss.numel() != 1 or len(self._losses) >= len(self._pending) or not self._loop.is_open(self._pending[-1].step):
            return None
        now_ns = time.monotonic_ns()
        if self._backward_since_ns:
            self._backward_ends(now_ns)
        self._backward_since_ns = now_ns
        if loss.is_cuda:
            self._losses.append((self._copies.start(loss.detach()), 0))
            return None
        value = float(loss.item())
        # A loop that fetched several micro-batches first: when the later ones' forwards began is not known.
        forward_ns, self._handed_ns = max(0, now_ns - self._handed_ns) if self._handed_ns else 0, 0
        self._losses.append((value, forward_ns))
        return value

    def waited(self, spent_ns: int) -> None:
        """The forward has waited for other ranks: that is no time of this rank's own."""
        if not self._backward_since_ns:
            self._backward_ns += spent_ns
            self._handed_ns += spent_ns if self._handed_ns else 0

    def norm_seen(self, norm: Any) -> None:
        """The norm of all gradients, as the loop's own clipping has computed it."""
        self._signs = True
        self._was_told_norm = self._norms.put(norm)

    def has_been_told_norm(self) -> bool:
        """Whether the loop has computed a norm that can be read, since this was asked."""
        told, self._was_told_norm = self._was_told_norm, False
        return told

    def norm_made(self, norm: Norm | None) -> None:
        """On request: of the gradients of one optimizer. The norms of several, of one step, are joined."""
        if norm is None:
            return
        self._signs = True
        self._made_norm = (
            norm.value if self._made_norm is None else self._made_norm.to(norm.value.device, non_blocking=True).hypot(norm.value)
        )
        self._norms.put(self._made_norm)
        if norm.is_of_shard and not self._has_shards and self._recorder is not None:
            self._has_shards = True
            self._recorder.write(GradientsSharded())

    def scale_seen(self, scale: Any) -> None:
        """What a GradScaler multiplies losses with from now on."""
        self.scale_is_known = self._signs = True
        self._scales.put(scale)

    def reach_seen(self, reach: Any) -> None:
        """How near to the edge of its domain the newest binary_cross_entropy has come."""
        self._signs = True
        self._reach.put(reach)

    def tokenizer_seen(self, tokens: int) -> None:
        """How many ids the tokenizer of the training's data has; 0: nobody knows."""
        if tokens and tokens != self._tokens and self._recorder is not None:
            self._tokens = tokens
            self._recorder.write(TokenizerSeen(tokens=tokens))

    def _backward_ends(self, now_ns: int) -> None:
        self._backward_ns += now_ns - self._backward_since_ns
        self._backward_since_ns = 0

    @property
    def has_seen_loss(self) -> bool:
        """Whether a backward has begun since the last fetch."""
        return bool(self._losses)

    @property
    def loss_is_of_newest(self) -> bool:
        """Whether the newest loss is certainly that of the newest batch: not where an evaluation, or all micro-batches of a step, were fetched before it."""
        newest = self._pending[-1] if self._pending else None
        if newest is None or newest.evaluation:
            return False
        waiting = sum(micro.loss is None and not micro.evaluation and micro.step == newest.step for micro in self._pending)
        return waiting == len(self._losses)

    def newest_loss(self) -> float | None:
        """The loss of the newest backward, where it has arrived by now: in a loop that waits for its device in each step it has."""
        return arrived(self._losses[-1][0]) if self._losses else None

    def flush(self, *, ending: bool = False) -> None:
        """Writes the micro-steps whose loss has arrived, or will not come any more, in order. `ending`: none will come for the open window."""
        if self._backward_since_ns:
            self._backward_ends(time.monotonic_ns())
        if self._losses:
            self._assign()
        while self._pending and self._recorder is not None:
            first = self._pending[0]
            loss = arrived(first.loss)
            if loss is None or (first.loss is None and not ending and not first.evaluation and self._loop.is_open(first.step)):
                return
            self._write(self._recorder, self._pending.popleft(), loss)

    def _assign(self) -> None:
        """Gives the losses since the last fetch to the batches that wait for one.

        A loop that took all micro-batches of a step first runs their backwards in the same order. Where there are fewer, the first batches were given up.
        """
        losses, self._losses = self._losses, []
        waiting = [micro for micro in self._pending if micro.loss is None and not micro.evaluation and micro.step == self._pending[-1].step]
        for micro, (loss, forward_ns) in zip(waiting[-len(losses) :], losses, strict=False):
            micro.loss, micro.forward_ns = loss, forward_ns

    def _write(self, recorder: Recorder, micro: _OpenMicroStep, loss: float) -> None:
        scale, reach = (self._scales.take(), self._reach.take()) if self._signs else (None, None)
        self._scale = self._scale if scale is None else scale
        recorder.write(
            _new(
                MicroStep,
                (
                    micro.step, micro.micro_step, micro.time_ns, micro.loader_ns, loss, micro.loss is not None, micro.evaluation,
                    micro.forward_ns or elapsed_ns(micro.loss), self._scale, reach or 0.0,
                ),
            )
        )  # fmt: skip

    def step_done(self, step: int, *, vetoed: bool) -> None:
        now_ns = time.monotonic_ns()
        self.flush()
        update_ns = now_ns - self.update_since_ns if self.update_since_ns else 0
        if self._recorder is not None:
            norm, memory = self._norms.take() if self._signs else None, self._memory.figures(now_ns)
            self._recorder.write(
                _new(
                    StepDone,
                    (
                        step, time.time_ns(), now_ns - self._last_gate_ns, self._loop.trained_on, memory.allocated, memory.reserved, memory.peak,
                        vetoed, self._loop.updates_applied, self._backward_ns, -1.0 if norm is None else norm, memory.retries, update_ns,
                    ),
                )
            )  # fmt: skip
            if self._memory.uuid or self._tokens or self._has_shards:
                self._name_again(self._recorder, step)
        self._last_gate_ns, self._backward_ns, self.update_since_ns, self._made_norm = now_ns, 0, 0, None

    def _name_again(self, recorder: Recorder, step: int) -> None:
        """The GPU, which is known some steps after the first, the tokenizer, and of what the norms are."""
        if self._memory.uuid and self._steps_done % _NAME_EVERY == 0:
            recorder.write(DeviceNamed(uuid=self._memory.uuid))
        if self._tokens and step % _NAME_EVERY == 0:
            recorder.write(TokenizerSeen(tokens=self._tokens))
        if self._has_shards and step % _NAME_EVERY == 0:
            recorder.write(GradientsSharded())
        self._steps_done += bool(self._memory.uuid)
