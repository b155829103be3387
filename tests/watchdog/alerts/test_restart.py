"""`watchdog serve` is killed at the worst moment: no incident is lost, none is told twice under two keys, and what is open stays open."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from fleet_harness import SimulatedNode, until
from http_receiver import HttpReceiver

from torch_watchdog_proto.envelopes import TOKEN_KEY

TOKEN = "t" * 43
JOBS = 6


class Serve:
    """A real `watchdog serve` that can be killed and started again over the same files."""

    def __init__(self, root: Path, pager: HttpReceiver) -> None:
        self.root, self.pager = root, pager
        (root / "token").write_text(TOKEN)
        self.process = self.start()

    def start(self) -> subprocess.Popen[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_WATCHDOG")}
        more = {
            "TORCH_WATCHDOG_TOKEN_FILE": str(self.root / "token"),
            "TORCH_WATCHDOG_ALERT": f"pagerduty://KEY@127.0.0.1:{self.pager.port}",
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "torch_watchdog.cli", "serve", "--port", "0", "--dir", str(self.root / "runs")],
            env=kept | more, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stderr is not None
        said = next(line for line in process.stderr if "daemon at " in line)  # on a busy machine another word may come first
        self.address = said.split("daemon at ")[1].split(",")[0]
        return process

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        if self.process.stderr is not None:
            self.process.stderr.close()

    def node(self, job: str, **more: Any) -> SimulatedNode:
        return SimulatedNode(self.address, job, metadata=((TOKEN_KEY, TOKEN),), **more)


def test_a_daemon_that_is_killed_before_it_could_tell_tells_after_it_is_back(root: Path) -> None:
    with HttpReceiver() as pager:
        pager.status = 503  # the pager is away, too
        serve = Serve(root, pager)
        nodes = [serve.node(f"job-{number}") for number in range(JOBS)]
        for node in nodes:
            node.rank(0, 1)
            node.steps(0, 0, 1)
            node.exited(0, signal=9)
            node.goodbye(1)
        until(lambda: len(list((root / "runs").glob("*/incidents/1/incident.json"))) == JOBS)
        serve.kill()
        for node in nodes:
            node.close()
        pager.status = 202
        serve.process = serve.start()
        again = [serve.node(f"job-{number}") for number in range(JOBS)]
        assert [node.hello.next_seq for node in again] == [3] * JOBS  # what was acked is not asked for again
        until(lambda: len(pager.bodies(event_action="trigger")) >= JOBS)
        told = Counter(body["dedup_key"] for body in pager.bodies(event_action="trigger"))
        assert len(told) == JOBS and set(told.values()) == {1}
        for node in again:
            node.close()
        serve.kill()


def test_what_was_told_before_the_kill_is_not_told_again_and_is_resolved_by_the_next_daemon(root: Path) -> None:
    with HttpReceiver() as pager:
        serve = Serve(root, pager)
        node = serve.node("job")
        node.rank(0, 1)
        node.steps(0, 0, 1)
        node.exited(0, signal=9)
        node.goodbye(1)
        until(lambda: pager.got)
        until(lambda: '"took": 0' not in (root / "runs" / "job" / "alerts.json").read_text())
        serve.kill()
        node.close()
        serve.process = serve.start()
        requeued = serve.node("job.2", session="t")
        requeued.rank(0, 1)
        requeued.steps(0, 0)
        until(lambda: pager.bodies(event_action="resolve"))
        assert [body["event_action"] for body in pager.bodies()] == ["trigger", "resolve"]
        requeued.close()
        serve.kill()
