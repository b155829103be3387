"""The table that other tools read, read back by one of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from histories import history

from torch_watchdog.report.parquet import write_parquet


def test_another_library_reads_back_every_step(tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    path = tmp_path / "steps.parquet"
    assert write_parquet(history(), path) == 24
    table = duckdb.read_parquet(str(path))
    assert table.aggregate("count(*), count(distinct rank), min(step), max(step)").fetchall() == [(24, 4, 0, 5)]
    row = table.filter("rank = 3 and step = 5").project("job, node, gpu, step_s, loader_s, forward_s, loss, vetoed, peak_bytes").fetchall()
    assert row == [("train-1", "node-1", "GPU-3", 1.0, 0.1, 0.3, 1.5, True, 2**30)]
    assert table.filter("step = 0").aggregate("min(epoch(time))").fetchall() == [(1_700_000_001.0,)]
