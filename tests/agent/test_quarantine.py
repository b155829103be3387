"""Quarantined samples are left out, in their own data set only, and a broken file leaves out nothing."""

from __future__ import annotations

import json
from pathlib import Path

from torch_watchdog_agent.quarantine import Quarantine, dataset_name
from torch_watchdog_proto.messages import BatchFact, Sample, Violation


def violation(index: int | None) -> Violation:
    sample = Sample(position_in_batch=0, dataset_index=index)
    return Violation(kind="batch.index_out_of_range", summary="bad", cause="c", fix="f", batch=BatchFact(key="ids", sample=sample))


def test_what_one_rank_adds_every_rank_leaves_out_from_its_next_pass(tmp_path: Path) -> None:
    here, there = Quarantine(tmp_path / "q.jsonl"), Quarantine(tmp_path / "q.jsonl")
    assert here.add(violation(7), dataset="Rows[48]", rank=1, step=3)
    assert there.replaced("Rows[48]", [5, 7, 9]) == [5, 7, 9]
    there.reload()
    assert there.replaced("Rows[48]", [5, 7, 9]) == [5, 9, 9]


def test_that_others_stand_in_for_samples_from_a_later_pass_on_is_said_once(tmp_path: Path) -> None:
    """Of those that the launch was given it has told itself."""
    said: list[str] = []
    quarantine = Quarantine(tmp_path / "q.jsonl", say=said.append)
    for index in (6, 7, 8):
        quarantine.add(violation(index), dataset="Rows[48]", rank=1, step=3)
        quarantine.reload()
    assert said == [f"samples left out from here on: 2 ({tmp_path / 'q.jsonl'}); another of the same batch stands in for each"]


def test_the_same_index_of_another_data_set_stays(tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path / "q.jsonl")
    quarantine.add(violation(1), dataset="Train[9]", rank=0, step=0)
    quarantine.reload()
    assert quarantine.replaced("Valid[9]", [1, 2]) == [1, 2]


def test_a_batch_of_nothing_else_stays_as_it_is(tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path / "q.jsonl")
    quarantine.add(violation(1), dataset="D[9]", rank=0, step=0)
    quarantine.reload()
    assert quarantine.replaced("D[9]", [1]) == [1]


def test_an_unknown_sample_cannot_be_quarantined(tmp_path: Path) -> None:
    assert not Quarantine(tmp_path / "q.jsonl").add(violation(None), dataset="D[9]", rank=0, step=0)
    assert not (tmp_path / "q.jsonl").exists()


def test_torn_and_foreign_lines_are_passed_over(tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path / "q.jsonl")
    quarantine.add(violation(3), dataset="D[9]", rank=0, step=0)
    with (tmp_path / "q.jsonl").open("ab") as file:
        file.write(b'[1]\n{"dataset": 4}\n\xff\xfe\n{"dataset": "D[9]", "dataset_index": tru')
    quarantine.reload()
    assert quarantine.replaced("D[9]", [3, 4]) == [4, 4]


def test_data_sets_are_told_apart_by_class_and_length() -> None:
    assert dataset_name([1, 2]) == "list[2]"
    assert dataset_name(iter([1])) == "list_iterator[?]"


def test_what_a_checkpoint_brings_along_is_left_out_and_handed_on_with_the_runs_own(tmp_path: Path) -> None:
    old, new = (json.dumps({"dataset": "D[9]", "dataset_index": index}) for index in (3, 5))
    (tmp_path / "carried.jsonl").write_text(f"{old}\n")
    (tmp_path / "own.jsonl").write_text(f"{new}\n")
    quarantine = Quarantine(tmp_path / "own.jsonl")
    assert quarantine.take_over(tmp_path / "carried.jsonl") == 1
    quarantine.reload()
    assert quarantine.replaced("D[9]", [3, 4, 5]) == [4, 4, 4]
    assert quarantine.lines() == (old, new)
    assert quarantine.take_over(tmp_path / "nothing.jsonl") == 0
