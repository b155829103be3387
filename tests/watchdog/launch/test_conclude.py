"""The end of a launch: the exit code comes out, whatever fails while it is told."""

from __future__ import annotations

import errno
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

    def __init__(self, **broken: Any) -> None:
        self.seat = SimpleNamespace(config=SimpleNamespace(exit_codes={}))
        self.job, self.joined, self.plan = "j", None, SimpleNamespace(command=("torchrun", "train.py"))
        self.directory = SimpleNamespace(root=Path("/r"), quarantine_file=SimpleNamespace(exists=broken.pop("quarantine", bool)))
        self.ranks_heard, self.unused_resume, self.write_end = lambda: 2, lambda: None, lambda *_, **__: None
        vars(self).update(broken)

    def finish(self, *_: object) -> JobOutcome:
        return JobOutcome(exit_code=65, incidents=(), lines=())

    def last_status(self) -> None:
        return None


@pytest.mark.parametrize("broken", ["quarantine", "ranks_heard", "unused_resume", "write_end"])
def test_a_file_server_that_is_gone_does_not_make_a_stopped_job_look_finished(broken: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert conclude(Stopped(**{broken: stale}), 0, ()) == 65  # type: ignore[arg-type]
    assert "the end of this launch could not be told" in capfd.readouterr().err
