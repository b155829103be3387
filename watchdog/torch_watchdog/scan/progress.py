"""Shows how far a scan is while its launch runs: a bar on a terminal, else a plain line now and then. Knows neither ranks' files nor verdicts."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from torch_watchdog.launch.say import PREFIX, say
from torch_watchdog.scan.results import Results, read_results
from torch_watchdog.scan.tell import plain_progress

__all__ = ["follow"]

POLL_S = 0.5
LINE_EVERY_S = 10.0


def follow(process: subprocess.Popen[bytes], run_dir: Path) -> None:
    """Returns when the process has ended."""
    if sys.stderr.isatty():
        _with_bar(process, run_dir)
    else:
        _with_lines(process, run_dir)


def _until_ended(process: subprocess.Popen[bytes], run_dir: Path, show: Callable[[Results], None]) -> None:
    while True:
        try:
            process.wait(POLL_S)
            return
        except subprocess.TimeoutExpired:
            show(read_results(run_dir))


def _with_bar(process: subprocess.Popen[bytes], run_dir: Path) -> None:
    columns = (TextColumn(PREFIX + " {task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("scan: learning from the first steps", total=None)

        def show(results: Results) -> None:
            if any(rank.driving for rank in results.ranks):
                text = f"{plain_progress(results)}, {results.samples_per_s:,.0f} samples/s"
                bar.update(task, description=text, completed=results.batches, total=results.total_batches)

        _until_ended(process, run_dir, show)


def _with_lines(process: subprocess.Popen[bytes], run_dir: Path) -> None:
    last_s = time.monotonic()

    def show(results: Results) -> None:
        nonlocal last_s
        if time.monotonic() - last_s >= LINE_EVERY_S and any(rank.driving for rank in results.ranks):
            last_s = time.monotonic()
            say(plain_progress(results))

    _until_ended(process, run_dir, show)
