"""What the rules look at: the newest steps of each rank and the newest samples of each GPU, in windows of fixed length.

Owns the ranks' rows, and what has come since the look before. Pure. Memory and time per step are bounded: a job may have 16,384 ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import numpy as np

from torch_watchdog.rules.columns import Columns, Joined, KeyRows, Stretch
from torch_watchdog.rules.windows import Floats, Ints, Windows, grown, medians
from torch_watchdog_proto.messages import GpuSample, StepTable

__all__ = ["REACHES", "STEPS", "GpuStream", "KeyStream", "View"]

STEPS = 64  # of losses and of what batches held
REACHES = 24  # batches of which it is kept how near their probabilities came to the edge
TIMED = 32  # steps of which the times are kept
MEMORY = 48  # readings of the allocator
_MAX_KEYS = 16
_MAX_WAITING = 4096  # blocks of ranks: those of the largest jobs are taken in several times between two looks
_MOST_STRETCHES = 32  # within one look: what it costs stays a few milliseconds
_STRETCHED_RANKS = 8192  # of all stretches of a look together: a look costs by the rank
_MAX_FRESH = 1 << 22  # losses of all ranks between two looks


class KeyStream:
    """One integer tensor of the batch over the newest steps of each rank: its highest value, and the share of its elements that is not the ignored value."""

    __slots__ = ("bound_high", "highs", "kept", "steps")

    def __init__(self) -> None:
        self.bound_high: float | None = None
        self.highs, self.kept, self.steps = Windows(STEPS), Windows(STEPS), Windows(1)


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


class View:
    """Everything that was seen of one attempt. A rank has one row in all windows. Times in seconds, over the steps of which everything is known.

    `own_s`: of a step, without the time from its losses to the end of backward, in which a rank waits for others; on a GPU the device's own forward time.
    """

    def __init__(self, *, watches_highs: bool = False) -> None:
        """`watches_highs`: for the one rule that looks at them in every job, and is seldom on. A job whose tokenizer is known has them watched, too."""
        self._watches_highs = watches_highs
        self._waiting: list[StepTable] = []
        self._num_waiting = 0  # blocks
        self._row_of: dict[int, int] = {}
        self._joined = Joined()
        self._users: dict[str, tuple[int, ...]] | None = None  # GPU -> ranks
        self._counted: Ints = np.zeros(0, np.int64)  # losses, at the last look
        self._counted_before: Ints = self._counted  # and at the one before
        self.ranks: list[int] = []  # by row
        self.gpu_of: list[str] = []
        self.step: Ints = np.zeros(0, np.int64)  # the newest
        self.losses, self.loss_steps = Windows(STEPS), Windows(STEPS)
        self.first_loss: Floats = np.zeros(0)  # the median of the first ones, NaN before
        self.first_loader_s: Floats = np.zeros(0)  # likewise
        self.scales, self.reach = Windows(STEPS), Windows(REACHES)
        self.tokens_of: Ints = np.zeros(0, np.int64)  # by row, 0 where no tokenizer is known
        self.step_s, self.own_s, self.loader_s, self.sizes = Windows(TIMED), Windows(TIMED), Windows(TIMED), Windows(TIMED)
        self.memory_steps, self.memory_ns, self.allocated, self.reserved, self.retries, self.peaks = (Windows(MEMORY) for _ in range(6))
        self.keys: dict[str, KeyStream] = {}
        self.gpus: dict[str, GpuStream] = {}

    def take_steps(self, table: StepTable) -> None:
        self._waiting.append(table)
        self._num_waiting += len(table.rank)
        if self._num_waiting >= _MAX_WAITING:
            for _ in self.take_waiting():
                pass

    def take_gpu(self, node: str, sample: GpuSample) -> None:
        name = _plain(sample.uuid)
        if name not in self.gpus:
            self.gpus[name] = GpuStream(node, sample)
        self.gpus[name].take(sample)

    def take_waiting(self) -> Iterator[None]:
        """Takes all that has come. Stops after every few batches of each rank, for the rules whose sign may be over when all is taken."""
        tables, self._waiting, self._num_waiting = self._waiting, [], 0
        if not tables:
            yield
            return
        row_of = [row for table in tables for row in map(self._row, table.rank, table.gpu)]
        self._take_tokens(row_of, tables)
        columns = Columns(tables, row_of, watched=self.keys, highs=self._watches_highs)
        self.step = grown(self.step, len(self.ranks), 0)
        self.first_loss = grown(self.first_loss, len(self.ranks), np.nan)
        self.first_loader_s = grown(self.first_loader_s, len(self.ranks), np.nan)
        for stretch in columns.stretches(max(1, min(_MOST_STRETCHES, _STRETCHED_RANKS // len(self.ranks)))):
            self._take_stretch(stretch, columns)
            yield
        self._take_losses(columns)
        self._take_times(columns)
        self._take_memory(columns)

    def _take_stretch(self, stretch: Stretch, columns: Columns) -> None:
        self.scales.add(*stretch.trained(columns.scale))
        self.reach.add(*stretch.trained(columns.reach))
        for key, told in columns.keys.items():
            self._take_key(key, told, stretch)
        rows, steps = stretch.gates()
        self.step[rows] = steps

    def _take_tokens(self, rows: Sequence[int], tables: Sequence[StepTable]) -> None:
        self.tokens_of = grown(self.tokens_of, len(self.ranks), 0)
        for row, tokens in zip(rows, chain.from_iterable(table.tokens for table in tables), strict=True):
            if tokens:
                self.tokens_of[row] = tokens
                self._watches_highs = True

    def looked(self) -> None:
        """A look is over: what it saw is old at the one after the next."""
        self._counted_before, self._counted = self._counted, self.losses.count.copy()

    def fresh_losses(self) -> tuple[Ints, Ints]:
        """How many losses each rank has reported since the look before the last, and since the last.

        Two looks: in the first of them the other ranks may not have told of the same step.
        """
        count = self.losses.count
        since = grown(self._counted_before, len(count), 0)[: len(count)]
        return count - since, count - grown(self._counted, len(count), 0)[: len(count)]

    def used_gpus(self) -> Iterable[tuple[GpuStream, tuple[int, ...]]]:
        """Those that ranks of this job compute on, with these ranks: a neighbour's GPU is a neighbour's matter."""
        if self._users is None:
            users: dict[str, list[int]] = {}
            for rank, gpu in zip(self.ranks, self.gpu_of, strict=True):
                if gpu:
                    users.setdefault(gpu, []).append(rank)
            self._users = {gpu: tuple(sorted(ranks)) for gpu, ranks in users.items()}
        for gpu, ranks in self._users.items():
            if gpu in self.gpus:
                yield self.gpus[gpu], ranks

    def _row(self, rank: int, uuid: str) -> int:
        row = self._row_of.get(rank)
        if row is None:
            row = self._row_of[rank] = len(self.ranks)
            self.ranks.append(rank)
            self.gpu_of.append("")
        if uuid and self.gpu_of[row] != (gpu := _plain(uuid)):
            self.gpu_of[row], self._users = gpu, None
        return row

    def _take_losses(self, columns: Columns) -> None:
        told = columns.loss_known & np.isfinite(columns.loss)  # rules/loss.py tells of the others
        rows = columns.rows[told]
        self._make_room_for_fresh(rows)
        self.losses.add(rows, columns.loss[told])
        self.loss_steps.add(rows, columns.steps[told].astype(float))
        _take_first(self.losses, self.first_loss, STEPS // 2)

    def _make_room_for_fresh(self, rows: Ints) -> None:
        """Each loss is judged by those before it, also where a look sees hundreds of new ones."""
        if not len(rows):
            return
        came = np.bincount(rows, minlength=len(self.losses.count))
        count = grown(self.losses.count, len(came), 0)
        needed = int((count + came - grown(self._counted_before, len(came), 0)[: len(came)]).max()) + STEPS
        room = min(1 << (needed - 1).bit_length(), max(STEPS, _MAX_FRESH // len(count)))
        if needed > self.losses.size and room > self.losses.size:
            self.losses.widen(room)
            self.loss_steps.widen(room)

    def _take_key(self, key: str, told: KeyRows, stretch: Stretch) -> None:
        if key not in self.keys and len(self.keys) >= _MAX_KEYS:
            return
        stream = self.keys.setdefault(key, KeyStream())
        stream.bound_high = told.bound_high if told.bound_high is not None else stream.bound_high
        rows, steps, highs, kept = stretch.batches_of(told)
        stream.steps.add(rows, steps)
        stream.kept.add(rows, kept)
        if self._watches_highs:
            stream.highs.add(rows, highs)

    def _take_times(self, columns: Columns) -> None:
        rows, whole_s, backward_s, loader_s, forward_s, size = self._joined.finished(columns, self.step)
        on_gpu: Ints = np.fromiter(map(bool, self.gpu_of), bool, len(self.gpu_of))[rows]
        self.step_s.add(rows, whole_s)
        self.loader_s.add(rows, loader_s)
        self.own_s.add(rows, np.where(on_gpu, forward_s, np.maximum(0.0, whole_s - backward_s)))
        self.sizes.add(rows, size)
        _take_first(self.loader_s, self.first_loader_s, TIMED)

    def _take_memory(self, columns: Columns) -> None:
        """The allocator is read a few times a second, so most steps repeat what the one before said: one reading a block is enough."""
        rows, readings = columns.memory()
        windows = (self.memory_steps, self.memory_ns, self.allocated, self.reserved, self.retries, self.peaks)
        for window, values in zip(windows, readings, strict=True):
            window.add(rows, values)


def _take_first(window: Windows, first: Floats, length: int) -> None:
    """The median of the first ones, of those ranks that have just had so many."""
    count = window.count
    ready = np.flatnonzero((count >= length) & np.isnan(first[: len(count)]))
    if len(ready):
        first[ready] = medians(window.oldest(ready, length))


def _plain(uuid: str) -> str:
    """CUDA names an instance of a divided GPU as it does a GPU, NVML does not."""
    return uuid.removeprefix("GPU-").removeprefix("MIG-")
