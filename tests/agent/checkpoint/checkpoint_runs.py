"""Starts the small training of scripts/train.py as real processes and reads what it says of itself.

Each rank is a new process, forked from a server that has imported torch and nothing more has happened in: the seconds that the import takes
are paid once.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).with_name("scripts")
DEADLINE_S = 100

_server = multiprocessing.get_context("forkserver")
sys.path.insert(0, str(SCRIPTS))
_server.set_forkserver_preload(["train", "torch_watchdog_agent.checkpoint.load", "torch_watchdog_agent.checkpoint.dcp"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What each rank said: exit code, standard error, and its result where it came to one."""

    codes: tuple[int | None, ...]
    errors: tuple[str, ...]
    results: tuple[dict[str, Any] | None, ...]


def train(folder: Path, *args: str, world: int = 1) -> Run:
    """One launch of `world` ranks; its files lie in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    out = folder / f"run-{len(list(folder.iterdir()))}"
    processes = [_server.Process(target=_rank, args=(rank, world, str(out), args)) for rank in range(world)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(DEADLINE_S)
        process.kill()
        process.join()
    errors = tuple(Path(f"{out}.{rank}.err").read_text() for rank in range(world))
    results = tuple(_result(Path(f"{out}.{rank}.json")) for rank in range(world))
    return Run(codes=tuple(process.exitcode for process in processes), errors=errors, results=results)


def finished(folder: Path, *args: str, world: int = 1) -> tuple[dict[str, Any], ...]:
    """Like `train`, for runs that must end well: the results."""
    run = train(folder, *args, world=world)
    assert run.codes == (0,) * world, f"exit codes {run.codes}\n" + "\n".join(run.errors)
    return tuple(result for result in run.results if result is not None)


def from_step(result: dict[str, Any], step: int) -> dict[str, Any]:
    """The result as a run that began at `step` must have it."""
    return {**result, "losses": {name: loss for name, loss in result["losses"].items() if int(name) >= step}}


def _rank(rank: int, world: int, out: str, args: tuple[str, ...]) -> None:
    """The body of a rank: standard error goes to a file, a failure is exit code 1."""
    errors = os.open(f"{out}.{rank}.err", os.O_WRONLY | os.O_CREAT)
    os.dup2(errors, 2)
    multiprocessing.set_start_method("fork", force=True)  # the script's own workers start as in a plain run
    import train as script

    try:
        script.main([*args, "--out", out, "--store", f"{out}.store", "--rank", str(rank), "--world", str(world)])
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # not by the interpreter's teardown: see the script's _alive


def _result(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.exists() else None
