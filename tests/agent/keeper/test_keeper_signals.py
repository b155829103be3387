"""Every signal that the launcher or the terminal sends reaches the rank once."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import subprocess
import termios

import pytest
from keeper_harness import DEADLINE_S, Stage, eventually, is_alive, on_terminal, read_line

COUNTER = """
import os, signal, sys
counts = {}
def count(number, frame):
    counts[number] = counts.get(number, 0) + 1
    os.write(1, f"{signal.Signals(number).name} {counts[number]}\\n".encode())
for name in sys.stdin.readline().split():
    signal.signal(getattr(signal, name), count)
os.write(1, b"ready\\n")
while signal.SIGUSR2 not in counts: signal.pause()
"""

NAMES = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGQUIT", "SIGCONT", "SIGTSTP", "SIGWINCH", "SIGALRM", "SIGABRT", "SIGRTMIN")


def start_counter(stage: Stage) -> subprocess.Popen[bytes]:
    process = stage.start(COUNTER, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(" ".join((*NAMES, "SIGUSR2")).encode() + b"\n")
    process.stdin.flush()
    assert read_line(process) == b"ready\n"
    return process


@pytest.mark.parametrize("to_group", [False, True])
def test_each_signal_arrives_exactly_once(stage: Stage, to_group: bool) -> None:
    process = start_counter(stage)
    for name in NAMES:
        (os.killpg if to_group else os.kill)(process.pid, getattr(signal, name))
        assert read_line(process) == f"{name} 1\n".encode()
    os.killpg(process.pid, signal.SIGUSR2)
    assert process.communicate(timeout=DEADLINE_S)[0] == b"SIGUSR2 1\n"
    assert process.returncode == 0


def test_a_signal_to_the_launchers_group_is_never_doubled(stage: Stage) -> None:
    """torchrun signals the group: without a group of its own the rank would get it from there and from its keeper."""
    process = start_counter(stage)
    for i in range(1, 101):
        os.killpg(process.pid, signal.SIGUSR1)
        assert read_line(process) == f"SIGUSR1 {i}\n".encode()
    os.killpg(process.pid, signal.SIGUSR2)
    assert process.communicate(timeout=DEADLINE_S)[0] == b"SIGUSR2 1\n"


def test_a_signal_sent_while_the_rank_is_born_arrives_once(stage: Stage) -> None:
    """At any moment of the start: it ends as it would have ended without us, by that signal."""
    for _ in range(20):
        process = stage.start("import signal; print('up', flush=True); signal.pause()", stdout=subprocess.PIPE, log=stage.folder / "log")
        os.killpg(process.pid, signal.SIGTERM)
        process.communicate(timeout=DEADLINE_S)
        assert process.returncode == -signal.SIGTERM


def test_sigterm_ends_the_rank_and_the_keeper_tells_so(stage: Stage) -> None:
    process = stage.start("import signal; print('up', flush=True); signal.pause()", stdout=subprocess.PIPE)
    read_line(process)
    process.terminate()
    assert process.wait(DEADLINE_S) == -signal.SIGTERM
    process.communicate(timeout=DEADLINE_S)


def test_a_stop_from_the_terminal_does_not_stop_a_session_leaders_rank_for_ever(stage: Stage) -> None:
    code = "import os, sys\nos.write(1, b'up\\n')\nfor line in sys.stdin: os.write(1, line.encode())"
    process = stage.start(code, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert read_line(process) == b"up\n"
    process.send_signal(signal.SIGTSTP)
    assert process.stdin is not None
    process.stdin.write(b"still here\n")
    process.stdin.flush()
    assert read_line(process) == b"still here\n"
    process.communicate(timeout=DEADLINE_S)


def test_signals_that_the_launcher_ignores_stay_ignored(stage: Stage) -> None:
    code = "import signal; print(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN, signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = stage.start(code, stdout=subprocess.PIPE, preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1]))
    finally:
        signal.signal(signal.SIGHUP, previous)
    assert process.communicate(timeout=DEADLINE_S)[0] == f"True {{<Signals.SIGUSR1: {signal.SIGUSR1.value}>}}\n".encode()


def test_a_launcher_that_ignores_its_children_still_hears_the_exit_code(stage: Stage) -> None:
    process = stage.start("raise SystemExit(3)", preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN))
    assert process.wait(DEADLINE_S) == 3


@pytest.mark.parametrize("with_log", [False, True])
def test_ctrl_c_is_one_keyboard_interrupt(stage: Stage, with_log: bool) -> None:
    code = """
import signal, time
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
try:
    print("up", flush=True)
    while True: time.sleep(60)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    signal.sigwait({signal.SIGUSR1})  # comes after all that the key has set off: a second one would end this
    print("once", flush=True)
    raise
"""
    terminal = on_terminal(stage.command(code), stage.environment("guard", stage.folder / "log" if with_log else None))
    terminal.read_until(b"up\r\n")
    terminal.type(b"\x03")
    terminal.read_until(b"interrupted\r\n")
    os.kill(terminal.process_pid, signal.SIGUSR1)
    assert terminal.end() == -signal.SIGINT
    assert b"interrupted\r\nonce\r\n" in terminal.received
    assert b"KeyboardInterrupt" in terminal.received.splitlines()[-1]


def test_a_resized_terminal_is_seen_by_the_rank(stage: Stage) -> None:
    code = """
import os, signal, sys, time
signal.signal(signal.SIGWINCH, lambda *_: None)
print("up", flush=True)
while os.get_terminal_size(1).columns != 132:
    print(os.get_terminal_size(1).columns, flush=True)
    time.sleep(0.01)
print("seen", flush=True)
"""
    terminal = on_terminal(stage.command(code), stage.environment("guard", stage.folder / "log"), size=(24, 81))
    terminal.read_until(b"81\r\n")
    fcntl.ioctl(terminal.master, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 132, 0, 0))
    terminal.read_until(b"seen\r\n")
    assert terminal.end() == 0


def test_sigwinch_gives_the_rank_the_new_size_before_it_hears_of_it(stage: Stage) -> None:
    code = """
import os, signal
def tell(*_):
    os.write(1, f"{tuple(os.get_terminal_size(1))}\\n".encode())
    os._exit(0)
signal.signal(signal.SIGWINCH, tell)
print("up", flush=True)
while True: signal.pause()
"""
    master, slave = os.openpty()
    process = stage.start(code, stdin=subprocess.DEVNULL, stdout=slave, stderr=slave, log=stage.folder / "log")
    with open(master, "rb", buffering=0) as terminal:
        assert terminal.readline() == b"up\r\n"
        fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 132, 0, 0))
        process.send_signal(signal.SIGWINCH)
        assert terminal.readline() == b"(132, 40)\r\n"
        assert process.wait(DEADLINE_S) == 0
    os.close(slave)


def test_a_second_signal_ends_a_keeper_whose_reader_is_stuck(stage: Stage) -> None:
    """The rank is dead, nobody reads: the launcher's SIGTERM is obeyed at once, and the output is still there for whoever reads later."""
    code = "import os\nos.write(1, b'x' * 65536)\nos.write(1, b'y' * 65536)\nos.write(2, str(os.getpid()).encode())\nos._exit(3)"
    process = stage.start(code, stdout=subprocess.PIPE, stderr=subprocess.PIPE, log=stage.folder / "log")
    assert process.stderr is not None
    rank_pid = int(os.read(process.stderr.fileno(), 20))
    eventually(lambda: not is_alive(rank_pid), "the rank ends")
    process.terminate()
    assert process.wait(DEADLINE_S) == 3
    assert process.stdout is not None
    assert process.stdout.read() == b"x" * 65536 + b"y" * 65536
    process.communicate(timeout=DEADLINE_S)
