"""A rank fails on a real launch: the others are free at once, one whole copy of the state is saved, the first is named, the launcher's word is the truth."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import SCRIPTS, Ended, environment, launch, script, start, torchrun, until, watchdog
from namespaces import PROCESSES, needs_processes
from safetensors.torch import save_file

pytestmark = pytest.mark.e2e

FREE_WITHIN_S = 10.0  # on a machine that may be busy; measured: well under a second


def failed(folder: Path, *arguments: object, options: tuple[str, ...] = (), **more: str) -> Ended:
    return launch(folder, [*watchdog(), *torchrun(*script("failing.py", *arguments), options=options)], **more)


def saved_as_after_an_update(run: Ended, incident: dict[str, Any], *model: str) -> bool:
    """The checkpoint holds, bit by bit, what the healthy rank itself had after that update."""
    path = incident["action"]["checkpoint"]["path"]
    check = [sys.executable, str(SCRIPTS / "failing.py"), "--check", path, *model]
    found = subprocess.run(check, cwd=run.folder, env=environment(), capture_output=True, text=True, timeout=120).stdout.splitlines()
    (saver,) = incident["action"]["checkpoint"]["saved_by"]
    return found[-1] in (run.folder / f"trail-0-{saver}").read_text().splitlines()


def seconds_to_free(run: Ended) -> float:
    times = {what: max(map(float, re.findall(rf"rank \d {what} ([\d.]+)", run.out))) for what in ("fault", "free")}
    return times["free"] - times["fault"]


@pytest.mark.parametrize(
    ("fault", "kind", "more"),
    [
        (("raise",), "rank.exception", ()),
        (("kill",), "rank.died", ()),
        (("raise",), "rank.exception", ("--place", "evaluation")),
        pytest.param(("exit3",), "rank.exception", (), marks=pytest.mark.slow),
        pytest.param(("exit3-now",), "rank.exception", (), marks=pytest.mark.slow),
        pytest.param(("segv",), "rank.died", (), marks=pytest.mark.slow),
        pytest.param(("raise",), "rank.exception", ("--teardown", "0.5"), marks=pytest.mark.slow),
        pytest.param(("kill",), "rank.died", ("--place", "after", "--wait", "barrier"), marks=pytest.mark.slow),
        pytest.param(("kill",), "rank.died", ("--workers", "2"), marks=pytest.mark.slow),
    ],
    ids=lambda value: "-".join(value).strip("-") if isinstance(value, tuple) else value,
)
def test_the_state_is_saved_bit_by_bit_and_the_culprit_is_named(
    tmp_path: Path, fault: tuple[str], kind: str, more: tuple[str, ...]
) -> None:
    run = failed(tmp_path, "--fault", *fault, *more)
    (incident,) = run.incidents
    assert (run.code, incident["kind"], incident["origin"]["rank"], incident["ranks_affected"]) == (1, kind, 1, [0]), run.err
    assert incident["action"]["checkpoint"]["committed"], incident["cause"]
    assert saved_as_after_an_update(run, incident)
    assert re.search(r"Root Cause.*?rank +: 1 ", run.err, re.DOTALL)
    assert seconds_to_free(run) < FREE_WITHIN_S


@pytest.mark.parametrize("answer", ["return", "exit-now"])
def test_a_rank_that_catches_what_it_got_of_a_lost_one_and_ends_is_asked_first(tmp_path: Path, answer: str) -> None:
    """Its end is milliseconds behind the other's, whose end is yet to be seen then."""
    run = failed(tmp_path, "--fault", "kill", "--answer", answer)
    (incident,) = run.incidents
    assert (run.code, incident["kind"], incident["origin"]["rank"], incident["ranks_affected"]) == (1, "rank.died", 1, [0]), run.err
    assert saved_as_after_an_update(run, incident), incident["cause"]


def test_ranks_whose_threads_would_keep_them_for_ever_are_ended_once_all_is_saved(tmp_path: Path) -> None:
    run = launch(tmp_path, [*watchdog("--grace", "10"), *torchrun(*script("failing.py", "--fault", "raise", "--thread"))])
    (incident,) = run.incidents
    assert (run.code, incident["kind"], incident["origin"]["rank"]) == (1, "rank.exception", 1), run.err
    assert saved_as_after_an_update(run, incident)
    kept = re.findall(r"rank (\d): the script of this rank has ended, but a thread that it had started", run.err)
    assert sorted(kept) == ["0", "1"], run.err
    assert re.search(r"Root Cause.*?rank +: 1 .*?exitcode +: 1 ", run.err, re.DOTALL), run.err
    assert run.err.rindex("failed: rank.exception") > run.err.rindex("keeps its process"), "the last words come last"


def test_a_launch_that_is_killed_as_a_rank_fails_leaves_a_record_of_what_that_rank_said(tmp_path: Path) -> None:
    run = start(tmp_path, [*watchdog("--job", "job"), *torchrun(*script("failing.py", "--fault", "raise", "--teardown", "1"))])
    events = tmp_path / "watchdog_runs" / "job" / "events.jsonl"
    until(lambda: events.exists() and "rank.failed" in events.read_text(), "the failure is in the record")
    run.kill()
    run.wait()

    def status() -> str:
        return subprocess.run(
            [*watchdog("status", "job")], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60
        ).stdout

    until(lambda: "ended without a word" in status(), "the launcher has ended, too")
    assert re.search(r"said +rank 1, step \d+: ValueError: a fault of the script's own", told := status()), told
    assert "the node process is gone: the training cannot go on" in (tmp_path / "err").read_text()


def test_with_record_the_culprit_is_named_too(tmp_path: Path) -> None:
    run = failed(tmp_path, "--fault", "raise", "--teardown", "0.5", RECORD="1")
    (incident,) = run.incidents
    assert (incident["origin"]["rank"], incident["evidence"]["exception"]["text"]) == (1, "ValueError: a fault of the script's own")


@pytest.mark.parametrize(
    "model",
    [(), pytest.param(("--no-buffers",), marks=pytest.mark.slow)],
    ids=["the other waits in forward", "the other waits in backward"],
)
def test_a_rank_that_is_stopped_is_found_and_the_job_ends_with_75(tmp_path: Path, model: tuple[str, ...]) -> None:
    run = failed(tmp_path, "--fault", "stop", *model)
    (incident,) = run.incidents
    assert (run.code, incident["kind"], incident["origin"]["rank"]) == (75, "rank.hang", 1), run.err
    assert incident["action"]["checkpoint"]["committed"], incident["cause"]
    assert saved_as_after_an_update(run, incident, *model)
    assert "SIGSTOP" in incident["summary"]
    assert "; the watchdog ended by SIGKILL what made no progress" in run.err and "kill -CONT" not in run.err.partition(" stopped: ")[2], (
        run.err
    )
    assert "waits in a collective" in (run.run_dir / "incidents" / incident["id"] / "stacks.txt").read_text()


def test_an_endless_loop_is_ended_before_the_collective_gives_up(tmp_path: Path) -> None:
    run = failed(tmp_path, "--fault", "loop", "--timeout", 30)
    (incident,) = run.incidents
    assert (run.code, incident["kind"], incident["origin"]["rank"]) == (75, "rank.hang", 1), run.err
    assert "failing.py" in incident["summary"]
    assert saved_as_after_an_update(run, incident)


@pytest.mark.parametrize(("fault", "timeout_s"), [pytest.param("leave", 600, marks=pytest.mark.slow), ("barrier", 8)])
def test_ranks_that_wait_in_different_collectives_are_told_apart(tmp_path: Path, fault: str, timeout_s: int) -> None:
    """Found by the standstill, or by what the ranks say when their process group gives up before that."""
    run = failed(tmp_path, "--fault", fault, "--timeout", timeout_s)
    (incident,) = run.incidents
    assert (run.code, incident["kind"], incident["origin"]["rank"]) == (65, "rank.desync", 1), run.err
    assert "rank 1 has called" in incident["summary"] and re.search(r"rank 1: barrier at \S*failing.py:\d+", incident["cause"])
    assert saved_as_after_an_update(run, incident)
    assert (run.run_dir / "incidents" / incident["id"] / "stacks.txt").read_text()


def test_sharded_parameters_are_not_called_whole(tmp_path: Path) -> None:
    run = failed(tmp_path, "--fault", "kill", "--fsdp")
    (incident,) = run.incidents
    assert (run.code, incident["origin"]["rank"], incident["action"]["checkpoint"]) == (1, 1, None)
    assert "shards the parameters" in incident["cause"]


@pytest.mark.slow
@needs_processes
def test_a_wrapper_that_is_the_first_process_of_its_container_rescues_too(tmp_path: Path) -> None:
    run = launch(tmp_path, [*PROCESSES, *watchdog(), *torchrun(*script("failing.py", "--fault", "kill"))])
    (incident,) = run.incidents
    assert (run.code, incident["kind"], incident["origin"]["rank"]) == (1, "rank.died", 1), run.err
    assert saved_as_after_an_update(run, incident)


def test_steps_that_another_rank_took_for_its_own_are_not_called_whole(tmp_path: Path) -> None:
    """A script that repeats a failed step: each try's gradients go into one of the others' next steps."""
    run = failed(tmp_path, "--fault", "repeat")
    (incident,) = run.incidents
    assert (run.code, incident["origin"]["rank"], incident["action"]["checkpoint"]) == (1, 1, None), run.err
    assert "rank 0 has applied 8 updates and rank 1 5: they were not in the same steps, as where a script repeats one" in incident["cause"]


def test_a_restart_of_the_launcher_goes_on_from_what_was_saved(tmp_path: Path) -> None:
    run = failed(tmp_path, "--fault", "kill", "--steps", 12, "--restore", options=("--max-restarts", "1"))
    assert run.code == 0, run.err
    assert len(run.lines(r"rank \d done 12")) == 2
    (incident,) = run.incidents
    assert (incident["attempt"], incident["origin"]["rank"], incident["action"]["checkpoint"]["committed"]) == (0, 1, True)
    saved = (run.folder / "trail-0-0").read_text().splitlines()[-1]
    assert run.lines("resumed") == [f"rank {rank} resumed {saved}" for rank in (0, 1)]
    assert "finished in attempt 1 after rank.died in attempt 0 (exit code 0)" in run.err
    assert "attempt 1 goes on from" in run.err and "  resume " not in run.err


def test_of_two_ranks_that_both_raise_one_saves_what_it_held_before(tmp_path: Path) -> None:
    run = failed(tmp_path, "--fault", "raise", "--both")
    (incident,) = run.incidents
    assert (run.code, incident["kind"]) == (1, "rank.exception")
    assert saved_as_after_an_update(run, incident)


@pytest.mark.parametrize(("policy", "code"), [("stop", 65), pytest.param("skip", 1, marks=pytest.mark.slow)])
def test_a_rank_that_raises_in_the_step_of_another_s_bad_batch_is_told_beside_it(tmp_path: Path, policy: str, code: int) -> None:
    run = launch(tmp_path, [*watchdog("--policy", policy), *torchrun(*script("failing.py", "--fault", "raise", "--bad"))])
    batch, error = run.incidents
    assert (run.code, batch["kind"], batch["origin"]["rank"], batch["batch"]["value"]) == (code, "batch.index_out_of_range", 0, 77), run.err
    assert (error["kind"], error["origin"]["rank"]) == ("rank.exception", 1) and "a fault of the script's own" in error["summary"]
    assert "rank 1, step 5: ValueError: a fault of the script's own" in run.err or "who    rank 1, step 5" in run.err
    assert saved_as_after_an_update(run, error)


@pytest.mark.slow
def test_of_two_ranks_that_both_die_nothing_is_saved(tmp_path: Path) -> None:
    run = failed(tmp_path, "--fault", "kill", "--both")
    assert all(incident["action"]["checkpoint"] is None for incident in run.incidents)
    assert any("no healthy rank is left" in incident["cause"] for incident in run.incidents)


def test_the_batch_of_a_failing_rank_is_replayed_with_its_true_stack(tmp_path: Path) -> None:
    run = launch(tmp_path, [*watchdog("--policy", "observe"), *torchrun(*script("train.py", "--bad", 38))])
    bundle = run.run_dir / "bundles" / f"0-{run.incidents[0]['origin']['rank']}.safetensors"
    assert bundle.stat().st_mode & 0o777 == 0o600
    replayed = launch(tmp_path, [*watchdog("replay"), str(bundle)])
    assert replayed.code == 1, replayed.err
    assert re.search(r"File \".*train.py\", line \d+, in forward(?s:.*)index out of range", replayed.err)
    assert run.err.count(": policy observe, so the training goes on unchanged") == 1, run.err
    said = re.search(r"  what   (ids\[\S+\] = 51, allowed 0\.\.39)", run.err)
    assert said is not None and said[0] in replayed.err, replayed.err


@pytest.mark.parametrize("more", [(), pytest.param(("--fsdp2",), marks=pytest.mark.slow)])
def test_a_script_for_gpus_is_replayed_on_the_cpu(tmp_path: Path, more: tuple[str, ...]) -> None:
    bundle = tmp_path / "0-0.safetensors"
    save_file({"0": torch.full((4, 8), 40), "1": torch.zeros(4, dtype=torch.int64)}, bundle)
    replayed = launch(tmp_path, [*watchdog("replay"), str(bundle), "--", *script("for_gpus.py", *more)])
    assert replayed.code == 1, replayed.err
    assert re.search(r"File \".*for_gpus.py\", line \d+, in forward(?s:.*)index out of range", replayed.err), replayed.err
    assert "batch[0][0,0] = 40, allowed 0..39, and 31 elements more" in replayed.err


@pytest.mark.slow
def test_what_a_script_for_gpus_can_take_goes_through_on_the_cpu(tmp_path: Path) -> None:
    bundle = tmp_path / "0-0.safetensors"
    save_file({"0": torch.full((4, 8), 39), "1": torch.zeros(4, dtype=torch.int64)}, bundle)
    replayed = launch(tmp_path, [*watchdog("replay", "--cuda"), str(bundle), "--", *script("for_gpus.py")])
    assert replayed.code == 0 and "went through forward, backward and update without an error" in replayed.err, replayed.err
    assert ("no GPU can be used here" in replayed.err) is not torch.cuda.is_available()


@pytest.mark.slow
def test_a_healthy_rank_that_never_answers_does_not_keep_the_launcher_waiting(tmp_path: Path) -> None:
    began = time.monotonic()
    run = failed(tmp_path, "--fault", "kill", "--freeze")
    (incident,) = run.incidents
    assert (run.code, incident["kind"], incident["origin"]["rank"], incident["action"]["checkpoint"]) == (1, "rank.died", 1, None), run.err
    assert "no word from rank 0; rank 0 is stopped (state T" in incident["cause"]
    assert time.monotonic() - began < 120  # 10 s for its word; torchrun itself takes 30 s to end a process that is stopped


@pytest.mark.parametrize("where", ["draw", "backward"])
def test_a_loop_without_a_loader_is_saved_and_goes_on_as_one_that_never_failed(tmp_path: Path, where: str) -> None:
    run = launch(tmp_path, [*watchdog("--job", "j"), *torchrun(*script("own_batches.py", "--raise-in", where))])
    assert run.code == 1, run.err
    (path,) = (run.run_dir / "checkpoints").glob("*/COMMITTED")
    assert path.parent.name == "step-9"
    resumed = launch(tmp_path, [*watchdog("--job", "j", "--resume", str(path.parent)), *torchrun(*script("own_batches.py"))])
    whole = launch(tmp_path, torchrun(*script("own_batches.py")))
    assert (resumed.code, whole.code) == (0, 0), resumed.err
    assert resumed.lines("^end ") == whole.lines("^end ") != [], resumed.err
