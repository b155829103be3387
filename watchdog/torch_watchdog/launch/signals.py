"""Signals between the terminal, the scheduler and the wrapped command, and an end that looks like the command's own.

Owns signal masks, forwarding and the last exit. Signals are blocked before any thread starts and taken one by one in the main thread, so no
handler ever runs in the middle of anything. It must not know jobs or daemons.
"""

from __future__ import annotations

import functools
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NoReturn

from torch_watchdog.launch.witness import Witness

__all__ = [
    "FORWARDED",
    "block_signals",
    "end_like",
    "exit_code_of",
    "pending_end",
    "replace_with",
    "send",
    "spawn",
    "unblock_signals",
    "wait_forwarding",
    "wait_while",
]

FORWARDED = frozenset({signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGQUIT})
_WAITED = FORWARDED | {signal.SIGCHLD}
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)  # the interpreter ignores these; a command must start with the defaults


def block_signals() -> set[int]:
    """Call in the main thread before any other starts, so that they all inherit the mask. Returns the mask before, for `unblock_signals`."""
    return set(signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED))


def unblock_signals(before: set[int]) -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def pending_end() -> int | None:
    """A signal that came before the command was started, and asks for the end: the command is then not started at all."""
    waiting = [number for number in signal.sigpending() & FORWARDED if signal.getsignal(number) is not signal.SIG_IGN]
    return min(waiting) if waiting else None


def spawn(command: Sequence[str], environment: Mapping[str, str], *, mask: set[int], ignored: Sequence[signal.Signals] = ()) -> int:
    """Starts the command in our process group, with our own stdin, stdout and stderr; it begins with `ignored` signals ignored. Raises OSError.

    posix_spawn, not fork: gRPC's threads are running, and nothing of ours may run in the child.
    """
    # The child inherits that they are ignored; here they are blocked and waited for.
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ignored}
    try:
        return os.posix_spawnp(command[0], list(command), environment, setsigmask=mask, setsigdef=_IGNORED_BY_PYTHON)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def replace_with(command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Becomes the command: nothing of ours is left. Raises OSError where it cannot be started."""
    for number in _IGNORED_BY_PYTHON:
        signal.signal(number, signal.SIG_DFL)
    os.execvpe(command[0], list(command), environment)  # noqa: S606 - the user's own command, without a shell in between


def wait_forwarding(
    pid: int,
    witness: Witness,
    *,
    tick: Callable[[], None],
    came: Callable[[signal.Signals], object],
    instead: Mapping[signal.Signals, Callable[[], None]] = MappingProxyType({}),
    interval_s: float = 1.0,
) -> int:
    """Waits for the command, passing on what came for us alone (`kill PID`; not Ctrl-C, `kill %1` or `timeout`, which reach the command too).

    Calls `tick` about every `interval_s`, and `came` with each signal. `instead`: what is done with one in place of passing it on. Returns the wait status.
    """
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        info = signal.sigtimedwait(_WAITED, interval_s)
        if info is None:
            witness.forget()
            tick()
        elif info.si_signo in FORWARDED:
            came(signal.Signals(info.si_signo))
            if not witness.saw(info.si_signo):
                instead.get(signal.Signals(info.si_signo), functools.partial(send, pid, info.si_signo))()


def wait_while(is_so: Callable[[], bool], *, within_s: float, came: Callable[[signal.Signals], object], interval_s: float = 0.1) -> None:
    """Waits for as long as something is so, and at most `within_s`; `came` is told each signal from outside."""
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s and is_so():
        info = signal.sigtimedwait(_WAITED, interval_s)
        if info is not None and info.si_signo in FORWARDED:
            came(signal.Signals(info.si_signo))


def send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass  # it ended in between: the next waitpid says how


def exit_code_of(status: int) -> int:
    """As a shell shows it in `$?`."""
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def end_like(status: int, before: set[int]) -> NoReturn:
    """Ends as the command did. Death by a signal is repeated, because a shell stops a script on Ctrl-C only when it sees that death."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # `2>&-`
            stream.flush()
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))  # the command wrote its own core
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        unblock_signals(before - {number})
        os.kill(os.getpid(), number)
    sys.exit(exit_code_of(status))  # reached after a signal only as process 1 of a container, which no default action kills
