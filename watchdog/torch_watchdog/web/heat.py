"""Ranks x time of a running job, in memory that does not grow with the run: at most COLUMNS columns, which get twice as wide when they are full.

Owns the sums; knows nothing of HTTP. Time is when a report came, by the daemon's own clock: a node's may be wrong. A map of 16,384 ranks takes some
75 MB. What came before this daemon began is not in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from torch_watchdog.rules.columns import counts_of, flat
from torch_watchdog_proto.messages import NodeReport, StepTable

__all__ = ["COLUMNS", "METRICS", "HeatMap", "HeatWindow", "Row"]

COLUMNS = 160
MAX_RANKS = 65_536
MAX_ROWS = 256
_MAX_WAITING = 2_048  # steps: of a few fast ranks a column as wide as minutes holds many
METRICS = {
    "step": ("step time", "ms"),
    "loader": ("waiting for data, per batch", "ms"),
    "forward": ("forward, per batch", "ms"),
    "loss": ("loss", ""),
}
_NUMBER = {name: number for number, name in enumerate(METRICS)}
_Array = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the map: ranks `first` to `last`."""

    label: str
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatWindow:
    """A copy of some ranks' columns of one metric, to be summed up in another thread."""

    metric: str
    rows: Sequence[Row]
    starts: Sequence[int]
    sums: _Array
    counts: _Array
    column_s: float
    began_s: float

    def to_json(self) -> dict[str, Any]:
        """`cells` are the highest of each row's ranks, `series` the range over all of them, None where nothing is known."""
        with numpy.errstate(invalid="ignore", divide="ignore"):
            means = numpy.where(self.counts > 0, self.sums / self.counts, numpy.nan)
        cells = numpy.fmax.reduceat(means, self.starts, axis=0) if len(self.starts) else means
        filled = numpy.isfinite(cells)
        known = cells[filled]
        return {
            "metric": self.metric, "title": METRICS[self.metric][0], "unit": METRICS[self.metric][1], "column_s": self.column_s,
            "began_s": self.began_s, "rows": [{"label": row.label, "first": row.first, "last": row.last} for row in self.rows],
            "low": float(known.min()) if known.size else None, "high": float(known.max()) if known.size else None,
            "typical": float(numpy.median(known)) if known.size else None,
            "cells": [[float(f"{value:.4g}") if is_known else None for value, is_known in zip(*pair, strict=True)]
                      for pair in zip(cells.tolist(), filled.tolist(), strict=True)],
            "series": _series(means),
        }  # fmt: skip


def _series(means: _Array) -> dict[str, list[float | None]]:
    known = numpy.isfinite(means)
    some = known.any(axis=0)
    low = numpy.where(known, means, numpy.inf).min(axis=0, initial=numpy.inf)
    high = numpy.where(known, means, -numpy.inf).max(axis=0, initial=-numpy.inf)
    middle = numpy.where(known, means, 0).sum(axis=0) / numpy.maximum(1, known.sum(axis=0))
    return {name: [float(f"{value:.5g}") if there else None for value, there in zip(column.tolist(), some.tolist(), strict=True)]
            for name, column in (("low", low), ("middle", middle), ("high", high))}  # fmt: skip


class HeatMap:
    """Of one job. Not for two threads at once."""

    def __init__(self, began_s: float, *, column_s: float = 1.0) -> None:
        self._began_s, self._column_s, self.newest_s = began_s, column_s, began_s
        self._nodes: list[str] = []
        self._sums: _Array = numpy.zeros((len(METRICS), 0, COLUMNS), numpy.float32)
        self._counts: _Array = numpy.zeros((len(METRICS), 0, COLUMNS), numpy.float32)
        self._waiting: list[StepTable] = []
        self._waiting_column = self._waiting_steps = 0

    @property
    def num_ranks(self) -> int:
        return len(self._nodes)

    def add(self, node: str, report: NodeReport, now_s: float) -> None:
        column, self.newest_s = self._column(now_s), now_s
        if column != self._waiting_column or self._waiting_steps >= _MAX_WAITING:
            self._sum_up_waiting()
        self._waiting_column = column
        self._waiting.append(report.steps)
        self._waiting_steps += max(len(report.steps.loss), len(report.steps.rank))
        for rank in report.steps.rank:
            if rank < MAX_RANKS:
                self._know(rank, node)

    def _sum_up_waiting(self) -> None:
        """Many reports at once, all of one column: each by itself costs more than all the rest that is done with it."""
        tables, self._waiting, self._waiting_steps = self._waiting, [], 0
        ranks: _Array = numpy.array([rank for table in tables for rank in table.rank], numpy.int64)
        shown = ranks < MAX_RANKS
        for metric, total, count in _by_block(tables):
            part = (_NUMBER[metric], ranks[shown], self._waiting_column)
            numpy.add.at(self._sums, part, total[shown])
            numpy.add.at(self._counts, part, count[shown])

    def _column(self, now_s: float) -> int:
        while now_s - self._began_s >= COLUMNS * self._column_s:
            self._widen()
        return max(0, int((now_s - self._began_s) / self._column_s))

    def _widen(self) -> None:
        """Two columns become one: the sums and counts of both are kept."""
        self._sum_up_waiting()
        self._column_s *= 2
        for array in (self._sums, self._counts):
            array[:, :, : COLUMNS // 2] = array[:, :, 0::2] + array[:, :, 1::2]
            array[:, :, COLUMNS // 2 :] = 0

    def _know(self, rank: int, node: str) -> None:
        if rank >= len(self._nodes):
            self._nodes += [""] * (rank + 1 - len(self._nodes))
        if rank >= self._sums.shape[1]:
            more = max(rank + 1, 2 * self._sums.shape[1]) - self._sums.shape[1]
            wider: _Array = numpy.zeros((len(METRICS), more, COLUMNS), numpy.float32)
            self._sums = numpy.concatenate((self._sums, wider), axis=1)
            self._counts = numpy.concatenate((self._counts, wider), axis=1)
        self._nodes[rank] = node

    def window(self, metric: str, first: int, last: int, now_s: float) -> HeatWindow:
        """Ranks `first` to `last` until `now_s`, in at most MAX_ROWS lines: a rank each, or a node each, or some nodes each."""
        self._sum_up_waiting()
        first, last = max(0, first), min(last, len(self._nodes) - 1)
        used = self._column(now_s) + 1
        rows = self._rows(first, last)
        part = (_NUMBER[metric], slice(first, max(first, last + 1)), slice(0, used))
        return HeatWindow(
            metric=metric, rows=rows, starts=[row.first - first for row in rows], sums=self._sums[part].copy(), counts=self._counts[part].copy(),
            column_s=self._column_s, began_s=self._began_s,
        )  # fmt: skip

    def _rows(self, first: int, last: int) -> list[Row]:
        if last - first < MAX_ROWS:
            return [Row(label=f"rank {rank}", first=rank, last=rank) for rank in range(first, last + 1)]
        runs: list[Row] = []
        for rank in range(first, last + 1):
            if runs and runs[-1].label == self._nodes[rank]:
                runs[-1] = Row(label=runs[-1].label, first=runs[-1].first, last=rank)
            else:
                runs.append(Row(label=self._nodes[rank], first=rank, last=rank))
        size = -(-len(runs) // MAX_ROWS)
        groups = (runs[start : start + size] for start in range(0, len(runs), size))
        return [Row(label=_span(group), first=group[0].first, last=group[-1].last) for group in groups]


def _span(group: Sequence[Row]) -> str:
    return group[0].label if len(group) == 1 else f"{group[0].label} to {group[-1].label}"


def _by_block(tables: Sequence[StepTable]) -> Iterator[tuple[str, _Array, _Array]]:
    """Of each metric the sum over a block, and of how many values it is."""
    batches, steps = counts_of(tables, "num_micro_steps"), counts_of(tables, "num_steps")
    blocks = numpy.arange(len(steps))
    of_batch: _Array = numpy.repeat(blocks, batches)

    def summed(owners: _Array, values: _Array, known: _Array) -> tuple[_Array, _Array]:
        owners = owners[known]
        return numpy.bincount(owners, values[known], len(blocks)), numpy.bincount(owners, minlength=len(blocks))

    step = flat(tables, "step_ns", "num_steps")
    loader, forward, loss, known = (flat(tables, name, "num_micro_steps") for name in ("loader_ns", "forward_ns", "loss", "loss_known"))
    yield "step", *summed(numpy.repeat(blocks, steps), step / 1e6, step > 0)
    yield "loader", *summed(of_batch, loader / 1e6, loader >= 0)
    yield "forward", *summed(of_batch, forward / 1e6, forward > 0)
    yield "loss", *summed(of_batch, loss, (known > 0) & (abs(loss) < 1e30))
