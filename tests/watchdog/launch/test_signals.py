"""Signals on their way to the command, and an end that looks like the command's own. Real processes; each wait is bounded."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from process_tree import children

WRAPPER = """
import os, sys
from torch_watchdog.launch import signals
from torch_watchdog.launch.witness import open_witness
mask = signals.block_signals()
with open_witness(signals.FORWARDED) as witness:
    early = signals.pending_end()
    pid = signals.spawn(sys.argv[1:], os.environ, mask=mask)
    status = signals.wait_forwarding(pid, witness, tick=lambda: None, came=lambda _: None)
signals.end_like(status, mask)
"""
# Counts what it gets, says so, and ends after SIGTERM or a line on stdin.
COUNTER = """
import os, signal, sys
def note(number, frame):
    os.write(1, f"got {number}\\n".encode())  # a print would fail inside another one
    if number == signal.SIGTERM: sys.exit(7)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP): signal.signal(number, note)
os.write(1, b"ready\\n")
while True: signal.pause()
"""
TIMEOUT_S = 30


def wrapped(*command: str) -> list[str]:
    return [sys.executable, "-c", WRAPPER, *command]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(wrapped(*command), capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def start(command: Sequence[str]) -> subprocess.Popen[str]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert line(process) == "ready"
    return process


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("code", [0, 1, 3, 255])
def test_the_commands_exit_code_comes_out(code: int) -> None:
    assert run("sh", "-c", f"exit {code}").returncode == code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV, signal.SIGINT])
def test_a_death_by_a_signal_is_seen_as_that_death(number: signal.Signals) -> None:
    assert run("sh", "-c", f"kill -{number.value} $$").returncode == -number


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT])
def test_a_signal_to_the_wrapper_reaches_the_command_once(number: signal.Signals) -> None:
    process = start(wrapped(sys.executable, "-c", COUNTER))
    process.send_signal(number)
    assert line(process) == f"got {number.value}"
    process.send_signal(signal.SIGTERM)
    assert line(process) == "got 15"  # nothing in between: the first came once
    assert process.wait(TIMEOUT_S) == 7


@pytest.mark.parametrize("way", ["to the group", "to every process"])
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGHUP, signal.SIGINT])
def test_a_signal_that_the_command_got_itself_is_not_passed_on(number: signal.Signals, way: str) -> None:
    process = subprocess.Popen(wrapped(sys.executable, "-c", COUNTER), stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert line(process) == "ready"
    if way == "to the group":
        os.killpg(process.pid, number)
    else:
        for pid in (process.pid, *children(process.pid)):
            os.kill(pid, number)
    assert line(process) == f"got {number.value}"
    process.send_signal(signal.SIGTERM)
    assert line(process) == "got 15"
    assert process.wait(TIMEOUT_S) == 7


def test_a_signal_for_the_wrapper_alone_is_passed_on_after_the_witness_was_killed() -> None:
    process = start(wrapped(sys.executable, "-c", COUNTER))
    (witness,) = [pid for pid in children(process.pid) if cmdline(pid) == cmdline(process.pid)]
    os.kill(witness, signal.SIGKILL)
    process.send_signal(signal.SIGTERM)
    assert line(process) == "got 15"
    assert process.wait(TIMEOUT_S) == 7


def cmdline(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def test_ctrl_c_on_a_terminal_reaches_the_command_once_and_the_wrapper_lives() -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvp(sys.executable, wrapped(sys.executable, "-c", COUNTER))
    with os.fdopen(terminal, "r+b", buffering=0) as screen:
        shown = b""
        while b"ready" not in shown:
            shown += screen.read(100)
        screen.write(b"\x03")
        while b"got 2" not in shown:
            shown += screen.read(100)
        os.kill(pid, signal.SIGTERM)
        while b"got 15" not in shown:
            shown += screen.read(100)
        _, status = os.waitpid(pid, 0)
    assert shown.count(b"got 2") == 1
    assert os.waitstatus_to_exitcode(status) == 7


SIGNALS_OF_LIBC = 0x1_8000_0000  # 32 and 33: glibc's posix_spawn ignores them in every child, and its threads take them back when needed


def signal_sets(command: Sequence[str]) -> dict[str, int]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True, stdin=subprocess.DEVNULL)
    return {name: int(value, 16) & ~SIGNALS_OF_LIBC for name, value in (row.split() for row in done.stdout.splitlines())}


LOOK = ("grep", "-E", "Sig(Blk|Ign|Cgt)", "/proc/self/status")


def test_the_command_starts_with_the_masks_and_actions_of_a_plain_start() -> None:
    assert signal_sets(wrapped(*LOOK)) == signal_sets(LOOK)


def test_what_nohup_ignores_stays_ignored() -> None:
    plain = signal_sets(["nohup", *LOOK])
    assert plain["SigIgn:"] & 1  # SIGHUP
    assert signal_sets(["nohup", *wrapped(*LOOK)]) == plain


def test_the_command_shares_our_process_group_and_our_standard_streams() -> None:
    done = subprocess.run(
        wrapped("sh", "-c", "cat; ps -o pgid= -p $$; ps -o pgid= -p $PPID"),
        input="hello\n",
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    words = done.stdout.split()
    assert words[0] == "hello" and words[1] == words[2]


def test_a_signal_that_came_before_the_start_is_seen() -> None:
    script = WRAPPER.replace("early =", "os.kill(os.getpid(), 15); early =").replace("pid =", "print(early); sys.exit(0); pid =")
    done = subprocess.run([sys.executable, "-c", script, "true"], capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    assert done.stdout.strip() == "15"
