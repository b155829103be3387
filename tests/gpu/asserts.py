"""Bad batches of every kind of device-side assertion, on a real GPU: `python tests/gpu/asserts.py --out FILE.json`.

Each kind runs in processes of its own: on the CPU under the watchdog (what it must say), and on the GPU under it with the batch moved by the loop and with
one that is on the GPU when the loader yields it; the bad value comes in a step whose bounds are known, and in the very first. Without the watchdog it
runs too: what would have happened. An assertion must never be reached, the context must work afterwards, and the finding must be the CPU's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
sys.path.insert(0, str(Path(__file__).parent / "scripts"))
from bad_value import KINDS
from launching import Ended, environment
from machine import machine

SCRIPT = Path(__file__).resolve().parent / "scripts" / "bad_value.py"
WATCHDOG = [sys.executable, "-m", "torch_watchdog.cli"]
RUNS: dict[str, tuple[list[str], list[str]]] = {
    "cpu, later step": (WATCHDOG, ["--device", "cpu"]),
    "cpu, first step": (WATCHDOG, ["--device", "cpu", "--bad-step", "0"]),
    "plain": ([], []),
    "moved by the loop, later step": (WATCHDOG, []),
    "moved by the loop, first step": (WATCHDOG, ["--bad-step", "0"]),
    "on the GPU already, later step": (WATCHDOG, ["--resident"]),
    "on the GPU already, first step": (WATCHDOG, ["--resident", "--bad-step", "0"]),
}
FACTS = ("kind", "step", "summary", "cause", "fix")


def run(folder: Path, kind: str, name: str) -> dict[str, Any]:
    wrapper, options = RUNS[name]
    place = folder / kind / name.replace(" ", "-").replace(",", "")
    place.mkdir(parents=True)
    command = [*wrapper, sys.executable, str(SCRIPT), kind, *options]
    done = subprocess.run(command, cwd=place, env=environment(), capture_output=True, text=True, timeout=300, check=False)
    ended = Ended(done.returncode, done.stdout, done.stderr, place)
    text = ended.out + ended.err
    seen: dict[str, Any] = {
        "exit code": ended.code,
        "assertion": "device-side assert" in text or "Assertion `" in text,
        "context works": "context works" in ended.out,
    }
    if wrapper:
        incidents = ended.incidents
        seen["finding"] = _said(incidents[0]) if incidents else None
        if not incidents:
            seen["output"] = text[-1500:]
    return seen


def _said(incident: dict[str, Any]) -> dict[str, Any]:
    """All facts but the device, which is another one on purpose."""
    where = {name: value for name, value in (incident.get("batch") or {}).items() if name != "device"}
    said = {**{name: incident[name] for name in FACTS}, "batch": where, "bound": incident["bound"]}
    found: dict[str, Any] = json.loads(json.dumps(said).replace(f"{SCRIPT.parent}/", ""))
    return found


def judged(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One row: was the assertion kept away, and was the same said as on the CPU."""
    row: dict[str, Any] = {"without the watchdog": {k: runs["plain"][k] for k in ("exit code", "assertion", "context works")}}
    for name, seen in runs.items():
        if name in ("plain",) or name.startswith("cpu"):
            continue
        expected = runs["cpu, " + name.split(", ")[1]]["finding"]
        same = seen["finding"] is not None and json.dumps(seen["finding"]) == json.dumps(expected)  # NaN is not equal to itself
        row[name] = {
            "exit code": seen["exit code"], "no assertion": not seen["assertion"], "context works": seen["context works"],
            "says what it says on the CPU": same,
        }  # fmt: skip
        if not same:
            row[name] |= {"said": seen["finding"] or seen.get("output"), "on the CPU": expected}
    row["finding"] = (runs["on the GPU already, later step"]["finding"] or {}).get("summary")
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--jobs", type=int, default=10)
    parser.add_argument("--cpu-only", action="store_true", help="only what is said on the CPU: for a machine without a GPU")
    args = parser.parse_args()
    began = time.monotonic()
    names = [name for name in RUNS if name.startswith("cpu") or not args.cpu_only]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        futures = {kind: {name: pool.submit(run, Path(folder), kind, name) for name in names} for kind in args.kinds}
        runs = {kind: {name: future.result() for name, future in of_kind.items()} for kind, of_kind in futures.items()}
    rows = {kind: of_kind if args.cpu_only else judged(of_kind) for kind, of_kind in runs.items()}
    results: dict[str, Any] = {"machine": machine(), "command": "python tests/gpu/asserts.py", "kinds": rows}
    if not args.cpu_only:
        guarded = [seen for row in rows.values() for name, seen in row.items() if "step" in name]
        results["totals"] = {
            "kinds": len(rows),
            "kinds that assert without the watchdog": sum(row["without the watchdog"]["assertion"] for row in rows.values()),
            "guarded runs": len(guarded),
            "reached an assertion": sum(not one["no assertion"] for one in guarded),
            "context works afterwards": sum(one["context works"] for one in guarded),
            "same finding as on the CPU": sum(one["says what it says on the CPU"] for one in guarded),
            "seconds": round(time.monotonic() - began),
        }
    args.out.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results.get("totals", results), indent=1))


if __name__ == "__main__":
    main()
