"""An order that finds a loop at an awkward moment: what is saved goes on as a run that nobody stopped, and lacks no batch, rate or random number."""

from __future__ import annotations

import re
import shlex
import signal
from pathlib import Path

import pytest
from launching import BIN, ended, launch, script, start, until, watchdog

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

PYTHON = str(BIN / "python")


@pytest.mark.parametrize(
    "loop",
    [
        "first",
        "plateau",
        "persistent",
        "itself",
        "lightning",
        "cut",
        "behind",
        "sliced",
        *(pytest.param(loop, marks=pytest.mark.slow) for loop in ("ahead", "late", "unmarked", "measured")),
    ],
)
def test_a_run_that_goes_on_ends_as_one_that_was_never_stopped(loop: str, tmp_path: Path) -> None:
    process = start(tmp_path, [*watchdog("--job", "j"), PYTHON, *script("places.py", loop, "--meet", tmp_path)])
    until(lambda: (tmp_path / "here").exists() or process.poll() is not None, "the loop is there")
    process.send_signal(signal.SIGUSR1)
    until(lambda: '"order.opened"' in (tmp_path / "watchdog_runs" / "j" / "events.jsonl").read_text(), "the order has come")
    (tmp_path / "go").touch()
    run = ended(process, tmp_path)
    assert run.code == 128 + signal.SIGUSR1, run.err
    (line,) = re.findall(r"\[torch-watchdog\]   resume (.*)", run.err)
    words = [word for word in shlex.split(line) if word not in ("--meet", str(tmp_path))]
    resumed = launch(tmp_path, [*watchdog(), *words[1:]])
    whole = launch(tmp_path, [PYTHON, *script("places.py", loop)])
    assert (resumed.code, whole.code) == (0, 0), resumed.err
    assert resumed.lines(r"\d+ ") == whole.lines(r"\d+ ") != [], resumed.err
