"""What a launch said at its end, said again: with a checkpoint that no record names, because nobody was left to write it down."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from torch_watchdog.report.last_words import last_words
from torch_watchdog.store.checkpoints import unfinished_checkpoints
from torch_watchdog.store.run_directory import RunDirectory
from torch_watchdog_agent.checkpoint.places import note_elsewhere

RECORD = {
    "command": ["torchrun", "train.py"],
    "options": ["--job", "train"],
    "folder": "/here",
    "exit_code": 137,
    "ranks_reported": 2,
    "end": {},
}
GIVEN_UP = {
    "kind": "order.stop",
    "severity": "info",
    "summary": "a clean stop; given up",
    "action": {"exit_code": None, "checkpoint": None},
}


def sealed(run: Path, step: int, **more: Any) -> Path:
    """As the ranks write it."""
    folder = run / "checkpoints" / f"step-{step}"
    folder.mkdir(parents=True)
    (folder / "rank-0.safetensors").write_bytes(b"x" * 7)
    manifest = {"updates_applied": step, "format": "dcp", "finite": True, "files": [{"name": "rank-0.safetensors", "size": 7}]} | more
    (folder / "watchdog.json").write_text(json.dumps(manifest))
    digest = hashlib.sha256((folder / "watchdog.json").read_bytes()).hexdigest()
    (folder / "COMMITTED").write_text(json.dumps({"manifest_sha256": digest}))
    return folder


def said(run: Path, record: dict[str, Any] = RECORD, incidents: tuple[Any, ...] = (GIVEN_UP,), *, is_dead: bool = False) -> list[str]:
    return last_words(RunDirectory(run), record, incidents, here="/here", is_dead=is_dead)


def of_saving(lines: list[str]) -> list[str]:
    return [line for line in lines if line.split()[0] in ("saved", "resume")]


def test_a_checkpoint_that_the_ranks_sealed_after_the_launch_had_ended_is_told_with_its_resume_line(tmp_path: Path) -> None:
    (tmp_path / "resumed").touch()
    sealed(tmp_path, 20)
    newest = sealed(tmp_path, 23)
    lines = said(tmp_path)
    assert of_saving(lines) == [
        f"  saved  {newest} (23 updates, verified), by the ranks when nobody watched them any more",
        f"  resume watchdog --job train --resume {newest} torchrun train.py",
    ]
    assert lines[0] == "job train failed: order.stop (exit code 137)".replace("train", tmp_path.name) and lines[-1].startswith("  more")


def test_so_it_is_of_a_launch_that_was_killed_itself_and_not_while_it_may_still_run(tmp_path: Path) -> None:
    running = {name: value for name, value in RECORD.items() if name not in ("exit_code", "end")}
    newest = sealed(tmp_path, 23)
    assert said(tmp_path, running) == []
    saved, resume, call = said(tmp_path, running, is_dead=True)
    assert str(newest) in saved and f"--resume {newest}" in resume and "restore(" in call


def test_ranks_that_had_failed_before_a_launch_was_killed_are_told_by_their_own_words_unless_they_were_judged(tmp_path: Path) -> None:
    running = {name: value for name, value in RECORD.items() if name not in ("exit_code", "end")}
    events = (
        {"order": 1, "attempt": 0, "kind": "rank.failed", "rank": 0, "step": 3, "text": "OSError: of the attempt before"},
        {"order": 2, "attempt": 1, "kind": "rank.failed", "rank": 1, "step": 60, "text": "ValueError: it fell"},
        {"order": 3, "attempt": 1, "kind": "rank.exited", "rank": 1, "exit_code": 1, "text": "rank 1 ended with exit code 1"},
        {"order": 4, "attempt": 1, "kind": "rank.exited", "rank": 0, "signal": 9, "text": "rank 0 was ended by signal 9"},
    )
    (tmp_path / "events.jsonl").write_text("".join(json.dumps({"step": None} | event) + "\n" for event in events))
    first, second, note = said(tmp_path, running, is_dead=True)
    assert (first, second) == ("  said   rank 1, step 60: ValueError: it fell", "  said   rank 0 was ended by signal 9")
    assert "nobody was left to say which of them failed first" in note
    judged = {
        "kind": "rank.exception",
        "severity": "critical",
        "attempt": 1,
        "action": {},
        "cause": "it raised this itself",
        "fix": "mend it",
    }
    assert said(tmp_path, running, incidents=(judged,), is_dead=True) == ["  why    it raised this itself", "  fix    mend it"]
    assert said(tmp_path, running, is_dead=False) == []
    (tmp_path / "events.jsonl").write_text("")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-1.log").touch()
    assert said(tmp_path, running, is_dead=True) == [f"  note   nobody watched its end: what its ranks have printed is in {tmp_path}/logs"]


def test_a_launch_that_was_killed_tells_the_checkpoint_that_its_incident_names_and_one_that_only_lacks_its_name(tmp_path: Path) -> None:
    running = {name: value for name, value in RECORD.items() if name not in ("exit_code", "end")}
    newest = sealed(tmp_path, 14)
    named = {
        "severity": "critical",
        "attempt": 0,
        "action": {"checkpoint": {"path": str(newest), "committed": True}},
        "cause": "c",
        "fix": "f",
    }
    assert any(f"--resume {newest}" in line for line in said(tmp_path, running, incidents=(named,), is_dead=True))
    unnamed = newest.rename(newest.with_name("partial.step-14"))
    lines = said(tmp_path, running, incidents=(), is_dead=True)
    assert any(f"--resume {unnamed}" in line for line in lines) and not any("never to be used" in line for line in lines)
    (unnamed / "COMMITTED").unlink()
    lines = said(tmp_path, running, incidents=(), is_dead=True)
    assert any("never to be used" in line for line in lines) and not any("--resume" in line for line in lines)


def test_one_that_the_record_names_is_told_once(tmp_path: Path) -> None:
    checkpoint = {
        "path": f"/moved/since/{sealed(tmp_path, 23).name}",
        "updates_applied": 23,
        "committed": True,
        "finite": True,
        "format": "dcp",
    }
    stopped = GIVEN_UP | {"action": {"exit_code": 0, "checkpoint": checkpoint}}
    assert not any("nobody watched" in line for line in said(tmp_path, incidents=(stopped,)))


@pytest.mark.parametrize("broken", ["half", "other", "missing", "nan", "garbage"])
def test_one_that_is_not_whole_and_committed_is_not_told(tmp_path: Path, broken: str) -> None:
    folder = sealed(tmp_path, 23, finite=broken != "nan")
    if broken == "half":
        (folder / "rank-0.safetensors").write_bytes(b"x")
    if broken == "other":
        (folder / "watchdog.json").write_text("{}")
    if broken == "missing":
        (folder / "COMMITTED").unlink()
    if broken == "garbage":
        (folder / "COMMITTED").write_text("[")
    assert of_saving(said(tmp_path)) == []


def test_a_training_that_came_to_its_own_end_has_nothing_to_go_on_from(tmp_path: Path) -> None:
    sealed(tmp_path, 23)
    assert of_saving(said(tmp_path, RECORD | {"exit_code": 0})) == []


def test_a_checkpoint_that_nobody_was_left_to_finish_is_told_as_what_it_is_until_it_is_deleted(tmp_path: Path) -> None:
    running = {name: value for name, value in RECORD.items() if name not in ("exit_code", "end")}
    before = said(tmp_path)
    for step in (5, 7):
        (tmp_path / "checkpoints" / f"partial.step-{step}").mkdir(parents=True)
    note = (
        f"  note   {tmp_path}/checkpoints/partial.step-7 and 1 beside it: checkpoints whose writer was killed, not finished and never to be used; nothing "
        "needs or removes them any more: delete them"
    )
    assert said(tmp_path) == [*before, note]
    assert said(tmp_path, running) == [] and said(tmp_path, running, is_dead=True) == [note]
    (tmp_path / "checkpoints" / "partial.step-7").rmdir()
    assert "partial.step-5: a checkpoint whose writer was killed" in said(tmp_path)[-1] and said(tmp_path)[-1].endswith(": delete it")


def test_one_in_a_frameworks_own_folder_is_told_as_well(tmp_path: Path) -> None:
    """Once nobody is at it, for a later launch may write there; the end of the launch itself tells it at once."""
    running = {name: value for name, value in RECORD.items() if name not in ("exit_code", "end")}
    run_dir, left = tmp_path / "job", tmp_path / "out" / "partial.checkpoint-7"
    left.mkdir(parents=True)
    run_dir.mkdir()
    for _ in range(2):
        note_elsewhere(tmp_path / "out" / "checkpoint-7", run_dir / "checkpoints" / "step-7")
    assert unfinished_checkpoints(run_dir / "checkpoints") == (str(left),)
    assert said(run_dir, running, is_dead=True) == []
    os.utime(left, (0, 0))
    (note,) = said(run_dir, running, is_dead=True)
    assert note.startswith(f"  note   {left}: a checkpoint whose writer was killed, not finished and never to be used")
    sealed(run_dir, 7).rename(left.with_name("checkpoint-7"))
    assert not any("--resume" in line for line in said(run_dir, running, is_dead=True))  # of another job
    sealed(run_dir, 7, job="job").rename(left.with_name("checkpoint-8"))
    note_elsewhere(tmp_path / "out" / "checkpoint-8", run_dir / "checkpoints" / "step-8")
    assert any(f"--resume {left.with_name('checkpoint-8')}" in line for line in said(run_dir, running, is_dead=True))
