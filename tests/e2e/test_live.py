"""Commands and a job that runs: it is found by its own record, looked at, saved, and stopped."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import SCRIPTS, ended, environment, launch, start, until

from torch_watchdog.daemon.token import token_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

SCRIPT = str(Path(__file__).parent / "tiny_train.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
WATCHDOG = [sys.executable, "-m", "torch_watchdog.cli"]
LONG = ["--steps", "4000", "--step-time-s", "0.02"]
TIMEOUT_S = 120


def ask(folder: Path, *words: str) -> Any:
    done = launch(folder, [*WATCHDOG, *words, "--json"])
    assert done.code == 0, done.err
    return json.loads(done.out)


def eventually(look: Callable[[], Any], what: str, within_s: float = 180.0) -> Any:
    """The first true answer of `look`."""
    deadline = time.monotonic() + within_s
    while not (found := look()):
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
    return found


@pytest.fixture
def running(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A two-rank training, past its first steps."""
    command = [*WATCHDOG, "--job", "job", *TORCHRUN, SCRIPT, *LONG]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while not process.stdout.readline().startswith("step 10 "):
        assert process.poll() is None
    yield process
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=TIMEOUT_S)


def start_in(folder: Path, command: list[str]) -> subprocess.Popen[str]:
    folder.mkdir()
    return start(folder, command)


def committed(folder: Path) -> set[str]:
    return {path.parent.name for path in (folder / "watchdog_runs" / "job" / "checkpoints").glob("*/COMMITTED")}


def test_a_running_job_is_seen_running_with_its_ranks(running: subprocess.Popen[str], tmp_path: Path) -> None:
    status = eventually(lambda: (found := ask(tmp_path, "status"))["ranks"][1:] and found, "both ranks are known")
    assert (status["job"], status["state"], status["world_size"], status["exit_code"]) == ("job", "running", 2, None)
    assert [(rank["rank"], rank["alive"]) for rank in status["ranks"]] == [(0, True), (1, True)]
    assert [job["state"] for job in ask(tmp_path, "jobs")["jobs"]] == ["running"]


def test_the_contract_of_a_running_job_is_there_once_its_first_steps_are_done(running: subprocess.Popen[str], tmp_path: Path) -> None:
    learned = eventually(lambda: (found := ask(tmp_path, "contract"))["traces"] and found, "a contract")
    assert [row["key"] for row in learned["guarded"]]


def test_a_checkpoint_on_request_is_committed_and_the_job_goes_on(running: subprocess.Popen[str], tmp_path: Path) -> None:
    answer = ask(tmp_path, "checkpoint", "job")
    assert answer["accepted"] and answer["checkpoint"]["committed"] and answer["checkpoint"]["finite"]
    (name,) = committed(tmp_path)
    assert Path(answer["checkpoint"]["path"]).name == name
    assert running.stdout is not None
    step = int(re.sub(r"\D", "", name))
    while not running.stdout.readline().startswith(f"step {step + 5} "):
        assert running.poll() is None
    assert ask(tmp_path, "status", "job")["state"] == "running"
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=TIMEOUT_S)
    assert f"rank 0: checkpoint committed after {step} updates: {tmp_path}/watchdog_runs/job/checkpoints/{name} (requested by " in err, err
    assert "job job was interrupted (SIGINT, as by Ctrl-C): 2 ranks" in err
    assert f"  saved  watchdog_runs/job/checkpoints/{name} ({step} updates, verified), on request" in err
    assert f"  resume watchdog --job job --resume watchdog_runs/job/checkpoints/{name} " in err


def test_a_stop_on_request_saves_and_ends_every_rank(running: subprocess.Popen[str], tmp_path: Path) -> None:
    assert ask(tmp_path, "stop", "job", "--reason", "maintenance")["accepted"]
    out, err = running.communicate(timeout=TIMEOUT_S)
    assert running.returncode == 0, err
    assert len(committed(tmp_path)) == 1
    assert "step 3999" not in out and "--resume watchdog_runs/job/checkpoints/" in err
    record = json.loads((tmp_path / "watchdog_runs" / "job" / "job.json").read_text())
    assert record["exit_code"] == 0 and record["exit_reason"].startswith("stopped by the watchdog")
    for command in ("status", "timeline", "incidents"):
        assert "--resume watchdog_runs/job/checkpoints/" in launch(tmp_path, [*WATCHDOG, command]).out
    refused = launch(tmp_path, [*WATCHDOG, "stop", "job"])
    assert refused.code == 1 and "it is not running" in refused.err


def test_who_asks_for_a_stop_is_told_at_once_which_rank_is_stopped_and_what_lets_it_go_on(
    running: subprocess.Popen[str], tmp_path: Path
) -> None:
    pid = eventually(lambda: (found := ask(tmp_path, "status"))["ranks"][1:] and found, "both ranks are known")["ranks"][1]["pid"]
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: ask(tmp_path, "status")["ranks"][1]["phase"] == "stopped", "the status shows it")
    asked = tmp_path / "asked"
    waiting = start_in(asked, [*WATCHDOG, "stop", "job", "--dir", str(tmp_path / "watchdog_runs")])
    until(lambda: f"`kill -CONT {pid}` on " in (asked / "err").read_text(), "it is told before anything is given up")
    os.kill(pid, signal.SIGCONT)
    told = ended(waiting, asked)
    assert told.code == 0, told.err
    (name,) = committed(tmp_path)
    assert f"resume cd {tmp_path} && watchdog --job job --resume watchdog_runs/job/checkpoints/{name} " in told.out, told.out
    _, err = running.communicate(timeout=TIMEOUT_S)
    assert running.returncode == 0 and "stopped on request" in err, err


def test_who_asks_for_a_stop_is_told_who_is_late_and_what_ends_it_and_so_is_who_asks_again(tmp_path: Path) -> None:
    """A rank sleeps in its step: it answers, so a step is agreed on, and never comes to it."""
    sleeps = [str(SCRIPTS / "failing.py"), "--fault", "sleep", "--at", "9", "--pause", "0.05"]
    process = start(tmp_path, [*WATCHDOG, "--job", "job", *TORCHRUN, *sleeps])
    until((tmp_path / "watchdog_runs" / "job" / "job.json").exists, "the launch has begun")
    eventually(lambda: (found := ask(tmp_path, "status"))["ranks"][1:] and found["ranks"][1]["last_step"] == 8, "it has come to that step")
    asked = tmp_path / "asked"
    waiting = start_in(asked, [*WATCHDOG, "stop", "job", "--dir", str(tmp_path / "watchdog_runs")])
    late = re.compile(
        r"rank 0 waits for rank 1: .*failing\.py\", line .*`kill -9 (\d+)` on \S+ ends rank 1, SIGTERM to the launch ends all: the ranks"
    )
    until(lambda: late.search((asked / "err").read_text()) is not None, "it is told while it is waited for")
    for again in ([], ["--cancel"]):
        refused = launch(tmp_path, [*WATCHDOG, "stop", "job", *again])
        assert refused.code == 1 and late.search(refused.err), refused.err
    assert ask(tmp_path, "status")["ranks"][1]["phase"] == "late"
    found = late.search((asked / "err").read_text())
    assert found is not None
    os.kill(int(found[1]), signal.SIGKILL)
    told, run = ended(waiting, asked), ended(process, tmp_path)
    assert len(late.findall(told.err)) == 1, told.err
    assert committed(tmp_path) == {"step-9"}, run.err
    assert told.code == 0 and "step-9 (9 updates, verified)" in told.out and "--resume watchdog_runs/job/checkpoints/step-9" in told.out, (
        told.err
    )
    assert run.err.count("rank 1 is gone") == 1, run.err


def test_a_keeper_that_is_stopped_is_told_once_its_rank_has_ended_with_what_lets_the_launch_end(tmp_path: Path) -> None:
    """The launcher waits for it, and nothing had said why."""
    process = start(tmp_path, [*WATCHDOG, "--job", "job", *TORCHRUN, SCRIPT, "--steps", "300", "--step-time-s", "0.02"])
    until(lambda: "step 10 " in (tmp_path / "out").read_text(), "ten steps")
    pid = eventually(lambda: (found := ask(tmp_path, "status"))["ranks"][1:] and found["ranks"][1]["pid"], "both ranks are known")
    keeper = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(keeper, signal.SIGSTOP)
    told = f"its keeper, pid {keeper}, is stopped (SIGSTOP); `kill -CONT {keeper}` lets it go on, `kill -9 {keeper}` ends it"
    until(lambda: told in (tmp_path / "err").read_text(), "the stopped keeper is told")
    os.kill(keeper, signal.SIGCONT)
    gone = ended(process, tmp_path)
    assert (gone.code, gone.err.count("is stopped (SIGSTOP)")) == (0, 1), gone.err


def test_a_stop_is_taken_back_while_a_rank_has_not_answered_and_nothing_of_it_remains(tmp_path: Path) -> None:
    """One rank is in C code that holds the interpreter's lock, so that nothing can be decided yet."""
    go, steps = tmp_path / "go", ("--steps", "40")
    process = start(tmp_path, [*WATCHDOG, "--job", "job", *TORCHRUN, SCRIPT, *steps, "--deaf-until", str(go)])
    until((tmp_path / "go.deaf").exists, "a rank is deaf")
    waiting = start_in(tmp_path / "asked", [*WATCHDOG, "stop", "job", "--dir", str(tmp_path / "watchdog_runs")])
    until(lambda: "every rank is told" in (tmp_path / "asked" / "out").read_text(), "the stop is under way")
    taken_back = launch(tmp_path, [*WATCHDOG, "stop", "job", "--cancel"])
    assert (taken_back.code, taken_back.out) == (0, "asked: every rank is told\n"), taken_back.err
    asked = ended(waiting, tmp_path / "asked")
    assert asked.code == 1 and "given up: taken back by" in asked.err
    too_late = launch(tmp_path, [*WATCHDOG, "stop", "job", "--cancel"])
    assert too_late.code == 1 and "no order is under way" in too_late.err
    go.touch()
    run = ended(process, tmp_path)
    assert run.code == 0 and "2 ranks, 40 steps" in run.err, run.err
    assert committed(tmp_path) == set()
    assert run.lines("step") == launch(tmp_path, [*TORCHRUN, SCRIPT, *steps]).lines("step")


def test_an_order_is_given_up_at_once_where_a_rank_does_not_know_how_far_it_is(tmp_path: Path) -> None:
    points = str(SCRIPTS / "points.py")
    process = start(tmp_path, [*WATCHDOG, "--job", "job", *TORCHRUN, points, "--fault", "off"])
    until(lambda: (tmp_path / "here").exists() or process.poll() is not None, "a hook of ours is off")
    asked = launch(tmp_path, [*WATCHDOG, "stop", "job"])
    assert asked.code == 1 and "given up: rank 1 can promise nothing: its loader hook had turned itself off" in asked.err, asked.err
    (incident,) = [json.loads(path.read_text()) for path in (tmp_path / "watchdog_runs" / "job").glob("incidents/*/incident.json")]
    assert incident["kind"] == "order.stop" and incident["status"] == "resolved"
    (tmp_path / "go").touch()
    run = ended(process, tmp_path)
    assert run.code == 0 and "(exit code 0)" in run.err and len(run.lines("done")) == 2, run.err
    assert run.err.count("the stop that was asked for was given up: rank 1 can promise nothing: ") == 1, run.err
    assert committed(tmp_path) == set()


def test_a_launch_can_join_a_daemon_of_its_own(tmp_path: Path) -> None:
    serve = subprocess.Popen([*WATCHDOG, "serve", "--port", "0"], cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True)
    assert serve.stderr is not None
    found = re.search(r"daemon at (127\.0\.0\.1:\d+)", serve.stderr.readline())
    assert found is not None
    address = found[1]
    ended = launch(tmp_path, [*WATCHDOG, "--daemon", address, "--job", "job", *TORCHRUN, SCRIPT])
    assert ended.code == 0 and "2 ranks, 6 steps (6 updates), nothing found" in ended.err
    jobs = ask(tmp_path, "jobs", "--daemon", address)["jobs"]
    assert [(job["job"], job["state"], job["exit_code"]) for job in jobs] == [("job", "ended", 0)]
    assert ask(tmp_path, "status", "--daemon", address)["exit_code"] == 0
    taken = launch(tmp_path, [*WATCHDOG, "serve", "--port", address.rpartition(":")[2]])
    assert taken.code == 1 and len(taken.err.splitlines()) == 1 and "cannot listen" in taken.err
    serve.send_signal(signal.SIGTERM)
    assert serve.wait(TIMEOUT_S) == 0


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    """The address of a daemon of this user's."""
    serve = subprocess.Popen([*WATCHDOG, "serve", "--port", "0"], cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True)
    assert serve.stderr is not None
    found = re.search(r"daemon at (127\.0\.0\.1:\d+)", serve.stderr.readline())
    assert found is not None
    yield found[1]
    serve.terminate()
    serve.communicate(timeout=TIMEOUT_S)


def test_another_user_gets_one_sentence_from_a_served_daemon_and_stops_nothing(served: str, tmp_path: Path) -> None:
    """Another user cannot read our runtime folder: that user is played by one who looks elsewhere."""
    other = tmp_path / "token"
    other.write_text("guessed\n")
    for words in (["stop", "job"], ["status", "job"], ["jobs"]):
        refused = launch(tmp_path, [*WATCHDOG, *words, "--daemon", served], TORCH_WATCHDOG_TOKEN_FILE=str(other))
        assert refused.code == 1 and refused.out == ""
        assert len(refused.err.splitlines()) == 1 and "another token" in refused.err


def test_a_launch_with_a_wrong_token_trains_unwatched_and_says_why_once(served: str, tmp_path: Path) -> None:
    other = tmp_path / "token"
    other.write_text("guessed\n")
    command = [*WATCHDOG, "--daemon", served, "--job", "job", sys.executable, "-c", "print('trained')"]
    run = launch(tmp_path, command, TORCH_WATCHDOG_TOKEN_FILE=str(other))
    assert (run.code, run.out) == (0, "trained\n")
    assert run.err.count("another token") == 1 and "the training goes on" in run.err


def test_the_token_is_in_no_record_of_a_launch(served: str, tmp_path: Path) -> None:
    token = token_for(served, os.environ)
    run = launch(tmp_path, [*WATCHDOG, "--daemon", served, "--job", "job", *TORCHRUN, SCRIPT])
    assert "2 ranks, 6 steps (6 updates), nothing found" in run.err and token and len(token) > 30
    texts = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert texts and all(token.encode() not in text for text in [*texts, run.out.encode(), run.err.encode()])


def test_the_demo_tells_its_whole_story(tmp_path: Path) -> None:
    ended = launch(tmp_path, [*WATCHDOG, "demo"])
    assert ended.code == 0, ended.err
    assert "FAIL" not in ended.err and ended.err.count("] ok   ") == 7
    assert "X " in ended.out and list(tmp_path.iterdir()) == []
