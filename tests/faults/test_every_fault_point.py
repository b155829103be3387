"""The matrix of fault points covers every word of the protocol, by all who say, pass on and hear it; and its judge sees what must not be."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import get_args

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import fault_points
from launching import Ended

from torch_watchdog_agent.checkpoint.files import sha256
from torch_watchdog_proto.messages import Order, RankMessage

SAID = {word.__name__ for word in get_args(RankMessage)}
TOLD = {word.__name__ for word in get_args(Order)}
TRIED = {point for _, point in fault_points.points()}


@pytest.mark.parametrize("word", sorted(SAID))
def test_every_word_of_a_rank_has_its_trials(word: str) -> None:
    by_rank = {f"rank-{rank} before {word}" for rank in (0, 1)}
    by_keeper = {f"keeper-of-{point}" for point in by_rank}
    assert TRIED & by_rank and TRIED & by_keeper and {f"node got {word}", f"daemon got {word}"} <= TRIED


@pytest.mark.parametrize("word", sorted(TOLD))
def test_every_order_has_its_trials(word: str) -> None:
    assert {f"daemon before {word}", f"node before {word}"} <= TRIED
    if word != "Release":  # it is for the keeper, and a file
        by_rank = {f"rank-{rank} got {word}" for rank in (0, 1)}
        assert TRIED & by_rank and TRIED & {f"keeper-of-{point}" for point in by_rank}


def test_a_story_names_words_of_the_protocol_only() -> None:
    for story in fault_points.STORIES.values():
        assert story.said.keys() <= SAID and story.told.keys() <= TOLD


def test_the_judge_sees_different_updates_the_bad_one_and_a_half_checkpoint(tmp_path: Path) -> None:
    story = fault_points.STORIES["skip"]
    fine = "".join(f"rank {rank} step {step} parameters {min(step, 3)}a\n" for step in range(5) for rank in (0, 1))
    assert fault_points.judge(Ended(1, fine, "", tmp_path), story) == []
    other = fine.replace("rank 1 step 2 parameters 2a", "rank 1 step 2 parameters 9a")
    assert fault_points.judge(Ended(1, other, "", tmp_path), story) == ["step 2: the ranks' parameters differ"]
    applied = fine.replace("step 4 parameters 3a", "step 4 parameters 4a")
    assert fault_points.judge(Ended(1, applied, "", tmp_path), story) == [f"rank {rank} applied the bad batch" for rank in (0, 1)]
    (half := tmp_path / "checkpoints" / "step-4").mkdir(parents=True)
    (half / "watchdog.json").write_text(json.dumps({"updates_applied": 4, "files": [{"name": "rank-0.json", "size": 1, "sha256": "0"}]}))
    (half / "COMMITTED").write_text(json.dumps({"manifest_sha256": sha256(half / "watchdog.json")}))
    (found,) = fault_points.judge(Ended(1, fine, "", tmp_path), story)
    assert "step-4 is called good" in found and "rank-0.json is missing" in found


def test_the_table_tells_what_was_not_as_it_must_be() -> None:
    known = {"skip / rank-1 before Ack": {"good": [], "seconds": 9.0, "wrong": ["x"], "date": "2026-01-01", "commit": "abc"}}
    assert "| skip | Ack | 1 of " in fault_points.table(known) and "rank-1 before Ack: x" in fault_points.table(known)
