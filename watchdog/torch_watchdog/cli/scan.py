"""`watchdog scan CMD...`: learn from the first steps, then look at all data without training on it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import click

from torch_watchdog.cli.options import given_words, json_option, settings
from torch_watchdog.cli.output import print_json, print_table
from torch_watchdog.config import LaunchConfig
from torch_watchdog.launch.plan import job_name
from torch_watchdog.launch.say import say
from torch_watchdog.scan.progress import follow
from torch_watchdog.scan.results import FOLDER, Results, read_results
from torch_watchdog.scan.tell import COLUMNS, headline, row
from torch_watchdog.store.run_directory import RunDirectory

__all__ = ["command"]

LAST_LINES = 15


@click.command("scan", short_help="Check all of CMD's data, without training.", context_settings={"allow_interspersed_args": False})
@click.option("--job", metavar="NAME", help="Name of the scan (default: scan-, the script and the time).")
@click.option("--dir", metavar="DIR", help="Run directories are DIR/NAME (default: watchdog_runs).")
@click.option(
    "--after",
    type=click.Path(path_type=Path),
    metavar="RUN_DIR",
    help="Go on where an interrupted scan of the same command ended, or without the samples that ended it.",
)
@json_option
@click.argument("words", nargs=-1, type=click.UNPROCESSED, required=True, metavar="CMD...")
@click.pass_context
def command(context: click.Context, /, words: tuple[str, ...], job: str | None, after: Path | None, as_json: bool, **_: object) -> int:
    """Check every sample of CMD's data without training on it.

    CMD trains for a few steps, from which the bounds are learned; then each rank's loader is run to its end through the guard alone.
    Exit code 65 where a sample would fail, 0 where none would, another one where the scan did not come to its end or met no batch.
    """
    config = settings(context)
    run_dir = _new_run_dir(config.directory, job or f"scan-{job_name(words, datetime.now())}")
    log = run_dir.with_name(f"{run_dir.name}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    say(f"scan {run_dir.name}: learning from the first steps; the command's output is in {log}")
    with log.open("wb") as output:
        process = subprocess.Popen(
            _launch(config, run_dir, after, words), stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )
        try:
            follow(process, run_dir)
        except KeyboardInterrupt:  # the command has got it too
            process.wait()
    results = read_results(run_dir)
    _show(results, run_dir, process.returncode, goes_on=after is not None, as_json=as_json)
    if results.saw_nothing:
        say(
            "next: let the loop take its batches by `for batch in torch_watchdog_agent.watch(batches)`, from a generator or a list, then scan again"
        )
    elif not results.finished:
        has_left_out = RunDirectory(run_dir).quarantine_file.exists()
        line = to_go_on(given_words(context), run_dir, words, as_json=as_json) if begun(results) or has_left_out else None
        _say_unfinished(process.returncode, log, line, has_begun=begun(results))
    return results.exit_code(process.returncode)


def to_go_on(given: Sequence[str], run_dir: Path, words: Sequence[str], *, as_json: bool) -> str:
    """The line to type. `given`: our own options as they were typed, of which only some may stand before the command."""
    pairs = list(zip(given[::2], given[1::2], strict=False))
    before = [word for name, value in pairs if name in ("--config", "--daemon") for word in (name, value)]
    behind = [word for name, value in pairs if name in ("--job", "--dir") for word in (name, value)]
    shown = ["--json"] if as_json else []
    return shlex.join(["watchdog", *before, "scan", *behind, "--after", os.path.relpath(run_dir), *shown, *words])


def _new_run_dir(parent: Path, name: str) -> Path:
    """A name that is free: the launch would take another one by itself, and its files would not be found."""
    for number in range(1, 1000):
        path = parent / (name if number == 1 else f"{name}.{number}")
        if not path.exists():
            return path
    raise click.UsageError(f"{parent / name} has too many runs of this name: pass another --job NAME")


def _launch(config: LaunchConfig, run_dir: Path, after: Path | None, words: Sequence[str]) -> list[str]:
    ours = ["--policy", "skip", "--dir", str(config.directory), "--job", run_dir.name]
    again: list[str] = []
    if after is not None:
        again = ["--scan-after", str((after / FOLDER).absolute())]
        left_out = RunDirectory(after).quarantine_file
        ours += ["--quarantine", str(left_out.absolute())] if left_out.exists() else []  # each is listed, and would end this scan, too
    return [sys.executable, "-m", "torch_watchdog.cli", *ours, "run", "--scan", *again, "--", *words]


def begun(results: Results) -> bool:
    return any(rank.driving for rank in results.ranks)


def _show(results: Results, run_dir: Path, code: int, *, goes_on: bool, as_json: bool) -> None:
    if as_json:
        print_json({"run_dir": str(run_dir), **results.as_json(), "exit_code": results.exit_code(code)})
    elif results.bad:
        print_table(COLUMNS, [row(entry) for entry in results.bad], empty="")
    sys.stdout.flush()
    if begun(results) or results.finished or results.bad or results.saw_nothing:
        say(headline(results, goes_on=goes_on))


def _say_unfinished(code: int, log: Path, line: str | None, *, has_begun: bool) -> None:
    """`line`: what goes on from there, None where nothing had been looked at."""
    if line is not None:
        where = "did not come to its end" if has_begun else "met a bad sample in a step that it learns from, which fails of it"
        say(f"the scan {where} (exit code {code}); go on {'where it ended' if has_begun else 'without that sample'} with")
        say(line)
        return
    say(f"the command ended (exit code {code}) before the scan could begin; its last lines, from {log}:")
    for text in log.read_text(errors="replace").splitlines()[-LAST_LINES:]:
        print(f"    {text}", file=sys.stderr)
