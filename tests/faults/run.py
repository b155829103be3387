"""The fault-injection suite: `python tests/faults/run.py` runs what is not in the results yet, then prints the table.

Pieces: `--seeds 0 1 2`, `--clean 0:90`, `--for SECONDS` (begin nothing new after them). Results are kept in results.json and RESULTS.md beside this file, or
beside `--out`; `--fresh` forgets those that it is asked for. `--at-once N`: that many launches beside each other, where the machine has the cores for it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

from catalogue import ANY, FAULTS, LASTING, ON_GPU, PRECURSORS, Fault, clean_runs, launches, precursor_launches, settings_of
from ports import free_port

HERE = Path(__file__).parent
ON_GPUS = HERE.parent / "gpu" / "scripts" / "faulty.py"
TIMEOUT_S = 150
WORDS = """Written by `python tests/faults/run.py`: real trainings of two ranks on one machine. A launch has one fault that lasts and one that ends it;
"steps until it is told" counts from the step of the fault to the step that the finding names. Holds are shorter than by default (`catalogue.py`), for clean
runs alike. Findings besides are listed below the table: in a launch with faults most follow from the fault. Of a clean run that is restarted (by `--resume`
after a preemption, or by torchrun's `--max-restarts` after a SIGKILL) what ended its first part must be told, and nothing else."""


def main() -> None:
    options = arguments()
    known: dict[str, Any] = json.loads(options.out.read_text())["runs"] if options.out.exists() else {}
    until = time.monotonic() + options.seconds
    asked = todo(options)
    if options.fresh:
        known = {name: result for name, result in known.items() if name not in {one[0] for one in asked}}
    waiting = [one for one in asked if one[0] not in known]
    with ThreadPoolExecutor(options.at_once) as pool:
        for done in as_completed([pool.submit(run_before, until, *one) for one in waiting]):
            name, result = done.result()
            if result is not None:
                known[name] = result
                print(name, json.dumps(result)[:300], flush=True)
                write(options.out, known)
    told = table(json.loads(options.out.read_text()))
    options.out.with_name("RESULTS.md").write_text(f"# Faults on purpose, and clean runs\n\n{WORDS}\n\n{told}\n")
    print(told)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--clean", default="0:90")
    parser.add_argument("--only", help="launches with this fault")
    parser.add_argument("--for", dest="seconds", type=float, default=float("inf"))
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    parser.add_argument("--fresh", action="store_true")
    return parser.parse_args()


def todo(options: argparse.Namespace) -> list[tuple[str, dict[str, Any], list[tuple[Fault, int]]]]:
    faulty = [(f"faults-{seed}-{number:02}", *launch) for seed in options.seeds for number, launch in enumerate(launches(seed))]
    faulty += [(f"precursors-{seed}-{number}", *launch) for seed in options.seeds for number, launch in enumerate(precursor_launches(seed))]
    if options.only:
        return [one for one in faulty if any(fault.name == options.only for fault, _ in one[2])]
    first, last = map(int, options.clean.split(":"))
    return faulty + [(f"clean-{number:02}", plan, []) for number, plan in enumerate(clean_runs()) if first <= number < last]


def run_before(until: float, name: str, plan: dict[str, Any], placed: list[tuple[Fault, int]]) -> tuple[str, dict[str, Any] | None]:
    """None: it is too late to begin another."""
    return name, None if time.monotonic() > until else run(plan, placed)


def run(plan: dict[str, Any], placed: list[tuple[Fault, int]]) -> dict[str, Any]:
    """One launch, and what was said of it: each fault found or not, and everything that was said besides."""
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    (folder / "watchdog.toml").write_text(settings_of(plan))
    begun = time.monotonic()
    try:
        for command in commands(plan):
            ended = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S)
        code, tail = ended.returncode, ended.stderr[-1500:]
    except subprocess.TimeoutExpired:
        code, tail = None, "not within its time"
    seconds = time.monotonic() - begun
    incidents = [json.loads(path.read_text()) for path in sorted(folder.glob("watchdog_runs/*/incidents/*/incident.json"))]
    incidents = but_for_the_restart(plan, incidents)
    shutil.rmtree(folder, ignore_errors=True)
    return (
        judged(placed, incidents)
        | {"exit_code": code, "seconds": round(seconds, 1), "load": round(os.getloadavg()[0], 1), "plan": plan}
        | ({"tail": tail} if (code if not placed else not incidents) else {})
    )


def commands(plan: dict[str, Any]) -> list[list[str]]:
    """One launch; where it is to be preempted another one that resumes it, and where a rank is to be killed one whose launcher starts the ranks again."""
    restart, launcher = plan.get("restart"), ["bash", str(HERE / "two_ranks.sh")]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    if restart == "killed":
        launcher = [*torchrun, "--standalone", "--max-restarts", "1"]
    if plan.get("device") == "cuda":
        launcher = [*torchrun, "--master-port", str(free_port())]
    script = [*launcher, str(ON_GPUS if plan.get("device") == "cuda" else HERE / "train.py")]
    ours = [sys.executable, "-m", "torch_watchdog.cli", "--job", "suite"]
    shape = json.dumps({name: value for name, value in plan.items() if name != "watch"})
    again = [[*ours, "--resume", "watchdog_runs/suite/checkpoints", *script, shape]] if restart == "preempted" else []
    return [[*ours, *script, shape], *again]


def but_for_the_restart(plan: dict[str, Any], incidents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the one that tells how the first part ended; that it is missing is a surprise, too."""
    if not plan.get("restart"):
        return incidents
    kind = {"preempted": "order.preemption", "killed": "rank.died"}[plan["restart"]]
    ends = [one for one in incidents if one["kind"] == kind and one["attempt"] == 0]
    if len(ends) != 1:
        return [*incidents, {"kind": kind, "summary": f"told {len(ends)} times", "step": None, "origin": {"rank": None}}]
    return [one for one in incidents if one is not ends[0]]


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TORCH_WATCHDOG", "PYTEST"))}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHON": sys.executable, "MASTER_PORT": str(free_port())}


def judged(placed: list[tuple[Fault, int]], incidents: list[dict[str, Any]]) -> dict[str, Any]:
    left, found = list(incidents), []
    for fault, step in placed:
        mine = [
            one
            for one in left
            if one["kind"] in fault.kinds and fault.says in one["summary"] and (one["step"] is None or one["step"] >= step - 1)
        ]
        right = [one for one in mine if fault.rank == ANY or one["origin"]["rank"] == fault.rank]
        told = (right or mine or [None])[0]
        left = [one for one in left if one not in mine]
        found.append({
            "fault": (*FAULTS, *ON_GPU).index(fault), "told": told is not None, "rank_right": bool(right),
            "after_steps": None if told is None or told["step"] is None else told["step"] - step, "kind": told and told["kind"],
            "summary": told and told["summary"],
        })  # fmt: skip
    return {"found": found, "surprises": [f"{one['kind']}: {one['summary']}" for one in left]}


def write(out: Path, runs: dict[str, Any]) -> None:
    import torch

    about = {
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }
    told = json.dumps({"about": about, "runs": dict(sorted(runs.items()))}, indent=1).replace(
        f"{HERE}/", ""
    )  # where this checkout lies is nobody's matter
    out.write_text(told + "\n")


def table(results: dict[str, Any]) -> str:
    """Markdown: a line a fault, then the clean runs."""
    runs = results["runs"]
    found = [one for run in runs.values() for one in run["found"]]
    lines = ["| fault | rank at fault | told | rank right | as | steps until it is told |", "|---|---|---|---|---|---|"]
    for number, fault in enumerate(FAULTS):
        mine = [one for one in found if one["fault"] == number]
        steps = sorted(one["after_steps"] for one in mine if one["after_steps"] is not None)
        spread = "" if not steps else f"{steps[0]}" if steps[0] == steps[-1] else f"{steps[0]} to {steps[-1]}"
        rank = {None: "all", ANY: "all"}.get(fault.rank, fault.rank)  # type: ignore[call-overload]
        told, right = sum(one["told"] for one in mine), sum(one["rank_right"] for one in mine)
        lines.append(f"| {fault.does} | {rank} | {told}/{len(mine)} | {right}/{len(mine)} | {', '.join(fault.kinds)} | {spread} |")
    clean = {name: run for name, run in runs.items() if name.startswith("clean") and not run["plan"].get("watch")}
    faulty = [run for name, run in runs.items() if not name.startswith("clean")]
    alarms, hours = sum(len(run["surprises"]) for run in clean.values()), sum(run["seconds"] for run in clean.values()) / 3600
    told, right = sum(one["told"] for one in found), sum(one["rank_right"] for one in found)
    about = results["about"]
    lines += [
        "",
        f"{len(found)} faults: {told} told, {right} with the right rank; {sum(len(run['surprises']) for run in faulty)} other findings in those launches. "
        f"{len(clean)} clean runs ({hours:.2f} h): {alarms} false alarms, {alarms / hours if hours else 0:.1f} an hour; {restarts_of(clean.values())}.",
        "",
        f"{about['date']}, torch {about['torch']}, Python {about['python']}, {about['cores']} cores, gloo.{load_of(runs)}",
    ]
    lines += ["", *precursors(found, runs)]
    surprises = [f"* {name}: {one}" for name, run in runs.items() for one in run["surprises"]]
    return "\n".join(lines + ([""] + surprises if surprises else []))


def restarts_of(clean: Iterable[dict[str, Any]]) -> str:
    """How many of them went on in another launch, or in another attempt of theirs, and ended well."""
    ways = [run["plan"].get("restart") for run in clean if run["exit_code"] == 0]
    return f"{ways.count('preempted')} of them resumed after a preemption, {ways.count('killed')} went on in the next attempt of their launcher"


def load_of(runs: dict[str, Any]) -> str:
    """What else the machine did meanwhile."""
    loads = [run["load"] for run in runs.values() if "load" in run]
    return (
        f" Load average at the end of {len(loads)} of the launches: {statistics.median(loads):.1f}, at most {max(loads)}." if loads else ""
    )


def precursors(found: list[dict[str, Any]], runs: dict[str, dict[str, Any]]) -> list[str]:
    """How early each warning comes after its fault has begun, and how often it came in a clean run that it was on in."""
    lines = [
        "| warning | told | steps after the fault began: least, median, most | false alarms in clean runs |",
        "|---|---|---|---|",
    ]
    warnings = {(kind, fault.says, fault.watch): None for fault in (*LASTING, *PRECURSORS) for kind in fault.kinds}
    for kind, says, watch in sorted(warnings):
        of_it = [number for number, fault in enumerate(FAULTS) if kind in fault.kinds and fault.lasts and fault.says == says]
        mine = [one for one in found if one["fault"] in of_it]
        steps = sorted(one["after_steps"] for one in mine if one["after_steps"] is not None)
        early = f"{steps[0]}, {statistics.median_low(steps)}, {steps[-1]}" if steps else ""
        clean = [run for name, run in runs.items() if name.startswith("clean") and run["plan"].get("watch", "") == watch]
        wrong = [run["plan"]["sorted_ids"] for run in clean for one in run["surprises"] if one.startswith(f"{kind}: ") and says in one]
        of_sorted = f", {sum(wrong)} of them where the data are sorted" if wrong and watch else ""
        name = f"{kind} ({watch or says})" if says else kind
        hours = sum(run["seconds"] for run in clean) / 3600
        lines.append(
            f"| {name} | {sum(one['told'] for one in mine)}/{len(mine)} | {early} | {len(wrong)} in {len(clean)} runs, {hours:.2f} h{of_sorted} |"
        )
    return lines


assert len(FAULTS) == 33 and all(fault.lasts for fault in (*LASTING, *PRECURSORS))

if __name__ == "__main__":
    main()
