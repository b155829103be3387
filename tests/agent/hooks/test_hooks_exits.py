"""What is trained is there for a rescue while an exit of a bad status ends the script, and goes with the script's frames otherwise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from listening import run_script

pytestmark = pytest.mark.e2e  # scripts with torch in processes of their own


@pytest.mark.parametrize(("how", "code", "held"), [("bad", 7, [1, 1]), ("good", 0, [0, 0]), ("caught", 0, [0, 0])])
def test_the_state_outlives_the_frames_of_a_bad_exit_alone(tmp_path: Path, how: str, code: int, held: list[int]) -> None:
    done = run_script(tmp_path, "exits_inside.py", [how], "stop")
    assert done.returncode == code, done.stderr
    *found, why = json.loads(done.stdout)
    assert found == held
    assert (why == "") == bool(held[0])
