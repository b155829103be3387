"""A folder of run directories as commands meet it, and `watchdog` in it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_watchdog.store.job_files import JobFiles
from torch_watchdog.store.run_directory import RunDirectory, write_json
from torch_watchdog_proto.messages import NodeReport, StepBlock, StepTable

TIMEOUT_S = 60
INCIDENT: dict[str, Any] = {
    "id": "1",
    "severity": "critical",
    "kind": "batch.index_out_of_range",
    "time": "2026-01-31T00:00:05Z",
    "attempt": 0,
    "origin": {"rank": 1},
    "step": 3,
    "summary": "rank 1 fetched a batch whose input_ids[2,7] is 70\x1b[31m",
}


@dataclass(frozen=True)
class Runs:
    """Commands in that folder, as processes of their own."""

    folder: Path

    def __call__(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_WATCHDOG")} | variables
        return subprocess.run(
            [sys.executable, "-m", "torch_watchdog.cli", *words],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )

    def add_job(self, name: str, *, started: str = "2026-01-31T00:00:00.000Z", exit_code: int | None = 65) -> RunDirectory:
        root = self.folder / "watchdog_runs" / name
        record = {
            "schema_version": 1,
            "job": name,
            "policy": "stop",
            "daemon": "unix:/nowhere/0/daemon.sock",
            "session": "0",
            "host": "node-a",
            "started": started,
            "ended": None if exit_code is None else "2026-01-31T00:00:12.000Z",
            "exit_code": exit_code,
            "exit_reason": "stopped by the watchdog",
            "world_size": 2,
        }
        write_json(RunDirectory(root).job_file, record)
        return RunDirectory(root)


def add_steps(directory: RunDirectory) -> None:
    files = JobFiles(directory.root)
    for rank in (0, 1):
        block = StepBlock(
            rank=rank,
            attempt=0,
            pid=1,
            first_record=1,
            micro_step=(0,) * 4,
            micro_of_step=(0, 1, 2, 3),
            micro_time_ns=(1, 2, 3, 4),
            loader_ns=(0,) * 4,
            loss=(2.0, 1.5, 1.25, 1.0),
            loss_known=(True,) * 4,
            evaluation=(False,) * 4,
            step=(0, 1, 2, 3),
            step_time_ns=(10**9, 2 * 10**9, 3 * 10**9, 4 * 10**9),
            step_ns=(10**7,) * 4,
            vetoed=(False, False, False, True),
            allocated_bytes=(0,) * 4,
            reserved_bytes=(0,) * 4,
            peak_bytes=(0,) * 4,
            updates_applied=(1, 2, 3, 3),
        )
        files.append_report("node-a", "0", NodeReport(seq=rank + 1, time_ns=5, steps=StepTable.of((block,))))
    files.write_incident(INCIDENT, None)
    files.close()
