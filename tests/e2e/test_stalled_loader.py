"""A rank whose data become slow in the middle: who waits is told, and what the worker of its loader is doing meanwhile."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from launching import launch, watchdog

sys.path.append(str(Path(__file__).resolve().parents[1] / "faults"))
from catalogue import SETTINGS
from run import HERE, environment

pytestmark = pytest.mark.e2e


@pytest.mark.skipif(shutil.which("py-spy") is None, reason="py-spy is not installed")
def test_a_rank_that_waits_for_its_data_is_told_with_what_the_worker_of_its_loader_does(tmp_path: Path) -> None:
    (tmp_path / "watchdog.toml").write_text(SETTINGS)
    plan = {"steps": 160, "workers": 1, "faults": [("slow_loader", 1, 90, 150)]}
    command = ["bash", str(HERE / "two_ranks.sh"), str(HERE / "train.py"), json.dumps(plan)]
    ended = launch(tmp_path, [*watchdog("--job", "stalled"), *command], **environment())
    (incident,) = ended.incidents
    assert (ended.code, incident["kind"], incident["origin"]["rank"]) == (0, "loader.stalled", 1), ended.err
    assert "when they were looked at: rank, pid " in incident["cause"], incident["cause"]
    assert "worker, pid " in incident["cause"] and "Batches.__getitem__ (train.py:" in incident["cause"], incident["cause"]
    stacks = (ended.run_dir / "incidents" / incident["id"] / "stacks.txt").read_text()
    assert "_worker_loop (torch/utils/data/_utils/worker.py:" in stacks
