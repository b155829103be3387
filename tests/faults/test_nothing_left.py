"""The count of what launches leave: it sees a process, a file in /dev/shm and one in /tmp, and it sees no other's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from namespaces import needs_processes

sys.path.insert(0, str(Path(__file__).parent))

import nothing_left

LEAVES = """
import json, subprocess, sys
sys.path.insert(0, sys.argv[1])
import nothing_left
nothing_left.ENDS_WITHIN_S = 0.5
print(json.dumps(nothing_left.left()))
subprocess.run(["sh", "-c", "sleep 30 & exit 0"])
open("/dev/shm/forgotten", "w").close(), open("/tmp/forgotten", "w").close()
print(json.dumps(nothing_left.left()))
"""


@needs_processes
def test_what_is_left_is_seen_and_nothing_else() -> None:
    command = nothing_left.entering([sys.executable, "-c", LEAVES, str(Path(__file__).parent)])
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    before, after = map(json.loads, done.stdout.splitlines())
    assert before == {"processes": [], "shm": [], "tmp": []}
    assert after == {"processes": ["sleep 30 "], "shm": ["forgotten"], "tmp": ["forgotten"]}


def test_the_table_adds_up_rounds() -> None:
    clean = {"launches": {"ends well": 2, "a bad batch": 1}, "wrong": [], "processes": [], "shm": [], "tmp": []}
    shared = ["torch-watchdog-0"]
    of_torch = ["torchelastic_29lfzhdh", "torchelastic__61v8qob"]
    told = nothing_left.table(
        [clean | {"shm": shared}, clean | {"shm": shared, "tmp": [*shared, *of_torch], "wrong": ["y"], "processes": ["p"]}]
    )
    assert "| ends well | 4 |" in told
    assert "6 launches, 2 looks: 1 processes left, 1 launches with another exit code than expected." in told
    assert told.endswith("in /dev/shm: torch-watchdog-0; in /tmp: torch-watchdog-0, 2 torchelastic_*.")
