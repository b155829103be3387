"""From parts to a good checkpoint: COMMITTED last, only where all is whole; old ones go, the last good one stays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from torch_watchdog_agent.checkpoint.errors import CheckpointError, RestoreError
from torch_watchdog_agent.checkpoint.files import digested
from torch_watchdog_agent.checkpoint.manifest import commit, finished, newest_committed, remove, verify


def written(folder: Path, step: int, content: str = "shard") -> tuple[Path, dict[str, object]]:
    partial = folder / f"partial.step-{step}"
    partial.mkdir(parents=True)
    (partial / "__0_0.distcp").write_text(content)
    files = [{"name": file.name, "size": file.size, "sha256": file.sha256} for file in [digested(partial, "__0_0.distcp")]]
    return partial, {"updates_applied": step, "ranks": [0], "world_size": 1, "files": files, "finite": True, "format": "dcp"}


def committed(folder: Path, step: int, *, good: bool = True, content: str = "shard") -> Path:
    _, manifest = written(folder, step, content)
    return commit(folder / f"step-{step}", {**manifest, "finite": good}, good=good)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_committed_checkpoint_verifies_and_says_what_made_it(tmp_path: Path) -> None:
    manifest = verify(committed(tmp_path, 5))
    assert names(tmp_path) == ["step-5"]
    assert (manifest["updates_applied"], manifest["step"], manifest["good"]) == (5, 5, True)
    assert manifest["versions"].keys() == {"torch", "torch_watchdog", "python"}
    assert newest_committed(tmp_path) == tmp_path / "step-5"


def test_nothing_is_committed_where_a_part_is_missing_or_short(tmp_path: Path) -> None:
    partial, manifest = written(tmp_path, 5)
    (partial / "__0_0.distcp").write_text("sha")
    with pytest.raises(CheckpointError, match="has 3 bytes, its rank wrote 5"):
        commit(tmp_path / "step-5", manifest, good=True)
    (partial / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match="is not there"):
        commit(tmp_path / "step-5", manifest, good=True)
    assert newest_committed(tmp_path) is None


def test_a_half_written_folder_is_never_offered_nor_accepted(tmp_path: Path) -> None:
    committed(tmp_path, 3)
    partial, _ = written(tmp_path, 5)
    assert newest_committed(tmp_path) == tmp_path / "step-3"
    with pytest.raises(RestoreError, match=r"never finished\. Resume from .*step-3 instead"):
        verify(partial)


def test_a_folder_without_committed_is_refused(tmp_path: Path) -> None:
    path = committed(tmp_path, 5)
    (path / "COMMITTED").unlink()
    with pytest.raises(RestoreError, match="no COMMITTED"):
        verify(path)
    assert newest_committed(tmp_path) is None


@pytest.mark.parametrize(("content", "reason"), [("shart", "digest differs"), ("shards", "has 6 bytes, 5 were written")])
def test_a_changed_file_is_refused(tmp_path: Path, content: str, reason: str) -> None:
    path = committed(tmp_path, 5)
    (path / "__0_0.distcp").write_text(content)
    with pytest.raises(RestoreError, match=reason):
        verify(path)


def test_the_newest_three_are_kept_and_always_the_newest_good_one(tmp_path: Path) -> None:
    committed(tmp_path, 1)
    committed(tmp_path, 2)
    for step in (3, 4, 5):
        committed(tmp_path, step, good=False)
    assert names(tmp_path) == ["not-good.step-3", "not-good.step-4", "not-good.step-5", "step-2"]
    committed(tmp_path, 6)
    assert names(tmp_path) == ["not-good.step-4", "not-good.step-5", "step-6"]


def test_a_state_that_is_not_good_never_takes_the_place_of_a_good_one(tmp_path: Path) -> None:
    committed(tmp_path, 5)
    committed(tmp_path, 5, good=False)
    assert newest_committed(tmp_path) == tmp_path / "step-5"
    assert json.loads((tmp_path / "not-good.step-5" / "watchdog.json").read_text())["good"] is False


def test_a_second_stop_at_the_same_step_replaces_the_first(tmp_path: Path) -> None:
    committed(tmp_path, 5, content="first")
    path = committed(tmp_path, 5, content="second")
    verify(path)
    assert (path / "__0_0.distcp").read_text() == "second"
    assert names(tmp_path) == ["step-5"]


def test_the_replaced_checkpoint_is_offered_as_long_as_the_new_one_is_not_committed(tmp_path: Path) -> None:
    path = committed(tmp_path, 5)
    path.rename(tmp_path / "replaced.step-5")
    partial, _ = written(tmp_path, 5)
    partial.rename(path)
    assert newest_committed(tmp_path) == tmp_path / "replaced.step-5"


def test_what_an_older_attempt_left_half_written_goes_with_the_next_commit(tmp_path: Path) -> None:
    written(tmp_path, 2)
    written(tmp_path, 9)
    committed(tmp_path, 5)
    assert names(tmp_path) == ["partial.step-9", "step-5"]


def test_a_removed_checkpoint_is_gone_at_once(tmp_path: Path) -> None:
    path = committed(tmp_path, 5)
    remove(path)
    assert finished(tmp_path) == []


def test_what_was_just_made_stays_though_an_earlier_attempt_had_come_further(tmp_path: Path) -> None:
    for step in (100, 200, 300):
        committed(tmp_path, step)
    assert verify(committed(tmp_path, 50))["updates_applied"] == 50


def test_the_newest_is_the_one_with_the_most_updates_whatever_its_name(tmp_path: Path) -> None:
    """An attempt that resumed after 300 updates and stopped at its own step 60."""
    committed(tmp_path, 300)
    _, manifest = written(tmp_path, 60)
    resumed = commit(tmp_path / "step-60", {**manifest, "updates_applied": 360}, good=True)
    assert newest_committed(tmp_path) == resumed


@pytest.mark.parametrize("before", [{"session": "another"}, {}, None])
def test_in_a_folder_of_the_users_only_what_this_launch_has_made_goes(before: dict[str, str] | None, tmp_path: Path) -> None:
    """Not what another launch did, nor an older version of ours, nor what cannot be read."""

    def made(content: str, **session: str) -> None:
        _, manifest = written(tmp_path, 5, content)
        commit(tmp_path / "step-5", {**manifest, **session}, good=True, ours=False)

    made("first", **(before or {}))
    if before is None:
        (tmp_path / "step-5" / "watchdog.json").write_text("{")
    for content in ("second", "third"):
        made(content, session="this")
    found = {path.parent.name: path.read_text() for path in tmp_path.glob("*/__0_0.distcp")}
    assert found == {"step-5": "third", "replaced.step-5": "first"}
