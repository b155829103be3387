"""The process that a launcher watches in the place of its rank: forked at interpreter start, it waits, forwards signals and ends as the rank did.

Owns the fork, the signals and the exit status; the copy of the output is `output.py`, a rank without a keeper `copied.py`. Knows nothing of torch,
steps or the watchdog's other parts. It stays tiny: no thread, a handful of descriptors, no stdin. Whatever cannot be set up is said once, and the
rank runs without it. Standard library only: it runs before torch is imported, in every rank.
"""

from __future__ import annotations

import os
import select
import signal
import time
from typing import TYPE_CHECKING

from torch_watchdog_agent.copied import KEPT_MARK, close_all_but, give_up, is_kept, tee_only
from torch_watchdog_agent.group import kill, lives
from torch_watchdog_agent.output import Tee, open_tee

if TYPE_CHECKING:  # what only annotations need is not paid for in every rank
    from collections.abc import Callable
    from mmap import mmap
    from pathlib import Path
    from typing import NoReturn

    from torch_watchdog_agent.holdback import HoldBack

    Say = Callable[[str], None]
    Prctl = Callable[[int, int | bytes], int]

__all__ = ["announce_leave", "announce_watched", "fork_is_guarded", "stand_guard"]

# A process cannot take these for another: they are its own fault, its own child, or cannot be caught.
OWN_SIGNALS = frozenset(
    {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}
    | {signal.SIGTRAP, signal.SIGSYS, signal.SIGPIPE, signal.SIGTTIN, signal.SIGTTOU}
)
HARMLESS_SIGNALS = frozenset({signal.SIGCONT, signal.SIGWINCH, signal.SIGURG, signal.SIGTSTP})
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NAME = 1, 4, 15

DRAIN_PATIENCE_MS = 2_000
SWEEP_GRACE_S = 1.0  # less than the head start of the rank that failed first: the launcher is to see its end first
SWEEP_POLL_MS = 50
HOLD_POLL_MS = 20

_leave_page: mmap | None = None


def stand_guard(*, log_path: Path | None, say: Say, hold: HoldBack | None = None) -> None:
    """Fork: the parent becomes the keeper and never returns, the child returns and is the rank. For session leaders (torchrun's ranks).

    With `hold` the bad end of a rank that had announced itself as watched is told the launcher only once that allows it. With `log_path`
    everything that the rank prints is appended there too. Returns without a fork, after a sentence, where one would be unsafe.
    """
    if is_kept():
        return
    prctl = _load_prctl()
    if prctl is None or _num_threads() > 1:
        say("this rank runs without a keeper: " + ("ctypes is missing" if prctl is None else "the process has threads before it begins"))
        if log_path is not None:
            tee_only(log_path=log_path, say=say)
        return
    page = _open_leave_page()
    tee = open_tee(log_path, say) if log_path is not None else None
    keeper_pid, terminal_fd = os.getpid(), _foreground_terminal()
    ready_fd, told_fd = os.pipe2(os.O_CLOEXEC)
    # Blocked until the rank has left the group: a signal to the group must reach it once, through the keeper.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        rank_pid = os.fork()
    except OSError as error:
        give_up(tee, (ready_fd, told_fd))
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        say(f"this rank runs without a keeper and its output is not kept: fork failed ({error.strerror})")
        return
    if rank_pid:
        _Keeper(rank_pid, tee, page, prctl, hold).guard(ready_fd)
    try:
        _become_rank(keeper_pid, terminal_fd, tee, page, prctl)
    finally:
        os.close(ready_fd)
        os.close(told_fd)  # the keeper's cue: signals reach a rank that is ready for them
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def announce_leave() -> None:
    """The watchdog decided this end: the keeper reports 0 to the launcher, whatever the interpreter's teardown makes of it. For the rank itself."""
    if _leave_page is not None and fork_is_guarded():
        _leave_page[0] = 1


def announce_watched(*, watched: bool = True) -> None:
    """Somebody outside knows of this rank, and will let its keeper tell a bad end (or not any more). For the rank itself."""
    if _leave_page is not None and fork_is_guarded():
        _leave_page[1] = watched


def fork_is_guarded() -> bool:
    """True in a rank whose parent is its keeper."""
    return os.environ.get(KEPT_MARK) == f"{os.getpid()}:{os.getppid()}"


class _Keeper:
    """The parent's whole life. Signals are forwarded by their handlers, so that nothing in the loop can hold them up."""

    def __init__(self, rank_pid: int, tee: Tee | None, page: mmap, prctl: Prctl, hold: HoldBack | None) -> None:
        self.rank_pid, self.tee, self.page, self.prctl, self.hold = rank_pid, tee, page, prctl, hold
        self.is_over = self.is_killed = self.is_bad = self.is_hurried = False
        self.wake_fd = -1

    def guard(self, ready_fd: int) -> NoReturn:
        status = 1 << 8
        try:
            self._settle_in(ready_fd)
            self._wait()
            status = self._see_off()
        finally:
            self._end_like(status)

    def _settle_in(self, ready_fd: int) -> None:
        if self.tee is not None:
            self.tee.keep()
        close_all_but({ready_fd, *(self.tee.descriptors() if self.tee is not None else ())})
        if self.hold is not None:
            self.hold.begin()
        self.wake_fd, wake_in_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake_in_fd, warn_on_full_buffer=False)
        for number in signal.valid_signals() - OWN_SIGNALS:
            signal.signal(number, self._forward)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # the rank may hold the foreground: our writes go on
        self.prctl(PR_SET_NAME, b"torch-watchdog")
        os.read(ready_fd, 1)  # end of file: the rank is ready, or dead
        os.close(ready_fd)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())

    def _forward(self, number: int, _frame: object) -> None:
        if self.is_over:
            self.is_hurried = self.is_hurried or number not in HARMLESS_SIGNALS
            return
        if number == signal.SIGWINCH and self.tee is not None:
            self.tee.follow_window()
        try:
            os.kill(self.rank_pid, number)
        except OSError:
            pass  # it changed its user, or is just gone: its end is noticed by itself

    def _wait(self) -> None:
        while not self._rank_has_ended():
            self._turn(None)

    def _turn(self, timeout_ms: int | None) -> None:
        if self.tee is not None:
            self.tee.turn(timeout_ms, self.wake_fd)
        else:
            poller = select.poll()
            poller.register(self.wake_fd, select.POLLIN)
            poller.poll(timeout_ms)
        self._hear()

    def _hear(self) -> None:
        try:
            os.read(self.wake_fd, 4_096)
        except BlockingIOError:
            pass

    def _rank_has_ended(self) -> bool:
        """Not reaped yet: until then nobody else gets its pid, nor its group."""
        try:
            change = os.waitid(os.P_PID, self.rank_pid, os.WEXITED | os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
            if change is not None and change.si_code == os.CLD_STOPPED:
                self._undo_terminal_stop()
                return False
        except ChildProcessError:
            return True  # the launcher made everyone below it ignore SIGCHLD, and it ended before we could listen
        self.is_over = change is not None
        self.is_killed = change is not None and change.si_code != os.CLD_EXITED
        self.is_bad = change is not None and (self.is_killed or change.si_status != 0)
        return self.is_over

    def _undo_terminal_stop(self) -> None:
        """A session leader cannot be stopped from the terminal (nobody could wake it): neither can the rank that takes its place."""
        stop = os.waitid(os.P_PID, self.rank_pid, os.WSTOPPED | os.WNOHANG)
        if stop is not None and stop.si_status == signal.SIGTSTP:
            os.kill(self.rank_pid, signal.SIGCONT)

    def _see_off(self) -> int:
        """Pass on the last output, sweep after a rank that was killed; the wait status to end with."""
        killed_s = time.monotonic()
        if self.is_killed:
            self._signal_group(signal.SIGTERM)
        if self.tee is not None:
            self.tee.drain(patience_ms=DRAIN_PATIENCE_MS, is_hurried=self._is_hurried_now, wake_fd=self.wake_fd)
        self._hold_back()  # before the rank is reaped: until then everybody can see how it ended
        status = self._reap()
        if self.is_killed:
            self._sweep(killed_s + SWEEP_GRACE_S)
        if self.tee is not None and self.tee.channels:
            self._leave_a_copier(self.tee)
        return 0 if self.page[0] else status

    def _hold_back(self) -> None:
        """A launcher that sees one rank fail ends the others: first they are to save what they hold."""
        if self.hold is None or not self.is_bad or self.page[0] or not self.page[1]:
            return
        while not self.hold.is_over(is_hurried=self.is_hurried):
            self._turn(HOLD_POLL_MS)

    def _is_hurried_now(self) -> bool:
        self._hear()
        return self.is_hurried

    def _reap(self) -> int:
        try:
            return os.waitpid(self.rank_pid, 0)[1]
        except ChildProcessError:
            return int(signal.SIGKILL)

    def _sweep(self, end_s: float) -> None:
        """Workers of a rank that was killed may wait for it for ever. Those that left its group, daemons, are not ours to end."""
        while self._signal_group(0) and time.monotonic() < end_s and not self.is_hurried and lives(self.rank_pid):
            self._turn(SWEEP_POLL_MS)
        if self._signal_group(0):
            kill(self.rank_pid)

    def _signal_group(self, number: int) -> bool:
        try:
            os.killpg(self.rank_pid, number)
        except OSError:
            return False
        return True

    def _leave_a_copier(self, tee: Tee) -> None:
        """Somebody still writes, or the terminal is slow: a process of nobody's goes on with the copy, so that nothing is lost and nobody waits."""
        try:
            if os.fork() == 0:
                tee.copy_to_the_end()
        except OSError:
            pass

    def _end_like(self, status: int) -> NoReturn:
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            self.prctl(PR_SET_DUMPABLE, 0)  # no second core: the limit on its size does not bind cores that go to a program
            if number != signal.SIGKILL:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
            os.kill(os.getpid(), number)
            os._exit(128 + number)
        os._exit(os.WEXITSTATUS(status))


def _become_rank(keeper_pid: int, terminal_fd: int | None, tee: Tee | None, page: mmap, prctl: Prctl) -> None:
    """The child's half of the fork; every signal is blocked meanwhile."""
    global _leave_page
    os.setpgid(0, 0)
    if terminal_fd is not None:
        os.tcsetpgrp(terminal_fd, os.getpgrp())
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != keeper_pid:
        os.kill(os.getpid(), signal.SIGKILL)  # the keeper died before the kernel was asked to tell
    while signal.sigtimedwait(signal.valid_signals(), 0) is not None:
        pass  # sent to the old group: the keeper got it too and forwards it
    if tee is not None:
        tee.enter()
    _leave_page = page
    os.environ[KEPT_MARK] = f"{os.getpid()}:{keeper_pid}"


def _foreground_terminal() -> int | None:
    """The terminal that this session holds in the foreground: the rank must take it over to read from it and to hear Ctrl-C as before."""
    for fd in (0, 1, 2):
        try:
            if os.tcgetpgrp(fd) == os.getpgrp():
                return fd
        except OSError:
            continue
    return None


def _num_threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))  # noqa: PTH208
    except OSError:
        return 1


def _open_leave_page() -> mmap:
    """Two bytes that both sides see (this end is ours; somebody watches): no descriptor that the program could close, or its children could inherit."""
    import mmap

    return mmap.mmap(-1, 2)


def _load_prctl() -> Prctl | None:
    try:
        import ctypes

        prctl = ctypes.CDLL(None).prctl
    except (ImportError, OSError, AttributeError):
        return None
    unsigned = ctypes.c_ulong

    def call(option: int, value: int | bytes) -> int:
        first = ctypes.c_char_p(value) if isinstance(value, bytes) else unsigned(value)
        return int(prctl(option, first, unsigned(0), unsigned(0), unsigned(0)))

    return call
