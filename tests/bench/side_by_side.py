"""The same faults under plain torchrun, NVIDIA's ft_launcher, torchft and the watchdog: `python tests/bench/side_by_side.py`.

One training (`faulty_train.py`, two ranks, gloo), five faults of rank 1 in its step 20, and clean runs for the cost. Of each: seconds from the fault to the
end of the whole job, exit code, steps lost against the newest checkpoint that is there, and whether rank and sample are in what a person is left with.
The other launchers are installed into an environment of their own, which borrows this one's torch. Resumable: what is in the results is not run again.

They are for different things: torchrun starts processes again; ft_launcher does, and finds hangs by heartbeats and sections; torchft lets the replicas
that are left train on. None of the three is meant to look at batches or losses.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1]))

from faulty_train import AT, CLEAN_STEPS, SAMPLE
from measuring import RESULTS, about, keep
from ports import free_port

HERE, BIN = Path(__file__).parent, Path(sys.executable).parent
FAULTS = ("bad label", "bad batch", "nan loss", "kill -9", "stopped")
LAUNCHERS = ("torchrun", "ft_launcher", "torchft", "watchdog")
OTHERS = ("defusedxml", "nvidia-ml-py", "packaging", "psutil>=6", "pynvml", "pyyaml", "opentelemetry-exporter-otlp-proto-http>=1.39.0")
WHEELS = ("nvidia-resiliency-ext==0.4.1", "torchft-nightly")  # without their torch
LATEST_S = 75.0  # more than the process group's timeout of 30 s, and what comes after it
COMMAND = "python tests/bench/side_by_side.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=1)
    parser.add_argument("--clean", type=int, default=3)
    parser.add_argument("--venv", type=Path, default=Path(tempfile.gettempdir()) / "side-by-side-venv")
    parser.add_argument("--for", dest="seconds", type=float, default=float("inf"), help="begin nothing after so many seconds")
    parser.add_argument("--out", type=Path, default=RESULTS / "side_by_side.json")
    given = parser.parse_args()
    until = time.monotonic() + given.seconds
    known: dict[str, Any] = (
        json.loads(given.out.read_text()) if given.out.exists() else about(COMMAND) | {"others": installed(given.venv), "runs": {}}
    )
    faulty = [(launcher, fault, trial) for fault in FAULTS for launcher in LAUNCHERS for trial in range(given.trials)]
    clean = [(launcher, "none", trial) for trial in range(given.clean) for launcher in LAUNCHERS]  # in turns
    wanted = sorted(faulty + clean, key=lambda one: one[1] == "stopped")  # what waits for timeouts comes last
    for launcher, fault, trial in wanted:
        name = f"{launcher}, {fault}, {trial}"
        if name in known["runs"] or time.monotonic() > until:
            continue
        known["runs"][name] = found = run(launcher, fault, given.venv)
        print(name, json.dumps(found)[:300], flush=True)
        keep(known, given.out)
        given.out.with_suffix(".md").write_text(table(known))
    print(table(known))


def installed(venv: Path) -> dict[str, str]:
    """Versions of the others; what cannot be installed is said."""
    if not (venv / "bin" / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        (packages,) = (venv / "lib").glob("*/site-packages")
        (packages / "torch.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    pip = [str(venv / "bin" / "pip"), "install", "-q", "--disable-pip-version-check"]
    for wheel in (*OTHERS, *WHEELS):
        subprocess.run(
            [*pip, *(["--no-deps"] if wheel in WHEELS else []), wheel], check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
    names = tuple(wheel.partition("==")[0] for wheel in WHEELS)
    code = f"import importlib.metadata as m, json; print(json.dumps({{name: m.version(name) for name in {names}}}))"
    told = subprocess.run([str(venv / "bin" / "python"), "-c", code], capture_output=True, text=True, check=False)
    return json.loads(told.stdout) if told.returncode == 0 else {"not installed": told.stderr[-300:]}


def run(launcher: str, fault: str, venv: Path) -> dict[str, Any]:
    out = Path(tempfile.mkdtemp(prefix="side-"))
    log = (out / "log").open("wb")
    processes = begun(launcher, fault, out, venv, log)
    try:
        ended_ns, codes = waited(processes)
    finally:
        for process in processes:
            _end(process)
        log.close()
    try:
        text = (out / "log").read_text(errors="replace")
        return judged(launcher, fault, out, text, ended_ns, codes)
    finally:
        shutil.rmtree(out, ignore_errors=True)


def begun(launcher: str, fault: str, out: Path, venv: Path, log: Any) -> list[subprocess.Popen[bytes]]:
    """The launcher; torchft has none: its replicas, which a person's scheduler would start, and their lighthouse."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_WATCHDOG")} | {"OMP_NUM_THREADS": "1"}
    training = [str(HERE / "faulty_train.py"), str(out), fault, launcher]
    rendezvous = ["--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}"]
    commands: list[tuple[list[str], dict[str, str]]]
    if launcher == "torchft":
        port = free_port()
        lighthouse = [
            str(venv / "bin" / "torchft_lighthouse"),
            "--min_replicas",
            "1",
            "--quorum_tick_ms",
            "100",
            "--join_timeout_ms",
            "5000",
            "--bind",
            f"[::]:{port}",
        ]
        own = {"TORCHFT_LIGHTHOUSE": f"http://localhost:{port}", "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
        replicas = [{**own, "REPLICA_GROUP_ID": str(number), "MASTER_PORT": str(free_port())} for number in range(2)]
        commands = [([str(venv / "bin" / "python"), *training], replica) for replica in replicas] + [(lighthouse, {})]
    elif launcher == "ft_launcher":
        beats = ["--ft-initial-rank-heartbeat-timeout", "60", "--ft-rank-heartbeat-timeout", "10", "--max-restarts", "0"]
        commands = [([str(venv / "bin" / "ft_launcher"), *rendezvous, *beats, *training], {})]
    else:
        ours = [str(BIN / "watchdog"), "--dir", str(out / "runs"), "--job", "side"] if launcher == "watchdog" else []
        commands = [([*ours, str(BIN / "torchrun"), *rendezvous, *training], {})]
    return [
        subprocess.Popen(command, env=kept | own, stdout=log, stderr=log, cwd=out, start_new_session=True)
        for command, own in commands
    ]  # fmt: skip


def waited(processes: list[subprocess.Popen[bytes]]) -> tuple[int | None, list[int | None]]:
    """When the job was over (None: not in time), and the exit codes. A lighthouse, the third, goes on by itself."""
    job, deadline = processes[:2], time.monotonic() + LATEST_S
    while any(process.poll() is None for process in job):
        if time.monotonic() > deadline:
            return None, [process.poll() for process in job]
        time.sleep(0.02)
    return time.time_ns(), [process.poll() for process in job]


def judged(launcher: str, fault: str, out: Path, text: str, ended_ns: int | None, codes: list[int | None]) -> dict[str, Any]:
    steps = {rank: _steps(out / f"steps-{rank}") for rank in range(2)}
    if fault == "none":
        times_ms = [(after - before) / 1e6 for (_, before), (_, after) in zip(steps[0][20:], steps[0][21:], strict=False)]
        done = len(steps[0]) == CLEAN_STEPS
        return {
            "exit_codes": codes,
            "step_ms": round(statistics.median(times_ms), 3) if done else None,
            **({} if done else {"tail": text[-1500:]}),
        }
    struck = out / "fault"
    if not struck.exists():
        return {"exit_codes": codes, "not_run": text[-1500:]}
    fault_ns = int(struck.read_text())
    after = [at for step, at in steps[0] if step >= AT and at > fault_ns]
    saved = _checkpoint_step(out)
    own = out / "own-checkpoint-step"
    saved = max(saved, int(own.read_text()) if own.exists() else 0)
    said = _said(out, text)
    to_its_end = all(len(found) for found in steps.values()) and steps[0][-1][0] == 49
    goes_on = launcher == "torchft" and bool(after)
    return {
        "exit_codes": codes,
        "fault_to_end_s": None if ended_ns is None else round((ended_ns - fault_ns) / 1e9, 2),
        "trained_to_its_end": to_its_end,
        "survivor_goes_on_after_s": round((after[0] - fault_ns) / 1e9, 2) if goes_on else None,
        "steps_lost": 0 if to_its_end or goes_on else max(0, AT - saved),
        "rank_named": not to_its_end
        and bool(re.search(r"rank\s*:?\s*1\b|rank1\b", said))
        and not re.search(r"first observed failure\):.*?rank\s*:\s*0", said, re.DOTALL),
        "sample_named": bool(re.search(rf"sample {SAMPLE}\b", said)),
        "checkpoint_of_the_fault": _checkpoint_step(out),
    }


def _steps(path: Path) -> list[tuple[int, int]]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(step), int(at)) for step, at in (line.split() for line in lines if line.count(" ") == 1)]


def _checkpoint_step(out: Path) -> int:
    found = [path.parent.name for path in out.glob("runs/side/checkpoints/*/COMMITTED")]
    return max((int(name.rpartition("-")[2]) for name in found), default=0)


def _said(out: Path, text: str) -> str:
    incidents = [json.loads(path.read_text()) for path in out.glob("runs/side/incidents/*/incident.json")]
    return text + "\n".join(f"rank {one['origin']['rank']} {one['summary']}" for one in incidents)


def _end(process: subprocess.Popen[bytes]) -> None:
    """It, and what it has left: ranks in sessions of their own are found by what they are."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGCONT)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)


def table(known: dict[str, Any]) -> str:
    lines = [
        "# Side by side", "",
        f"Written by `{known['command']}`, {known['date']}: torch {known['versions']['torch']}, {known['others']}, {known['machine']['cores']} cores.", "",
        "| fault | launcher | seconds to the end of the job | exit code | steps lost | rank named | sample named | checkpoint of the fault |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name, one in known["runs"].items():
        launcher, fault, _ = name.split(", ")
        if fault == "none":
            continue
        if "not_run" in one:
            lines.append(f"| {fault} | {launcher} | did not run | {one['exit_codes']} | | | | |")
            continue
        ends = f"not within {LATEST_S:.0f}" if one["fault_to_end_s"] is None else f"{one['fault_to_end_s']:.1f}"
        if one["survivor_goes_on_after_s"] is not None and one["exit_codes"] != [0, 0]:
            ends = f"the other replica trains on after {one['survivor_goes_on_after_s']:.1f}"
        elif one["trained_to_its_end"]:
            ends = "trains on to its end"
        word = {True: "yes", False: "no"}
        lines.append(
            f"| {fault} | {launcher} | {ends} | {one['exit_codes'][0]} | {one['steps_lost']} | {word[one['rank_named']]} | {word[one['sample_named']]} | "
            f"{one['checkpoint_of_the_fault'] or 'none'} |"
        )
    return "\n".join([*lines, "", *_costs(known["runs"])]) + "\n"


def _costs(runs: dict[str, Any]) -> list[str]:
    """Median step of clean runs, against torchrun's in the same turns."""
    times = {
        launcher: [one["step_ms"] for name, one in runs.items() if name.startswith(f"{launcher}, none") and one["step_ms"]]
        for launcher in LAUNCHERS
    }
    usual = statistics.median(times["torchrun"]) if times["torchrun"] else None
    told = [
        f"{launcher} {statistics.median(found):.1f} ms ({statistics.median(found) / usual:.3f})"
        for launcher, found in times.items()
        if found and usual
    ]
    return ["Median step of clean runs, the ratio to torchrun's: " + ", ".join(told) + "."] if told else []


if __name__ == "__main__":
    main()
