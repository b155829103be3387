"""What a rank prints arrives where it arrived before, byte for byte, and in the log too."""

from __future__ import annotations

import fcntl
import hashlib
import os
import select
import signal
import socket
import statistics
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import pytest
from keeper_harness import DEADLINE_S, Stage, eventually, is_alive, on_terminal, read_line

from torch_watchdog_agent.output import Channel, Log

MODES = pytest.mark.parametrize("mode", ["guard", "tee"])

JUNK = "import os, random; os.write(1, random.Random(1).randbytes(70_001)); os.write(2, random.Random(2).randbytes(333) + b'no newline at the end')"
CLOSES_ALL = "import os; print('x', flush=True); os.closerange(3, 65536)"  # ours, too
BULK = "import sys; [sys.stdout.buffer.write(b'%08d' % i * 12 + b'\\n') for i in range(103_000)]"


@MODES
@pytest.mark.parametrize("code", [JUNK, BULK, "print('one line')", "pass", "import sys; print('x', file=sys.stderr); 1 / 0", CLOSES_ALL])
def test_both_streams_are_the_same_with_and_without_us(stage: Stage, mode: str, code: str) -> None:
    plain, ours = stage.run(code, mode="plain"), stage.run(code, mode=mode, log=stage.folder / "log")
    assert (ours.returncode, ours.stdout, ours.stderr) == (plain.returncode, plain.stdout, plain.stderr)
    assert len((stage.folder / "log").read_bytes()) == len(plain.stdout) + len(plain.stderr)


@MODES
def test_ten_megabytes_come_through_a_slow_pipe_whole_and_within_seconds(stage: Stage, mode: str) -> None:
    process = stage.start(BULK, mode=mode, log=stage.folder / "log", stdout=subprocess.PIPE)
    began_s = time.monotonic()
    output = process.communicate(timeout=DEADLINE_S)[0]
    assert hashlib.sha256(output).digest() == hashlib.sha256((stage.folder / "log").read_bytes()).digest()
    assert output == b"".join(b"%08d" % i * 12 + b"\n" for i in range(103_000))
    assert time.monotonic() - began_s < 15


@MODES
def test_stdout_and_stderr_keep_their_order_where_both_are_one_file(stage: Stage, mode: str) -> None:
    code = "import os\nfor i in range(3000): os.write(1 + i % 2, b'%d\\n' % i)"
    expected = b"".join(b"%d\n" % i for i in range(3000))
    with (stage.folder / "both").open("wb") as both:
        process = stage.start(code, mode=mode, log=stage.folder / "log", stdout=both, stderr=subprocess.STDOUT)
        assert process.wait(DEADLINE_S) == 0
    assert (stage.folder / "both").read_bytes() == expected
    assert (stage.folder / "log").read_bytes() == expected


def test_two_openings_of_one_file_stay_two(stage: Stage) -> None:
    """`> out 2> out` overwrites itself, with us as without: the positions are separate."""
    code = "import os\nos.write(1, b'first')\nos.write(2, b'2')"
    path = stage.folder / "out"
    with path.open("wb") as out, path.open("wb") as err:
        out.write(b"header ")
        out.flush()
        assert stage.start(code, log=stage.folder / "log", stdout=out, stderr=err).wait(DEADLINE_S) == 0
    assert path.read_bytes() == b"2eader first"


def test_a_file_is_appended_to_where_its_other_writers_left_it(stage: Stage) -> None:
    with (stage.folder / "out").open("wb") as out:
        out.write(b"launcher\n")
        out.flush()
        ranks = [stage.start(f"import os; os.write(1, b'rank {i}\\n')", log=stage.folder / f"log{i}", stdout=out) for i in range(4)]
        assert [rank.wait(DEADLINE_S) for rank in ranks] == [0] * 4
        out.write(b"launcher\n")
    lines = (stage.folder / "out").read_bytes().splitlines()
    assert lines[0] == lines[-1] == b"launcher"
    assert sorted(lines[1:-1]) == [b"rank 0", b"rank 1", b"rank 2", b"rank 3"]


def test_lines_of_ranks_that_share_a_pipe_are_not_cut(stage: Stage) -> None:
    code = "import sys\nfor i in range(4000): sys.stdout.write('%s' * 200 + chr(10)); sys.stdout.flush()"
    reader, writer = os.pipe()
    ranks = [stage.start(code.replace("%s", letter), log=stage.folder / f"log{letter}", stdout=writer) for letter in "abc"]
    os.close(writer)
    with open(reader, "rb") as pipe:
        lines = pipe.read().splitlines()
    assert [rank.wait(DEADLINE_S) for rank in ranks] == [0] * 3
    assert sorted(set(lines)) == [b"a" * 200, b"b" * 200, b"c" * 200]
    assert len(lines) == 12_000


def test_a_line_that_is_written_in_pieces_is_passed_on_as_one(tmp_path: Path) -> None:
    said: list[str] = []
    reader, writer = os.pipe()
    channel, log = Channel((writer,), pause_ms=20_000), Log(tmp_path / "log", said.append)
    rank = os.dup(channel.inner)
    channel.keep()
    os.write(rank, b"step 3")

    def go_on() -> None:
        eventually(lambda: not select.select([channel.source], [], [], 0)[0], "the first piece is read")
        os.write(rank, b" loss 0.5\n")

    rest = threading.Thread(target=go_on)
    rest.start()
    channel.move({channel.source: select.POLLIN}, log)
    rest.join()
    assert os.read(reader, 100) == b"step 3 loss 0.5\n"
    assert (tmp_path / "log").read_bytes() == b"step 3 loss 0.5\n"
    channel.close()
    log.close()
    for fd in (rank, reader):
        os.close(fd)


def test_a_line_arrives_within_about_a_millisecond(stage: Stage) -> None:
    code = "import os, sys\nos.write(1, b'up\\n')\nfor line in sys.stdin.buffer: os.write(1, line)"
    waits_ms = {}
    for mode in ("plain", "guard"):
        process = stage.start(code, mode=mode, log=stage.folder / "log", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        read_line(process)
        assert process.stdin is not None
        times = []
        for _ in range(200):
            began_s = time.perf_counter()
            os.write(process.stdin.fileno(), b"a line\n")
            read_line(process)
            times.append((time.perf_counter() - began_s) * 1e3)
        process.communicate(timeout=DEADLINE_S)
        waits_ms[mode] = statistics.quantiles(times)[0]  # the lower quarter: what a busy machine adds is not ours
    assert waits_ms["guard"] - waits_ms["plain"] < 1.0


@MODES
def test_the_log_is_appended_to_and_only_its_owners_to_read(stage: Stage, mode: str) -> None:
    log = stage.folder / "new" / "folder" / "rank-0.log"
    for _ in range(2):
        stage.run("print('again')", mode=mode, log=log)
    assert log.read_bytes() == b"again\nagain\n"
    assert log.stat().st_mode & 0o777 == 0o600


@MODES
def test_a_full_log_is_dropped_with_one_sentence(stage: Stage, mode: str) -> None:
    code = "import os\nfor i in range(50): os.write(1, b'%d\\n' % i)"
    found = stage.run(code, mode=mode, log=Path("/dev/full"))
    assert found.returncode == 0
    assert found.stdout == b"".join(b"%d\n" % i for i in range(50))
    assert found.stderr.count(b"\n") == 1
    assert found.stderr.startswith(b"[torch-watchdog] the copy of this rank's output ends here: /dev/full cannot be written (No space left")


@MODES
def test_a_log_that_cannot_be_opened_leaves_the_output_alone(stage: Stage, mode: str) -> None:
    (stage.folder / "file").touch()
    found = stage.run("print('out')", mode=mode, log=stage.folder / "file" / "log")
    assert (found.returncode, found.stdout) == (0, b"out\n")
    assert found.stderr.startswith(b"[torch-watchdog] the output of this rank is not kept")


WRITE_UNTIL_BROKEN = """
import os, signal, sys, time
print("first", flush=True)
sys.stdin.read()
for i in range(100_000):
    try:
        os.write(1, b"line\\n")
    except BrokenPipeError:
        os.write(2, b"broken pipe\\n")
        os._exit(7)
    time.sleep(0.001)
"""


@MODES
def test_a_reader_that_left_is_a_broken_pipe_as_before(stage: Stage, mode: str) -> None:
    process = stage.start(
        WRITE_UNTIL_BROKEN, mode=mode, log=stage.folder / "log", stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert read_line(process) == b"first\n"
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    assert process.communicate(timeout=DEADLINE_S)[1] == b"broken pipe\n"
    assert process.returncode == 7


@MODES
def test_the_first_write_after_the_reader_left_fails_already(stage: Stage, mode: str) -> None:
    code = """
import os, select
poller = select.poll()
poller.register(1, 0)
os.write(1, b"first\\n")
if not poller.poll(20_000):
    os._exit(8)  # nobody told
try:
    os.write(1, b"second\\n")
except BrokenPipeError:
    os._exit(7)
"""
    process = stage.start(code, mode=mode, log=stage.folder / "log", stdout=subprocess.PIPE)
    assert read_line(process) == b"first\n"
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(DEADLINE_S) == 7


@MODES
def test_head_ends_a_rank_that_keeps_sigpipes_default(stage: Stage, mode: str) -> None:
    code = "import signal, sys\nsignal.signal(signal.SIGPIPE, signal.SIG_DFL)\nwhile True: sys.stdout.write('y\\n'); sys.stdout.flush()"
    head = subprocess.Popen(["head", "-n", "3"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process = stage.start(code, mode=mode, log=stage.folder / "log", stdout=head.stdin)
    assert head.stdin is not None
    head.stdin.close()
    assert head.stdout is not None
    assert head.stdout.read() == b"y\n" * 3
    assert process.wait(DEADLINE_S) == -signal.SIGPIPE
    head.stdout.close()
    head.wait(DEADLINE_S)


def test_a_slow_reader_slows_the_rank_and_loses_nothing(stage: Stage) -> None:
    code = "import os\nfor i in range(64): os.write(1, b'z' * 65536); os.write(2, b'%d\\n' % i)"
    process = stage.start(code, log=stage.folder / "log", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    eventually(lambda: select.select([process.stderr], [], [], 0)[0], "the rank starts")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    output, errors = process.communicate(timeout=DEADLINE_S)
    assert len(output) == 64 * 65536
    assert errors.splitlines()[-1] == b"63"


def test_one_stuck_stream_does_not_hold_up_the_other(stage: Stage) -> None:
    code = """
import os, signal, threading
threading.Thread(target=os.write, args=(1, b"z" * 10**6), daemon=True).start()
os.write(2, b"free\\n")
signal.pause()
"""
    process = stage.start(code, log=stage.folder / "log", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stderr is not None
    assert select.select([process.stderr], [], [], DEADLINE_S)[0]
    assert process.stderr.readline() == b"free\n"
    process.kill()
    process.communicate(timeout=DEADLINE_S)


def test_grandchildren_that_hold_the_pipe_do_not_make_the_launcher_wait_and_are_still_heard(stage: Stage) -> None:
    code = """
import os, sys
if os.fork() == 0:
    os.setsid()
    sys.stdin.readline()
    os.write(1, b"late\\n")
    os._exit(0)
print("early", flush=True)
os._exit(4)
"""
    process = stage.start(code, log=stage.folder / "log", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert read_line(process) == b"early\n"
    assert process.wait(DEADLINE_S) == 4
    assert process.communicate(b"go\n", timeout=DEADLINE_S)[0] == b"late\n"
    eventually(lambda: (stage.folder / "log").read_bytes() == b"early\nlate\n", "the copy is whole")


def test_a_grandchild_that_never_pauses_does_not_make_the_launcher_wait(stage: Stage) -> None:
    code = "import os\nif os.fork() == 0:\n    os.setsid()\n    while True: os.write(1, b'flood' * 1000)\nos._exit(4)"
    process = stage.start(code, log=Path("/dev/null"), stdout=subprocess.DEVNULL)
    assert process.wait(DEADLINE_S) == 4
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if str(stage.folder).encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                os.kill(int(path.parent.name), signal.SIGKILL)
        except OSError:
            continue


def test_the_last_words_of_a_killed_rank_are_kept(stage: Stage) -> None:
    code = "import os, signal\nos.write(1, b'last words' * 3000)\nos.kill(os.getpid(), signal.SIGKILL)"
    for mode in ("guard", "tee"):
        found = stage.run(code, mode=mode, log=stage.folder / mode)
        assert found.stdout == b"last words" * 3000 == (stage.folder / mode).read_bytes()


def test_without_a_log_the_rank_writes_to_its_original_descriptors(stage: Stage) -> None:
    code = "import os; print(os.readlink('/proc/self/fd/1'))"
    with (stage.folder / "out").open("wb") as out:
        assert stage.start(code, stdout=out).wait(DEADLINE_S) == 0
    assert (stage.folder / "out").read_text() == f"{stage.folder / 'out'}\n"


def test_a_rank_that_closes_its_output_lets_the_reader_see_the_end(stage: Stage) -> None:
    for log in (None, stage.folder / "log"):
        code = "import os, sys\nos.write(1, b'done\\n')\nos.close(1)\nsys.stdin.read()"
        process = stage.start(code, log=log, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.read() == b"done\n"
        assert process.poll() is None
        process.communicate(timeout=DEADLINE_S)


@MODES
@pytest.mark.parametrize("closed", ["1", "2", "12", "012"])
def test_descriptors_that_were_closed_stay_closed(stage: Stage, mode: str, closed: str) -> None:
    code = f"""
import os
if {len(closed) == 1}:
    os.write({2 if closed == "1" else 1}, b"x")
os._exit(sum(os.path.exists(f"/proc/self/fd/{{fd}}") for fd in {closed!r}))
"""
    command = f'exec "$0" "$@" {" ".join(fd + ">&-" for fd in closed)}'
    found = subprocess.run(
        ["/bin/sh", "-c", command, sys.executable, "-c", code],
        env=stage.environment(mode, stage.folder / "log"),
        start_new_session=mode == "guard",
        capture_output=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert found.returncode == 0
    assert found.stdout + found.stderr == (b"x" if len(closed) == 1 else b"")


@MODES
def test_a_socket_as_output_works(stage: Stage, mode: str) -> None:
    ours, ranks = socket.socketpair()
    process = stage.start(BULK, mode=mode, log=stage.folder / "log", stdout=ranks.fileno())
    ranks.close()
    digest, num_bytes = hashlib.sha256(), 0
    while piece := ours.recv(1 << 16):
        digest.update(piece)
        num_bytes += len(piece)
    assert process.wait(DEADLINE_S) == 0
    assert num_bytes == 103_000 * 97
    assert digest.digest() == hashlib.sha256((stage.folder / "log").read_bytes()).digest()
    ours.close()


TERMINAL_FACTS = """
import os, sys, termios
print([os.isatty(fd) for fd in (0, 1, 2)], sys.stdout.isatty(), sys.stdout.line_buffering, os.get_terminal_size(1), os.get_terminal_size(2))
print("lone\\r50%\\r100%\\x1b[31mred\\x1b[0m")
os.write(2, b"err\\n")
"""


@MODES
def test_a_terminal_stays_a_terminal_with_its_size_and_shows_the_same_bytes(stage: Stage, mode: str) -> None:
    shown = []
    for now in ("plain", mode):
        terminal = on_terminal(stage.command(TERMINAL_FACTS), stage.environment(now, stage.folder / "log"), size=(33, 99))
        assert terminal.end() == 0
        shown.append(terminal.received)
    assert shown[0] == shown[1]
    assert b"columns=99, lines=33" in shown[0]
    assert (stage.folder / "log").read_bytes() in shown[0].replace(b"\r\n", b"\n")


def test_only_a_terminal_becomes_one(stage: Stage) -> None:
    """stdout to a file, stderr to the terminal: each stays what it was."""
    master, slave = os.openpty()
    with (stage.folder / "out").open("wb") as out:
        code = "import os; print(os.isatty(1), os.isatty(2)); os.write(2, b'to the terminal\\n')"
        assert stage.start(code, log=stage.folder / "log", stdout=out, stderr=slave).wait(DEADLINE_S) == 0
    assert (stage.folder / "out").read_bytes() == b"False True\n"
    assert os.read(master, 100) == b"to the terminal\r\n"
    os.close(master)
    os.close(slave)


def test_ten_megabytes_on_a_terminal_come_whole(stage: Stage) -> None:
    terminal = on_terminal(stage.command(BULK), stage.environment("guard", stage.folder / "log"))
    assert terminal.end() == 0
    expected = b"".join(b"%08d" % i * 12 + b"\r\n" for i in range(103_000))
    assert terminal.received.removeprefix(b"\r\n") == expected  # first the echo of the test's own key


def test_a_terminal_that_hangs_up_is_an_error_to_the_rank_as_before(stage: Stage) -> None:
    code = """
import os, sys
os.write(1, b"up\\n")
sys.stdin.read()
for _ in range(100_000):
    try:
        os.write(1, b"line\\n")
    except OSError:
        os._exit(7)
"""
    master, slave = os.openpty()
    process = stage.start(code, log=stage.folder / "log", stdin=subprocess.PIPE, stdout=slave, stderr=subprocess.DEVNULL)
    os.close(slave)
    assert os.read(master, 10)
    os.close(master)
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 7


def test_a_stopped_terminal_holds_the_output_and_a_killed_rank_is_still_reported(stage: Stage) -> None:
    code = "import os\nos.write(2, str(os.getpid()).encode())\nwhile True: os.write(1, b'x' * 99 + b'\\n')"
    master, slave = os.openpty()
    process = stage.start(code, log=Path("/dev/null"), stdout=slave, stderr=subprocess.PIPE)
    assert process.stderr is not None
    rank_pid = int(os.read(process.stderr.fileno(), 20))
    os.kill(rank_pid, signal.SIGKILL)
    assert process.wait(DEADLINE_S) == -signal.SIGKILL
    assert not is_alive(rank_pid)
    os.close(slave)
    os.close(master)
    process.communicate(timeout=DEADLINE_S)


def test_a_copied_ranks_output_is_whole_when_its_parent_sees_it_end(stage: Stage) -> None:
    for i in range(20):
        with (stage.folder / f"out{i}").open("wb") as out:
            assert stage.start(f"print('line ' * 2000, {i})", mode="tee", log=stage.folder / f"log{i}", stdout=out).wait(DEADLINE_S) == 0
        assert (stage.folder / f"out{i}").read_bytes() == f"{'line ' * 2000} {i}\n".encode()


def test_a_copied_rank_keeps_its_pid_and_its_signals(stage: Stage) -> None:
    code = "import os, signal; print(os.getpid(), signal.pthread_sigmask(signal.SIG_BLOCK, []), flush=True); signal.pause()"
    process = stage.start(code, mode="tee", log=stage.folder / "log", stdout=subprocess.PIPE)
    assert read_line(process) == f"{process.pid} set()\n".encode()
    process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE_S) == -signal.SIGTERM
    assert process.communicate(timeout=DEADLINE_S)[0] == b""


def test_the_copier_of_a_copied_rank_survives_what_ends_its_group(stage: Stage) -> None:
    """It has its own session and hears no signal but SIGKILL: a rank must not lose its reader."""
    code = "import os, sys\nprint('up', flush=True)\nsys.stdin.readline()\nprint('still', flush=True)"
    process = stage.start(code, mode="tee", log=stage.folder / "log", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    read_line(process)
    copiers = [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/environ")
        if int(path.parent.name) != process.pid and _is_of(path, stage)
    ]
    assert len(copiers) == 1
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT}:
        os.kill(copiers[0], number)
    assert process.communicate(b"go\n", timeout=DEADLINE_S)[0] == b"still\n"
    eventually(lambda: not is_alive(copiers[0]), "the copier ends with its rank")


def _is_of(environ: Path, stage: Stage) -> bool:
    try:
        return str(stage.folder).encode() in environ.read_bytes()
    except OSError:
        return False


def test_a_window_size_of_zero_is_passed_on_as_it_is(stage: Stage) -> None:
    master, slave = os.openpty()
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
    code = "import fcntl, termios; print(fcntl.ioctl(1, termios.TIOCGWINSZ, bytes(8)))"
    assert stage.start(code, log=stage.folder / "log", stdout=slave).wait(DEADLINE_S) == 0
    os.close(slave)
    with open(master, "rb", buffering=0) as terminal:
        assert terminal.readline() == repr(bytes(8)).encode() + b"\r\n"
