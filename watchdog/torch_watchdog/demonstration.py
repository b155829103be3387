"""The demo's story in two launches: one that meets the bad sample and stops, one that goes on from its checkpoint to the end.

Owns what must happen, and checks it: the demo succeeds only when it did. It must not know how a launch works: it types the same lines as a
person would.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_watchdog.launch.say import say
from torch_watchdog.store.read import read_incidents, read_job
from torch_watchdog_proto.messages import EXIT_BAD_DATA

__all__ = ["Expectation", "judge", "run_demo"]

SCRIPT = Path(__file__).parent / "demo" / "train.py"
BAD_SAMPLE, BAD_TOKEN, ROWS = 301, 733, 512  # as in the script
LAUNCH_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """One thing that must have happened."""

    text: str
    met: bool


def run_demo(*, keep: bool) -> bool:
    """True where everything happened as it must."""
    with _folder(keep) as folder:
        first = _launch(folder, "demo", ())
        incidents = read_incidents(folder / "demo")
        expectations = judge(first, incidents)
        checkpoint = _checkpoint(incidents)
        if checkpoint is not None:
            say("the same training again, from that checkpoint:")
            second = _launch(folder, "demo-resumed", ("--resume", str(folder / checkpoint)))
            expectations += [_resumed(second, folder)]
        for expectation in expectations:
            say(f"{'ok  ' if expectation.met else 'FAIL'} {expectation.text}")
        if keep:
            say(f"kept: watchdog timeline demo --dir {folder}")
    return all(expectation.met for expectation in expectations)


@contextlib.contextmanager
def _folder(keep: bool) -> Iterator[Path]:
    if keep:
        yield Path(tempfile.mkdtemp(prefix="torch-watchdog-demo-"))
        return
    with tempfile.TemporaryDirectory(prefix="torch-watchdog-demo-") as path:
        yield Path(path)


def _launch(folder: Path, job: str, options: Sequence[str]) -> int:
    """The exit code of `watchdog torchrun --nproc-per-node 2 train.py`, with the Python that runs this."""
    ours = [sys.executable, "-m", "torch_watchdog.cli", "--dir", str(folder), "--job", job, *options]
    theirs = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    say(f"$ watchdog {' '.join(('--job', job, *options))} torchrun --nproc-per-node 2 train.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*ours, *theirs], env=environment, timeout=LAUNCH_TIMEOUT_S, check=False).returncode


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


def _resumed(exit_code: int, folder: Path) -> Expectation:
    job = read_job(folder / "demo-resumed")
    met = exit_code == 0 and job.get("exit_reason") == "finished" and not read_incidents(folder / "demo-resumed")
    return Expectation(text="the resumed run went on past that batch and finished", met=met)
