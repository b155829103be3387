"""What a rank of a scan leaves behind, and what the next one takes over from it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from torch_watchdog_agent.contract import Guard
from torch_watchdog_agent.contract.guard import Checked
from torch_watchdog_agent.hooks import indices
from torch_watchdog_agent.hooks.indices import Indices, Source
from torch_watchdog_agent.loop import Loop
from torch_watchdog_agent.scan import Scan, bad_samples

torch.set_num_threads(1)


def scan(folder: Path, *, rank: int = 0, world_size: int = 1, earlier: Path | None = None) -> Scan:
    return Scan(folder, rank=rank, world_size=world_size, earlier=earlier, clock=iter(range(1000)).__next__)


def learned(table: nn.Module, head: nn.Module) -> Guard:
    """A guard that knows the table's rows and the head's classes."""
    guard = Guard(say=print, on_refused=print)
    for _ in range(5):
        batch = rows()
        checked = guard.fetched(batch, indices=None, worker=None)
        guard.handed_over(checked, batch)
        nn.functional.cross_entropy(head(table(batch["ids"]).mean(1)), batch["labels"]).backward()
        guard.step_ended()
    return guard


def rows() -> dict[str, torch.Tensor]:
    return {"ids": torch.arange(24).reshape(4, 6) % 10, "labels": torch.arange(4) % 3}


def taken(*batches: list[int]) -> Iterator[tuple[object, Source, Checked]]:
    for number, listed in enumerate(batches):
        yield {}, Source(Indices(listed), None), Checked(batch_id=number)


def test_every_bad_sample_of_a_batch_is_told_with_its_own_value() -> None:
    table, head = nn.Embedding(10, 4), nn.Linear(4, 3)
    guard, batch = learned(table, head), rows()
    batch["ids"][1, 2], batch["ids"][1, 4], batch["ids"][3, 0], batch["labels"][2] = 10, 11, -1, 3
    checked = guard.fetched(batch, indices=[40, 41, 42, 43], worker=1)
    found = sorted(
        (entry["dataset_index"], entry["key"], entry["element"], entry["value"], entry["worker"])
        for entry in bad_samples(guard, batch, checked)
    )
    assert found == [(41, "ids", [1, 2], 10, 1), (42, "labels", [2], 3, 1), (43, "ids", [3, 0], -1, 1)]
    assert batch["ids"][1, 2] == 10  # the batch itself is as it was


def test_a_scan_that_goes_on_leaves_out_what_any_rank_has_looked_at(tmp_path: Path) -> None:
    guard = Guard(say=print, on_refused=print)
    for rank in (0, 1):
        scan(tmp_path / "a", rank=rank, world_size=2).drive(taken([rank, rank + 2], [rank + 4]).__next__, guard, total=2, failed_at=Source)
    again = scan(tmp_path / "b", earlier=tmp_path / "a")
    assert all(again.has_seen([index]) for index in range(6))
    assert again.has_seen([0, 5])
    assert not again.has_seen([0, 6])
    assert not again.has_seen([])
    assert not again.has_seen(None)


def test_no_loader_makes_a_batch_that_an_earlier_scan_has_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indices, "_is_left_out", lambda index: index[0] < 4)
    asked = iter([[0, 1], [2, 3], [4, 5]])
    iterator = type("Iterator", (), {"_next_index": lambda self: next(asked), "_reset": lambda self: None})
    indices.patch(iterator)
    assert iterator()._next_index() == [4, 5]


def test_findings_of_an_earlier_scan_are_taken_over_once(tmp_path: Path) -> None:
    def failing() -> tuple[object, Source, Checked]:
        raise KeyError("gone")

    first = scan(tmp_path / "a")
    calls = iter([failing, taken([1]).__next__])
    first.drive(lambda: next(calls)(), Guard(say=print, on_refused=print), total=None, failed_at=lambda: Source(Indices([7]), None))
    for rank in (0, 1):
        scan(tmp_path / "b", rank=rank, world_size=2, earlier=tmp_path / "a").write(finished=True)
    lines = [json.loads(line) for path in sorted((tmp_path / "b").glob("*.jsonl")) for line in path.read_text().splitlines()]
    assert [(line["kind"], line["indices"]) for line in lines] == [("loader.exception", [7])]


def trained(one: Scan, loop: Loop, steps: int) -> int:
    """After how many of the steps the rank was ended."""
    for step in range(1, steps + 1):
        loop.at_gate(1)
        loop.gate_done(applied=True)
        try:
            one.updated(loop)
        except SystemExit:
            return step
    return 0


def test_a_loop_without_a_loader_is_ended_soon_or_where_a_loader_may_begin_still_later(tmp_path: Path) -> None:
    assert trained(scan(tmp_path / "a"), Loop(), 300) == 20
    loader = DataLoader(torch.arange(8))
    assert trained(scan(tmp_path / "b"), Loop(), 300) == 200
    del loader


def test_a_loop_with_a_loader_is_never_ended_for_want_of_one(tmp_path: Path) -> None:
    fed, elsewhere = Loop(), Loop()
    one = scan(tmp_path / "a")
    assert trained(one, fed, 10) == 0
    fed.handed_over()
    assert trained(one, fed, 300) == 0
    elsewhere.fed_elsewhere = True
    assert trained(scan(tmp_path / "b"), elsewhere, 300) == 0


def test_a_loader_that_only_fails_is_given_up_and_not_called_finished(tmp_path: Path) -> None:
    def failing() -> tuple[object, Source, Checked]:
        raise OSError("no such file")

    one = Scan(tmp_path / "a", rank=0, world_size=1, earlier=None)
    one.drive(failing, Guard(say=print, on_refused=print), total=None, failed_at=Source)
    state = json.loads((tmp_path / "a" / "rank-0.json").read_text())
    assert (state["finished"], state["failures"]) == (False, 1000)
