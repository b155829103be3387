"""--resume that nobody takes is said after the first step, once, by one rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from torch_watchdog_agent.asked import TAKEN, AskedResume


@pytest.mark.parametrize(
    ("path", "speaks", "said"), [("/c", True, 1), ("/c", False, 0), (None, True, 0)], ids=["asked for", "another rank", "not asked for"]
)
def test_it_is_said_once_where_it_was_asked_for(tmp_path: Path, path: str | None, speaks: bool, said: int) -> None:
    lines: list[str] = []
    resume = AskedResume(path, tmp_path, speaks=speaks, say=lines.append)
    resume.missed()
    resume.missed()
    assert len(lines) == said
    assert not (tmp_path / TAKEN).exists()


def test_nothing_is_said_once_it_was_taken(tmp_path: Path) -> None:
    lines: list[str] = []
    resume = AskedResume("/c", tmp_path, speaks=True, say=lines.append)
    resume.taken()
    resume.missed()
    assert lines == [] and (tmp_path / TAKEN).exists()


def test_a_run_directory_that_is_gone_harms_nothing(tmp_path: Path) -> None:
    AskedResume("/c", tmp_path / "gone", speaks=True, say=lambda _: None).taken()
