"""The tables of many nodes as columns: what each node reported by itself, read at once for all ranks.

Owns the reading of StepTables, and the joining of a step with its batches, which may come in different blocks. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import chain, pairwise
from typing import Any

import numpy as np

from torch_watchdog.rules.windows import Floats, Ints
from torch_watchdog_proto.messages import StepTable, TensorColumns

__all__ = ["Columns", "Joined", "KeyRows", "Stretch", "counts_of", "flat"]

_STEP_BITS = 36  # of a row and a step in one number, which a float holds exactly
_STRETCH = 8  # batches of each rank between two looks of a rule that sees only the newest: shorter than any window of theirs
_MAX_OPEN = 8  # steps that wait for their micro-steps: a loss from a GPU comes after its gate


class KeyRows:
    """One tensor of the batch, in all tables."""

    __slots__ = ("_arrays", "_highs", "_kept", "_places", "bound_high")

    def __init__(self) -> None:
        self.bound_high: float | None = None
        self._arrays: tuple[Ints, Floats, Floats] | None = None
        self._places: list[int] = []
        self._highs: list[float] = []
        self._kept: list[float] = []

    def take(self, columns: TensorColumns, elements: Sequence[int], places: Sequence[int]) -> None:
        if columns.bound_high is not None:
            self.bound_high = columns.bound_high
        self._places += places
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

    def __init__(self, tables: Sequence[StepTable], rows: Sequence[int], *, watched: Container[str], highs: bool) -> None:
        """`rows`: of each block's rank. `watched`: tensors that are in `keys` besides those with ignored values; with `highs`, those with a bound, too."""
        self._by_block: Ints = np.array(rows, np.int64)
        batches, self._gates = counts_of(tables, "num_micro_steps"), counts_of(tables, "num_steps")
        of_batches, self._of_gates = partial(flat, tables, counts="num_micro_steps"), partial(flat, tables, counts="num_steps")
        self.all_rows: Ints = np.repeat(self._by_block, batches)
        self.all_steps: Ints = of_batches("micro_of_step").astype(np.int64)
        self.evaluation = of_batches("evaluation") > 0
        trained = ~self.evaluation
        self.rows, self.steps = self.all_rows[trained], self.all_steps[trained]
        self.loader_s = of_batches("loader_ns")[trained] / 1e9
        self.forward_s = of_batches("forward_ns")[trained] / 1e9
        self.scale = of_batches("scale")[trained]
        self.reach = of_batches("reach")[trained]
        self.loss_known = of_batches("loss_known")[trained] > 0
        self.loss = of_batches("loss")[trained]
        self.keys: dict[str, KeyRows] = {}
        self.size = self._take_tensors(tables, watched, highs=highs)[trained]
        self.step_rows: Ints = np.repeat(self._by_block, self._gates)
        self.step: Ints = self._of_gates("step").astype(np.int64)
        self.whole_s = self._of_gates("step_ns") / 1e9
        self.backward_s = self._of_gates("backward_ns") / 1e9

    def memory(self) -> tuple[Ints, tuple[Floats, ...]]:
        """The newest reading of the allocator in each block: rows; then steps, their time_ns, allocated, reserved, retries, peaks."""
        last = (np.cumsum(self._gates) - 1)[self._gates > 0]
        names = ("step_time_ns", "allocated_bytes", "reserved_bytes", "alloc_retries", "peak_bytes")
        readings = [self._of_gates(name)[last] for name in names]
        known = readings[1] > 0
        rows, steps = self._by_block[self._gates > 0][known], self.step[last][known].astype(float)
        return rows, (steps, *(reading[known] for reading in readings))

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

    def _take_tensors(self, tables: Iterable[StepTable], watched: Container[str], *, highs: bool) -> Floats:
        """Fills `keys`. Returns the elements of the largest tensor of each batch: what the work of a step follows."""
        keys, begin = self.keys, 0
        all_places, all_elements = list[int](), list[int]()
        for table in tables:
            for columns in table.tensors:
                places, elements = [begin + row for row in columns.rows], list(map(_size_of, columns.shapes))
                if elements:
                    all_places += places
                    all_elements += elements
                key = columns.key
                if key not in keys and (key in watched or _may_be_watched(columns, highs=highs)):
                    keys[key] = KeyRows()
                if key in keys:
                    keys[key].take(columns, elements, places)
            begin += sum(table.num_micro_steps)
        sizes = np.zeros(begin)
        np.maximum.at(sizes, np.array(all_places, np.int64), np.array(all_elements, float))
        return sizes


def counts_of(tables: Iterable[StepTable], name: str) -> Ints:
    """One for each block."""
    return np.array([count for table in tables for count in getattr(table, name)], np.int64)


def flat(tables: Iterable[StepTable], name: str, counts: str) -> Floats:
    """A column of all tables. One that an older node process does not send is all zeros."""
    columns = [getattr(table, name) or (0,) * sum(getattr(table, counts)) for table in tables]
    return np.fromiter(chain.from_iterable(columns), float, sum(map(len, columns)))


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
