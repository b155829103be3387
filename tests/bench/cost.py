"""What the watchdog costs, by runs that alternate on this machine: a launch, its start, a line of output, a training step.

`make bench`. Nothing is judged here; the numbers belong into the change that moves them.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
NUM_ROUNDS, NUM_LINES, NUM_STEPS = 5, 500, 300

ECHO = "import os, sys\nos.write(1, b'up\\n')\nfor line in sys.stdin.buffer: os.write(1, line)"


def watched(command: list[str], runs: Path) -> list[str]:
    return [str(Path(sys.executable).with_name("watchdog")), "--dir", str(runs), *command]


def launch_ms(command: list[str]) -> float:
    began_s = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return (time.perf_counter() - began_s) * 1e3


def start_ms(command: list[str]) -> float:
    """Until the command itself says its first word."""
    began_s = time.perf_counter()
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        took_ms = (time.perf_counter() - began_s) * 1e3
        process.stdout.read()
    return took_ms


def line_ms(command: list[str]) -> float:
    """From a line on its standard input to the same line on its standard output."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        times_ms = []
        for _ in range(NUM_LINES):
            began_s = time.perf_counter()
            process.stdin.write(b"a line\n")
            process.stdout.readline()
            times_ms.append((time.perf_counter() - began_s) * 1e3)
        process.stdin.close()
        process.stdout.read()
    return statistics.median(times_ms)


def step_ms(command: list[str]) -> float:
    found = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return float(found.stdout.split()[-1])


def compare(what: str, command: list[str], measure: Callable[[list[str]], float], runs: Path) -> None:
    plain, ours = [], []
    for _ in range(NUM_ROUNDS):
        plain.append(measure(command))
        ours.append(measure(watched(command, runs)))
    ratio = statistics.median(mine / theirs for mine, theirs in zip(ours, plain, strict=True))
    more_ms = statistics.median(mine - theirs for mine, theirs in zip(ours, plain, strict=True))
    figures = f"plain {statistics.median(plain):9.3f} ms   watched {statistics.median(ours):9.3f} ms   more {more_ms:9.3f} ms   ratio {ratio:7.3f}"
    print(f"{what:<8} {figures}   {shown(command)}", flush=True)


def shown(command: list[str]) -> str:
    return " ".join(Path(word).name if "/" in word else word.partition("\n")[0] for word in command)


def main() -> None:
    print(f"medians of {NUM_ROUNDS} alternating rounds", flush=True)
    with tempfile.TemporaryDirectory() as runs:
        compare("launch", [sys.executable, "-c", "pass"], launch_ms, Path(runs))
        compare("start", [sys.executable, "-c", "import os; os.write(1, b'up')"], start_ms, Path(runs))
        compare("line", [sys.executable, "-c", ECHO], line_ms, Path(runs))
        compare("step", [sys.executable, str(HERE / "loop.py"), str(NUM_STEPS)], step_ms, Path(runs))


if __name__ == "__main__":
    main()
