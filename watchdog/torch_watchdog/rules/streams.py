"""What the rules look at: the newest steps of each rank and the newest samples of each GPU, in windows of fixed length.

Owns the reading of StepBlocks and GpuSamples into windows, once for all rules. Pure. Memory and time per step are bounded: a job may have 16,384 ranks.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch_watchdog_proto.messages import GpuSample, StepBlock, TensorColumns

__all__ = ["GpuStream", "KeyStream", "RankStream", "View", "Window", "median", "quartile"]

STEPS = 64  # of losses and of what batches held
TIMED = 32  # steps of which the times are kept
MEMORY = 48  # readings of the allocator
_MAX_KEYS = 16
_MAX_OPEN = 8  # steps that wait for their micro-steps: a loss from a GPU comes after its gate


class Window:
    """The newest values, oldest first. `count`: how many there have ever been."""

    __slots__ = ("_next", "_size", "_values", "count", "newest")

    def __init__(self, size: int) -> None:
        self._values, self._size, self._next = array("d"), size, 0
        self.count, self.newest = 0, math.nan

    def add(self, value: float) -> None:
        self.count += 1
        self.newest = value
        if len(self._values) < self._size:
            self._values.append(value)
            return
        self._values[self._next] = value
        self._next = (self._next + 1) % self._size

    def values(self) -> list[float]:
        ordered = self._values[self._next :] + self._values[: self._next] if self._next else self._values
        return ordered.tolist()

    def highest(self) -> float:
        return max(self._values, default=0.0)

    @property
    def is_full(self) -> bool:
        return self.count >= self._size


class KeyStream:
    """One integer tensor of the batch over the newest steps: its highest value, and the share of its elements that is not the ignored value."""

    __slots__ = ("bound_high", "highs", "kept", "step")

    def __init__(self) -> None:
        self.bound_high: float | None = None
        self.step = 0
        self.highs, self.kept = Window(STEPS), Window(STEPS)


class RankStream:
    """One rank's newest steps. Times in seconds, over the steps of which everything is known.

    `own_s`: of a step, without the time from its losses to the end of backward, in which a rank waits for others; on a GPU the device's own forward time.
    """

    __slots__ = (
        "_done", "_micro", "_watches_highs", "allocated", "first_loader_s", "first_loss", "gpu", "keys", "loader_s", "loss_steps",
        "losses", "memory_steps", "own_s", "rank", "reserved", "retries", "scales", "sizes", "step", "step_s",
    )  # fmt: skip

    def __init__(self, rank: int, *, watches_highs: bool = False) -> None:
        self.rank, self.gpu, self._watches_highs = rank, "", watches_highs
        self.step: int | None = None
        self.losses, self.loss_steps = Window(STEPS), Window(STEPS)
        self.first_loss: float | None = None  # the median of the first window
        self.first_loader_s: float | None = None  # likewise
        self.scales = Window(STEPS)
        self.step_s, self.own_s, self.loader_s, self.sizes = Window(TIMED), Window(TIMED), Window(TIMED), Window(TIMED)
        self.memory_steps, self.allocated, self.reserved, self.retries = (Window(MEMORY) for _ in range(4))
        self.keys: dict[str, KeyStream] = {}
        self._micro: dict[int, list[float]] = {}  # step -> loader, forward, size of its micro-steps so far
        self._done: dict[int, tuple[float, float]] = {}  # step -> whole and backward seconds

    def take(self, block: StepBlock) -> None:
        self.gpu = block.gpu or self.gpu
        if block.micro_step:
            self._take_micro(block)
        if block.step:
            self._take_steps(block)
        for step in [step for step in self._done if step in self._micro]:
            self._finish(step)

    def _take_micro(self, block: StepBlock) -> None:
        sizes = _sizes(block)
        rows = len(block.micro_of_step)
        evaluation, loader_ns = _column(block.evaluation, rows), _column(block.loader_ns, rows)
        forward_ns, scale, loss_known = _column(block.forward_ns, rows), _column(block.scale, rows), _column(block.loss_known, rows)
        for row, step in enumerate(block.micro_of_step):
            if evaluation[row]:
                continue
            known = self._micro.setdefault(step, [0.0, 0.0, 0.0])
            known[0] += loader_ns[row] / 1e9
            known[1] += forward_ns[row] / 1e9
            known[2] += sizes[row]
            if loss_known[row] and block.loss:
                self._take_loss(step, block.loss[row])
            if scale[row] > 0:
                self.scales.add(scale[row])
        for columns in block.tensors:
            if columns.key in self.keys or (self._watches_highs and columns.bound_high is not None) or any(columns.ignored):
                self._take_key(columns, block.micro_of_step, evaluation)
        while len(self._micro) > _MAX_OPEN:
            del self._micro[next(iter(self._micro))]

    def _take_loss(self, step: int, loss: float) -> None:
        if not math.isfinite(loss):
            return  # rules/loss.py tells
        self.losses.add(loss)
        self.loss_steps.add(step)
        if self.first_loss is None and self.losses.count == STEPS // 2:
            self.first_loss = median(self.losses.values())

    def _take_key(self, columns: TensorColumns, steps: Sequence[int], evaluation: Sequence[float]) -> None:
        if columns.key not in self.keys and (len(self.keys) >= _MAX_KEYS or not columns.dtype.startswith(("int", "uint"))):
            return
        stream = self.keys.setdefault(columns.key, KeyStream())
        stream.bound_high = columns.bound_high if columns.bound_high is not None else stream.bound_high
        for row, high, ignored, shape in zip(columns.rows, columns.high, columns.ignored, columns.shapes, strict=False):
            if not evaluation[row] and not math.isnan(high):
                stream.step = steps[row]
                if self._watches_highs:
                    stream.highs.add(high)
                stream.kept.add(1.0 - ignored / max(1, math.prod(shape)))

    def _take_steps(self, block: StepBlock) -> None:
        self.step = max(block.step)
        step_ns, backward_ns = _column(block.step_ns, len(block.step)), _column(block.backward_ns, len(block.step))
        for row, step in enumerate(block.step):
            self._done[step] = step_ns[row] / 1e9, backward_ns[row] / 1e9
        if block.allocated_bytes and block.allocated_bytes[-1]:
            self._take_memory(block)
        while len(self._done) > _MAX_OPEN:
            del self._done[next(iter(self._done))]

    def _take_memory(self, block: StepBlock) -> None:
        """The allocator is read a few times a second, so most steps repeat what the one before said: one reading a block is enough."""
        self.memory_steps.add(block.step[-1])
        self.allocated.add(block.allocated_bytes[-1])
        self.reserved.add(block.reserved_bytes[-1] if block.reserved_bytes else 0)
        self.retries.add(block.alloc_retries[-1] if block.alloc_retries else 0)

    def _finish(self, step: int) -> None:
        whole_s, backward_s = self._done.pop(step)
        loader_s, forward_s, size = self._micro.pop(step)
        self.step_s.add(whole_s)
        self.loader_s.add(loader_s)
        self.own_s.add(forward_s if self.gpu else max(0.0, whole_s - backward_s))
        self.sizes.add(size)
        if self.first_loader_s is None and self.loader_s.is_full:
            self.first_loader_s = median(self.loader_s.values())


class GpuStream:
    """One GPU. `first`: as it was when the job's samples began, so that only what has come since is told."""

    __slots__ = ("first", "newest", "node", "samples", "xids")

    def __init__(self, node: str, sample: GpuSample) -> None:
        self.node, self.first, self.newest = node, sample, sample
        self.samples: list[GpuSample] = []  # of the last minute, roughly
        self.xids: dict[int, int] = {}  # code -> time_ns of the first

    def take(self, sample: GpuSample) -> None:
        self.newest = sample
        if not sample.lost:
            self.first = sample if self.first.lost else self.first
            self.samples = [*self.samples[-59:], sample]
        for code in sample.xids:
            self.xids.setdefault(code, sample.time_ns)


@dataclass(slots=True)
class View:
    """Everything that was seen of one attempt."""

    watches_highs: bool = False  # only one rule looks at them, and it is seldom on
    ranks: dict[int, RankStream] = field(default_factory=dict)
    gpus: dict[str, GpuStream] = field(default_factory=dict)

    def take_block(self, block: StepBlock) -> None:
        stream = self.ranks.get(block.rank)
        if stream is None:
            stream = self.ranks[block.rank] = RankStream(block.rank, watches_highs=self.watches_highs)
        stream.take(block)

    def take_gpu(self, node: str, sample: GpuSample) -> None:
        if sample.uuid not in self.gpus:
            self.gpus[sample.uuid] = GpuStream(node, sample)
        self.gpus[sample.uuid].take(sample)

    def used_gpus(self) -> Iterable[tuple[GpuStream, tuple[int, ...]]]:
        """Those that ranks of this job compute on, with these ranks: a neighbour's GPU is a neighbour's matter."""
        users: dict[str, list[int]] = {}
        for stream in self.ranks.values():
            if stream.gpu:
                users.setdefault(stream.gpu, []).append(stream.rank)
        for uuid, ranks in users.items():
            if uuid in self.gpus:
                yield self.gpus[uuid], tuple(sorted(ranks))


def median(values: Iterable[float]) -> float:
    """Of at least one value."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def quartile(values: Iterable[float]) -> float:
    """A quarter of the values is at most this."""
    ordered = sorted(values)
    return ordered[len(ordered) // 4]


def _column(values: Sequence[float], length: int) -> Sequence[float]:
    """A column that an older node process does not send is all zeros."""
    return values or (0,) * length


def _sizes(block: StepBlock) -> list[float]:
    """Elements of the largest tensor of each row: what the work of a step follows."""
    sizes = [0.0] * len(block.micro_step)
    for columns in block.tensors:
        for row, shape in zip(columns.rows, columns.shapes, strict=False):
            sizes[row] = max(sizes[row], float(math.prod(shape)))
    return sizes
