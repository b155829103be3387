"""The log of a central daemon: a line for what changed, none for what goes on as before, and none at all in a launch."""

from __future__ import annotations

import errno
import math
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fleet_harness import BAD_TOKEN, Fleet, until
from http_receiver import HttpReceiver

from torch_watchdog.daemon.client import DaemonClient
from torch_watchdog.daemon.config import AlertsConfig, DaemonConfig
from torch_watchdog.daemon.embedded import EmbeddedDaemon
from torch_watchdog_proto import __version__
from torch_watchdog_proto import messages as m


@pytest.fixture
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tw") as path:
        yield Path(path)


def central(root: Path, receiver: HttpReceiver) -> Fleet:
    alerts = AlertsConfig.to_all((f"pagerduty://KEY@127.0.0.1:{receiver.port}",), restores_all=True)
    return Fleet(root, audit_file=root / "audit.jsonl", alerts=alerts)


def run_that_dies(fleet: Fleet, job: str = "job", **more: Any) -> None:
    node = fleet.node(job, **more)
    node.rank(0, 1)
    for step in range(5):
        node.steps(0, step)
    node.exited(0, signal=9)
    node.goodbye(1)


def test_a_job_from_its_begin_to_its_end_with_whom_it_was_told_to_is_one_line_each(root: Path) -> None:
    with HttpReceiver() as receiver, central(root, receiver) as fleet:
        run_that_dies(fleet)
        until(lambda: any("was told" in line for line in fleet.said))
        again = fleet.node("job.2", session="t")
        again.rank(0, 1)
        again.steps(0, 0)
        until(lambda: any("resolve" in line for line in fleet.said))
        again.goodbye(0)
        until(lambda: any("job job.2: ended" in line for line in fleet.said))
    begun, died, over, ended, told, *rest = fleet.said
    assert begun == "job job: begins, policy stop, on node-0"
    assert died.startswith("job job: incident 1: rank.died, critical, ")
    assert over.startswith("job job: over, incident 1: rank.died, critical, ")
    assert ended == "job job: ended, exit code 1, 1 incident"
    assert told == "alert job/1: 1-pagerduty was told, trigger"
    assert rest == [
        "job job.2: begins, policy stop, on node-0",
        "alert job/1: 1-pagerduty was told, resolve",
        "job job.2: ended, exit code 0, 0 incidents",
    ]


def test_a_receiver_that_is_away_is_one_line_for_each_alert_until_it_is_told(root: Path) -> None:
    with HttpReceiver() as receiver, central(root, receiver) as fleet:
        receiver.status = 500
        run_that_dies(fleet)
        run_that_dies(fleet, "other", session="o")
        lines = until(lambda: len(found := [line for line in fleet.said if "was not told" in line]) == 2 and found)
        assert sorted(lines) == [f"alert {job}/1: 1-pagerduty was not told, trigger: it is tried again" for job in ("job", "other")]
        receiver.status = 202
        until(lambda: sum("was told" in line for line in fleet.said) == 2)
        assert sum("was not told" in line for line in fleet.said) == 2


def test_a_job_that_a_daemon_finds_again_goes_on_and_its_incident_is_not_said_anew(root: Path) -> None:
    with HttpReceiver() as receiver:
        with central(root, receiver) as first:
            node = first.node()
            node.rank(0, 1)
            node.steps(0, 0)
            node.say(m.Noticed(rank=0, step=3, micro_step=0, violation=BAD_TOKEN))
            until(lambda: any("incident 1: batch.index_out_of_range" in line for line in first.said))
        with central(root, receiver) as second:
            second.node()
            until(lambda: second.said)
        assert second.said[0] == "job job: goes on here, with 1 incident so far, policy stop, on node-0"
        assert not any("incident 1: batch" in line for line in second.said)


def test_a_job_that_is_found_again_began_when_it_began(root: Path) -> None:
    with Fleet(root) as fleet:
        fleet.node("job").steps(0, 0)
        (first,) = fleet.get("api/v1/jobs").json()["jobs"]
    with Fleet(root) as fleet:
        fleet.node("job")
        (second,) = fleet.get("api/v1/jobs").json()["jobs"]
    assert second["started_s"] == pytest.approx(first["started_s"], abs=0.01)


def test_words_of_a_job_bring_no_control_characters_into_the_log(root: Path) -> None:
    with HttpReceiver() as receiver, central(root, receiver) as fleet:
        node = fleet.node("job", node="n\x1b[2J\nforged line")
        node.rank(0, 1)
        until(lambda: fleet.said)
        assert fleet.said[0] == "job job: begins, policy stop, on n [2J forged line"


def test_the_terminal_of_a_launch_hears_none_of_it(root: Path) -> None:
    with Fleet(root) as fleet:
        run_that_dies(fleet)
        until(lambda: fleet.get("api/v1/jobs/job").json()["state"] == "ended")
    assert fleet.said == []


def test_a_loss_that_became_nan_and_is_only_observed_has_one_line_at_the_terminal_of_its_launch(root: Path) -> None:
    with Fleet(root) as fleet:
        node = fleet.node(policy="observe")
        node.rank(0, 1)
        for step, loss in enumerate((1.0, math.nan, math.nan)):
            node.steps(0, step, loss=loss)
        until(lambda: fleet.said)
        node.goodbye(0)
        until(lambda: fleet.get("api/v1/jobs/job").json()["state"] == "ended")
    assert fleet.said == [
        "rank 0, step 1: the loss is nan: policy observe, so the training goes on unchanged; the next ones are recorded, not said"
    ]


class FullDisk:
    def write(self, _: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_log_that_cannot_be_written_costs_its_own_lines_only(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk, a reader of a pipe that is gone: what failed came up in the call of a node, and the effects behind it were not done."""
    known = DaemonConfig(runs_dir=root / "runs", listen=(f"unix:{root / 'socket'}",), audit_file=root / "audit.jsonl")
    hello = m.NodeHello(job="job", node="node-0", version=__version__, policy="stop", command=(), run_dir=str(root), session="s")
    monkeypatch.setattr(sys, "stderr", FullDisk())
    with EmbeddedDaemon(known) as daemon, DaemonClient(daemon.addresses[0]) as client:
        client.goodbye(hello, m.NodeGoodbye(exit_code=0))
        assert client.job("job").state == "ended"
