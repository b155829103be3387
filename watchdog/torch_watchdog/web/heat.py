"""Ranks x time of a running job, in memory that does not grow with the run: at most COLUMNS columns, which get twice as wide when they are full.

Owns the sums; knows nothing of HTTP. Time is when a report came, by the daemon's own clock: a node's may be wrong. A map of 16,384 ranks takes some
75 MB. What came before this daemon began is not in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from torch_watchdog_proto.messages import NodeReport, StepBlock

__all__ = ["COLUMNS", "METRICS", "HeatMap", "HeatWindow", "Row"]

COLUMNS = 160
MAX_RANKS = 65_536
MAX_ROWS = 256
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

    @property
    def num_ranks(self) -> int:
        return len(self._nodes)

    def add(self, node: str, report: NodeReport, now_s: float) -> None:
        column, self.newest_s = self._column(now_s), now_s
        for block in report.blocks:
            if block.rank < MAX_RANKS:
                self._know(block.rank, node)
                self._add_block(block, column)

    def _column(self, now_s: float) -> int:
        while now_s - self._began_s >= COLUMNS * self._column_s:
            self._widen()
        return max(0, int((now_s - self._began_s) / self._column_s))

    def _widen(self) -> None:
        """Two columns become one: the sums and counts of both are kept."""
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

    def _add_block(self, block: StepBlock, column: int) -> None:
        losses = [loss for loss, known in zip(block.loss, block.loss_known, strict=False) if known and abs(loss) < 1e30]
        forward = [value for value in block.forward_ns if value]
        for metric, total, count in (
            ("step", sum(block.step_ns) / 1e6, len(block.step_ns)),
            ("loader", sum(block.loader_ns) / 1e6, len(block.loader_ns)),
            ("forward", sum(forward) / 1e6, len(forward)),
            ("loss", sum(losses), len(losses)),
        ):
            if count:
                self._sums[_NUMBER[metric], block.rank, column] += total
                self._counts[_NUMBER[metric], block.rank, column] += count

    def window(self, metric: str, first: int, last: int, now_s: float) -> HeatWindow:
        """Ranks `first` to `last` until `now_s`, in at most MAX_ROWS lines: a rank each, or a node each, or some nodes each."""
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
