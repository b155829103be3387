"""Real ranks for the keeper's tests: a shim folder whose sitecustomize does what the agent's does, and nothing else."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch_watchdog_agent

AGENT_ROOT = Path(torch_watchdog_agent.__file__).resolve().parent.parent
DEADLINE_S = 40.0  # far more than anything takes: the machine may be busy

SHIM = """
import os
from pathlib import Path
from torch_watchdog_agent import copied, keeper

def say(text):
    os.write(2, f"[torch-watchdog] {text}\\n".encode())

def hold():
    path = os.environ.get("KEEPER_TEST_RELEASED")
    if not path:
        return None
    from torch_watchdog_agent.holdback import HoldBack
    return HoldBack(Path(path), launcher_pid=int(os.environ["KEEPER_TEST_LAUNCHER"]), grace_s=float(os.environ["KEEPER_TEST_GRACE"]))

mode, log = os.environ.pop("KEEPER_TEST_MODE", None), os.environ.get("KEEPER_TEST_LOG")
if mode == "guard":
    keeper.stand_guard(log_path=Path(log) if log else None, say=say, hold=hold())
elif mode == "tee":
    copied.tee_only(log_path=Path(log), say=say)
"""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Starts ranks: `mode` is "guard", "tee" or "plain" (as if we were not there)."""

    folder: Path

    def command(self, code: str) -> list[str]:
        return [sys.executable, "-c", code]

    def environment(self, mode: str, log: Path | None = None) -> dict[str, str]:
        shim = self.folder / "shim"
        if not shim.exists():
            shim.mkdir()
            (shim / "sitecustomize.py").write_text(SHIM)
        path = os.pathsep.join([str(shim), str(AGENT_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        found = {**os.environ, "PYTHONPATH": path, "KEEPER_TEST_MODE": mode, "PYTHONDONTWRITEBYTECODE": "1"}
        return found if log is None else {**found, "KEEPER_TEST_LOG": str(log)}

    def start(self, code: str, *, mode: str = "guard", log: Path | None = None, **options: object) -> subprocess.Popen[bytes]:
        return subprocess.Popen(  # type: ignore[call-overload, no-any-return]
            self.command(code), env=self.environment(mode, log), start_new_session=mode != "tee", **options
        )

    def run(self, code: str, *, mode: str = "guard", log: Path | None = None) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            self.command(code),
            env=self.environment(mode, log),
            start_new_session=mode != "tee",
            capture_output=True,
            timeout=DEADLINE_S,
            check=False,
        )


def eventually(condition: Callable[[], object], what: str) -> None:
    """Wait for what another process does; bounded."""
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end_s, f"within {DEADLINE_S:g} s: {what}"
        select.select([], [], [], 0.005)


def is_alive(pid: int) -> bool:
    """False for a zombie too: what waits to be reaped does nothing any more."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def read_line(process: subprocess.Popen[bytes]) -> bytes:
    """The next line of its stdout; fails rather than waits for ever."""
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], DEADLINE_S)[0], "no line arrived"
    return process.stdout.readline()


@dataclass(kw_only=True)
class Terminal:
    """A rank on a real terminal; `controlling`: it leads that terminal's session, so that Ctrl-C reaches it."""

    master: int
    process_pid: int
    received: bytearray = field(default_factory=bytearray)

    def read_until(self, text: bytes) -> None:
        eventually(lambda: text in self._read(), f"{text!r} on the terminal, which shows {bytes(self.received[-500:])!r}")

    def type(self, text: bytes) -> None:
        os.write(self.master, text)

    def end(self) -> int:
        """Its exit status as Popen tells it; everything on the terminal is in `received`."""
        found: list[int] = []

        def has_ended() -> bool:
            self._read()
            pid, status = os.waitpid(self.process_pid, os.WNOHANG)
            found[:] = [status] if pid else []
            return bool(pid)

        eventually(has_ended, f"the rank ends; the terminal shows {bytes(self.received[-500:])!r}")
        self._read()
        os.close(self.master)
        return os.waitstatus_to_exitcode(found[0])

    def _read(self) -> bytearray:
        while select.select([self.master], [], [], 0)[0]:
            try:
                self.received += os.read(self.master, 65_536)
            except OSError:
                break
        return self.received


def on_terminal(command: list[str], environment: Mapping[str, str], size: tuple[int, int] = (24, 80)) -> Terminal:
    """Start `command` as the leader of a new session whose controlling terminal is a new pseudo-terminal."""
    import fcntl
    import struct
    import termios

    pid, master = pty.fork()
    if pid == 0:
        os.read(0, 1)  # the test's word that the size is set
        os.execve(command[0], command, dict(environment))
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
    os.write(master, b"\n")
    return Terminal(master=master, process_pid=pid)


def end_for_sure(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass
