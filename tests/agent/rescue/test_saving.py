"""Who seals a rescue's checkpoint where its name is taken: by an earlier launch of the same job, in a folder of the user's, or by another rank of this one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torch_watchdog_agent.checkpoint.files import digested
from torch_watchdog_agent.checkpoint.manifest import verify
from torch_watchdog_agent.rescue.saving import seal
from torch_watchdog_agent.saver import Saver
from torch_watchdog_proto.messages import Committed, Saved, WriteCommitted
from torch_watchdog_proto.rescue_words import Rescue

WEIGHTS = "model.safetensors"


def sealed(place: Path, weights: str, *, session: str, rank: int = 0) -> Committed:
    """What a rank answers that has written `weights` where a Trainer has its checkpoints, after the fifth update of a launch of the job bert."""
    here: Any = SimpleNamespace(
        config=SimpleNamespace(job="bert", session=session), identity=SimpleNamespace(rank=rank, attempt=0, world_size=2)
    )
    here.saver = Saver(here, leave=lambda: None)
    partial = place.with_name(f"partial.{place.name}")
    partial.mkdir()
    (partial / WEIGHTS).write_text(weights)
    file = digested(partial, WEIGHTS)
    facts = {
        "updates_applied": 5, "ranks": [rank], "files": [dataclasses.asdict(file)], "finite": True, "kind": "rescue", "generation": 1,
        "reason": "", "format": "transformers",
    }  # fmt: skip
    return seal(
        here,
        Rescue(generation=1, path=str(place.parent / "runs" / "step-5"), reason=""),
        WriteCommitted(generation=1, good=True, manifest=facts),
        Saved(rank=rank, generation=1, updates_applied=5, path=str(place), files=(file,), finite=True, format="transformers"),
        parts=0,
    )


@pytest.mark.parametrize("launches", [2, 3])
def test_what_an_earlier_launch_of_the_job_has_left_there_is_neither_ours_nor_lost(launches: int, tmp_path: Path) -> None:
    place = tmp_path / "checkpoint-5"
    for launch in range(launches):
        assert sealed(place, f"weights of launch {launch}", session=str(launch)).error is None
    assert (place / WEIGHTS).read_text() == f"weights of launch {launches - 1}"
    assert verify(place)["session"] == str(launches - 1)
    found = sorted(path.read_text() for path in tmp_path.glob(f"*/{WEIGHTS}"))
    assert found == [f"weights of launch {launch}" for launch in range(launches)]
    assert not list(tmp_path.glob("partial.*"))


def test_what_another_rank_has_sealed_before_it_died_is_ours_and_nothing_half_written_stays(tmp_path: Path) -> None:
    place = tmp_path / "checkpoint-5"
    assert sealed(place, "weights of rank 0", session="a").error is None
    assert sealed(place, "weights of rank 1", session="a", rank=1) == Committed(rank=1, generation=1)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-5"]
    assert (place / WEIGHTS).read_text() == "weights of rank 0"
    assert verify(place)["ranks"] == [0]
