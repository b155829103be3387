"""A checkpoint that the training should begin from and does not is said after the first step, once, by one rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from torch_watchdog_agent.asked import TAKEN, AskedResume


@pytest.mark.parametrize(
    ("path", "speaks", "said"), [("/c", True, 1), ("/c", False, 0), (None, True, 0)], ids=["asked for", "another rank", "not asked for"]
)
def test_it_is_said_once_where_it_was_asked_for(tmp_path: Path, path: str | None, speaks: bool, said: int) -> None:
    lines: list[str] = []
    resume = AskedResume(path, tmp_path, attempt=0, speaks=speaks, say=lines.append)
    resume.missed()
    resume.missed()
    assert len(lines) == said
    assert not (tmp_path / TAKEN).exists()


def test_nothing_is_said_once_it_was_taken(tmp_path: Path) -> None:
    lines: list[str] = []
    resume = AskedResume("/c", tmp_path, attempt=1, speaks=True, say=lines.append)
    resume.taken()
    resume.missed()
    assert lines == [] and (tmp_path / TAKEN).exists()


def test_a_later_attempt_that_takes_nothing_of_what_the_run_has_saved_says_so(tmp_path: Path) -> None:
    saved = tmp_path / "checkpoints" / "step-7"
    saved.mkdir(parents=True)
    (saved / "watchdog.json").write_text(json.dumps({"updates_applied": 7}))
    for committed, attempt, said in ((False, 1, 0), (True, 0, 0), (True, 1, 1)):
        (saved / "COMMITTED").touch() if committed else None
        lines: list[str] = []
        AskedResume(None, tmp_path, attempt=attempt, speaks=True, say=lines.append).missed()
        assert [f"attempt 1 has not begun from {saved}" in line for line in lines] == [True] * said


def test_a_run_directory_that_is_gone_harms_nothing(tmp_path: Path) -> None:
    AskedResume("/c", tmp_path / "gone", attempt=1, speaks=True, say=lambda _: None).taken()
