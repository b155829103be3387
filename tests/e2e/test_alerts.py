"""A real launch tells the person on call: once, with the sample and the checkpoint, and again when its requeue trains."""

from __future__ import annotations

import shlex
import time
from pathlib import Path

import pytest
from http_receiver import HttpReceiver
from launching import launch, script, torchrun, watchdog

pytestmark = pytest.mark.e2e


def test_a_stopped_job_pages_once_and_the_line_that_resumes_it_resolves_it(tmp_path: Path) -> None:
    with HttpReceiver() as receiver:
        told = {"TORCH_WATCHDOG_ALERT": f"pagerduty://SECRET@127.0.0.1:{receiver.port}"}
        stopped = launch(tmp_path, [*watchdog(), *torchrun(*script("train.py", "--bad", 38))], **told)
        assert stopped.code == 65, stopped.err
        (page,) = receiver.bodies()
        assert (
            page["payload"]["summary"].startswith(f"{stopped.run_dir.name}: bad batch, rank ")
            and ", sample 38" in page["payload"]["summary"]
        )
        done = next(line for line in page["payload"]["custom_details"]["lines"] if line.startswith("done: "))
        assert "2 ranks stopped at step" in done and "checkpoint verified" in done and "exit code 65" in done
        assert not [
            line for line in page["payload"]["custom_details"]["lines"] if "watchdog ack" in line
        ]  # the launch has ended: who would take it?
        look = next(line for line in page["payload"]["custom_details"]["lines"] if line.startswith("look: ")).removeprefix("look: ")
        (tmp_path / "elsewhere").mkdir()
        shown = launch(tmp_path / "elsewhere", [*watchdog(), *shlex.split(look)[1:]])  # the reader may stand anywhere
        assert shown.code == 0 and "dataset sample 38" in shown.out, shown.out + shown.err
        assert "SECRET" not in stopped.out + stopped.err
        assert not [path for path in stopped.run_dir.rglob("*") if path.is_file() and b"SECRET" in path.read_bytes()]

        resume = next(line for line in stopped.err.splitlines() if "[torch-watchdog]   resume " in line).split("  resume ")[1]
        goes_on = next(line for line in page["payload"]["custom_details"]["lines"] if line.startswith("resume: "))
        assert goes_on == f"resume: cd {tmp_path} && {resume}"
        again = launch(tmp_path, [*watchdog(), *shlex.split(resume)[1:]], **told)
        assert again.code == 0, again.err
        assert [body["event_action"] for body in receiver.bodies()] == ["trigger", "resolve"]
        assert receiver.bodies()[1]["dedup_key"] == page["dedup_key"]


def test_a_receiver_that_is_not_there_costs_the_launch_seconds_and_one_line(tmp_path: Path) -> None:
    told = watchdog("--alert", "pagerduty://KEY@127.0.0.1:9")
    began = time.monotonic()
    stopped = launch(tmp_path, [*told, *torchrun(*script("train.py", "--bad", 38))])
    assert stopped.code == 65 and time.monotonic() - began < 120
    assert stopped.err.count("alert receiver 1-pagerduty did not answer") == 1
