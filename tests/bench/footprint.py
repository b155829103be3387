"""Memory and CPU that a watched launch takes besides its training: `python tests/bench/footprint.py`. One rank, some 45 steps a second, an embedded daemon.

A process's own memory is what nobody shares with it (USS). Prints a line a process, of the plain training first.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

WARM_S, LOOKED_AT_S, TRAINED_S, PAUSE_S = 16, 10, 32, 0.017


def main() -> None:
    training = [sys.executable, str(Path(__file__).resolve()), "--train"]
    with tempfile.TemporaryDirectory() as runs:
        watchdog = [str(Path(sys.executable).with_name("watchdog")), "--dir", runs]
        for title, command in (("plain", training), ("watched", [*watchdog, *training])):
            for line in looked_at(command):
                print(f"{title:<8} {line}", flush=True)


def looked_at(command: list[str]) -> list[str]:
    launch = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(WARM_S)
    root = psutil.Process(launch.pid)
    before = {process: cpu_s(process) for process in (root, *root.children(recursive=True))}
    time.sleep(LOOKED_AT_S)
    told = []
    for process, cpu_before_s in before.items():
        memory = process.memory_full_info()
        share = (cpu_s(process) - cpu_before_s) / LOOKED_AT_S
        what = "training" if "--train" in process.cmdline() and "watchdog" not in process.cmdline()[1] else "watchdog"
        told.append(f"{what}: {memory.rss / 2**20:.0f} MiB, {memory.uss / 2**20:.0f} of them its own, {share:.1%} of a core")
    assert launch.wait() == 0
    return told


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def train() -> None:
    import torch
    from overhead import stepping

    torch.set_num_threads(1)
    step, until = stepping("small", 8), time.monotonic() + TRAINED_S
    while time.monotonic() < until:
        step()
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    train() if "--train" in sys.argv[1:] else main()
