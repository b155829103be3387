"""Which of a run's checkpoints a later attempt of it takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from torch_watchdog_agent.checkpoint.again import newest_of_this_run
from torch_watchdog_agent.checkpoint.peers import Peers


class TwoNodes(Peers):
    """The other node sees what `theirs` says."""

    def __init__(self, theirs: str | None) -> None:
        super().__init__(None, rank=0, index=0, count=2)
        self.theirs = theirs

    def gather(self, value: Any) -> list[Any]:
        return [value, self.theirs]


ALONE = Peers(None, rank=0, index=0, count=1)


def saved(run: Path, updates: int, *, form: str = "dcp", good: bool = True, ranks: int = 1) -> Path:
    place = run / "checkpoints" / f"{'' if good else 'not-good.'}step-{updates}"
    place.mkdir(parents=True)
    (place / "watchdog.json").write_text(json.dumps({"updates_applied": updates, "format": form, "world_size": ranks, "finite": good}))
    if good:
        (place / "COMMITTED").touch()
    return place


def taken(run: Path, peers: Peers = ALONE, *, loads: bool = True, needs_position: bool = True) -> tuple[Path | None, str]:
    lines: list[str] = []
    found = newest_of_this_run(run, peers, loads=loads, needs_position=needs_position, say=lines.append)
    return found, "\n".join(lines)


def test_nothing_saved_is_nothing_taken_and_nothing_said(tmp_path: Path) -> None:
    assert taken(tmp_path) == (None, "")


def test_the_newest_good_one_is_taken_and_said(tmp_path: Path) -> None:
    saved(tmp_path, 4)
    newest = saved(tmp_path, 11)
    saved(tmp_path, 12, good=False)
    found, said = taken(tmp_path)
    assert found == newest and f"goes on from {newest}, the newest good checkpoint of this run (11 updates)" in said


@pytest.mark.parametrize(
    ("newest", "loads"),
    [({"form": "lightning"}, True), ({"form": "callback"}, True), ({"ranks": 4}, True), ({"form": "dcp"}, False)],
    ids=["a framework's", "the user's own", "another number of ranks", "a model that the script loads itself"],
)
def test_one_that_this_restore_cannot_take_is_passed_over_aloud(tmp_path: Path, newest: dict[str, Any], loads: bool) -> None:
    older = saved(tmp_path, 4, form="dcp" if loads else "callback")
    other = saved(tmp_path, 9, **newest)
    found, said = taken(tmp_path, loads=loads)
    assert found == older and f"{other} is not what this restore() can take" in said


def test_the_number_of_ranks_does_not_matter_where_no_place_in_the_data_is_asked_for(tmp_path: Path) -> None:
    assert taken(tmp_path, needs_position=False)[0] is None
    newest = saved(tmp_path, 9, ranks=4)
    assert taken(tmp_path, needs_position=False)[0] == newest


def test_nodes_that_see_different_ones_take_none(tmp_path: Path) -> None:
    newest = saved(tmp_path, 9, ranks=2)
    assert taken(tmp_path, TwoNodes(str(newest)))[0] == newest
    found, said = taken(tmp_path, TwoNodes(None))
    assert found is None and "not every node sees the checkpoints" in said
