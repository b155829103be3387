"""The keeper ends as its rank ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from keeper_harness import DEADLINE_S, Stage, eventually, is_alive, on_terminal, read_line

KEEP = "from torch_watchdog_agent import keeper\n"


@pytest.mark.parametrize("code", [0, 1, 3, 65, 255])
def test_the_exit_code_is_the_ranks(stage: Stage, code: int) -> None:
    assert stage.run(f"raise SystemExit({code})").returncode == code


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGABRT", "SIGTERM", "SIGINT", "SIGPIPE", "SIGRTMIN"])
@pytest.mark.parametrize("with_log", [False, True])
def test_a_death_by_signal_is_mirrored(stage: Stage, name: str, with_log: bool) -> None:
    number = getattr(signal, name)
    code = f"import os, signal; signal.signal({number}, 0) if {number} != 9 else None; os.kill(os.getpid(), {number})"
    assert stage.run(code, log=stage.folder / "log" if with_log else None).returncode == -number


def test_the_keepers_own_death_leaves_no_second_core(stage: Stage) -> None:
    """Where the machine allows cores: the rank's own is the only one."""
    code = f"""
import os, resource, subprocess, sys
resource.setrlimit(resource.RLIMIT_CORE, (resource.getrlimit(resource.RLIMIT_CORE)[1],) * 2)
rank = subprocess.Popen(
    [sys.executable, "-c", "import os; os.abort()"],
    env=dict(os.environ, KEEPER_TEST_MODE="guard"), start_new_session=True, cwd={str(stage.folder)!r},
)
print(os.WCOREDUMP(os.waitpid(rank.pid, 0)[1]))
"""
    assert stage.run(code, mode="plain").stdout == b"False\n"


def test_an_uncaught_exception_is_exit_code_1_with_its_traceback(stage: Stage) -> None:
    found = stage.run("raise ValueError('as before')", log=stage.folder / "log")
    assert found.returncode == 1
    assert found.stderr.endswith(b"ValueError: as before\n")


def test_the_rank_is_another_process_in_its_own_group_of_the_same_session(stage: Stage) -> None:
    code = "import os; print(os.getpid(), os.getppid(), os.getpgrp(), os.getsid(0))"
    process = stage.start(code, stdout=subprocess.PIPE)
    pid, parent, group, session = map(int, read_line(process).split())
    process.communicate(timeout=DEADLINE_S)
    assert (parent, group, session) == (process.pid, pid, process.pid)
    assert pid != process.pid


def test_announcing_a_leave_makes_every_end_a_clean_one(stage: Stage) -> None:
    for end in ("os.abort()", "raise SystemExit(65)", "os._exit(3)", "os.kill(os.getpid(), 9)", "pass"):
        assert stage.run(f"{KEEP}import os\nkeeper.announce_leave()\n{end}").returncode == 0


def test_a_forked_worker_cannot_announce_its_ranks_leave(stage: Stage) -> None:
    code = f"""{KEEP}
import os
if os.fork() == 0:
    keeper.announce_leave()
    os._exit(0)
os.wait()
raise SystemExit(65)
"""
    assert stage.run(code).returncode == 65


def test_only_the_rank_itself_is_guarded(stage: Stage) -> None:
    code = f"""{KEEP}
import os
print(keeper.fork_is_guarded(), flush=True)
if os.fork() == 0:
    print(keeper.fork_is_guarded(), flush=True)
    os._exit(0)
os.wait()
"""
    assert stage.run(code).stdout == b"True\nFalse\n"
    assert stage.run(f"{KEEP}print(keeper.fork_is_guarded())", mode="plain").stdout == b"False\n"


def test_a_rank_that_executes_itself_anew_keeps_its_keeper_and_gets_no_second_copy(stage: Stage) -> None:
    again = "from torch_watchdog_agent import keeper; print(keeper.fork_is_guarded())"
    code = f"import os, sys; os.environ['KEEPER_TEST_MODE'] = 'guard'; os.execv(sys.executable, [sys.executable, '-c', {again!r}])"
    found = stage.run(code, log=stage.folder / "log")
    assert (found.stdout, found.returncode) == (b"True\n", 0)
    assert (stage.folder / "log").read_bytes() == b"True\n"


def test_kill_9_of_the_keeper_ends_the_rank(stage: Stage) -> None:
    process = stage.start("import os, signal; print(os.getpid(), flush=True); signal.pause()", stdout=subprocess.PIPE)
    rank_pid = int(read_line(process))
    process.kill()
    process.wait(DEADLINE_S)
    eventually(lambda: not is_alive(rank_pid), "the rank dies with its keeper")
    assert process.communicate(timeout=DEADLINE_S)[0] == b""


def test_workers_of_a_killed_rank_are_swept_and_daemons_are_not(stage: Stage) -> None:
    code = """
import os, signal, sys, time
def start(*, stubborn=False, daemon=False):
    pid = os.fork()
    if pid == 0:
        if stubborn: signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if daemon: os.setsid()
        os.write(pipe[1], b"1")
        os.close(1)
        while True: signal.pause()
    os.read(pipe[0], 1)
    return pid
pipe = os.pipe()
print(start(), start(stubborn=True), start(daemon=True), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    process = stage.start(code, stdout=subprocess.PIPE)
    worker, stubborn, daemon = map(int, read_line(process).split())
    try:
        assert process.wait(DEADLINE_S) == -signal.SIGKILL
        eventually(lambda: not is_alive(worker) and not is_alive(stubborn), "the workers end")
        assert is_alive(daemon)
    finally:
        os.kill(daemon, signal.SIGKILL)
        process.communicate(timeout=DEADLINE_S)


def test_a_killed_rank_whose_worker_hears_no_sigterm_leaves_no_semaphore(stage: Stage) -> None:
    """Python's tracker of them removes it, once the worker is gone; killed with the group it could not."""
    (stage.folder / "deaf.py").write_text("""
import os, signal

def work(ready):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready.release()
    signal.pause()

def main(context):
    ready = context.Semaphore(0)
    context.Process(target=work, args=(ready,)).start()
    ready.acquire()
    print(ready._semlock.name, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
""")
    code = f"import multiprocessing, sys; sys.path.insert(0, {str(stage.folder)!r}); import deaf; deaf.main(multiprocessing.get_context('spawn'))"
    process = stage.start(code, stdout=subprocess.PIPE)
    semaphore = Path("/dev/shm") / f"sem.{read_line(process).decode().strip().lstrip('/')}"
    assert process.wait(DEADLINE_S) == -signal.SIGKILL
    eventually(lambda: not semaphore.exists(), "the semaphore is removed")
    process.communicate(timeout=DEADLINE_S)


def test_workers_of_a_rank_that_ended_by_itself_are_left_alone(stage: Stage) -> None:
    code = "import os, signal\npid = os.fork()\nif pid == 0:\n    os.close(1)\n    signal.pause()\nprint(pid, flush=True)\nos._exit(3)"
    process = stage.start(code, stdout=subprocess.PIPE)
    worker = int(read_line(process))
    assert process.wait(DEADLINE_S) == 3
    assert is_alive(worker)
    os.kill(worker, signal.SIGKILL)
    process.communicate(timeout=DEADLINE_S)


def test_a_process_with_threads_gets_no_keeper_but_keeps_its_copy(stage: Stage) -> None:
    code = """
import os, signal, threading, pathlib
from torch_watchdog_agent import keeper
threading.Thread(target=threading.Event().wait, daemon=True).start()
keeper.stand_guard(log_path=pathlib.Path(os.environ["KEEPER_TEST_LOG"]), say=lambda text: os.write(2, text.encode()))
print(keeper.fork_is_guarded())
"""
    found = stage.run(code, mode="plain", log=stage.folder / "log")
    assert (found.returncode, found.stdout) == (0, b"False\n")
    assert found.stderr == b"this rank runs without a keeper: the process has threads before it begins"
    assert (stage.folder / "log").read_bytes() == b"False\n"


def test_a_hundred_launches_leave_no_process_behind(stage: Stage) -> None:
    for _ in range(25):
        ranks = [stage.start("import os; os.write(1, b'x\\n')", log=stage.folder / "log", stdout=subprocess.DEVNULL) for _ in range(4)]
        assert [rank.wait(DEADLINE_S) for rank in ranks] == [0, 0, 0, 0]
    marked = [
        path.parent.name
        for path in Path("/proc").glob("[0-9]*/environ")
        if str(stage.folder).encode() in _content(path) and path.parent.name != str(os.getpid())
    ]
    assert marked == []
    assert (stage.folder / "log").read_bytes() == b"x\n" * 100


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_the_keeper_has_few_descriptors_no_standard_input_and_one_thread(stage: Stage) -> None:
    code = "import os, signal; print(os.getppid(), flush=True); signal.pause()"
    extra, other = os.pipe()
    process = stage.start(code, stdin=subprocess.PIPE, stdout=subprocess.PIPE, log=stage.folder / "log", pass_fds=(extra,))
    keeper = Path(f"/proc/{int(read_line(process))}")
    eventually(lambda: (keeper / "comm").read_text() == "torch-watchdog\n", "the keeper settles in")
    links = {path.name: path.readlink() for path in (keeper / "fd").iterdir()}
    assert links["0"] == Path("/dev/null")
    assert str(extra) not in {
        name for name, link in links.items() if "pipe" in str(link) and link == Path(f"/proc/self/fd/{extra}").readlink()
    }
    assert len(links) <= 12
    assert len(list((keeper / "task").iterdir())) == 1
    process.kill()
    process.communicate(timeout=DEADLINE_S)
    os.close(extra)
    os.close(other)


def test_the_keeper_leaves_no_zombie_to_its_rank_and_the_rank_has_no_child(stage: Stage) -> None:
    code = "import os\ntry:\n    os.waitpid(-1, os.WNOHANG)\nexcept ChildProcessError:\n    print('childless')"
    for mode in ("guard", "tee"):
        assert stage.run(code, mode=mode, log=stage.folder / mode).stdout == b"childless\n"


def test_the_rank_finds_the_same_descriptors_as_without_us(stage: Stage) -> None:
    code = "import os; print(sorted(map(int, os.listdir('/proc/self/fd'))))"
    plain = stage.run(code, mode="plain").stdout
    assert stage.run(code).stdout == plain
    assert stage.run(code, log=stage.folder / "log").stdout == plain


def test_a_copied_rank_carries_its_own_descriptors_where_no_program_counts_and_hands_none_down(stage: Stage) -> None:
    listing = "import os; print([fd for fd in sorted(map(int, os.listdir('/proc/self/fd'))) if fd < 700])"
    plain = stage.run(listing, mode="plain").stdout
    assert stage.run(listing, mode="tee", log=stage.folder / "log").stdout == plain
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {listing.replace('if fd < 700', '')!r}], close_fds=False)"
    assert stage.run(child, mode="tee", log=stage.folder / "log").stdout == plain


def test_a_rank_that_leads_its_terminals_session_reads_from_it(stage: Stage) -> None:
    terminal = on_terminal(stage.command("print('got', input('say: '))"), stage.environment("guard", stage.folder / "log"))
    terminal.read_until(b"say: ")
    terminal.type(b"this\n")
    assert terminal.end() == 0
    assert b"got this\r\n" in terminal.received


def test_importing_the_keeper_costs_less_than_15_ms(tmp_path: Path) -> None:
    code = "import torch_watchdog_agent, time; t = time.process_time(); import torch_watchdog_agent.keeper; print((time.process_time() - t) * 1e3)"
    installed = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path), "PYTHONDONTWRITEBYTECODE": ""}
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, env=installed) for _ in range(7)]
    assert min(float(run.stdout) for run in runs) < 15
