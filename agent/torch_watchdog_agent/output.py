"""A second copy of a rank's output: pipes or pseudo-terminals in front of its descriptors 1 and 2, and the loop that passes every byte on.

Owns the copy and nothing else: no signals, no exit statuses, no ranks. Whoever reads (`Tee`) outlives whoever writes, or the writer would die
of a broken pipe that it never had. Nothing here blocks but the log's disk, and descriptors that cannot be opened a second time.
Standard library only: it runs before torch is imported, in every rank.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import stat
import termios
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what only annotations need is not paid for in every rank
    from collections.abc import Callable
    from pathlib import Path
    from typing import NoReturn

    Say = Callable[[str], None]

__all__ = ["Channel", "Log", "Tee", "lift", "open_tee", "silence"]

CHUNK_BYTES = 65_536  # what a pipe holds: one read never cuts a small write in two
ATOMIC_BYTES = 4_096  # PIPE_BUF: a piece up to this size is never mixed with what other ranks write to the same pipe
LINE_ENDS = (b"\n", b"\r")
PAUSE_IN_A_LINE_MS = 1  # longer than between two writes of one print(), shorter than anybody sees
LAST_WORDS_BYTES = 1 << 20  # more than any pipe holds: the bound for writers that never pause
NUM_LOOKS = 10


class Log:
    """The file that gets the copy. The first failure ends it: the disk's trouble is not the training's."""

    __slots__ = ("_path", "_say", "fd")

    def __init__(self, path: Path, say: Say) -> None:
        self._path, self._say = path, say
        path.parent.mkdir(parents=True, exist_ok=True)
        self.fd: int | None = lift(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOCTTY, 0o600))

    def write(self, text: bytes) -> None:
        try:
            while text and self.fd is not None:
                text = text[os.write(self.fd, text) :]
        except OSError as error:
            self.close()
            self._say(
                f"the copy of this rank's output ends here: {self._path} cannot be written ({error.strerror}); the output itself goes on"
            )

    def close(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


class Channel:
    """One stream: what the rank writes to `inner` is read from `source` and written to `target`, where it wrote before."""

    __slots__ = ("_cuts_lines", "_is_broken", "_pause_ms", "_pending", "_window", "fds", "inner", "is_tty", "source", "target")

    def __init__(self, fds: tuple[int, ...], *, pause_ms: int = PAUSE_IN_A_LINE_MS) -> None:
        self.fds, self._pause_ms = fds, pause_ms
        self.is_tty = os.isatty(fds[0])
        self.source, self.inner = _open_terminal_like(fds[0]) if self.is_tty else _open_pipe()
        self.target = -1
        self._pending = b""
        self._window = b""
        self._cuts_lines = self._is_broken = False

    def enter(self) -> None:
        """In the rank: descriptors 1 and 2 become the inner end."""
        for fd in self.fds:
            os.dup2(self.inner, fd)
        self.abandon()

    def abandon(self) -> None:
        os.close(self.inner)
        os.close(self.source)

    def keep(self) -> None:
        """In the reader: only it holds the source from now on."""
        os.close(self.inner)
        os.set_blocking(self.source, False)
        self.target = _open_target(self.fds[0])
        self._cuts_lines = not stat.S_ISREG(os.fstat(self.target).st_mode)

    @property
    def is_open(self) -> bool:
        return self.source >= 0

    @property
    def is_pending(self) -> bool:
        return bool(self._pending)

    def register(self, poller: select.poll) -> None:
        """Read only what has a place to go: a slow reader then slows the rank, as it did before. A target that breaks reports itself."""
        poller.register(self.target, select.POLLOUT if self._pending else 0)
        if not self._pending:
            poller.register(self.source, select.POLLIN)

    def move(self, ready: dict[int, int], log: Log) -> int:
        """Pass on what `ready` allows; the number of bytes read."""
        num_bytes = 0
        if self._pending:
            self._flush(bool(ready.get(self.target)))
        elif ready.get(self.source):
            num_bytes = self._read(log)
        elif ready.get(self.target):
            self._is_broken = True
        if self._is_broken:
            self._end_as_its_reader_did(log)
        return num_bytes

    def follow_window(self) -> None:
        """Give the rank the size of the real terminal."""
        if not self.is_tty or not self.is_open:
            return
        try:
            size = fcntl.ioctl(self.target, termios.TIOCGWINSZ, bytes(8))
            if size != self._window:
                fcntl.ioctl(self.source, termios.TIOCSWINSZ, size)
                self._window = size
        except OSError:
            pass  # the terminal is gone: the next write says so

    def close(self) -> None:
        """Both ends, the original descriptors too: whoever reads there sees the end when the rank's own end is closed."""
        os.close(self.source)
        if self.target not in self.fds:
            os.close(self.target)
        for fd in self.fds:
            silence(fd)
        self.source = self.target = -1
        self._pending = b""

    def _read(self, log: Log) -> int:
        text = self._take()
        if text is None:
            return 0
        if not text:
            self.close()
            return 0
        self.follow_window()
        text += self._rest_of_line(text)
        self._pending = text
        self._flush(True)
        log.write(text)
        return len(text)

    def _rest_of_line(self, text: bytes) -> bytes:
        """`print` writes a line in pieces where nothing is buffered (torchrun's ranks): passed on one by one, more of them would meet another rank's."""
        rest = b""
        while not (rest or text).endswith(LINE_ENDS) and len(rest) < ATOMIC_BYTES:
            poller = select.poll()
            poller.register(self.source, select.POLLIN)
            piece = self._take() if poller.poll(self._pause_ms) else None
            if not piece:
                break  # it is the whole for now: a prompt, a progress bar; or it was the last, as the next look will tell
            rest += piece
        return rest

    def _take(self) -> bytes | None:
        """None: nothing there yet; empty: nobody holds the other end."""
        try:
            return os.read(self.source, CHUNK_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            return b""  # EIO: how a pseudo-terminal says it

    def _flush(self, is_ready: bool) -> None:
        try:
            while self._pending and is_ready:
                written = os.write(self.target, self._next_piece())
                self._pending = self._pending[written:]
                is_ready = not self._pending or self._takes_more()
        except BlockingIOError:
            pass
        except OSError:
            self._is_broken = True

    def _takes_more(self) -> bool:
        poller = select.poll()
        poller.register(self.target, select.POLLOUT)
        return bool(poller.poll(0))

    def _next_piece(self) -> bytes:
        """Whole lines where they fit: ranks that share a pipe or a terminal keep their lines apart, as they did without us."""
        if not self._cuts_lines or len(self._pending) <= ATOMIC_BYTES:
            return self._pending
        end = self._pending.rfind(b"\n", 0, ATOMIC_BYTES) + 1
        return self._pending[: end or ATOMIC_BYTES]

    def _end_as_its_reader_did(self, log: Log) -> None:
        """The rank's next write fails as it would have failed without us. What it had written before goes to the log."""
        num_bytes = 0
        while num_bytes < LAST_WORDS_BYTES and (text := self._take()):
            log.write(text)
            num_bytes += len(text)
        self.close()


class Tee:
    """All channels of one rank and their log."""

    __slots__ = ("channels", "log", "num_bytes")

    def __init__(self, channels: list[Channel], log: Log) -> None:
        self.channels, self.log = channels, log
        self.num_bytes = 0

    def enter(self) -> None:
        for channel in self.channels:
            channel.enter()
        self.log.close()

    def abandon(self) -> None:
        for channel in self.channels:
            channel.abandon()
        self.log.close()

    def keep(self) -> None:
        for channel in self.channels:
            channel.keep()
        self.follow_window()

    def follow_window(self) -> None:
        for channel in self.channels:
            channel.follow_window()

    def descriptors(self) -> set[int]:
        """All that the reader must not close."""
        fds = {fd for channel in self.channels for fd in (channel.source, channel.target, *channel.fds)}
        return fds if self.log.fd is None else {*fds, self.log.fd}

    def turn(self, timeout_ms: int | None, wake_fd: int | None = None) -> bool:
        """Wait until anything can move (or `wake_fd` can be read) and move it; False: the time passed and nothing did."""
        poller = select.poll()
        for channel in self.channels:
            channel.register(poller)
        if wake_fd is not None:
            poller.register(wake_fd, select.POLLIN)
        ready = dict(poller.poll(timeout_ms))
        for channel in self.channels:
            self.num_bytes += channel.move(ready, self.log)
        self.channels = [channel for channel in self.channels if channel.is_open]
        return bool(ready)

    def drain(self, *, patience_ms: int, wake_fd: int | None, is_hurried: Callable[[], bool]) -> None:
        """Pass on what a dead writer left. Ends when nothing is there, or its reader takes nothing for `patience_ms`, or somebody is in a hurry."""
        end_bytes = self.num_bytes + LAST_WORDS_BYTES
        while self.channels and self.num_bytes < end_bytes and not is_hurried():
            is_waiting = any(channel.is_pending for channel in self.channels)
            if not self.turn(patience_ms if is_waiting else 0, wake_fd):
                return

    def copy_to_the_end(self) -> NoReturn:
        """The rest of this process's life: until the last writer has closed. No signal ends it, or the writers would lose their reader."""
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            os.setsid()
            os.chdir("/")
            while self.channels:
                self.turn(None)
        finally:
            os._exit(0)


def open_tee(log_path: Path, say: Say) -> Tee | None:
    """Pipes and log, open but not yet in anybody's way. None, and a sentence, where they cannot be had: the output then stays as it is."""
    try:
        log = Log(log_path, say)
    except OSError as error:
        say(f"the output of this rank is not kept: {log_path} cannot be opened ({error.strerror}); make its folder writable to have it")
        return None
    try:
        channels = open_channels()
    except OSError as error:
        log.close()
        say(f"the output of this rank is not kept: no pipe or pseudo-terminal can be had ({error.strerror})")
        return None
    return Tee(channels, log)


def open_channels() -> list[Channel]:
    """One channel for each place that descriptors 1 and 2 lead to; a closed descriptor stays closed."""
    channels: list[Channel] = []
    try:
        for fds in _streams():
            channels.append(Channel(fds))  # noqa: PERF401 - those before a failure must be closed again
    except OSError:
        for channel in channels:
            channel.abandon()
        raise
    return channels


def lift(fd: int, lowest: int = 3) -> int:
    """The same descriptor out of the way: 0, 1 and 2 have a meaning, even where they are closed."""
    if fd >= lowest:
        return fd
    try:
        lifted = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, lowest)
    except OSError:
        return fd  # above this process's limit
    os.close(fd)
    return lifted


def silence(fd: int) -> None:
    """Put the null device at `fd`: nothing is held open through it any more."""
    try:
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return  # no null device in this container: what is held open longer does no harm
    if null != fd:
        os.dup2(null, fd, inheritable=False)
        os.close(null)


def _streams() -> list[tuple[int, ...]]:
    open_fds = [fd for fd in (1, 2) if _is_open(fd)]
    if open_fds == [1, 2] and _lead_to_one_place():
        return [(1, 2)]
    return [(fd,) for fd in open_fds]


def _is_open(fd: int) -> bool:
    try:
        return bool(os.fstat(fd))
    except OSError:
        return False


def _lead_to_one_place() -> bool:
    out, err = os.fstat(1), os.fstat(2)
    if (out.st_dev, out.st_ino, out.st_rdev) != (err.st_dev, err.st_ino, err.st_rdev):
        return False
    return not stat.S_ISREG(out.st_mode) or _share_a_position()


def _share_a_position() -> bool:
    """Two openings of one file have a position each and overwrite each other. Looked at more than once: other ranks may be writing just now."""
    flags = {fcntl.fcntl(fd, fcntl.F_GETFL) for fd in (1, 2)}
    if len(flags) > 1:
        return False
    if flags.pop() & os.O_APPEND:
        return True
    return any(os.lseek(1, 0, os.SEEK_CUR) == os.lseek(2, 0, os.SEEK_CUR) for _ in range(NUM_LOOKS))


def _open_pipe() -> tuple[int, int]:
    source, inner = os.pipe()
    return lift(source), lift(inner)


def _open_terminal_like(fd: int) -> tuple[int, int]:
    """A pseudo-terminal with the settings and size of `fd`, but no output processing: the real terminal does its own, once."""
    settings = termios.tcgetattr(fd)
    settings[1] &= ~termios.OPOST
    source, inner = os.openpty()
    source, inner = lift(source), lift(inner)
    termios.tcsetattr(inner, termios.TCSANOW, settings)
    fcntl.ioctl(source, termios.TIOCSWINSZ, fcntl.ioctl(fd, termios.TIOCGWINSZ, bytes(8)))
    return source, inner


def _open_target(fd: int) -> int:
    """A second opening of the same pipe or terminal, so that non-blocking writes are ours alone: the flag of `fd` itself is shared with everyone."""
    mode = os.fstat(fd).st_mode
    if not (stat.S_ISFIFO(mode) or os.isatty(fd)):
        return fd  # a file's position is shared with others: keep that opening
    try:
        return lift(os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return fd  # another user's terminal, or no /proc: poll() before each piece has to do
