"""A rank that is signalled: who hears of it, whose handler wins, and when the signal comes into its own. Real processes, real signals."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

TIMEOUT_S = 30
PROGRAM = """
import os, signal, sys, threading, time
from torch_watchdog_agent.preemption import Preemption
said = threading.Event()
def tell(number):
    os.write(1, f"told {number}\\n".encode())
    said.set()
    return HEARD
trained = 0
preemption = Preemption(tell, grace_s=GRACE, progress=lambda: trained)
BEFORE
preemption.install()
AFTER
os.write(1, b"ready\\n")
end = time.monotonic() + 20
while time.monotonic() < end:
    time.sleep(0.05)
    DURING
"""
OWN = "signal.signal(signal.SIGTERM, lambda *_: os.write(1, b'mine\\n'))"
CHAINED = "before = signal.getsignal(signal.SIGTERM); signal.signal(signal.SIGTERM, lambda *a: (os.write(1, b'mine\\n'), before(*a)))"


class Program:
    def __init__(self, *, heard: bool = True, grace_s: float = 60, before: str = "", after: str = "", during: str = "pass") -> None:
        words = {"HEARD": str(heard), "GRACE": str(grace_s), "BEFORE": before, "AFTER": after, "DURING": during}
        text = PROGRAM
        for word, meant in words.items():
            text = text.replace(word, meant)
        self.process = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
        assert self.line() == "ready"

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def ended(self) -> tuple[str, int]:
        out, _ = self.process.communicate(timeout=TIMEOUT_S)
        return out, self.process.returncode


def test_a_signal_after_which_nothing_was_trained_ends_the_program_in_its_own_way() -> None:
    program = Program(during="if said.is_set(): print('last', end=''); preemption.at_end()")
    program.send(signal.SIGTERM)
    assert program.ended() == ("told 15\nlast", -signal.SIGTERM)


def test_a_program_that_trained_on_to_its_end_within_the_grace_has_finished() -> None:
    program = Program(during="if said.is_set(): trained += 1; preemption.at_end(); sys.exit(0)")
    program.send(signal.SIGTERM)
    assert program.ended() == ("told 15\n", 0)


def test_a_program_that_ignores_sigterm_goes_on_as_without_us() -> None:
    program = Program(before="signal.signal(signal.SIGTERM, signal.SIG_IGN)", after="signal.signal(signal.SIGUSR2, lambda *_: sys.exit(4))")
    program.send(signal.SIGTERM)
    program.send(signal.SIGUSR2)
    assert program.ended() == ("", 4)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_told_once_and_the_rank_leaves_in_its_own_time(number: signal.Signals) -> None:
    program = Program(during="said.is_set() and sys.exit(5)")
    program.send(number)
    program.send(number)
    assert program.ended() == (f"told {int(number)}\n", 5)


def test_a_rank_that_has_not_left_within_the_grace_ends_as_by_the_signal() -> None:
    program = Program(grace_s=0.3)
    program.send(signal.SIGTERM)
    assert program.ended() == (f"told {int(signal.SIGTERM)}\n", -signal.SIGTERM)


def test_where_nobody_hears_of_it_the_signal_acts_at_once() -> None:
    program = Program(heard=False)
    program.send(signal.SIGTERM)
    assert program.ended()[1] == -signal.SIGTERM


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_handler_of_the_scripts_own_wins_whenever_it_came(when: str) -> None:
    program = Program(before=OWN if when == "before" else "", after=OWN if when == "after" else "")
    program.send(signal.SIGTERM)
    assert program.line() == "mine"
    program.process.kill()
    assert program.ended()[0] == ""


def test_a_handler_that_calls_the_one_before_it_is_not_saved_for_twice() -> None:
    program = Program(after=CHAINED)
    program.send(signal.SIGTERM)
    assert program.line() == "mine"
    program.process.kill()
    assert program.ended()[0] == ""


def test_a_forked_child_ends_by_sigterm_and_does_not_mind_sigusr1() -> None:
    """As a worker of a loader does."""
    forked = "child = os.fork()\nif not child:\n    time.sleep(20)\n    os._exit(3)"
    waits = (
        "os.kill(child, signal.SIGUSR1); time.sleep(0.1); os.kill(child, signal.SIGTERM); sys.exit(os.WTERMSIG(os.waitpid(child, 0)[1]))"
    )
    program = Program(after=forked, during=waits)
    assert program.ended() == ("", int(signal.SIGTERM))
