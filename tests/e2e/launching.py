"""Starts real launches for the end-to-end tests: one folder a test, a free port, one thread a rank."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for scripts that use this beside pytest
from ports import free_port

BIN = Path(sys.executable).parent
SCRIPTS = Path(__file__).parent / "scripts"
TIMEOUT_S = 240


@dataclass(frozen=True)
class Ended:
    """What a launch left behind. `code` is negative for a signal, as subprocess has it."""

    code: int
    out: str
    err: str
    folder: Path

    @property
    def run_dir(self) -> Path:
        (found,) = [path for path in (self.folder / "watchdog_runs").iterdir() if (path / "job.json").exists()]
        return found

    @property
    def incidents(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted(self.run_dir.glob("incidents/*/incident.json"))]

    def lines(self, pattern: str) -> list[str]:
        """Lines of standard output that match, sorted: ranks print in any order."""
        return sorted(line for line in self.out.splitlines() if re.search(pattern, line))


def torchrun(*arguments: str, ranks: int = 2, options: tuple[str, ...] = ()) -> list[str]:
    return [str(BIN / "torchrun"), "--nproc-per-node", str(ranks), "--master-port", str(free_port()), *options, *arguments]


def is_torchrun(pid: int) -> bool:
    """However it was started: some installations' `torchrun` is a line of shell that runs its module."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:  # it has ended meanwhile
        return False
    return words[1:3] == [b"-m", b"torch.distributed.run"] or (words[1:] != [] and words[1].endswith(b"/torchrun"))


def script(name: str, *arguments: object) -> list[str]:
    return [str(SCRIPTS / name), *map(str, arguments)]


def watchdog(*options: str) -> list[str]:
    return [str(BIN / "watchdog"), *options]


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TORCH_WATCHDOG", "PYTEST"))}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1", **more}


def launch(folder: Path, command: list[str], **more: str) -> Ended:
    """Runs the command in `folder` to its end."""
    done = subprocess.run(command, cwd=folder, env=environment(**more), capture_output=True, text=True, timeout=TIMEOUT_S)
    return Ended(done.returncode, done.stdout, done.stderr, folder)


def start(folder: Path, command: list[str], **more: str) -> subprocess.Popen[str]:
    """Starts the command in `folder`; its output goes to files there, so that nobody has to read it meanwhile."""
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        return subprocess.Popen(command, cwd=folder, env=environment(**more), stdout=out, stderr=err, text=True)


def ended(process: subprocess.Popen[str], folder: Path) -> Ended:
    code = process.wait(TIMEOUT_S)
    return Ended(code, (folder / "out").read_text(), (folder / "err").read_text(), folder)


def until(true: Callable[[], bool], what: str, within_s: float = 180.0) -> None:
    """Polls, within a bound, for what another process does."""
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
        time.sleep(0.05)
