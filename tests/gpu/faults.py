"""Faults on purpose on real GPUs, and clean runs: `python tests/gpu/faults.py --out FILE.json` on a machine with two; `--cpu` for what needs none.

Trainings of two ranks under `watchdog torchrun`, by tests/faults. What fills a GPU, slows it down or makes its driver speak has the machine to itself.
Beside them the node's own eyes look on: the samples around each Xid are kept, to be played again (tests/watchdog/rules/test_gpu_replays.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import statistics
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from random import Random
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "faults"))

from catalogue import ENDING, LASTING, ON_GPU, PRECURSORS, REST, START, Fault, clean_runs
from machine import machine
from run import run

from torch_watchdog_agent.node.nvml import Gpus

ALL = (*LASTING, *ENDING, *PRECURSORS, *ON_GPU)
AROUND_NS = 4 * 10**9  # samples that are kept before and after an Xid
Part = tuple[int, int, Sequence[Fault]]  # after how many steps it begins, how many it lasts
Launch = tuple[str, dict[str, Any], list[tuple[Fault, int]]]


class Watched(threading.Thread):
    """What NVML says each second, as the node process asks it. `events`: Xids, and the launches that were running."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.running: list[str] = []
        self.events: list[dict[str, Any]] = []
        self._samples: list[dict[str, Any]] = []
        self._ended = threading.Event()

    def run(self) -> None:
        gpus = Gpus.open()
        while gpus is not None and not self._ended.wait(1.0):
            for sample in gpus.samples():
                told = dataclasses.asdict(sample)
                self._samples.append(told)
                self.events += [
                    {
                        "code": code,
                        "uuid": sample.uuid,
                        "pci": sample.pci,
                        "index": sample.index,
                        "time_ns": sample.time_ns,
                        "during": list(self.running),
                    }
                    for code in sample.xids
                ]

    def end(self) -> list[dict[str, Any]]:
        """The samples around the events."""
        self._ended.set()
        self.join()
        return [one for one in self._samples if any(abs(one["time_ns"] - event["time_ns"]) <= AROUND_NS for event in self.events)]


def named(name: str, *, rank: int | str | None = 1) -> list[Fault]:
    """What must be said of it, on a GPU where it is another thing there."""
    return [one for one in ON_GPU if one.name == name] or [next(one for one in ALL if one.name == name and one.rank == rank)]


def launches(seed: int) -> tuple[list[Launch], list[Launch]]:
    """Those that bear company, and those that do not."""
    together = [
        placed(f"data-{seed}", seed, [(0, 36, named("slow_loader")), (36 + REST, 1000, named("nan_loss"))]),
        placed(f"ids-{seed}", seed, [(0, 150, named("ids_creep")), (150 + REST, 1, named("long_batch"))]),
    ]
    alone = [
        placed(f"compute-{seed}", seed, [(0, 110, named("straggler_compute")), (110 + REST, 1, named("device_assert"))]),
        placed(
            f"memory-{seed}", seed, [(0, 2000, named("leak")), (0, 320, named("pieces")), (320 + REST, 2000, named("retries"))], steps=2500
        ),
    ]
    return together, alone


def placed(name: str, seed: int, parts: Sequence[Part], **more: Any) -> Launch:
    step, faults = START + Random(seed).randint(0, 20), []
    plan: dict[str, Any] = {"seed": seed, "device": "cuda", "steps": step + max(after for after, *_ in parts) + 60, "faults": []}
    for after, lasts, group in parts:
        plan["faults"].append((group[0].name, group[0].rank, step + after, step + after + lasts - 1))
        for fault in group:
            plan |= dict(fault.needs) | ({"watch": fault.watch} if fault.watch else {})
            faults.append((fault, step + after))
    return name, plan | more, faults


def on_cpu(launch: Launch) -> Launch:
    name, plan, faults = launch
    left = [(fault, step) for fault, step in faults if fault not in ON_GPU]
    kept = [one for one in plan.get("faults", []) if one[0] in {fault.name for fault, _ in left}]
    return name, {**plan, "device": "cpu", "faults": kept, "length": 12, "model": "text"}, left


def judged(result: dict[str, Any]) -> dict[str, Any]:
    """With whether the forecast range of steps holds the one in which memory was full, and how many steps before it was told."""
    told = {ALL[one["fault"]].says: one for one in result["found"] if one["told"]}
    forecast, full = told.get("are full in step"), told.get("out of memory")
    if forecast is None or full is None or (step := re.search(r", in step (\d+)", full["summary"])) is None:
        return result
    told_at, first, last = map(int, re.findall(r", step (\d+):.* step (\d+)\.\.(\d+) ", forecast["summary"])[0])
    true = int(step[1])
    return result | {
        "forecast": {"told_at": told_at, "range": [first, last], "full_in": true, "holds": first <= true <= last, "lead": true - told_at}
    }


def table(runs: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """A row a fault."""
    rows = []
    for number, fault in enumerate(ALL):
        mine = [one for run in runs.values() for one in run["found"] if one["fault"] == number]
        steps = sorted(one["after_steps"] for one in mine if one["after_steps"] is not None)
        if mine:
            rows.append({
                "fault": fault.does, "as": ", ".join(fault.kinds), "launches": len(mine), "told": sum(one["told"] for one in mine),
                "rank right": sum(one["rank_right"] for one in mine),
                "steps until it is told": [steps[0], statistics.median_low(steps), steps[-1]] if steps else None,
            })  # fmt: skip
    return rows


def totals(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    clean = [run for name, run in runs.items() if name.startswith("clean")]
    forecasts = [run["forecast"] for run in runs.values() if "forecast" in run]
    return {
        "faults": table(runs),
        "forecasts": {
            "made": len(forecasts),
            "hold": sum(one["holds"] for one in forecasts),
            "lead in steps": [one["lead"] for one in forecasts],
        },
        "clean runs": len(clean),
        "clean runs that failed": sum(run["exit_code"] != 0 for run in clean),
        "false alarms": [one for run in clean for one in run["surprises"]],
        "hours of clean runs": round(sum(run["seconds"] for run in clean) / 3600, 3),
        "other findings": {name: run["surprises"] for name, run in runs.items() if run["surprises"] and not name.startswith("clean")},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--clean", type=int, default=6)
    parser.add_argument("--only", default="", help="launches whose name matches")
    parser.add_argument("--at-once", type=int, default=6, help="of those that bear company")
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    of_seeds = [launches(seed) for seed in args.seeds]
    clean = [(f"clean-{number}", {**plan, "device": "cuda"}, list[Any]()) for number, plan in enumerate(clean_runs()[: args.clean])]
    together = [*clean, *(one for some, _ in of_seeds for one in some)]
    alone = [one for _, some in of_seeds for one in some]
    began, watched, runs = time.monotonic(), Watched(), dict[str, Any]()
    watched.start()
    for group, at_once in ((together, args.at_once), (alone, 1)):
        wanted = [on_cpu(one) if args.cpu else one for one in group if re.search(args.only, one[0])]
        with ThreadPoolExecutor(at_once) as pool:
            for done in as_completed([pool.submit(_one, watched, one) for one in wanted if one[2] or one[0].startswith("clean")]):
                name, result = done.result()
                runs[name] = judged(result)
                print(name, json.dumps(result["found"] or result["surprises"])[:400], flush=True)
                write(args.out, runs, watched.events, seconds=time.monotonic() - began)
    write(args.out, runs, watched.events, seconds=time.monotonic() - began, samples=watched.end())
    print(json.dumps(totals(runs), indent=1))


def _one(watched: Watched, launch: Launch) -> tuple[str, dict[str, Any]]:
    name, plan, faults = launch
    watched.running.append(name)
    result = run(plan, faults)
    watched.running.remove(name)
    return name, result


def write(
    out: Path, runs: dict[str, Any], events: Iterable[dict[str, Any]], *, seconds: float, samples: Sequence[dict[str, Any]] = ()
) -> None:
    """After each launch, so that what is done stays where the rest is cut off."""
    results = {
        "machine": machine(), "command": "python tests/gpu/faults.py", "seconds": round(seconds), "totals": totals(runs),
        "xids": list(events), "samples around them": list(samples), "runs": dict(sorted(runs.items())),
    }  # fmt: skip
    out.write_text(json.dumps(results, indent=1).replace(f"{Path(__file__).resolve().parents[2]}/", "") + "\n")


if __name__ == "__main__":
    main()
