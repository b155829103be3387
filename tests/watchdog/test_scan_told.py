"""What a scan says at its end: first whether that was the end."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from torch_watchdog.cli.scan import to_go_on
from torch_watchdog.scan.results import RankState, Results
from torch_watchdog.scan.tell import headline


def results(*bad: dict[str, Any], finished: bool) -> Results:
    state = RankState(
        rank=0, world_size=1, batches=145, samples=580, total_batches=None, unconfirmed=0, driving=True, seconds=2.0, finished=finished
    )
    return Results(ranks=(state,), bad=bad)


ONE, TWO = ({"dataset_index": 3},), ({"dataset_index": 3}, {"dataset_index": 4})
EFFORT = "145 batches, 1 rank, 2.0 s, 290 samples/s"


@pytest.mark.parametrize(
    ("bad", "finished", "goes_on", "said"),
    [
        ((), True, False, f"scan: 580 samples in {EFFORT}: no sample would fail"),
        (ONE, True, False, f"scan: 580 samples in {EFFORT}: 1 sample would fail"),
        ((), True, True, f"scan: 580 samples in {EFFORT}: no sample would fail; the rest was looked at by the scan before"),
        ((), False, False, f"scan: not finished: so far none of 580 samples fails ({EFFORT})"),
        (TWO, False, False, f"scan: not finished: so far 2 of 580 samples fail ({EFFORT})"),
        ((), False, True, f"scan: not finished: so far none of 580 samples fails, beside those of the scan before ({EFFORT})"),
        (
            ONE,
            False,
            True,
            f"scan: not finished: so far 1 sample would fail, and 580 were looked at, beside those of the scan before ({EFFORT})",
        ),
    ],
)
def test_what_was_not_looked_at_is_not_called_good(bad: tuple[dict[str, Any], ...], finished: bool, goes_on: bool, said: str) -> None:
    assert headline(results(*bad, finished=finished), goes_on=goes_on) == said


def test_a_scan_that_has_met_no_batch_is_not_called_clean() -> None:
    ends = [
        RankState(
            rank=rank, world_size=2, batches=0, samples=0, total_batches=None, unconfirmed=0, driving=False, seconds=0.0, finished=True
        )
        for rank in (0, 1)
    ]
    nothing = Results(ranks=tuple(ends), bad=())
    assert headline(nothing).startswith("scan: nothing was scanned: no batch of a DataLoader")
    assert (nothing.finished, nothing.exit_code(0), nothing.exit_code(9)) == (False, 1, 9)


def test_the_line_to_go_on_is_the_command_itself_with_the_options_that_were_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    line = to_go_on(
        ("--job", "looked", "--dir", "my runs", "--config", "w.toml"),
        tmp_path / "my runs" / "looked",
        ("python", "train.py", "--name", "a b"),
        as_json=False,
    )
    assert shlex.split(line) == [
        *("watchdog", "--config", "w.toml", "scan", "--job", "looked", "--dir", "my runs", "--after", "my runs/looked"),
        *("python", "train.py", "--name", "a b"),
    ]  # fmt: skip
