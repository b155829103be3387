"""A wrapped launch is the launch: same stdout, same end, same answer to signals; and it leaves nothing behind."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

SCRIPT = str(Path(__file__).parent / "tiny_train.py")
PYTHON = [sys.executable]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--cpu", "--num_processes", "2", "--num_machines", "1"]
ACCELERATE += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
LAUNCHERS = {"python": PYTHON, "torchrun": TORCHRUN, "accelerate": ACCELERATE}
TIMEOUT_S = 240


def environment(**variables: str) -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_WATCHDOG")}
    return {**ours, "OMP_NUM_THREADS": "1", **variables}


def watchdog(folder: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "torch_watchdog.cli", "--dir", str(folder / "runs"), "--job", "job", *options]


def run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S, check=False, **options)


def job_json(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "runs" / "job" / "job.json").read_text())
    return found


def eventually(true: Callable[[], bool], what: str, within_s: float = 180.0) -> None:
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
        time.sleep(0.05)


def folders_of_launches() -> set[Path]:
    return {path for base in (Path("/dev/shm"), Path("/tmp")) for path in base.glob(f"torch-watchdog-{os.getuid()}/*") if path.is_dir()}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_clean_run_is_the_same_with_and_without_the_watchdog(launcher: str, tmp_path: Path) -> None:
    plain = run([*LAUNCHERS[launcher], SCRIPT])
    watched = run([*watchdog(tmp_path), *LAUNCHERS[launcher], SCRIPT])
    assert plain.returncode == 0, plain.stderr
    assert (watched.returncode, watched.stdout) == (plain.returncode, plain.stdout), watched.stderr
    assert plain.stdout.count("loss") == 6


@pytest.mark.parametrize(
    ("launcher", "end"),
    [
        pytest.param("python", ("--exit", "1"), marks=pytest.mark.slow),
        pytest.param("python", ("--exit", "3"), marks=pytest.mark.slow),
        ("python", ("--die-by", "15")),
        pytest.param("python", ("--die-by", "9"), marks=pytest.mark.slow),
        pytest.param("torchrun", ("--exit", "3"), marks=pytest.mark.slow),
        ("torchrun", ("--die-by", "9")),
    ],
)
def test_an_end_that_is_not_ours_comes_out_as_it_is(launcher: str, end: tuple[str, str], tmp_path: Path) -> None:
    plain = run([*LAUNCHERS[launcher], SCRIPT, *end])
    watched = run([*watchdog(tmp_path), *LAUNCHERS[launcher], SCRIPT, *end])
    assert plain.returncode != 0
    assert (watched.returncode, watched.stdout) == (plain.returncode, plain.stdout), watched.stderr
    assert "did not answer" not in watched.stderr and re.search(r": rank\.|ended by SIGTERM", watched.stderr), watched.stderr


def test_a_launcher_that_restarts_its_ranks_does_so(tmp_path: Path) -> None:
    """The first attempt fails in the middle of its training."""
    command = [*TORCHRUN, "--max-restarts", "1", SCRIPT, "--fail-first-attempt"]
    plain, watched = run(command), run([*watchdog(tmp_path), *command])
    second = [[line for line in ended.stdout.splitlines() if line.startswith("step")] for ended in (plain, watched)]
    assert plain.returncode == 0 and len(second[0]) == 6, plain.stderr
    assert (watched.returncode, second[1]) == (0, second[0]), watched.stderr
    assert "attempt 0 step" in watched.stdout


@pytest.mark.parametrize(
    ("launcher", "number"),
    [
        pytest.param("python", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("python", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("torchrun", signal.SIGTERM, marks=pytest.mark.slow),
        ("torchrun", signal.SIGINT),
    ],
)
def test_a_signal_to_the_wrapper_ends_the_launch_as_it_ends_a_plain_one(launcher: str, number: signal.Signals, tmp_path: Path) -> None:
    ends = []
    for wrapper in ([], [*watchdog(tmp_path), "--on-signal", "pass"]):
        command = [*wrapper, *LAUNCHERS[launcher], SCRIPT, "--steps", "2000", "--step-time-s", "0.05"]
        process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert process.stdout is not None
        assert process.stdout.readline().startswith("step 0 ")
        process.send_signal(number)
        process.stdout.read()
        ends.append(process.wait(TIMEOUT_S))
    assert ends[1] == ends[0]


@pytest.mark.slow
def test_a_signal_to_the_whole_process_group_ends_the_launch_as_it_ends_a_plain_one(tmp_path: Path) -> None:
    """As `timeout` and `kill %1` send it; the script counts what it gets."""
    shown = []
    for wrapper in ([], watchdog(tmp_path)):
        command = [*wrapper, *LAUNCHERS["python"], SCRIPT, "--steps", "2000", "--step-time-s", "0.05", "--count-signals"]
        process = subprocess.Popen(
            command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
        )
        assert process.stdout is not None
        assert process.stdout.readline().startswith("step 0 ")
        os.killpg(process.pid, signal.SIGTERM)
        signals = [line for line in process.stdout if line.startswith("signal")]
        shown.append((signals, process.wait(TIMEOUT_S)))
    assert shown[1] == shown[0] == (["signal 15\n"], 0)


@pytest.mark.parametrize(("launcher", "code"), [pytest.param("python", -signal.SIGINT, marks=pytest.mark.slow), ("torchrun", 1)])
def test_ctrl_c_on_a_terminal_ends_a_training_as_it_ends_a_plain_one_and_is_told_in_one_line(
    launcher: str, code: int, tmp_path: Path
) -> None:
    command = [*LAUNCHERS[launcher], SCRIPT, "--steps", "2000", "--step-time-s", "0.05"]
    ends = [_end_after_ctrl_c([*wrapper, *command]) for wrapper in ([], watchdog(tmp_path))]
    assert ends[1][0] == ends[0][0] == code
    shown = ends[1][1].decode(errors="replace")
    last_words = [line for line in shown.splitlines() if line.startswith("[torch-watchdog]")][1:]
    assert len(last_words) == 1 and "job job was interrupted (SIGINT, as by Ctrl-C): " in last_words[0], shown
    assert job_json(tmp_path)["exit_reason"] == "interrupted (SIGINT, as by Ctrl-C)"
    assert not list((tmp_path / "runs" / "job").glob("incidents/*"))


def _end_after_ctrl_c(command: Sequence[str]) -> tuple[int, bytes]:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe(command[0], list(command), environment())
    with os.fdopen(terminal, "r+b", buffering=0) as screen:
        shown = b""
        while b"step 1 " not in shown:
            shown += screen.read(1000)
        screen.write(b"\x03")
        try:
            while more := screen.read(1000):
                shown += more
        except OSError:
            pass  # the terminal's last reader has gone
        _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), shown


def test_a_training_outlives_a_wrapper_that_is_killed(tmp_path: Path) -> None:
    done = tmp_path / "done"
    command = [*watchdog(tmp_path), *TORCHRUN, SCRIPT, "--steps", "60", "--step-time-s", "0.05", "--done-file", str(done)]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("step 0 ")
    process.kill()
    process.wait(TIMEOUT_S)
    eventually(done.exists, "the training went on to its end")
    process.stdout.close()


def test_stdin_reaches_the_command(tmp_path: Path) -> None:
    done = run([*watchdog(tmp_path), *PYTHON, "-c", "print(input())"], input="hello\n")
    assert done.stdout == "hello\n"


@pytest.mark.parametrize("options", [("--dir", "/dev/null/runs")])
def test_where_nothing_of_ours_can_start_the_command_runs_all_the_same(options: tuple[str, ...], tmp_path: Path) -> None:
    done = run(
        [*watchdog(tmp_path), *options, *PYTHON, "-c", "import os; print(os.environ.get('TORCH_WATCHDOG_AGENT')); raise SystemExit(3)"]
    )
    assert (done.returncode, done.stdout) == (3, "None\n")
    assert done.stderr.count("\n") == 1 and "runs without the watchdog" in done.stderr


def test_a_launch_from_a_folder_that_is_gone_runs_plain(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    inside = f"cd {gone} && rmdir {gone} && exec {sys.executable} -m torch_watchdog.cli {sys.executable} -c 'print(7); raise SystemExit(3)'"
    done = run(["sh", "-c", inside])
    assert (done.returncode, done.stdout) == (3, "7\n")
    assert "runs without the watchdog" in done.stderr


def test_a_launch_without_a_standard_error_runs_all_the_same(tmp_path: Path) -> None:
    words = " ".join([*watchdog(tmp_path), sys.executable, "-c", "'print(7)'"])
    done = run(["sh", "-c", f"exec {words} 2>&-"])
    assert (done.returncode, done.stdout) == (0, "7\n")


def test_a_python_that_keeps_us_out_is_reported_and_not_passed_over_in_silence(tmp_path: Path) -> None:
    done = run([*watchdog(tmp_path), *PYTHON, "-I", "-c", "print('ran')"])
    assert done.returncode == 0 and done.stdout == "ran\n"
    assert "0 of 1 ranks reported, so nothing was watched" in done.stderr


def test_a_run_leaves_its_record_and_nothing_else_behind(tmp_path: Path) -> None:
    done = run([*watchdog(tmp_path, "--policy", "observe"), *PYTHON, SCRIPT])
    record = job_json(tmp_path)
    assert done.returncode == 0, done.stderr
    assert (record["schema_version"], record["job"], record["policy"], record["exit_code"]) == (1, "job", "observe", 0)
    assert record["exit_reason"] == "finished" and record["started"] < record["ended"]
    assert record["command"] == [*PYTHON, SCRIPT]
    assert "PATH" in record["environment"] and os.environ["PATH"] not in json.dumps(record)
    assert record["session"] not in {path.name for path in folders_of_launches()}


def test_the_end_is_written_where_no_new_file_can_be_any_more(tmp_path: Path) -> None:
    """As on a disk that is full by then."""
    in_the_way = "import os; os.makedirs(f'runs/job/.job.json.{os.getppid()}.partial/x')"
    done = run([*watchdog(tmp_path), *PYTHON, "-c", in_the_way], cwd=tmp_path)
    assert (job_json(tmp_path)["exit_code"], job_json(tmp_path)["exit_reason"]) == (0, "finished"), done.stderr
    assert "could not be told" not in done.stderr and not list((tmp_path / "runs" / "job").glob("*.reserved"))


def test_a_second_run_of_one_name_gets_a_folder_of_its_own(tmp_path: Path) -> None:
    for _ in range(2):
        assert run([*watchdog(tmp_path), *PYTHON, "-c", ""]).returncode == 0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["job", "job.2"]


def test_the_watchdog_inside_the_watchdog_adds_nothing(tmp_path: Path) -> None:
    inner = [sys.executable, "-m", "torch_watchdog.cli", "--dir", str(tmp_path / "inner"), *PYTHON, "-c", "print('ran')"]
    done = run([*watchdog(tmp_path), *inner])
    assert done.stdout == "ran\n" and not (tmp_path / "inner").exists()


def test_a_launcher_inside_a_shell_script_is_watched_too(tmp_path: Path) -> None:
    script = " ".join([*TORCHRUN, SCRIPT])
    done = run([*watchdog(tmp_path), "sh", "-c", f"{script}; exit 4"])
    assert done.returncode == 4
    assert job_json(tmp_path)["ranks_reported"] == 2, done.stderr
