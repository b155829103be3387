"""Whatever of ours fails, the loop goes on as without us, and one line says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from listening import run_script

pytestmark = pytest.mark.e2e  # scripts with torch in processes of their own


def test_a_rank_that_cannot_be_made_is_said_once_and_disturbs_nothing(tmp_path: Path) -> None:
    done = run_script(tmp_path, "no_rank.py", [], "stop")
    assert (done.returncode, done.stdout) == (0, "trained\n")
    assert done.stderr.count("no rank here") == 1
    assert "training goes on" in done.stderr


def test_gradients_that_hold_no_numbers_turn_off_only_the_look_at_them(tmp_path: Path) -> None:
    plain = run_script(tmp_path, "odd_gradients.py", [], "observe")
    watched = run_script(tmp_path, "odd_gradients.py", [], "observe", watch_gradients=True)
    assert plain.stdout.startswith("trained ") and (watched.returncode, watched.stdout) == (0, plain.stdout), watched.stderr
    assert [line for line in watched.stderr.splitlines() if "turned itself off" in line and "gradients hook" not in line] == []
    assert watched.stderr.count("the gradients hook turned itself off") == 1


def test_a_scaler_that_is_turned_off_has_no_scale_and_is_no_fault(tmp_path: Path) -> None:
    done = run_script(tmp_path, "scaler_off.py", [], "stop")
    assert done.returncode == 0
    assert done.stdout.startswith("trained ")
    assert "turned itself off" not in done.stderr


CAUGHT = """
import sys
from torch_watchdog_agent.hooks import active
active._note_exception = lambda kind, error: print("noted:", error)
sys.excepthook = active._noting(sys.excepthook)
try:
    raise ValueError("caught")
except ValueError:
    sys.excepthook(*sys.exc_info())
raise ValueError("uncaught")
"""


def test_an_error_that_the_script_only_has_printed_ends_no_rank() -> None:
    done = subprocess.run([sys.executable, "-c", CAUGHT], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines() == ["noted: uncaught"]
    assert done.stderr.count("ValueError: ") == 2
