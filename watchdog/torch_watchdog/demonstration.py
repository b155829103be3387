"""The demo's story in two launches: one that meets the bad sample and stops, one that goes on from its checkpoint to the end.

Owns what must happen, and checks it: the demo succeeds only when it did. It must not know how a launch works: it types the same lines as a
person would.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_watchdog.launch.say import say
from torch_watchdog.phrases import as_typed
from torch_watchdog.store.read import read_incidents, read_job
from torch_watchdog_proto.messages import EXIT_BAD_DATA

__all__ = ["Expectation", "judge", "run_demo"]

SCRIPT = Path(__file__).parent / "demo" / "train.py"
BAD_SAMPLE, BAD_TOKEN, ROWS = 304, 733, 512  # as in the script
LAUNCH = ("torchrun", "--standalone", "--nproc-per-node", "2", SCRIPT.name)
LAUNCH_TIMEOUT_S = 120.0
RUNS = "watchdog_runs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """One thing that must have happened."""

    text: str
    met: bool


def run_demo(*, keep: bool) -> bool:
    """True where everything happened as it must."""
    if importlib.util.find_spec("torch") is None:
        say(f"the demo trains, and {sys.executable} has no torch: pip install torch (its CPU build will do)")
        return False
    with _folder(keep) as folder:
        shutil.copy(SCRIPT, folder)
        expectations = _play(folder)
        for expectation in expectations:
            say(f"{'ok  ' if expectation.met else 'FAIL'} {expectation.text}")
        kept = f"kept: {folder} (try `watchdog timeline demo` in there)"
        say(
            kept
            if keep
            else "the files of both runs are removed now, so that the lines above cannot be tried: `watchdog demo --keep` leaves them"
        )
    return all(expectation.met for expectation in expectations)


def _play(folder: Path) -> list[Expectation]:
    first = _type(folder, "watchdog", "--job", "demo", *LAUNCH)
    incidents = read_incidents(folder / RUNS / "demo")
    expectations = judge(first, incidents)
    checkpoint = _checkpoint(incidents)
    if checkpoint is not None:
        _type(folder, "watchdog", "timeline", "demo")
        left_out = str(folder / RUNS / "demo" / "quarantine.jsonl")
        second = _type(folder, "watchdog", "--job", "demo-resumed", "--quarantine", left_out, "--resume", checkpoint, *LAUNCH)
        expectations.append(_resumed(second, folder / RUNS / "demo-resumed"))
    return expectations


@contextlib.contextmanager
def _folder(keep: bool) -> Iterator[Path]:
    if keep:
        yield Path(tempfile.mkdtemp(prefix="torch-watchdog-demo-")).resolve()
        return
    with tempfile.TemporaryDirectory(prefix="torch-watchdog-demo-") as path:
        yield Path(path).resolve()


def _type(folder: Path, *words: str) -> int:
    """Runs the line as a person would type it in that folder, with the programs that belong to this Python. Its exit code."""
    shown = [as_typed(word, str(folder)) for word in words]
    say(f"$ {shlex.join(shown)}")
    programs = Path(sys.executable).parent
    command = [sys.executable, "-m", "torch_watchdog.cli", *shown[1:]]
    environment = {**os.environ, "PATH": f"{programs}:{os.environ.get('PATH', '')}", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=environment, timeout=LAUNCH_TIMEOUT_S, check=False).returncode


def judge(exit_code: int, incidents: Sequence[Mapping[str, Any]]) -> list[Expectation]:
    """What the first launch must have come to."""
    found = next((incident for incident in incidents if incident.get("kind") == "batch.index_out_of_range"), {})
    batch, bound, action = (found.get(name) or {} for name in ("batch", "bound", "action"))
    sample = (batch.get("sample") or {}).get("dataset_index")
    checkpoint = action.get("checkpoint") or {}
    return [
        Expectation(text=f"the job stopped with exit code {EXIT_BAD_DATA}", met=exit_code == EXIT_BAD_DATA),
        Expectation(text="the op never ran on the bad batch", met=action.get("prevented") is True),
        Expectation(text=f"dataset sample {BAD_SAMPLE} was named", met=sample == BAD_SAMPLE),
        Expectation(
            text=f"token {BAD_TOKEN} was found past the {ROWS} rows of the table",
            met=(batch.get("value"), bound.get("high")) == (BAD_TOKEN, ROWS - 1),
        ),
        Expectation(text="both ranks stopped after the same step", met=sorted(action.get("ranks_stopped") or ()) == [0, 1]),
        Expectation(text="the checkpoint is committed and finite", met=bool(checkpoint.get("committed") and checkpoint.get("finite"))),
    ]


def _checkpoint(incidents: Sequence[Mapping[str, Any]]) -> str | None:
    for incident in incidents:
        checkpoint = (incident.get("action") or {}).get("checkpoint") or {}
        if checkpoint.get("committed"):
            return str(checkpoint["path"])
    return None


def _resumed(exit_code: int, run_dir: Path) -> Expectation:
    met = exit_code == 0 and read_job(run_dir).get("exit_reason") == "finished" and not read_incidents(run_dir)
    return Expectation(text="the resumed run went on past that batch and finished", met=met)
