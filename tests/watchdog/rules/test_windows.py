"""Windows of many rows hold what a list for each row would."""

from __future__ import annotations

import random

import numpy as np
import pytest

from torch_watchdog.rules.windows import Windows, medians, quartiles


def filled(size: int, rows: int, adds: int, *, seed: int, widen: int = 0) -> tuple[Windows, list[list[float]]]:
    rng, windows, lists = random.Random(seed), Windows(size), [[] for _ in range(rows)]
    for number in range(adds):
        some = [rng.randrange(rows) for _ in range(rng.randint(0, 3 * rows))]
        values = [rng.random() for _ in some]
        windows.add(np.array(some, np.int64), np.array(values))
        for row, value in zip(some, values, strict=True):
            lists[row].append(value)
        if widen and number == adds // 2:
            windows.widen(widen)
    return windows, lists


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("adds", [1, 3, 20])
def test_rows_that_come_in_any_order_and_several_times_are_kept_oldest_first(seed: int, adds: int) -> None:
    windows, lists = filled(8, 5, adds, seed=seed)
    for row, ordered, newest in zip(lists, windows.ordered(), windows.newest(), strict=False):
        expected = [np.nan] * (8 - len(row[-8:])) + row[-8:]
        np.testing.assert_array_equal(ordered, expected)
        np.testing.assert_array_equal(newest, row[-1] if row else np.nan)
    assert windows.full().tolist() == [number for number, row in enumerate(lists) if len(row) >= 8]


@pytest.mark.parametrize("seed", range(10))
def test_a_window_that_is_widened_loses_nothing_and_keeps_more(seed: int) -> None:
    windows, lists = filled(4, 3, 12, seed=seed, widen=16)
    for row, ordered in zip(lists, windows.ordered(), strict=False):
        kept = ordered[~np.isnan(ordered)]
        assert len(kept) >= min(4, len(row))
        np.testing.assert_array_equal(kept, row[len(row) - len(kept) :])


def test_medians_leave_out_what_is_not_there_and_quartiles_are_those_of_a_sorted_list() -> None:
    rng = np.random.default_rng(0)
    matrix = rng.random((50, 32))
    np.testing.assert_allclose(quartiles(matrix), np.sort(matrix, axis=1)[:, 8])
    matrix[rng.random(matrix.shape) < 0.4] = np.nan
    np.testing.assert_allclose(medians(matrix), np.nanmedian(matrix, axis=1))
