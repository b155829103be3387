"""Blocks of many ranks as columns: what each rank's node reported by itself, read at once for all of them.

Owns the reading of StepBlocks, and the joining of a step with its batches, which may come in different blocks. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, pairwise
from operator import attrgetter
from typing import Any

import numpy as np

from torch_watchdog.rules.windows import Floats, Ints
from torch_watchdog_proto.messages import StepBlock, TensorColumns

__all__ = ["Columns", "Joined", "KeyRows", "Stretch"]

_STEP_BITS = 36  # of a row and a step in one number, which a float holds exactly
_STRETCH = 8  # batches of each rank between two looks of a rule that sees only the newest: shorter than any window of theirs
_MAX_OPEN = 8  # steps that wait for their micro-steps: a loss from a GPU comes after its gate


class KeyRows:
    """One tensor of the batch, in all blocks."""

    __slots__ = ("_arrays", "_highs", "_kept", "_places", "bound_high")

    def __init__(self) -> None:
        self.bound_high: float | None = None
        self._arrays: tuple[Ints, Floats, Floats] | None = None
        self._places: list[int] = []
        self._highs: list[float] = []
        self._kept: list[float] = []

    def take(self, columns: TensorColumns, elements: Sequence[int], begin: int) -> None:
        if columns.bound_high is not None:
            self.bound_high = columns.bound_high
        if len(columns.rows) == 1:  # most blocks of the largest jobs
            self._places.append(begin + columns.rows[0])
            self._highs.append(columns.high[0])
            self._kept.append(1.0 - columns.ignored[0] / (elements[0] or 1))
            return
        self._places += [begin + row for row in columns.rows]
        self._highs += columns.high
        self._kept += [1.0 - ignored / (count or 1) for ignored, count in zip(columns.ignored, elements, strict=True)]

    def arrays(self) -> tuple[Ints, Floats, Floats]:
        """Places among the batches, highest values, shares that are not ignored. Once all was taken."""
        if self._arrays is None:
            self._arrays = np.array(self._places, np.int64), np.array(self._highs), np.array(self._kept)
        return self._arrays


class Columns:
    """`rows` and what stands beside it: one entry for each batch that was trained on. `all_rows`, `all_steps`, `evaluation`: for each batch.

    `step_rows`, `step`: one entry for each gate.
    """

    def __init__(self, blocks: Sequence[StepBlock], rows: Sequence[int], *, watched: Container[str], highs: bool) -> None:
        """`rows`: of each block's rank. `watched`: tensors that are in `keys` besides those with ignored values; with `highs`, those with a bound, too."""
        self._blocks, self._rows = blocks, rows
        by_block = np.array(rows, np.int64)
        batches = np.fromiter((len(block.micro_step) for block in blocks), np.int64, len(blocks))
        self._begins: Sequence[int] = (np.cumsum(batches) - batches).tolist()
        self.all_rows: Ints = np.repeat(by_block, batches)
        self.all_steps: Ints = self._flat("micro_of_step", batches).astype(np.int64)
        self.evaluation = self._flat("evaluation", batches) > 0
        trained = ~self.evaluation
        self.rows, self.steps = self.all_rows[trained], self.all_steps[trained]
        self.loader_s = self._flat("loader_ns", batches)[trained] / 1e9
        self.forward_s = self._flat("forward_ns", batches)[trained] / 1e9
        self.scale = self._flat("scale", batches)[trained]
        self.reach = self._flat("reach", batches)[trained]
        self.loss_known = self._flat("loss_known", batches)[trained] > 0
        self.loss = self._flat("loss", batches)[trained]
        self.keys: dict[str, KeyRows] = {}
        sizes = [0] * len(self.evaluation)
        self._take_tensors(sizes, watched, highs=highs)
        self.size = np.array(sizes, float)[trained]
        gates = np.fromiter((len(block.step) for block in blocks), np.int64, len(blocks))
        self.step_rows: Ints = np.repeat(by_block, gates)
        self.step: Ints = self._flat("step", gates).astype(np.int64)
        self.whole_s = self._flat("step_ns", gates) / 1e9
        self.backward_s = self._flat("backward_ns", gates) / 1e9

    def memory(self) -> tuple[Ints, tuple[Floats, ...]]:
        """The newest reading of the allocator in each block: rows; then steps, allocated, reserved, retries, peaks."""
        told = [
            (
                row,
                block.step[-1],
                block.allocated_bytes[-1],
                _last(block.reserved_bytes),
                _last(block.alloc_retries),
                _last(block.peak_bytes),
            )
            for row, block in zip(self._rows, self._blocks, strict=True)
            if block.allocated_bytes and block.allocated_bytes[-1]
        ]
        table = np.array(told, float).reshape(-1, 6)
        return table[:, 0].astype(np.int64), tuple(table.T[1:])

    def stretches(self, most: int) -> Iterator[Stretch]:
        """All of it in the order of its steps, about `_STRETCH` batches of each rank at a time, in no more than `most` parts."""
        counted = int(np.bincount(self.rows).max()) if len(self.rows) else 0
        parts = min(most, -(-counted // _STRETCH))
        if parts <= 1:
            yield Stretch(self, first=-math.inf, last=math.inf)
            return
        first, width = int(self.steps.min()), -(-(int(np.ptp(self.steps)) + 1) // parts)
        edges = [-math.inf, *(float(first + width * part) for part in range(1, parts)), math.inf]
        yield from (Stretch(self, first=first, last=last) for first, last in pairwise(edges))

    def _flat(self, name: str, counts: Ints) -> Floats:
        """A column of all blocks. One that an older node process does not send is all zeros."""
        columns = list(map(attrgetter(name), self._blocks))
        total = int(counts.sum())
        if sum(map(len, columns)) != total:
            columns = [column or (0,) * count for column, count in zip(columns, counts.tolist(), strict=True)]
        return np.fromiter(chain.from_iterable(columns), float, total)

    def _take_tensors(self, sizes: list[int], watched: Container[str], *, highs: bool) -> None:
        """Fills `keys`, and `sizes` with the elements of the largest tensor of each batch: what the work of a step follows."""
        keys = self.keys
        for block, begin in zip(self._blocks, self._begins, strict=True):
            for columns in block.tensors:
                elements = tuple(map(_size_of, columns.shapes))
                for row, count in zip(columns.rows, elements, strict=False):
                    if count > sizes[begin + row]:
                        sizes[begin + row] = count
                key = columns.key
                if key in keys:
                    keys[key].take(columns, elements, begin)
                elif key in watched or _may_be_watched(columns, highs=highs):
                    keys[key] = KeyRows()
                    keys[key].take(columns, elements, begin)


class Stretch:
    """The batches and gates of the steps from `first` on and before `last`."""

    __slots__ = ("_columns", "_first", "_last")

    def __init__(self, columns: Columns, *, first: float, last: float) -> None:
        self._columns, self._first, self._last = columns, first, last

    def trained(self, values: Floats) -> tuple[Ints, Floats]:
        """Rows and values of the trained batches that have one: a column of `columns`, in which 0 is none."""
        there = self._holds(self._columns.steps) & (values > 0)
        return self._columns.rows[there], values[there]

    def batches_of(self, key: KeyRows) -> tuple[Ints, Floats, Floats, Floats]:
        """Rows, steps, highest values and kept shares of one tensor of the trained batches."""
        columns = self._columns
        at, high, kept = key.arrays()
        there = self._holds(columns.all_steps[at]) & ~columns.evaluation[at] & ~np.isnan(high)
        return columns.all_rows[at[there]], columns.all_steps[at[there]].astype(float), high[there], kept[there]

    def gates(self) -> tuple[Ints, Ints]:
        """Rows and steps."""
        there = self._holds(self._columns.step)
        return self._columns.step_rows[there], self._columns.step[there]

    def _holds(self, steps: Ints) -> Any:
        return (steps >= self._first) & (steps < self._last)


def _may_be_watched(columns: TensorColumns, *, highs: bool) -> bool:
    return (any(columns.ignored) or (highs and columns.bound_high is not None)) and columns.dtype.startswith(("int", "uint"))


class Joined:
    """Steps of which batches or gate are still to come."""

    def __init__(self) -> None:
        self._batches: Floats = np.zeros((0, 4))  # row and step in one, loader, forward, size
        self._gates: Floats = np.zeros((0, 3))  # row and step in one, whole, backward

    def finished(self, columns: Columns, newest: Ints) -> tuple[Ints, Floats, Floats, Floats, Floats, Floats]:
        """Rows, and of each the seconds of the whole step, of backward, loader and forward, and the size of its batches. `newest`: step, by row."""
        batches = _added((self._batches, _together(columns.rows, columns.steps, columns.loader_s, columns.forward_s, columns.size)))
        gates = np.concatenate((self._gates, _together(columns.step_rows, columns.step, columns.whole_s, columns.backward_s)))
        both, of_batches, of_gates = np.intersect1d(batches[:, 0], gates[:, 0], return_indices=True)
        done, gate = batches[of_batches], gates[of_gates]
        self._batches = _still_open(np.delete(batches, of_batches, axis=0), newest)
        self._gates = _still_open(np.delete(gates, of_gates, axis=0), newest)
        return both.astype(np.int64) >> _STEP_BITS, gate[:, 1], gate[:, 2], done[:, 1], done[:, 2], done[:, 3]


def _together(rows: Ints, steps: Ints, *columns: Floats) -> Floats:
    return np.stack([((rows << _STEP_BITS) + steps).astype(float), *columns], axis=1)


def _added(parts: Iterable[Floats]) -> Floats:
    """The batches of one step of one rank as one."""
    table = np.concatenate(tuple(parts))
    order = np.argsort(table[:, 0], kind="stable")
    table = table[order]
    begins = np.flatnonzero(np.concatenate(([True], table[1:, 0] != table[:-1, 0]))) if len(table) else np.zeros(0, np.int64)
    if len(begins) == len(table):
        return table
    return np.column_stack((table[begins, 0], np.add.reduceat(table[:, 1:], begins, axis=0)))


def _still_open(table: Floats, newest: Ints) -> Floats:
    keys = table[:, 0].astype(np.int64)
    return table[(keys & ((1 << _STEP_BITS) - 1)) > newest[keys >> _STEP_BITS] - _MAX_OPEN]


_size_of = lru_cache(maxsize=4096)(math.prod)  # of one shape: a column of them, as a key, would keep a whole report in memory


def _last(column: Sequence[int]) -> int:
    return column[-1] if column else 0
