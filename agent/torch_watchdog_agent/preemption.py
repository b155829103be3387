"""SIGTERM or SIGUSR1 becomes one checkpoint and stop of the whole job: the rank that is signalled tells the daemon, and trains on to the boundary.

Owns the two handlers of a rank, and the time that they hold the signal's own effect back. A handler of the script's, or of its framework, wins:
ours stands only where there was none, and does nothing once another has taken its place. It must not know how a job stops.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

__all__ = ["Preemption"]

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_POLL_S = 0.2
_UNHANDLED = {signal.SIGTERM: (signal.SIG_DFL,), signal.SIGUSR1: (signal.SIG_DFL, signal.SIG_IGN)}


class Preemption:
    """`tell` brings the news of a signal to the daemon; False where nobody hears it. `progress` counts the batches that the loop was handed. `acts`: is called
    before a signal comes into its own that the daemon had heard of.

    Everything but the wait runs on the main thread.
    """

    def __init__(
        self, tell: Callable[[int], bool], *, grace_s: float, progress: Callable[[], int], acts: Callable[[], object] = lambda: None
    ) -> None:
        self._tell, self._grace_s, self._progress, self._acts = tell, grace_s, progress, acts
        self._held_back: tuple[int, int] | None = None  # the signal, and the progress at which it came
        self._pid = os.getpid()
        self._told = self._is_due = False

    def install(self) -> tuple[signal.Signals, ...]:
        """Takes the signals that nobody handles; returns them. None of them on another than the main thread. SIGUSR1 is ignored by us, at the launch;
        who ignores SIGTERM means to live on.
        """
        if threading.current_thread() is not threading.main_thread():
            return ()
        taken = tuple(number for number in SIGNALS if signal.getsignal(number) in _UNHANDLED[number])
        for number in taken:
            signal.signal(number, self._on_signal)
        return taken

    def take(self, number: signal.Signals) -> None:
        """In the place of a handler that somebody else's library has put there for everybody."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(number, self._on_signal)

    def is_its_own(self, handler: object) -> bool:
        return handler == self._on_signal

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - a handler's signature
        if signal.getsignal(number) != self._on_signal:
            return  # called on by a handler that came after us: the signal is that one's
        if self._is_due or os.getpid() != self._pid:
            self._let_it_act(number)
        elif not self._told:
            self._told = True
            self._held_back = number, self._progress()
            # Bare, because a handler may come in between any two bytecodes: a lock that it needs may be held by the very thread that it interrupts.
            _thread.start_new_thread(self._wait_for_the_end, (number,))

    def _wait_for_the_end(self, number: int) -> None:
        """The process leaves by the job's order within the grace; else the signal comes into its own."""
        end_s = time.monotonic() + self._grace_s
        if self._tell(number):
            while time.monotonic() < end_s:
                time.sleep(_POLL_S)
            with contextlib.suppress(Exception):
                self._acts()
        self._is_due = True
        os.kill(self._pid, number)

    def at_end(self) -> None:
        """The program ends by itself. A signal after which it trained no more comes into its own: it would have ended it without us."""
        if self._held_back is not None and self._held_back[1] == self._progress() and os.getpid() == self._pid:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            self._let_it_act(self._held_back[0])

    def _let_it_act(self, number: int) -> None:
        """In a forked child SIGUSR1 means nothing: the launch was started with it ignored, so that it ends no launcher."""
        forked = os.getpid() != self._pid
        signal.signal(number, signal.SIG_IGN if forked and number == signal.SIGUSR1 else signal.SIG_DFL)
        os.kill(os.getpid(), number)
