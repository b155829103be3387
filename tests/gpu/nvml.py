"""What the node process reads of real GPUs: `python tests/gpu/nvml.py --out FILE.json` on a machine that has them.

Beside a load of known size (memory held, matrices multiplied) the samples must show it on the very card, found by its UUID, whatever CUDA_VISIBLE_DEVICES
makes of the order. nvidia-smi is asked as well: the figures are its own.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from machine import machine

from torch_watchdog_agent.node.nvml import Gpus

HELD_BYTES = 3 << 30
FIELDS = {
    "memory.total": "memory_total_bytes",
    "memory.used": "memory_used_bytes",
    "temperature.gpu": "temperature_c",
    "power.draw": "power_w",
    "utilization.gpu": "utilisation_percent",
}


def hold(seconds: float) -> None:
    """The load: on the first visible card. Says which one that is, then works until told to end."""
    import torch

    held = torch.empty(HELD_BYTES, dtype=torch.uint8, device="cuda:0")
    left = torch.rand(8192, 8192, device="cuda:0", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    print(torch.cuda.get_device_properties(0).uuid, flush=True)
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        for _ in range(20):
            left @ left
        torch.cuda.synchronize()
    del held


def by_smi() -> dict[str, dict[str, str]]:
    """nvidia-smi's rows by UUID."""
    names = ["uuid", "index", *FIELDS, "ecc.mode.current", "ecc.errors.uncorrected.volatile.total"]
    asked = subprocess.run(
        ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits"], capture_output=True, text=True, check=False
    )
    rows = csv.reader(io.StringIO(asked.stdout), skipinitialspace=True)
    return {row[0]: dict(zip(names, row, strict=True)) for row in rows if row}


def under_load(gpus: Gpus, visible: str) -> dict[str, Any]:
    """The card that shows the load, by what NVML says, and the one that bears it, by what CUDA says."""
    before = {sample.uuid: sample.memory_used_bytes for sample in gpus.samples()}
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": visible}
    load = subprocess.Popen([sys.executable, __file__, "--hold", "7"], env=environment, stdout=subprocess.PIPE, text=True)
    assert load.stdout is not None
    bears = "GPU-" + load.stdout.readline().strip().removeprefix("GPU-")
    time.sleep(3)
    smi, samples = by_smi(), gpus.samples()
    load.wait()
    shows = max(samples, key=lambda sample: sample.memory_used_bytes - before[sample.uuid])
    return {
        "CUDA_VISIBLE_DEVICES": visible,
        "bears the load": bears,
        "shows the load": shows.uuid,
        "same card": bears == shows.uuid,
        "memory that appeared (GiB)": round((shows.memory_used_bytes - before[shows.uuid]) / 2**30, 2),
        "samples": [dataclasses.asdict(sample) for sample in samples],
        "nvidia-smi": list(smi.values()),
        "agrees with nvidia-smi": all(_agrees(dataclasses.asdict(sample), smi.get(sample.uuid)) for sample in samples),
    }


def _agrees(sample: dict[str, Any], smi: dict[str, str] | None) -> bool:
    """Within what changes between two questions."""
    if smi is None or smi["index"] != str(sample["index"]):
        return False
    slack = {"memory.total": 0.02, "memory.used": 0.05, "temperature.gpu": 0.1, "power.draw": 0.3, "utilization.gpu": 0.5}
    for name, field in FIELDS.items():
        ours = sample[field] / (1 << 20 if field.endswith("bytes") else 1)
        if abs(ours - float(smi[name])) > max(30.0, slack[name] * float(smi[name])):
            return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--hold", type=float)
    args = parser.parse_args()
    if args.hold:
        hold(args.hold)
        return
    gpus = Gpus.open()
    if gpus is None or args.out is None:
        sys.exit("no NVML here (pip install nvidia-ml-py), or no --out")
    began = time.perf_counter()
    count = len(gpus.samples())
    took_ms = (time.perf_counter() - began) * 1e3
    orders = [",".join(map(str, order)) for order in ([range(count), range(count - 1, -1, -1)] if count > 1 else [[0]])]
    loads = [under_load(gpus, order) for order in orders]
    if count > 1:
        loads.append(under_load(gpus, loads[0]["samples"][-1]["uuid"]))
    results = {
        "machine": machine(),
        "command": "python tests/gpu/nvml.py",
        "cards": count,
        "ms for all samples": round(took_ms, 2),
        "loads": loads,
        "every load on the right card": all(load["same card"] for load in loads),
        "agrees with nvidia-smi": all(load["agrees with nvidia-smi"] for load in loads),
    }
    args.out.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps({name: value for name, value in results.items() if name != "loads"}, indent=1))


if __name__ == "__main__":
    main()
