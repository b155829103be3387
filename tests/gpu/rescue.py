"""A rank fails on real GPUs: run by hand on a machine with two or more, `python tests/gpu/rescue.py --out FILE.json`, `--ranks 8` for more of them. More
ranks than cards share one (one_card/sitecustomize.py).

For every fault, model, optimizer and kind of loop: was the healthy rank's state saved bit-identical to an update that all had applied, or refused with a
reason; was the culprit named; how long from the fault to the last rank's freedom. Never may a saved state differ. And what the gate on the device costs.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import mmap
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
from launching import Ended, environment

SCRIPT = Path(__file__).parent / "scripts" / "failing.py"
WATCHDOG = [sys.executable, "-m", "torch_watchdog.cli"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
FAULTS = ("raise", "kill", "exit3", "segv", "stop", "loop", "embedding", "label", "gather", "bce")
KINDS = {
    "raise": "rank.exception",
    "exit3": "rank.exception",
    "kill": "rank.died",
    "segv": "rank.died",
    "stop": "rank.hang",
    "loop": "rank.hang",
}
CODES = {"raise": 1, "exit3": 1, "kill": 1, "segv": 1, "stop": 75, "loop": 75}  # all others are assertions of the batch's: 65
PORTS = itertools.count(20_000)  # below those that the kernel gives to anybody who asks: several trials run at a time
# slow: the healthy rank's loader hands a batch over while the rescue is under way; deep: its step has more launches than the device's queue takes
# bn: with buffers that each step changes; hsdp: two copies, each sharded over half of the ranks
MODELS = ("ddp", "bn", "deep", "slow", "fsdp2", "hsdp")
AT = 30  # the step in which scripts/failing.py fails
FEW = ("raise", "kill", "stop", "embedding")
TOO_LONG_S = float(os.environ.get("TOO_LONG_S", "150"))
TOLD = (
    "fault",
    "model",
    "optimizer",
    "sync",
    "outcome",
    "updates",
    "culprit",
    "step",
    "kind",
    "exit_code",
    "seconds_from_fault_to_incident",
    "seconds_to_free",
    "seconds",
)
AT_ONCE = int(os.environ.get("AT_ONCE", "3"))
RANKS = 2
ENVIRONMENT = {
    "TORCH_WATCHDOG_DEVICE_GATE": os.environ.get("DEVICE_GATE", "true"),
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": os.environ.get("TORCH_NCCL_RETHROW_CUDA_ERRORS", "1"),
}


def launched(folder: Path, wrapper: list[str], *arguments: object) -> Ended:
    folder.mkdir(parents=True)
    command = [*TORCHRUN, "--nproc-per-node", str(RANKS), "--master-port", str(next(PORTS)), str(SCRIPT), *map(str, arguments)]
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        process = subprocess.Popen(
            [*wrapper, *command], cwd=folder, env=environment(**ENVIRONMENT), stdout=out, stderr=err, start_new_session=True
        )
        try:
            code = process.wait(TOO_LONG_S)
        except subprocess.TimeoutExpired:
            code = -99
            end_all_of(process, folder / "stacks")
    return Ended(code, (folder / "out").read_text(errors="replace"), (folder / "err").read_text(errors="replace"), folder)


def end_all_of(process: subprocess.Popen[bytes], stacks: Path) -> None:
    """The trial's processes, ranks in sessions of their own too: the next trials need the cards. Where they were is kept."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True).stdout.split()
    parents = dict(zip(map(int, listed[::2]), map(int, listed[1::2]), strict=True))
    mine = {process.pid}
    while more := {pid for pid, parent in parents.items() if parent in mine and pid not in mine}:
        mine |= more
    for pid in mine:
        told = subprocess.run(["py-spy", "dump", "--nonblocking", "--pid", str(pid)], capture_output=True, text=True, check=False)
        with stacks.open("a") as out:
            out.write(told.stdout + told.stderr)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def reference(folder: Path, model: str, optimizer: str) -> dict[int, str]:
    """The digest after each update, of a run without a fault."""
    run = launched(folder / f"reference-{model}-{optimizer}", [], "--model", model, "--optimizer", optimizer, "--trail", "--steps", 60)
    if run.code != 0:
        raise RuntimeError(run.err[-2000:])
    lines = (run.folder / "trail-0").read_text().split("\n")
    return {int(line.split()[0]): line.split()[1] for line in lines if line}


def checked(folder: Path, path: str, model: str, optimizer: str) -> str:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--check", path, "--model", model, "--optimizer", optimizer], cwd=folder, env=environment(**ENVIRONMENT),
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    found = re.search(r"checked \d+ (\w+)", done.stdout)
    return found[1] if found else done.stderr[-300:]


def row(folder: Path, fault: str, model: str, optimizer: str, sync: bool, known: dict[int, str], trial: int = 0) -> dict[str, Any]:
    arguments = ["--fault", fault, "--model", model, "--optimizer", optimizer, *(["--sync"] if sync else [])]
    timeout_s = 30 if fault in ("stop", "loop") else 600
    began = time.time()
    name = f"{fault}-{model}-{optimizer}-{'sync' if sync else 'nosync'}-{trial}"
    run = launched(folder / name, WATCHDOG, *arguments, "--timeout", timeout_s)
    seen: dict[str, Any] = {
        "fault": fault,
        "model": model,
        "optimizer": optimizer,
        "sync": sync,
        "exit_code": run.code,
        "seconds": time.time() - began,
    }
    seen["exit_right"] = run.code == CODES.get(fault, 65)
    stacks = run.folder / "stacks"
    if stacks.exists():  # it was ended by us
        seen["stacks"] = stacks.read_text()[-20000:]
    try:
        incident = next(found for found in run.incidents if found["kind"].startswith("rank."))
    except (StopIteration, ValueError):
        errors = [line for line in run.err.splitlines() if "Error" in line or "[torch-watchdog]" in line]
        return seen | {"outcome": "no incident", "tail": "\n".join(errors)[:3000]}
    action = incident["action"]
    point = action["checkpoint"]
    if fault_at := re.search(r"rank 1 fault ([\d.]+)", run.out):
        seen["seconds_from_fault_to_incident"] = datetime.datetime.fromisoformat(incident["time"]).timestamp() - float(fault_at[1])
    seen["said"] = [line[:300] for line in run.err.splitlines() if "[torch-watchdog]" in line][:40]
    seen |= {
        "kind": incident["kind"], "culprit": incident["origin"]["rank"], "culprit_right": incident["origin"]["rank"] == 1,
        "step": incident["step"], "step_right": incident["step"] == AT,
        "kind_right": incident["kind"] == KINDS.get(fault, "rank.assert"), "summary": incident["summary"][:300], "cause": incident["cause"][-300:],
        "seconds_to_free": action["seconds_to_stop"],
    }  # fmt: skip
    if point is None:
        return seen | {"outcome": "refused"}
    same = checked(run.folder, str(run.folder / point["path"]), model, optimizer) == known.get(point["updates_applied"])
    return seen | {"updates": point["updates_applied"], "outcome": "bit-identical" if same and point["committed"] else "POISONED"}


def cost() -> dict[str, Any]:
    """The step of one GPU with the gate and without, by turns, five times each."""
    from torch_watchdog_agent.rescue.device import DeviceGate
    from torch_watchdog_proto.record import DEVICE_WORDS_BYTES

    with tempfile.TemporaryFile(dir="/dev/shm") as file:  # as a rank's ring is: others see the gate's words
        file.truncate(mmap.PAGESIZE)
        words = memoryview(mmap.mmap(file.fileno(), mmap.PAGESIZE))
    gate = DeviceGate(torch.device("cuda", 0), words[:DEVICE_WORDS_BYTES])
    gate.after_update(7)
    torch.cuda.synchronize()
    is_shared = 7 in words.cast("i")[: DEVICE_WORDS_BYTES // 4]
    model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(2048, 2048), torch.nn.GELU()) for _ in range(24)]).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = torch.randn(1024, 2048, device="cuda")

    def steps(gated: bool) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for number in range(1, 101):
            model(batch).square().mean().backward()
            if gated:
                gate.before_update(number)
            optimizer.step()
            if gated:
                gate.after_update(number)
            optimizer.zero_grad()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) * 10

    steps(False)
    times: dict[bool, list[float]] = {False: [], True: []}
    for gated in (False, True) * 5:
        times[gated].append(steps(gated))
    return {
        "words_are_shared": is_shared,
        "plain_ms": times[False],
        "gated_ms": times[True],
        "ratio": statistics.median(times[True]) / statistics.median(times[False]),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="a regular expression over fault-model-optimizer-sync|nosync")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--trials", type=int, default=1)
    parser.add_argument("--no-cost", action="store_true", help="without the cost of the gate")
    args = parser.parse_args()
    global RANKS
    RANKS = args.ranks
    if torch.cuda.device_count() < RANKS:
        ENVIRONMENT["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent / "one_card"), os.environ.get("PYTHONPATH", "")])
    folder = Path(tempfile.mkdtemp(prefix="rescue-"))
    result: dict[str, Any] = {
        "cards": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())], "torch": torch.__version__,
        "driver": subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True).stdout.split()[0],
        "python": platform.python_version(), "date": datetime.date.today().isoformat(), "rows": [],
    }  # fmt: skip
    table = [
        (fault, model, optimizer, sync, trial)
        for fault, model, optimizer, sync, trial in itertools.product(
            FAULTS, MODELS, ("foreach", "fused"), (True, False), range(args.trials)
        )
        if (model in ("ddp", "fsdp2") or fault in FEW)
        and re.search(args.only, f"{fault}-{model}-{optimizer}-{'sync' if sync else 'nosync'}")
    ]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        whole = {place[1:3] for place in table if place[1] != "fsdp2"}
        known = dict(zip(whole, pool.map(lambda place: reference(folder, *place), whole), strict=True))
        for one in pool.map(lambda place: row(folder, *place[:4], known.get(place[1:3], {}), place[4]), table):
            result["rows"].append(one)
            print(json.dumps({name: one.get(name) for name in TOLD}), flush=True)
            args.out.write_text(json.dumps(result, indent=1))
    if not args.no_cost:
        result["cost"] = cost()
    args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
