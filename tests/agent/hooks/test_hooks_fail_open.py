"""Whatever of ours fails, the loop goes on as without us, and one line says so."""

from __future__ import annotations

from pathlib import Path

from listening import run_script


def test_a_rank_that_cannot_be_made_is_said_once_and_disturbs_nothing(tmp_path: Path) -> None:
    done = run_script(tmp_path, "no_rank.py", [], "stop")
    assert (done.returncode, done.stdout) == (0, "trained\n")
    assert done.stderr.count("no rank here") == 1
    assert "training goes on" in done.stderr
