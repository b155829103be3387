"""A rank fails, or a whole machine goes, in a job on two machines (network namespaces): both end at once, the state is saved, the right one is named."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import BIN, Ended, script, until, watchdog
from machines import Machine, all_ended, can_make_machines, machines

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not can_make_machines(), reason="machines are network namespaces: this needs root and `ip netns`"),
]

FREE_WITHIN_S = 10.0  # on a machine that may be busy; measured: well under a second


@pytest.fixture
def two(tmp_path: Path) -> Iterator[list[Machine]]:
    with machines(tmp_path, 2) as found:
        yield found


def begin(two: list[Machine], folder: Path, *words: object) -> list[subprocess.Popen[str]]:
    """Ranks 0 and 1 on node0, which keeps the record; 2 and 3 on node1."""
    started = []
    for rank, machine in enumerate(two):
        meets = ("--nnodes", "2", "--nproc-per-node", "2", "--node-rank", str(rank), "--master-addr", "node0", "--master-port", "29521")
        launched = [str(BIN / "torchrun"), *meets, *script("failing.py", *words)]
        started.append(machine.start(folder / machine.name, [*watchdog("--job", "job", "--dir", str(folder / "runs")), *launched]))
    return started


def incident_of(folder: Path) -> dict[str, Any]:
    (found,) = [json.loads(path.read_text()) for path in (folder / "runs" / "job").glob("incidents/*/incident.json")]
    return found  # type: ignore[no-any-return]


def times(runs: list[Ended], what: str) -> list[float]:
    return [float(at) for run in runs for at in re.findall(rf"rank \d {what} ([\d.]+)", run.out)]


def steps_done(folder: Path, rank: int) -> int:
    node = folder / f"node{rank // 2}"
    return len((node / f"trail-0-{rank}").read_text().splitlines()) if (node / f"trail-0-{rank}").exists() else 0


@pytest.mark.parametrize("failing", [3, 0])
def test_a_fault_on_one_machine_stops_the_job_on_both(two: list[Machine], tmp_path: Path, failing: int) -> None:
    processes = begin(two, tmp_path, "--fault", "kill", "--rank", failing, "--at", 8)
    runs = all_ended(processes, [tmp_path / machine.name for machine in two])
    incident = incident_of(tmp_path)
    assert (incident["kind"], incident["origin"]["rank"], incident["origin"]["node"]) == ("rank.died", failing, f"node{failing // 2}")
    assert [run.code for run in runs] == [1, 1], runs[0].err + runs[1].err
    assert incident["action"]["checkpoint"]["committed"], incident["cause"]
    free = max(times(runs, "free")) - max(times(runs, "fault"))
    print(f"free on both machines after {free:.2f} s")
    assert free < FREE_WITHIN_S and len(times(runs, "free")) == 3


@pytest.mark.parametrize("vanishes", [False, True], ids=["cut off", "vanished"])
def test_a_machine_that_is_gone_is_named_and_the_other_saves(two: list[Machine], tmp_path: Path, vanishes: bool) -> None:
    processes = begin(two, tmp_path, "--pause", 0.2)
    until(lambda: steps_done(tmp_path, 3) >= 6, "they train")
    two[1].unplug()
    if vanishes:
        for pid in subprocess.run(["ip", "netns", "pids", two[1].namespace], capture_output=True, text=True, check=True).stdout.split():
            subprocess.run(["kill", f"-{signal.SIGKILL}", pid], check=False)
    (host,) = all_ended(processes[:1], [tmp_path / "node0"])
    incident = incident_of(tmp_path)
    assert (host.code, incident["kind"], incident["origin"].get("rank")) == (75, "rank.hang", None), host.err
    assert "ranks 2 and 3" in incident["summary"] and "its node cannot be reached" in incident["summary"]
    assert incident["action"]["checkpoint"]["committed"], incident["cause"]
    two[1].plug_in()
    processes[1].terminate()
    processes[1].wait(120)
