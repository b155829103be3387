"""The map of ranks and time: what it keeps, how it zooms, and that it does not grow with the run."""

from __future__ import annotations

import json
import math
import tracemalloc

from torch_watchdog.web.heat import COLUMNS, MAX_ROWS, HeatMap
from torch_watchdog_proto.messages import NodeReport, StepBlock, StepTable


def report(*ranks: int, step_ms: float = 100, loss: float = 2.0, steps: int = 1) -> NodeReport:
    blocks = tuple(
        StepBlock(
            rank=rank, attempt=0, pid=1, first_record=1, step=tuple(range(steps)), step_ns=(int(step_ms * 1e6),) * steps, micro_step=(0,),
            loader_ns=(10**7,), loss=(loss,), loss_known=(True,),
        )
        for rank in ranks
    )  # fmt: skip
    return NodeReport(seq=1, time_ns=1, steps=StepTable.of(blocks))


def test_a_cell_is_the_mean_of_its_ranks_steps() -> None:
    heat = HeatMap(0.0)
    heat.add("n", report(0, step_ms=100), 0.2)
    heat.add("n", report(0, step_ms=300, steps=3), 0.7)
    heat.add("n", report(0, step_ms=50), 2.5)
    shown = heat.window("step", 0, 10, 2.6).to_json()
    assert shown["cells"] == [[250.0, None, 50.0]] and (shown["low"], shown["high"], shown["column_s"]) == (50.0, 250.0, 1.0)


def test_the_map_of_an_ended_job_ends_where_its_reports_do() -> None:
    heat = HeatMap(0.0)
    heat.add("n", report(0), 0.5)
    heat.add("n", report(0), 2.5)
    assert len(heat.window("step", 0, 0, 60.0).to_json()["cells"][0]) == 61
    assert heat.window("step", 0, 0, heat.newest_s).to_json()["cells"] == [[100.0, None, 100.0]]


def test_a_full_map_gets_coarser_and_forgets_nothing() -> None:
    heat = HeatMap(0.0)
    for second in range(COLUMNS):
        heat.add("n", report(0, step_ms=100 if second % 2 else 200), second + 0.5)
    heat.add("n", report(0, step_ms=400), COLUMNS + 0.5)
    shown = heat.window("step", 0, 0, COLUMNS + 0.5).to_json()
    assert shown["column_s"] == 2.0 and shown["cells"] == [[150.0] * (COLUMNS // 2) + [400.0]]


def test_a_run_of_a_year_fits_into_the_same_columns() -> None:
    heat = HeatMap(0.0)
    heat.add("n", report(0), 0.0)
    heat.add("n", report(0), 365 * 86_400.0)
    (cells,) = heat.window("step", 0, 0, 365 * 86_400.0).to_json()["cells"]
    assert len(cells) <= COLUMNS and [value for value in cells if value is not None] == [100.0, 100.0]


def test_many_ranks_are_groups_of_nodes_then_ranks_and_a_slow_one_shows_in_its_group() -> None:
    heat, slow = HeatMap(0.0), 10_001
    for node in range(2_048):
        heat.add(f"node-{node}", report(*range(node * 8, node * 8 + 8)), 0.5)
    heat.add(f"node-{slow // 8}", report(slow, step_ms=900), 1.5)
    shown = heat.window("step", 0, 1 << 30, 1.5).to_json()
    assert len(shown["rows"]) == MAX_ROWS and shown["rows"][0] == {"label": "node-0 to node-7", "first": 0, "last": 63}
    (hot,) = [row for row, cells in zip(shown["rows"], shown["cells"], strict=True) if cells[1] == 900.0]
    assert hot["first"] <= slow <= hot["last"]
    inside = heat.window("step", hot["first"], hot["last"], 1.5).to_json()
    assert [row["label"] for row, cells in zip(inside["rows"], inside["cells"], strict=True) if cells[1] == 900.0] == [f"rank {slow}"]


def test_what_is_shown_is_bounded_however_many_ranks_there_are() -> None:
    heat = HeatMap(0.0)
    heat.add("n", report(*range(16_384)), 0.5)
    assert len(json.dumps(heat.window("step", 0, 1 << 30, COLUMNS - 1.0).to_json())) < 400_000


def test_the_range_over_the_ranks_is_told() -> None:
    heat = HeatMap(0.0)
    heat.add("n", report(0, loss=1.0), 0.5)
    heat.add("n", report(1, loss=3.0), 0.5)
    assert heat.window("loss", 0, 1, 0.5).to_json()["series"] == {"low": [1.0], "middle": [2.0], "high": [3.0]}


def test_a_loss_that_is_no_number_leaves_a_gap_and_valid_json() -> None:
    heat = HeatMap(0.0)
    heat.add("n", report(0, loss=math.nan), 0.5)
    shown = heat.window("loss", 0, 0, 0.5).to_json()
    assert shown["cells"] == [[None]] and json.dumps(shown, allow_nan=False)


def test_a_map_without_ranks_is_empty() -> None:
    assert HeatMap(0.0).window("step", 0, 100, 5.0).to_json()["rows"] == []


def test_a_rank_number_beyond_all_sense_takes_no_memory() -> None:
    heat = HeatMap(0.0)
    heat.add("n", report(4_000_000_000), 0.5)
    assert heat.num_ranks == 0


def test_a_column_as_wide_as_minutes_keeps_no_more_steps_than_a_narrow_one() -> None:
    """Of a rank that does thousands a second."""
    heat = HeatMap(0.0, column_s=1_000.0)
    tracemalloc.start()
    try:
        most = max(held_after(heat, number / 10) for number in range(60))
    finally:
        tracemalloc.stop()
    assert most < 3 << 20, "120,000 steps are 8 MB"
    assert heat.window("step", 0, 0, 6.0).to_json()["cells"] == [[100.0]]


def held_after(heat: HeatMap, now_s: float) -> int:
    heat.add("n", NodeReport(seq=1, time_ns=1, steps=StepTable.of((of_many_steps(),))), now_s)
    return tracemalloc.get_traced_memory()[0]


def of_many_steps() -> StepBlock:
    count = 2_000
    return StepBlock(
        rank=0, attempt=0, pid=1, first_record=1, step=tuple(range(count)), step_ns=(10**8,) * count, micro_step=(0,) * count,
        loader_ns=(10**7,) * count, loss=tuple(number / 7 for number in range(count)), loss_known=(True,) * count,
    )  # fmt: skip
