"""The folder that commands are tried in."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_runs import Runs, add_steps

from torch_watchdog.store.run_directory import RunDirectory


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


@pytest.fixture
def ended_job(runs: Runs) -> RunDirectory:
    directory = runs.add_job("train-1")
    add_steps(directory)
    return directory
