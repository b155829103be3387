"""Ranks that fail or stand still, under DDP and FSDP2 on gloo: `python tests/faults/rescue_matrix.py` writes results/rescue-gloo.md.

What is in results/rescue-gloo.json already is not run again. `--only FAULT...`, `--trials 8`, `--jobs 2`, `--for SECONDS` (begin nothing new after them),
`--fresh` forgets what is there (of `--only` those), `--out FILE`. Each trial is a real launch of two ranks; rank 1 fails in step 5.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

from launching import SCRIPTS, Ended, environment, launch, script, torchrun, watchdog

from torch_watchdog.job.first_failure import SAME_FAILURE_NS

OUT = Path(__file__).parent / "results" / "rescue-gloo.json"
MODELS = ("DDP", "FSDP2")
ALONE = "torchrun alone"  # in the place of a model: the same training without us
ROOT_CAUSE = re.compile(r"Root Cause.*?rank +: (\d+) ", re.DOTALL)
GIVES_UP_S = 15.0  # the process groups: a rank that is late may still come until shortly before
WORDS = """Written by `python tests/faults/rescue_matrix.py`: real launches of two ranks on one machine, whose rank 1 fails in step 5. "free" is the time from
the fault to the moment when the healthy rank's Python runs again (it has left its collective); for ranks that stand still it holds the time until that is
sure: two looks, the first of them after 10 s without a step, or four fifths of the process groups' timeout (15 s here). "state": under DDP the checkpoint of
the rescue is bit by bit what the healthy rank itself had after that update; under FSDP2 no rank holds the whole state, the incident says so, and nothing is
saved. "launcher names it": torchrun's own root cause; `-` where it prints none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A way to fail, and what must come of it."""

    does: str
    words: tuple[str, ...]
    kinds: tuple[str, ...]
    exit_code: int
    models: tuple[str, ...] = MODELS
    recorded: bool = False  # by torch's @record


_RAISES: dict[str, Any] = {"kinds": ("rank.exception",), "exit_code": 1, "models": ("DDP", ALONE)}  # where launchers name the wrong rank
CASES = {
    "raise": Case(does="raises an exception", words=("--fault", "raise"), kinds=("rank.exception",), exit_code=1),
    "kill": Case(does="is killed (SIGKILL)", words=("--fault", "kill"), kinds=("rank.died",), exit_code=1),
    "exit3": Case(does="exits with 3", words=("--fault", "exit3"), kinds=("rank.exception",), exit_code=1),
    "exit3-now": Case(does="exits with 3, by os._exit", words=("--fault", "exit3-now"), kinds=("rank.exception",), exit_code=1),
    "segv": Case(does="segmentation fault", words=("--fault", "segv"), kinds=("rank.died",), exit_code=1),
    "stop": Case(does="is stopped (SIGSTOP)", words=("--fault", "stop"), kinds=("rank.hang",), exit_code=75),
    "loop": Case(does="endless loop in Python", words=("--fault", "loop"), kinds=("rank.hang",), exit_code=75),
    "native": Case(does="stuck in C, the interpreter's lock held", words=("--fault", "native"), kinds=("rank.hang",), exit_code=75),
    "loader": Case(does="stuck in the data set", words=("--fault", "loader"), kinds=("rank.hang",), exit_code=75),
    "worker": Case(
        does="stuck in a worker of the loader", words=("--fault", "loader", "--workers", "1"), kinds=("rank.hang",), exit_code=75
    ),
    "barrier": Case(does="in a barrier that the others do not come to", words=("--fault", "leave"), kinds=("rank.desync",), exit_code=65),
    "finally": Case(does="raises; `finally: destroy_process_group()`", words=("--fault", "raise", "--teardown", "0"), **_RAISES),
    "record": Case(does="the same with @record", words=("--fault", "raise", "--teardown", "0"), recorded=True, **_RAISES),
    "slow": Case(does="the same, its teardown takes 0.5 s", words=("--fault", "raise", "--teardown", "0.5"), **_RAISES),
    "record-slow": Case(does="the same with @record", words=("--fault", "raise", "--teardown", "0.5"), recorded=True, **_RAISES),
    "two": Case(does="both raise within a millisecond", words=("--fault", "raise", "--both"), **_RAISES),
}


def main() -> None:
    options = arguments()
    known: dict[str, Any] = json.loads(options.out.read_text())["trials"] if options.out.exists() else {}
    if options.fresh:
        forgotten = {f"{name}-{model}" for name, model in asked(options.only)}
        known = {key: trial for key, trial in known.items() if key.rpartition("-")[0] not in forgotten}
    wanted = [(name, model, number) for number in range(options.trials) for name, model in asked(options.only)]
    ends, writing = time.monotonic() + options.seconds, threading.Lock()

    def one(trial: tuple[str, str, int]) -> None:
        key = "-".join(map(str, trial))
        if key not in known and time.monotonic() < ends:
            known[key] = run(trial[0], trial[1])
            print(key, json.dumps(known[key]), flush=True)
            with writing:
                write(options.out, dict(sorted(known.items())))

    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(one, wanted))
    print("\n".join(table(known)))


def asked(only: Sequence[str] | None) -> list[tuple[str, str]]:
    return [(name, model) for name in only or CASES for model in CASES[name].models]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=CASES)
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--for", dest="seconds", type=float, default=float("inf"))
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--out", type=Path, default=OUT)
    return parser.parse_args()


def run(name: str, model: str) -> dict[str, Any]:
    """One launch, and what came of it."""
    case, folder = CASES[name], Path(tempfile.mkdtemp(prefix="rescue-"))
    training = script("failing.py", *case.words, "--timeout", GIVES_UP_S, *(("--fsdp",) if model == "FSDP2" else ()))
    command = [*([] if model == ALONE else watchdog()), *torchrun(*training)]
    try:
        ended = launch(folder, command, **({"RECORD": "1"} if case.recorded else {}))
        return judged(case, model, ended)
    except subprocess.TimeoutExpired:
        return {"told": False, "problem": "not within its time"}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def judged(case: Case, model: str, ended: Ended) -> dict[str, Any]:
    first = first_to_fail(ended)
    root = ROOT_CAUSE.search(ended.err)
    told: dict[str, Any] = {"exit_code": ended.code, "launcher": None if root is None else int(root[1]) in first}
    if model == ALONE:
        return told | {"told": bool(told["launcher"])}
    if len(ended.incidents) != 1:
        return told | {"told": False, "problem": f"{len(ended.incidents)} incidents", "tail": ended.err[-800:]}
    (incident,) = ended.incidents
    right = incident["kind"] in case.kinds and incident["origin"]["rank"] in first
    state = refused(incident) if model == "FSDP2" else saved(ended, incident)
    whole = right and state and ended.code == case.exit_code
    told |= {"told": right, "kind": incident["kind"], "state": state, "free_s": seconds_to_free(ended)}
    return told | ({} if whole else {"problem": incident["summary"], "cause": incident["cause"]})


def first_to_fail(ended: Ended) -> set[int | None]:
    """By the script's own clock, just before it raises; rank 1 where only that one fails. None stands for both: one failure at one moment."""
    raised = {int(rank): int(at) for rank, at in re.findall(r"rank (\d) raises (\d+)", ended.out)}
    if len(raised) < 2:
        return {1}
    return {min(raised, key=lambda rank: raised[rank]), *([None] if max(raised.values()) - min(raised.values()) < SAME_FAILURE_NS else [])}


def seconds_to_free(ended: Ended) -> float | None:
    fault = [float(at) for at in re.findall(r"rank \d fault ([\d.]+)", ended.out)]
    free = [float(at) for at in re.findall(r"rank 0 free ([\d.]+)", ended.out)]
    return round(free[0] - max(fault), 2) if free and fault else None


def refused(incident: dict[str, Any]) -> bool:
    return incident["action"]["checkpoint"] is None and "shards the parameters" in incident["cause"]


def saved(ended: Ended, incident: dict[str, Any]) -> bool:
    """The checkpoint holds, bit by bit, what the rank that wrote it had after that update."""
    checkpoint = incident["action"]["checkpoint"]
    if checkpoint is None or not checkpoint["committed"]:
        return False
    check = [sys.executable, str(SCRIPTS / "failing.py"), "--check", checkpoint["path"]]
    found = subprocess.run(check, cwd=ended.folder, env=environment(), capture_output=True, text=True, timeout=120).stdout.splitlines()
    (saver,) = checkpoint["saved_by"]
    return found[-1] in (ended.folder / f"trail-0-{saver}").read_text().splitlines()


def write(out: Path, trials: dict[str, Any]) -> None:
    import torch

    about = {
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[1]),
    }
    out.parent.mkdir(exist_ok=True)
    told = json.dumps({"about": about, "trials": trials}, indent=1).replace(
        f"{Path(__file__).resolve().parents[2]}/", ""
    )  # where it lies is nobody's matter
    out.write_text(told + "\n")
    foot = f"{about['date']}, torch {about['torch']}, Python {about['python']}, {about['cores']} cores with {about['load']} processes wanting to run, gloo."
    told = "\n".join(table(trials))
    out.with_suffix(".md").write_text(f"# Ranks that fail or stand still, on gloo\n\n{WORDS}\n\n{told}\n\n{foot}\n")


def table(trials: dict[str, Any]) -> list[str]:
    lines = [
        "| rank 1 | model | culprit and kind | state | exit code | launcher names it | free (median, most) |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, case in CASES.items():
        for model in case.models:
            mine = [trial for key, trial in trials.items() if key.startswith(f"{name}-{model}-")]
            if mine:
                lines.append(f"| {case.does} | {model} | {' | '.join(cells(case, mine))} |")
    return lines


def cells(case: Case, mine: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    count = len(mine)
    free = sorted(trial["free_s"] for trial in mine if trial.get("free_s") is not None)
    spread = f"{median(free):.2f} s, {free[-1]:.2f} s" if free else ""
    right = sum(trial.get("exit_code") == case.exit_code for trial in mine)
    named = sum(bool(trial.get("launcher")) for trial in mine)
    if all("kind" not in trial and "problem" not in trial for trial in mine):
        return "", "", f"{right} of {count}: {case.exit_code}", f"{named} of {count}", ""
    return (
        f"{sum(trial['told'] for trial in mine)} of {count}, {'/'.join(case.kinds)}", f"{sum(trial.get('state', False) for trial in mine)} of {count}",
        f"{right} of {count}: {case.exit_code}", f"{named} of {count}" if any(trial.get("launcher") is not None for trial in mine) else "-", spread,
    )  # fmt: skip


if __name__ == "__main__":
    main()
