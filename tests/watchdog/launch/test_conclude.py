"""The end of a launch: the exit code comes out, whatever fails while it is told."""

from __future__ import annotations

import errno
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torch_watchdog.launch.run import conclude
from torch_watchdog_agent.node.config import JobOutcome


def stale(*_: object, **__: object) -> Any:
    raise OSError(errno.ESTALE, "Stale file handle")


class Stopped:
    """A launch whose daemon has decided 65, and is gone by now."""

    def __init__(self, *, exit_code: int | None = 65, heard: int = 2, **broken: Any) -> None:
        self.exit_code, self.incidents = exit_code, broken.pop("incidents", ())
        self.seat = SimpleNamespace(config=SimpleNamespace(exit_codes={}, replay=None))
        self.job, self.joined, self.plan = "j", None, SimpleNamespace(command=("torchrun", "train.py"))
        self.directory = SimpleNamespace(root=Path("/r"), quarantine_file=SimpleNamespace(exists=broken.pop("quarantine", bool)))
        self.newest_attempt = lambda: 0
        self.ranks_heard, self.resumed, self.unused_resume, self.write_end = (
            lambda: heard,
            lambda: None,
            lambda: None,
            lambda *_, **__: None,
        )
        self.restores, self.ranks_to_go_on, self.has_lost_its_record = (lambda: True), tuple, (lambda: False)
        vars(self).update(broken)

    def finish(self, *_: object) -> JobOutcome:
        return JobOutcome(exit_code=self.exit_code, incidents=self.incidents, lines=())

    def last_status(self) -> None:
        return None


@pytest.mark.parametrize("broken", ["quarantine", "ranks_heard", "unused_resume", "write_end"])
def test_a_file_server_that_is_gone_does_not_make_a_stopped_job_look_finished(broken: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert conclude(Stopped(**{broken: stale}), 0, (), came=()) == 65  # type: ignore[arg-type]
    assert "the end of this launch could not be told" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("came", "status", "words"),
    [
        ((signal.SIGTERM,), 1 << 8, "SIGTERM ended it before any rank had begun to train (exit code 1)"),
        ((), signal.SIGINT, "SIGINT ended it before any rank had begun to train (exit code 130)"),  # as Ctrl-C, which we pass on to nobody
        ((signal.SIGUSR1,), 1 << 8, "no rank reported, so nothing was watched (exit code 1)"),
        ((), 1 << 8, "no rank reported, so nothing was watched (exit code 1)"),
        ((), signal.SIGSEGV, "no rank reported, so nothing was watched (exit code 139)"),
    ],
)
def test_a_signal_before_the_ranks_report_is_told_as_the_end(
    came: tuple[signal.Signals, ...], status: int, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    launch = Stopped(exit_code=None, heard=0, has_lost_its_record=bool)
    assert conclude(launch, status, (), came=came) is None  # type: ignore[arg-type]
    assert words in capfd.readouterr().err


@pytest.mark.parametrize(("kind", "words"), [("order.stop", "stopped on request, and saved nothing"), ("rank.died", "failed: rank.died")])
def test_a_stop_that_has_saved_nothing_is_told_as_one_and_not_as_a_failure(
    kind: str, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    found = {"kind": kind, "severity": "critical", "summary": "s", "action": {"exit_code": 1, "checkpoint": None}}
    assert conclude(Stopped(exit_code=1, incidents=(found,), has_lost_its_record=bool), 0, (), came=()) == 1  # type: ignore[arg-type]
    assert f"job j {words} (exit code 1)" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        ({"prevented": True, "stopped_at_step": 7}, "stopped by the watchdog: batch.index_out_of_range"),
        ({"prevented": True, "stopped_at_step": None}, "failed on a bad batch: batch.index_out_of_range"),  # found inside its step
        ({"prevented": False, "stopped_at_step": 7}, "stopped by the watchdog: batch.index_out_of_range"),
    ],
)
def test_the_record_says_as_the_summary_does_whether_the_job_stopped_or_failed(action: dict[str, Any], reason: str) -> None:
    written: list[str] = []
    incident = {"kind": "batch.index_out_of_range", "severity": "error", "action": {**action, "policy": "stop", "exit_code": 65}}
    told = Stopped(incidents=(incident,), quarantine=lambda: False, write_end=lambda _end, reason, **_: written.append(reason))
    assert conclude(told, 0, (), came=()) == 65  # type: ignore[arg-type]
    assert written == [reason]
