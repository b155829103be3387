"""The newest values of thousands of rows, as one matrix: what a look over all ranks costs is a few calls of numpy, and not a few for each rank.

Owns the matrix and its statistics by row. Knows nothing of ranks.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

__all__ = ["Floats", "Ints", "Windows", "grown", "medians", "of_others", "quartiles"]

Floats: TypeAlias = Any  # arrays of numpy; its types are too many for a checker that is to be quick
Ints: TypeAlias = Any


class Windows:
    """The newest `size` values of each row. `count`: how many it has ever had."""

    __slots__ = ("_values", "count", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.count: Ints = np.zeros(0, np.int64)
        self._values: Floats = np.zeros((0, size))

    def add(self, rows: Ints, values: Floats) -> None:
        """One value for each entry of `rows`. A row may come several times: its values are in the order of time."""
        if not len(rows):
            return
        self._make_room(int(rows.max()) + 1)
        came = np.bincount(rows, minlength=len(self.count))
        turns = _turns(rows) if came.max() > 1 else 0
        places = (self.count[rows] + turns) % self.size
        if came.max() > self.size:  # only the newest have a place
            newest = turns >= came[rows] - self.size
            rows, places, values = rows[newest], places[newest], values[newest]
        self._values[rows, places] = values
        self.count += came

    def widen(self, size: int) -> None:
        """Keeps more of what comes from now on."""
        values = np.full((len(self.count), size), np.nan)
        places = (self.count[:, None] - self.size + np.arange(self.size)) % size
        np.put_along_axis(values, places, self.ordered(), axis=1)
        self.size, self._values = size, values

    def ordered(self, rows: Ints | slice = slice(None)) -> Floats:
        """A line for each row, oldest first; NaN before the first where there have been fewer than `size`."""
        values, begins = self._values[rows], self.count[rows] % self.size
        if len(begins) and begins.min() == begins.max():  # as in nearly every job: its ranks are in the same step
            return np.concatenate((values[:, begins[0] :], values[:, : begins[0]]), axis=1)
        return np.take_along_axis(values, (begins[:, None] + np.arange(self.size)) % self.size, axis=1)

    def unordered(self, rows: Ints | slice = slice(None)) -> Floats:
        """As `ordered`, for what looks at all of a line alike. Windows that were always added to together have the same order."""
        return self._values[rows]

    def newest(self) -> Floats:
        """The newest of each row; NaN where there is none."""
        if not len(self.count):
            return np.zeros(0)
        return self._values[np.arange(len(self.count)), (self.count - 1) % self.size]

    def oldest(self, rows: Ints, length: int) -> Floats:
        """The `length` oldest values that are left of these rows, which have so many."""
        begin = self.size - np.minimum(self.count[rows], self.size)
        return np.take_along_axis(self.ordered(rows), begin[:, None] + np.arange(length), axis=1)

    def full(self) -> Ints:
        """The rows that have had `size` values."""
        return np.flatnonzero(self.count >= self.size)

    def _make_room(self, rows: int) -> None:
        if rows > len(self.count):
            self._values, self.count = grown(self._values, rows, np.nan), grown(self.count, rows, 0)


def grown(array: Any, rows: int, filled: float) -> Any:
    """The same with at least so many rows."""
    if rows <= len(array):
        return array
    larger = np.full((rows, *array.shape[1:]), filled, array.dtype)
    larger[: len(array)] = array
    return larger


def medians(matrix: Floats) -> Floats:
    """Of each line, without its NaN."""
    ordered = np.sort(matrix, axis=1)
    known = matrix.shape[1] - np.count_nonzero(np.isnan(matrix), axis=1)
    lines = np.arange(len(matrix))
    return (ordered[lines, np.maximum(known - 1, 0) // 2] + ordered[lines, known // 2]) / 2


def quartiles(matrix: Floats) -> Floats:
    """A quarter of each line is at most this. No NaN."""
    at = matrix.shape[1] // 4
    return np.partition(matrix, at, axis=1)[:, at]


def of_others(values: Floats) -> Floats:
    """What each value is held against: of two the other, of more the one in the middle."""
    return values[::-1] if len(values) == 2 else np.full(len(values), np.median(values))


def _turns(rows: Ints) -> Ints:
    """How often the same row came before, for each entry."""
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    begins = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    lengths = np.diff(np.concatenate((begins, [len(rows)])))
    turns: Ints = np.empty(len(rows), np.int64)
    turns[order] = np.arange(len(rows)) - np.repeat(begins, lengths)
    return turns
