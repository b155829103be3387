"""Which of a run's checkpoints a later attempt of it takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_watchdog_agent import restore
from torch_watchdog_agent.checkpoint.again import newest_of_this_run
from torch_watchdog_agent.checkpoint.errors import RestoreError
from torch_watchdog_agent.checkpoint.files import sha256
from torch_watchdog_agent.checkpoint.peers import Peers


class TwoNodes(Peers):
    """The other node sees what `theirs` says."""

    def __init__(self, theirs: list[str]) -> None:
        super().__init__(None, rank=0, index=0, count=2)
        self.theirs = theirs

    def gather(self, value: Any) -> list[Any]:
        return [value, value if isinstance(value, bool) else self.theirs]


ALONE = Peers(None, rank=0, index=0, count=1)


def saved(run: Path, updates: int, *, form: str = "dcp", good: bool = True, ranks: int = 1) -> Path:
    place = run / "checkpoints" / f"{'' if good else 'not-good.'}step-{updates}"
    place.mkdir(parents=True)
    (place / "part").write_text("whole")
    files = [{"name": "part", "size": 5, "sha256": sha256(place / "part")}]
    manifest = {"updates_applied": updates, "format": form, "world_size": ranks, "finite": good, "files": files}
    (place / "watchdog.json").write_text(json.dumps(manifest))
    if good:
        (place / "COMMITTED").write_text(json.dumps({"manifest_sha256": sha256(place / "watchdog.json")}))
    return place


def taken(run: Path, peers: Peers = ALONE, *, loads: bool = True, needs_position: bool = True) -> tuple[Path | None, str]:
    lines: list[str] = []
    found = newest_of_this_run(run, peers, loads=loads, needs_position=needs_position, say=lines.append)
    return found, "\n".join(lines)


def test_one_update_is_told_as_one(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    assert taken(tmp_path)[1].endswith("the newest good checkpoint of this run (1 update)")


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


def test_a_form_of_another_version_is_refused_and_not_taken_for_one_in_which_there_is_nothing_to_load(tmp_path: Path) -> None:
    """restore() had said which step it was, and left the model as it was made."""
    with pytest.raises(RestoreError, match=r"does not know its format 'newer'\. Resume with the version of torch-watchdog that wrote it"):
        restore(model=torch.nn.Linear(2, 2), path=saved(tmp_path, 4, form="newer", ranks=1))


def test_the_number_of_ranks_does_not_matter_where_no_place_in_the_data_is_asked_for(tmp_path: Path) -> None:
    assert taken(tmp_path, needs_position=False)[0] is None
    newest = saved(tmp_path, 9, ranks=4)
    assert taken(tmp_path, needs_position=False)[0] == newest


def test_nodes_that_see_different_ones_take_none(tmp_path: Path) -> None:
    newest = saved(tmp_path, 9, ranks=2)
    assert taken(tmp_path, TwoNodes([str(newest)]))[0] == newest
    found, said = taken(tmp_path, TwoNodes([]))
    assert found is None and "not every node sees the checkpoints" in said


@pytest.mark.parametrize("harm", ["a byte", "the manifest", "half a manifest", "no object", "another's folder"])
def test_one_that_is_damaged_is_passed_over_for_the_older_one(tmp_path: Path, harm: str) -> None:
    older, newest = saved(tmp_path, 4), saved(tmp_path, 9)
    manifest = newest / "watchdog.json"
    if harm == "a byte":
        (newest / "part").write_text("wholE")
    elif harm == "the manifest":
        manifest.write_text(manifest.read_text().replace('"updates_applied": 9', '"updates_applied": 999'))
    elif harm == "half a manifest":
        manifest.write_text(manifest.read_text()[:30])
    else:
        manifest.write_text("[]")
        if harm == "another's folder":
            (newest / "COMMITTED").write_text("{}")
    found, said = taken(tmp_path)
    assert found == older and str(newest) in said and "damaged" in said
