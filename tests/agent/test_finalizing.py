"""What outlives our modules while the interpreter takes itself apart makes nothing of ours speak up."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path

AGENT = Path(__file__).parents[2] / "agent" / "torch_watchdog_agent"
OUTLIVING = """
import os
import torch
from torch_watchdog_agent.checkpoint import buffers, subjects
from torch_watchdog_agent.hooks import left, looked_at, tracks

model = torch.nn.BatchNorm1d(2)
kept = buffers.Buffers([model], max_bytes=1000, say=print)
seen = subjects._Seen(lambda: subjects.bare_model(None))
seen.add(model)
os.outliving = [kept, seen, buffers, left, looked_at, subjects, tracks, looked_at.Pass(), model]
del model  # the list goes from its end, once modules that are newer than `os` are emptied
"""


def test_what_outlives_our_modules_goes_in_silence() -> None:
    ended = subprocess.run([sys.executable, "-c", OUTLIVING], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_whoever_is_called_back_says_so() -> None:
    """rescue/ending.py's goes with its exception, long before."""
    for path in AGENT.rglob("*.py"):
        lines = path.read_text().splitlines()
        for before, line in itertools.pairwise(lines):
            assert "def __del__" not in line or "@unless_finalizing" in before or path.stem == "ending", f"{path}: {line}"
            assert not re.search(r"weakref\.ref\([^()]*, (?!unless_finalizing)", line), f"{path}: {line}"
