"""The same promises on all GPUs of a machine: `python tests/gpu/many.py --out FILE.json`, on two, four or eight.

Owns the list only: what a step costs (DDP and FSDP2, compiled or not), stop and skip, and rescue with several trials of each fault, each by the script that
measures it on two. A part is kept when it is done; `--only` takes an expression over their names.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from machine import machine

HERE = Path(__file__).resolve().parent
SEVERAL = "DDP|FSDP2"  # of the cases of gpu_step.py
FAULTS = ("embedding", "kill", "stop")
COUNTED = ("outcome", "culprit_right", "kind_right", "exit_right", "step_right")
TIMES = ("seconds_from_fault_to_incident", "seconds_to_free")


LIMIT_S = 600.0  # for a part: what it has written by then counts


def of(script: str, *arguments: object) -> dict[str, Any]:
    """What a script of its own writes."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, str(HERE / script), "--out", str(out), *map(str, arguments)]
        try:
            ended: int | str = subprocess.run(command, stdout=subprocess.DEVNULL, timeout=LIMIT_S, check=False).returncode
        except subprocess.TimeoutExpired:
            ended = f"cut off after {LIMIT_S:g} s"
        found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    return found | ({"ended": ended} if ended else {})


def counted(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How often what, by fault and model, and the times of all their trials."""
    table: dict[str, Any] = {}
    for row in rows:
        place = table.setdefault(
            f"{row['fault']}, {row['model']}", {"trials": 0, **{name: {} for name in COUNTED}, **{name: [] for name in TIMES}}
        )
        place["trials"] += 1
        for name in COUNTED:
            place[name] = dict(Counter(place[name]) + Counter([str(row.get(name))]))
        for name in TIMES:
            place[name].append(round(row[name], 3) if row.get(name) is not None else None)
    return table


def rescues(ranks: int, trials: int, model: str) -> dict[str, Any]:
    found = of("rescue.py", "--ranks", ranks, "--trials", trials, "--no-cost", "--only", f"^({'|'.join(FAULTS)})-{model}-foreach-nosync$")
    return {"table": counted(found.get("rows", [])), **found}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=24, help="of the cost's measurement")
    args = parser.parse_args()
    ranks = torch.cuda.device_count()
    parts = {
        "stop and skip": lambda: of("stop.py", "--ranks", ranks),
        "stop and skip, batches on the GPU": lambda: of("stop.py", "--ranks", ranks, "--resident"),
        **{f"rescue, {model}": lambda model=model: rescues(ranks, args.trials, model) for model in ("hsdp", "ddp", "fsdp2")},
        "cost": lambda: of("../bench/gpu_step.py", "--ranks", ranks, "--rounds", args.rounds, "--only", SEVERAL),
    }
    results: dict[str, Any] = {"machine": machine(), "command": " ".join(["python tests/gpu/many.py", *sys.argv[1:]])}
    if args.out.exists():
        results |= json.loads(args.out.read_text())
    for name, part in parts.items():
        if re.search(args.only, name):
            results[name] = part()
            args.out.write_text(json.dumps(results, indent=1) + "\n")
            print(name, json.dumps(results[name].get("table", list(results[name]))), flush=True)


if __name__ == "__main__":
    main()
