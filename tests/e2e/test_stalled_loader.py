"""A rank whose data become slow in the middle: who waits is told, and what the worker of its loader is doing meanwhile."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from launching import launch, watchdog

sys.path.append(str(Path(__file__).resolve().parents[1] / "faults"))
from catalogue import SETTINGS
from run import HERE, environment

pytestmark = pytest.mark.e2e


def test_a_rank_that_waits_for_its_data_is_told_with_what_the_worker_of_its_loader_does(tmp_path: Path) -> None:
    """In which function is one moment's chance, and py-spy's: tests/agent/node/test_loaders_seen.py has that."""
    (tmp_path / "watchdog.toml").write_text(SETTINGS)
    plan = {"steps": 160, "workers": 1, "faults": [("slow_loader", 1, 90, 150)]}
    command = ["bash", str(HERE / "two_ranks.sh"), str(HERE / "train.py"), json.dumps(plan)]
    ended = launch(tmp_path, [*watchdog("--job", "stalled"), *command], **environment())
    (incident,) = [one for one in ended.incidents if one["kind"] == "loader.stalled"]
    assert (ended.code, incident["origin"]["rank"]) == (0, 1), ended.err
    found = re.search(r"when they were looked at: (rank, pid \d+: [^;]+); (worker, pid \d+: [^;]+)$", incident["cause"])
    assert found is not None, incident["cause"]
    stacks = (ended.run_dir / "incidents" / incident["id"] / "stacks.txt").read_text().splitlines()
    assert {found[1], found[2]} <= set(stacks), stacks
