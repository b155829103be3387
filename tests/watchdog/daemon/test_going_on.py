"""The lines of an alert that go on: of the launch's own record, where the daemon sees it."""

from __future__ import annotations

import json
from pathlib import Path

from torch_watchdog.daemon.going_on import going_on_lines
from torch_watchdog.store.run_directory import RunDirectory

CHECKPOINT = {"path": "/home/u/runs/j/checkpoints/step-5", "updates_applied": 5, "format": "dcp", "committed": True, "finite": True}


def test_they_are_the_launchs_own_from_anywhere_and_nothing_without_a_record(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    assert tuple(going_on_lines(directory, CHECKPOINT)) == ()
    record = {"command": ["torchrun", "train.py", "--token", "***"], "options": ["--job", "j"], "folder": "/home/u"}
    directory.job_file.write_text(json.dumps(record))
    resume, call = going_on_lines(directory, CHECKPOINT)
    assert resume.split(maxsplit=1) == [
        "resume",
        "cd /home/u && watchdog --job j --resume runs/j/checkpoints/step-5 torchrun train.py --token '***'",
    ]
    assert "restore(" in call
    (tmp_path / "resumed").touch()
    directory.quarantine_file.write_text("")
    (resume,) = going_on_lines(directory, CHECKPOINT)
    assert f" --quarantine {directory.quarantine_file} " in resume
    directory.job_file.write_text("no record")
    assert tuple(going_on_lines(directory, CHECKPOINT)) == ()
